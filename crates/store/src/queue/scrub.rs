//! Scrubs, which the queues of a pool carry out among them: the reads of pages and blocks.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use fathom_block::{BackendContext, Outcome, Request};

use super::StoreQueue;
use super::device::Purpose;
use crate::entry::MapEntry;
use crate::layout::BLOCK_BYTES;
use crate::pages::from_bytes;
use crate::scrub::{DamageKind, PageRead, ScrubLot, ScrubStep, TableRead};

/// The most blocks of a lot, of a request, and the most requests in flight, while nobody uses the
/// pool.
const LOT_MAX: usize = 512;
const RUN_MAX: usize = 256;
const READS_MAX: usize = 4;
/// The same while it is used; then there is one request in flight.
const LOT_MAX_USED: usize = 64;
/// The longest pause between two steps, in nanoseconds.
const PAUSE_NS_MAX: u64 = 10_000_000_000;

/// Blocks that are being read.
struct Lot {
    looked_up: ScrubLot,
    /// What is wrong with each block.
    damaged: Vec<Option<DamageKind>>,
    /// The runs that were not submitted yet: the first block of each, their number, and whether it
    /// is read a second time.
    runs: VecDeque<(usize, usize, bool)>,
}

impl Lot {
    fn new(lot: ScrubLot) -> Self {
        let mut runs: VecDeque<(usize, usize, bool)> = VecDeque::new();
        for (at, block) in lot.blocks.iter().enumerate() {
            match runs.back_mut() {
                Some((first, count, _))
                    if lot.blocks[*first].place + *count as u64 == block.place
                        && *count < RUN_MAX =>
                {
                    *count += 1;
                }
                _ => runs.push_back((at, 1, false)),
            }
        }
        Self { damaged: vec![None; lot.blocks.len()], looked_up: lot, runs }
    }

    /// A run has been read. What is wrong is read once more, block by block.
    fn put(&mut self, (first, count, is_again): (usize, usize, bool), bytes: Option<&[u8]>) {
        for at in first..first + count {
            let from = (at - first) * BLOCK_BYTES;
            let bytes = bytes.and_then(|bytes| bytes.get(from..from + BLOCK_BYTES));
            let damage = match bytes {
                None => Some(DamageKind::Unreadable),
                Some(bytes) => {
                    let found = MapEntry::new(0, crc32c::crc32c(bytes)).checksum();
                    (found != self.looked_up.blocks[at].checksum).then_some(DamageKind::Content)
                }
            };
            if damage.is_some() && !is_again {
                self.runs.push_back((at, 1, true));
            } else {
                self.damaged[at] = damage;
            }
        }
    }
}

/// What a queue does of a scrub.
#[derive(Default)]
pub(super) struct Scrubbing {
    is_active: bool,
    lot: Option<Lot>,
    tables: Option<TableRead>,
    in_flight: usize,
    /// The numbers that end the reads of pages in the state.
    intervals: Vec<u64>,
    /// When the step began, and when the next one may begin, in nanoseconds.
    begun_ns: u64,
    next_ns: u64,
}

impl Scrubbing {
    pub(super) fn is_active(&self) -> bool {
        self.is_active
    }

    /// The numbers that end its reads in the state.
    pub(super) fn intervals(&self) -> impl Iterator<Item = u64> {
        let of_lot = self.lot.as_ref().and_then(|lot| lot.looked_up.interval);
        self.intervals.iter().copied().chain(of_lot)
    }
}

impl StoreQueue {
    /// Begins to carry out a scrub if one is wanted, and goes on with it.
    pub(super) fn scrub(&mut self, context: &mut BackendContext<'_>) {
        if !self.scrubbing.is_active && !self.begin_scrub() {
            return;
        }
        if self.is_closed {
            if self.scrubbing.in_flight == 0 {
                self.leave_scrub_undone(false);
            }
            return;
        }
        let now_ns = context.now_ns();
        let used_at_ns = self.inner.used_at_ns.load(Ordering::Relaxed);
        let is_used = now_ns < used_at_ns.saturating_add(self.inner.options.idle_ns);
        if self.scrubbing.lot.is_some() {
            return self.read_lot(is_used, context);
        }
        if self.scrubbing.in_flight > 0 {
            return;
        }
        if is_used && now_ns < self.scrubbing.next_ns {
            return context.wake_at(self.scrubbing.next_ns);
        }
        self.scrubbing.begun_ns = now_ns;
        let count = if is_used { LOT_MAX_USED } else { LOT_MAX };
        match self.inner.shared.access(|state| state.step_scrub(count)) {
            ScrubStep::Page(read) => self.read_page(read, false, context),
            ScrubStep::Blocks(lot) => {
                self.scrubbing.lot = Some(Lot::new(lot));
                self.read_lot(is_used, context);
            }
            ScrubStep::Tables(read) => self.read_tables(read, false, context),
            // The next step belongs to the next round.
            ScrubStep::Again => context.wake_at(0),
            ScrubStep::Done => {
                self.inner.has_scrub.store(false, Ordering::Release);
                self.leave_scrub();
                // Another one may have begun before.
                if self.inner.shared.access(|state| state.is_scrubbing()) {
                    self.inner.has_scrub.store(true, Ordering::Release);
                    context.wake_at(0);
                }
            }
        }
    }

    fn begin_scrub(&mut self) -> bool {
        if self.is_closed
            || !self.inner.has_scrub.load(Ordering::Relaxed)
            || self.inner.is_scrubbed.swap(true, Ordering::AcqRel)
        {
            return false;
        }
        self.scrubbing.is_active = true;
        true
    }

