//! A queue's work on copies: it makes them in the background while the layer rests, and reads from them while
//! reads are carried.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fathom_block::{
    Background, BackgroundStep, CacheHit, Crossing, ErrorKind, Operation, Outcome, Permission,
    Request, StoreId, faults,
};

use super::copies::{Copies, CopyRead, Fill};
use super::heat::{Gathered, Heat};
use crate::wal::queue::purpose;

/// The longest read that counts, in blocks. Longer ones are fast on any disk.
const COUNTED_BLOCKS_MAX: u64 = 2;

/// The purposes of this layer's own requests, in the bits of their tokens above those of the log's part.
mod step {
    pub(super) const BITS: u32 = 2;
    /// A read of a copy.
    pub(super) const COPY: u64 = 0;
    /// A read of home, for a copy.
    pub(super) const HOME: u64 = 1;
    /// A write of a copy.
    pub(super) const FILL: u64 = 2;
}

fn token(step: u64, number: u64) -> u64 {
    (number << step::BITS | step) << purpose::BITS | purpose::OUTER
}

/// The copies of a disk, and what chooses them.
pub(super) struct Hot {
    pub copies: Copies,
    pub heat: Heat,
    /// Whether a queue makes copies.
    is_filling: AtomicBool,
    /// Whether a copy is made durable as it is written.
    is_forced: bool,
}

impl Hot {
    /// Copies in `area`, a range of the volume in bytes, of blocks of 2^`shift` bytes. `is_forced` is whether
    /// writes of the volume can be durable at once: then no flush of the log has to write copies.
    pub(super) fn new(area: &Range<u64>, shift: u32, window_ns: u64, is_forced: bool) -> Self {
        let copies = Copies::new(area, shift);
        let heat = Heat::new(copies.slots(), window_ns);
        Self { copies, heat, is_filling: AtomicBool::new(false), is_forced }
    }
}

/// One queue's part.
pub(super) struct HotQueue {
    hot: Arc<Hot>,
    store: StoreId,
    /// The size of the disk when the queue was opened, in bytes.
    capacity: u64,
    background: Background,
    gathered: Gathered,
    /// The reads of copies in flight, with the guest's requests, by number.
    reads: HashMap<u64, (Box<Request>, CopyRead)>,
    count: u64,
    /// The copies to make, the most important first, while this queue makes copies.
    plan: VecDeque<(u64, Option<u64>)>,
    is_filling: bool,
    fill: Option<Fill>,
    /// The scheduler is not asked again before this time, in nanoseconds.
    ask_ns: u64,
    plan_ns: u64,
}

impl HotQueue {
    pub(super) fn new(
        hot: Arc<Hot>,
        store: StoreId,
        capacity: u64,
        background: Background,
    ) -> Self {
        Self {
            hot,
            store,
            capacity,
            background,
            gathered: Gathered::new(),
            reads: HashMap::new(),
            count: 0,
            plan: VecDeque::new(),
            is_filling: false,
            fill: None,
            ask_ns: 0,
            plan_ns: 0,
        }
    }

    pub(super) fn copies(&self) -> &Copies {
        &self.hot.copies
    }

    /// Counts a read.
    pub(super) fn count(&mut self, range: &Range<u64>) {
        let blocks = self.hot.copies.blocks(range);
        if blocks.end - blocks.start <= COUNTED_BLOCKS_MAX {
            // Only whole blocks have copies.
            let whole = self.capacity / self.hot.copies.block_size();
            for block in blocks.filter(|block| *block < whole) {
                self.gathered.count(block, &self.hot.heat);
            }
        }
    }

    /// Reads from a copy. Returns the request if there is none.
    pub(super) fn read(
        &mut self,
        request: Box<Request>,
        next: &mut Crossing<'_>,
    ) -> Option<Box<Request>> {
        let Some(read) = self.hot.copies.begin_read(&request.range()) else { return Some(request) };
        self.count += 1;
        let mut own = next.request();
        own.operation = Operation::Read;
        own.token = token(step::COPY, self.count);
        (own.offset, own.length) = (read.offset, read.length);
        own.buffers.allocate(read.length as usize);
        self.reads.insert(self.count, (request, read));
        next.submit_to(self.store, own);
        None
    }

    /// A request of this part has returned. Returns a guest's read that has to go home, because the copy was
    /// not right.
    pub(super) fn returned(
        &mut self,
        own: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) -> Option<Box<Request>> {
        let rest = own.token >> purpose::BITS;
        let number = rest >> step::BITS;
        match rest & ((1 << step::BITS) - 1) {
            step::COPY => self.end_read(number, own, outcome, next),
            step::HOME => {
                self.end_home(own, outcome, next);
                None
            }
            step::FILL => {
                next.recycle(own);
                if outcome.is_err() {
                    self.hot.copies.fail();
                }
                self.end_fill(outcome, next);
                None
            }
            _ => {
                next.recycle(own);
                None
            }
        }
    }

