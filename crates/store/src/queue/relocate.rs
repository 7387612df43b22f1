//! Relocations, which the queues of a pool carry out among them: the copies of blocks, while no
//! request comes.

use std::sync::atomic::Ordering;

use fathom_block::{BackendContext, ErrorKind, Operation, Outcome, Request};

use super::StoreQueue;
use super::device::Purpose;
use crate::entry::MapEntry;
use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::relocation::{Relocated, RelocationStep};
use crate::state::State;

/// The most blocks of a lot, which is in memory as a whole: 64 MiB. The more it has, the shorter
/// are the seeks between its blocks.
const LOT_MAX: usize = 1 << 14;
/// The most blocks of a request, and the most requests in flight.
const RUN_MAX: usize = 256;
const REQUESTS_MAX: usize = 16;
/// The share of the time without requests, and the shortest time, between two looks at a walk or
/// at a checkpoint; the latter in nanoseconds.
const LOOK_SHARE: u64 = 10;
const LOOK_NS_MIN: u64 = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The blocks are read, in the order of their old places.
    Read,
    /// They are written to their new places, which are in order.
    Write,
    /// They are read from there.
    Check,
    /// The state has to be told.
    End,
}

/// Blocks that are being copied together.
struct Lot {
    blocks: Vec<Relocated>,
    /// The indexes of the blocks, by old place.
    by_place: Vec<usize>,
    bytes: Vec<u8>,
    /// Whether each block has had the right content in each phase.
    is_right: Vec<bool>,
    phase: Phase,
    /// The next block of the phase, and the requests in flight.
    next: usize,
    in_flight: usize,
    failed: Option<ErrorKind>,
}

impl Lot {
    fn new(blocks: Vec<Relocated>) -> Self {
        let mut by_place: Vec<usize> = (0..blocks.len()).collect();
        by_place.sort_unstable_by_key(|index| blocks[*index].from);
        Self {
            by_place,
            bytes: vec![0; blocks.len() * BLOCK_BYTES],
            is_right: vec![true; blocks.len()],
            blocks,
            phase: Phase::Read,
            next: 0,
            in_flight: 0,
            failed: None,
        }
    }

    /// The index of the block that is `at`-th in the phase, and the place that the phase has of it.
    fn at(&self, at: usize) -> (usize, u64) {
        match self.phase {
            Phase::Read => (self.by_place[at], self.blocks[self.by_place[at]].from),
            Phase::Write | Phase::Check | Phase::End => (at, self.blocks[at].to),
        }
    }

    /// The next adjoining blocks of the phase: the first one of them, and how many they are.
    fn run(&self) -> Option<(usize, usize)> {
        let end = self.blocks.len().min(self.next + RUN_MAX);
        let first = self.next;
        let place = (first < end).then(|| self.at(first).1)?;
        let adjoins = |at: &usize| self.at(*at).1 == place + (at - first) as u64;
        Some((first, (first..end).take_while(adjoins).count()))
    }

    fn bytes(&mut self, index: usize) -> &mut [u8] {
        &mut self.bytes[index * BLOCK_BYTES..][..BLOCK_BYTES]
    }

    /// Blocks have been read from the device.
    fn put(&mut self, first: usize, bytes: &[u8]) {
        for (at, bytes) in (first..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
            let (index, _) = self.at(at);
            let entry = MapEntry::new(0, crc32c::crc32c(bytes));
            self.is_right[index] &= entry.checksum() == self.blocks[index].checksum;
            if self.phase == Phase::Read {
                self.bytes(index).copy_from_slice(bytes);
            }
        }
    }

    /// Goes on to the next phase if this one has ended.
    fn advance(&mut self) {
        let is_over = self.next == self.blocks.len() || self.failed.is_some();
        if self.in_flight > 0 || !is_over {
            return;
        }
        self.next = 0;
        self.phase = match self.phase {
            _ if self.failed.is_some() => Phase::End,
            Phase::Read => Phase::Write,
            Phase::Write => Phase::Check,
            Phase::Check | Phase::End => Phase::End,
        };
    }
}

/// What a queue does of a relocation.
#[derive(Default)]
pub(super) struct Relocating {
    is_active: bool,
    lot: Option<Lot>,
}

impl Relocating {
    pub(super) fn is_active(&self) -> bool {
        self.is_active
    }
}

impl StoreQueue {
    /// Notes that the pool is used.
    pub(super) fn note_use(&self, context: &BackendContext<'_>) {
        if self.inner.relocates || self.inner.has_scrub.load(Ordering::Relaxed) {
            self.inner.used_at_ns.store(context.now_ns(), Ordering::Relaxed);
        }
    }

    /// Begins a relocation if one is wanted, and goes on with it.
    pub(super) fn relocate(&mut self, context: &mut BackendContext<'_>) {
        if !self.relocating.is_active && !self.begin_relocation() {
            return;
        }
        let is_copying = self.relocating.lot.as_ref().is_some_and(|lot| lot.in_flight > 0);
        if self.is_closed {
            if !is_copying {
                self.leave_relocation_undone(false);
            }
            return;
        }
        let used_at_ns = self.inner.used_at_ns.load(Ordering::Relaxed);
        let idle_ns = used_at_ns.saturating_add(self.inner.options.idle_ns);
        let is_wanted_back = self.inner.shared.access(|state| state.space.left() == 0);
        if context.now_ns() < idle_ns && !is_wanted_back {
            return context.wake_at(idle_ns);
        }
        match &mut self.relocating.lot {
            Some(lot) if lot.phase == Phase::End => self.end_lot(context),
            Some(_) => self.copy_lot(context),
            None => self.step_relocation(context),
        }
    }