    /// A step has ended: while the pool is used, the next one waits for some time.
    fn end_step_of_scrub(&mut self, context: &mut BackendContext<'_>) {
        let now_ns = context.now_ns();
        let pause = self.inner.shared.access(|state| state.scrub_pause());
        let took_ns = now_ns.saturating_sub(self.scrubbing.begun_ns);
        let pause_ns = took_ns.saturating_mul(u64::from(pause)).min(PAUSE_NS_MAX);
        self.scrubbing.next_ns = now_ns.saturating_add(pause_ns);
        context.wake_at(0);
    }

    fn read_page(&mut self, read: PageRead, is_again: bool, context: &mut BackendContext<'_>) {
        let own = self.device.read_in_background(read.block(), 1);
        self.scrubbing.in_flight += 1;
        if !is_again {
            self.scrubbing.intervals.extend(read.interval);
        }
        self.device.submit(own, Purpose::ScrubPage { read, is_again }, context);
    }

    /// A page of a map has been read.
    pub(super) fn scrub_page_read(
        &mut self,
        (read, is_again): (PageRead, bool),
        own: Box<Request>,
        outcome: Outcome,
        context: &mut BackendContext<'_>,
    ) {
        self.scrubbing.in_flight -= 1;
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok());
        let right = bytes.filter(|bytes| crc32c::crc32c(bytes) == read.entry.checksum);
        let page = match right {
            Some(bytes) => Ok(from_bytes(bytes)),
            None if bytes.is_some() => Err(DamageKind::Map),
            None => Err(DamageKind::Unreadable),
        };
        self.device.give(own);
        if page.is_err() && !is_again && !self.is_closed {
            return self.read_page(read, true, context);
        }
        // What a closed queue has not read twice is looked up again.
        if page.is_ok() || is_again {
            self.inner.shared.access(|state| state.scrub_page(&read, page));
        }
        self.scrubbing.intervals.clear();
        read.interval.into_iter().for_each(|interval| self.end_interval(interval));
        self.end_step_of_scrub(context);
    }

    /// Reads more of the blocks of the lot, or ends it.
    fn read_lot(&mut self, is_used: bool, context: &mut BackendContext<'_>) {
        let most = if is_used { 1 } else { READS_MAX };
        while self.scrubbing.in_flight < most {
            let Some(lot) = &mut self.scrubbing.lot else { return };
            let Some((first, count, is_again)) = lot.runs.pop_front() else { break };
            let block = self.inner.first_segment + lot.looked_up.blocks[first].place;
            self.scrubbing.in_flight += 1;
            let own = self.device.read_in_background(block, count);
            self.device.submit(own, Purpose::ScrubBlocks { first, count, is_again }, context);
        }
        if self.scrubbing.in_flight > 0 {
            return;
        }
        let Some(Lot { looked_up: lot, damaged, .. }) = self.scrubbing.lot.take() else { return };
        self.inner.shared.access(|state| state.end_lot_of_scrub(&lot, &damaged));
        lot.interval.into_iter().for_each(|interval| self.end_interval(interval));
        self.end_step_of_scrub(context);
    }

    /// Some blocks of the lot have been read.
    pub(super) fn scrub_blocks_read(
        &mut self,
        run: (usize, usize, bool),
        own: Box<Request>,
        outcome: Outcome,
    ) {
        self.scrubbing.in_flight -= 1;
        if let Some(lot) = &mut self.scrubbing.lot {
            lot.put(run, own.buffers.owned().filter(|_| outcome.is_ok()));
        }
        self.device.give(own);
    }

    fn read_tables(&mut self, read: TableRead, is_again: bool, context: &mut BackendContext<'_>) {
        let (block, count) = read.blocks();
        let own = self.device.read_in_background(block, count);
        self.scrubbing.in_flight += 1;
        self.scrubbing.tables = Some(read);
        self.device.submit(own, Purpose::ScrubTables { is_again }, context);
    }

    /// Pages of a table have been read.
    pub(super) fn scrub_tables_read(
        &mut self,
        is_again: bool,
        own: Box<Request>,
        outcome: Outcome,
        context: &mut BackendContext<'_>,
    ) {
        self.scrubbing.in_flight -= 1;
        let Some(read) = self.scrubbing.tables.take() else { return self.device.give(own) };
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok());
        let is_wrong = self.inner.shared.access(|state| state.scrub_tables(&read, bytes, is_again));
        self.device.give(own);
        if is_wrong && !self.is_closed {
            return self.read_tables(read, true, context);
        }
        if is_wrong {
            self.inner.shared.access(|state| state.give_up_tables_of_scrub(&read));
        }
        self.end_step_of_scrub(context);
    }

    fn leave_scrub(&mut self) {
        if std::mem::take(&mut self.scrubbing.is_active) {
            self.inner.is_scrubbed.store(false, Ordering::Release);
        }
    }

    /// The queue ends in the middle of a scrub. Another one goes on with it. `is_stuck` is whether
    /// the kernel may still carry out its reads.
    pub(super) fn leave_scrub_undone(&mut self, is_stuck: bool) {
        if !self.scrubbing.is_active {
            return;
        }
        let intervals: Vec<u64> = self.scrubbing.intervals().collect();
        let (lot, tables) = (self.scrubbing.lot.take(), self.scrubbing.tables.take());
        self.scrubbing.intervals.clear();
        self.inner.shared.access(|state| {
            if let Some(read) = &tables {
                state.give_up_tables_of_scrub(read);
            }
            if let Some(lot) = &lot {
                state.give_up_lot_of_scrub(&lot.looked_up);
            }
            // Places that the kernel may still read are not used again while the pool is open.
            for interval in intervals.into_iter().filter(|_| !is_stuck) {
                state.end_read(interval);
            }
        });
        self.leave_scrub();
        self.inner.wake_all();
    }
}