    fn end_read(
        &mut self,
        number: u64,
        own: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) -> Option<Box<Request>> {
        let Some((mut request, read)) = self.reads.remove(&number) else {
            next.recycle(own);
            return None;
        };
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok());
        if !self.hot.copies.end_read(&read, bytes) {
            next.recycle(own);
            return Some(request);
        }
        let before = faults();
        if let Some(bytes) = bytes {
            let start = read.skip as usize;
            request.buffers.copy_from(0, &bytes[start..start + request.length as usize]);
        }
        let outcome = if faults() == before { Ok(()) } else { Err(ErrorKind::Memory) };
        next.recycle(own);
        request.course.cache_hit = CacheHit::Hit;
        next.complete(request, outcome);
        None
    }

    /// Makes copies, as far as the scheduler allows, if it `may_fill`. `is_idle` returns whether the log is
    /// empty now, and no reads are carried.
    pub(super) fn work(
        &mut self,
        may_fill: bool,
        is_idle: &dyn Fn() -> bool,
        next: &mut Crossing<'_>,
    ) {
        let now_ns = next.round_ns();
        if !may_fill || self.hot.copies.has_failed() {
            if self.fill.is_none() {
                self.end_filling();
            }
            return;
        }
        if now_ns >= self.plan_ns {
            self.plan_ns = now_ns.saturating_add(self.hot.heat.interval_ns());
            self.gathered.pass_on(&self.hot.heat);
            if !self.is_filling && !self.hot.is_filling.swap(true, Ordering::AcqRel) {
                self.is_filling = true;
            }
            if self.is_filling {
                let copies = &self.hot.copies;
                let plan = self.hot.heat.plan(now_ns, |wanted| copies.compare(wanted));
                if let Some(plan) = plan {
                    let making = self.fill.map(|fill| fill.block);
                    self.plan =
                        plan.into_iter().filter(|(block, _)| Some(*block) != making).collect();
                }
            }
        }
        next.wake_at(self.plan_ns);
        if self.fill.is_none() {
            self.fill_next(is_idle, next);
        }
    }

    fn end_filling(&mut self) {
        self.plan.clear();
        self.background.rest();
        if std::mem::take(&mut self.is_filling) {
            self.hot.is_filling.store(false, Ordering::Release);
        }
    }

    /// Begins the next copy of the plan, if the scheduler allows it.
    fn fill_next(&mut self, is_idle: &dyn Fn() -> bool, next: &mut Crossing<'_>) {
        let block_size = self.hot.copies.block_size();
        while let Some((block, victim)) = self.plan.front().copied() {
            let now_ns = next.round_ns();
            if now_ns < self.ask_ns {
                return next.wake_at(self.ask_ns);
            }
            let waiting_bytes = self.plan.len() as u64 * block_size;
            // Copies need never be made.
            let step = BackgroundStep { bytes: block_size, waiting_bytes, deadline_ns: u64::MAX };
            if let Permission::Wait(until_ns) = self.background.ask(step, next.now_ns()) {
                self.ask_ns = until_ns;
                return next.wake_at(until_ns);
            }
            self.plan.pop_front();
            let Some(fill) = self.hot.copies.begin_fill(block, victim) else {
                self.background.end(next.now_ns());
                continue;
            };
            // A change that is in the log alone may have completed before the copy was begun. Later ones change
            // the version of their block.
            if !is_idle() {
                self.hot.copies.end_fill(&fill, false);
                self.background.end(next.now_ns());
                break;
            }
            self.fill = Some(fill);
            let mut own = next.request();
            own.operation = Operation::Read;
            own.token = token(step::HOME, 0);
            own.flags.background = true;
            (own.offset, own.length) = (block * block_size, block_size);
            own.buffers.allocate(block_size as usize);
            return next.submit(own);
        }
        self.end_filling();
    }

    /// The content of a block was read from home.
    fn end_home(&mut self, mut own: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok());
        let (Some(fill), Some(bytes)) = (self.fill, bytes) else {
            next.recycle(own);
            return self.end_fill(Err(ErrorKind::Io), next);
        };
        self.hot.copies.note(&fill, bytes);
        own.operation = Operation::Write;
        own.offset = self.hot.copies.place(&fill);
        own.token = token(step::FILL, 0);
        own.flags.force_unit_access = self.hot.is_forced;
        next.submit_to(self.store, own);
    }

    fn end_fill(&mut self, outcome: Outcome, next: &mut Crossing<'_>) {
        if let Some(fill) = self.fill.take() {
            self.hot.copies.end_fill(&fill, outcome.is_ok());
        }
        self.background.end(next.now_ns());
    }
}

impl Drop for HotQueue {
    /// The slot of a copy that is being written is never used again: the kernel may still write to it.
    fn drop(&mut self) {
        for (_, read) in self.reads.values() {
            self.hot.copies.abandon_read(read);
        }
        if self.is_filling {
            self.hot.is_filling.store(false, Ordering::Release);
        }
    }
}