    fn look_ns(&self) -> u64 {
        (self.inner.options.idle_ns / LOOK_SHARE).max(LOOK_NS_MIN)
    }

    fn begin_relocation(&mut self) -> bool {
        if !self.inner.relocates
            || self.is_closed
            || !self.inner.shared.access(|state| state.wants_relocation())
            || self.inner.is_relocated.swap(true, Ordering::AcqRel)
        {
            return false;
        }
        self.relocating.is_active = true;
        self.inner.shared.access(State::begin_relocation);
        true
    }

    fn step_relocation(&mut self, context: &mut BackendContext<'_>) {
        match self.inner.shared.access(|state| state.step_relocation(LOT_MAX)) {
            RelocationStep::AwaitWalk => {
                // It need not wait since the last one.
                self.inner.walk_at_ns.store(0, Ordering::Relaxed);
                context.wake_at(context.now_ns() + self.look_ns());
            }
            RelocationStep::AwaitPlaces => context.wake_at(context.now_ns() + self.look_ns()),
            RelocationStep::Copy(blocks) => {
                let places: Vec<u64> = blocks.iter().map(|block| block.to).collect();
                let pages = self.inner.shared.access(|state| {
                    if state.index.is_empty() {
                        Vec::new()
                    } else {
                        state.admit_fingerprints(&places)
                    }
                });
                self.load_fingerprints(&pages, context);
                self.relocating.lot = Some(Lot::new(blocks));
                context.wake_at(0);
            }
            RelocationStep::Done => self.leave_relocation(),
        }
    }

    /// Submits the next requests of the lot.
    fn copy_lot(&mut self, context: &mut BackendContext<'_>) {
        while let Some(lot) = &mut self.relocating.lot {
            lot.advance();
            if lot.phase == Phase::End {
                return context.wake_at(0);
            }
            let run = lot.run().filter(|_| lot.in_flight < REQUESTS_MAX && lot.failed.is_none());
            let Some((first, count)) = run else { return };
            let block = self.inner.first_segment + lot.at(first).1;
            let own = if lot.phase == Phase::Write {
                let mut own = self.device.take();
                (own.operation, own.offset) = (Operation::Write, block * BLOCK);
                own.length = (count * BLOCK_BYTES) as u64;
                own.buffers.allocate(count * BLOCK_BYTES);
                own.buffers.copy_from(0, &lot.bytes[first * BLOCK_BYTES..][..count * BLOCK_BYTES]);
                own
            } else {
                self.device.read(block, count)
            };
            lot.next += count;
            lot.in_flight += 1;
            self.device.submit(own, Purpose::Relocate { first, count }, context);
        }
    }

    /// A request of the lot has completed.
    pub(super) fn lot_returned(
        &mut self,
        first: usize,
        count: usize,
        own: Box<Request>,
        outcome: Outcome,
    ) {
        if let Some(lot) = &mut self.relocating.lot {
            lot.in_flight -= 1;
            match (lot.phase, outcome) {
                (Phase::Read | Phase::Check, Ok(())) => {
                    lot.put(first, own.buffers.owned().unwrap_or_default());
                }
                (Phase::Read, Err(_)) => {
                    for at in first..first + count {
                        let (index, _) = lot.at(at);
                        lot.is_right[index] = false;
                    }
                }
                (_, Err(kind)) => {
                    lot.failed = Some(kind);
                    let sound = kind == ErrorKind::NoSpace || lot.phase == Phase::Check;
                    let ends = [lot.blocks[first].to, lot.blocks[first + count - 1].to];
                    if !sound {
                        self.inner.shared.access(|state| {
                            for place in ends {
                                state.space.retire(place);
                            }
                        });
                    }
                }
                (Phase::Write | Phase::End, Ok(())) => {}
            }
        }
        self.device.give(own);
    }

    /// The lot has been copied.
    fn end_lot(&mut self, context: &mut BackendContext<'_>) {
        let Some(lot) = &self.relocating.lot else { return };
        let is_done = self.inner.shared.access(|state| {
            if lot.failed.is_some() {
                state.give_up_lot(&lot.blocks, false);
                state.give_up_relocation();
                return true;
            }
            state.end_lot(&lot.blocks, &lot.is_right)
        });
        if is_done {
            self.relocating.lot = None;
        }
        context.wake_at(if is_done { 0 } else { context.now_ns() + self.look_ns() });
    }

    fn leave_relocation(&mut self) {
        if std::mem::take(&mut self.relocating.is_active) {
            self.inner.is_relocated.store(false, Ordering::Release);
            self.inner.shared.wake();
        }
    }

    /// The queue ends in the middle of a relocation. `is_stuck` is whether the kernel may still
    /// carry out its requests.
    pub(super) fn leave_relocation_undone(&mut self, is_stuck: bool) {
        if !self.relocating.is_active {
            return;
        }
        let lot = self.relocating.lot.take();
        self.inner.shared.access(|state| {
            if let Some(lot) = &lot {
                state.give_up_lot(&lot.blocks, is_stuck && lot.in_flight > 0);
            }
            state.give_up_relocation();
            // Another queue begins it again.
            state.unsettled = state.space.used_places();
        });
        self.leave_relocation();
    }
}
