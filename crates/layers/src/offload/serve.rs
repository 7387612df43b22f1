//! A queue's work on copies: it fills them from what its guest reads and writes at home, and in the
//! background while the layer rests. While reads are carried, it reads from them.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fathom_block::{
    Background, BackgroundStep, CacheHit, Crossing, ErrorKind, Flags, Operation, Outcome,
    Permission, Request, StoreId, faults,
};

use super::budget::Budget;
use super::copies::{Copies, CopyRead, Fill};
use super::heat::{Gathered, Heat};
use super::weight::Runs;
use crate::wal::home::PAUSE_MAX;
use crate::wal::queue::purpose;

/// The longest read that counts, in blocks. Longer ones are fast on any disk.
const COUNTED_BLOCKS_MAX: u64 = 2;

/// The most bytes of guests' requests whose content is being copied, for all queues of a disk.
const PASSING_MAX: u64 = 4 << 20;

/// The purposes of this layer's own requests, in the bits of their tokens above those of the log's
/// part.
mod step {
    pub(super) const BITS: u32 = 2;
    /// A read of a copy.
    pub(super) const COPY: u64 = 0;
    /// A read of home, for a copy.
    pub(super) const HOME: u64 = 1;
    /// A write of a copy.
    pub(super) const FILL: u64 = 2;
    /// A guest's read of home, or change past the log, whose content also fills a copy.
    pub(super) const PASS: u64 = 3;
}

fn token(step: u64, number: u64) -> u64 {
    (number << step::BITS | step) << purpose::BITS | purpose::OUTER
}

/// The copies of a disk, and what chooses them.
pub(super) struct Hot {
    pub copies: Copies,
    pub heat: Heat,
    /// Whether a queue makes copies in the background.
    is_filling: AtomicBool,
    /// The bytes of guests' requests whose content is being copied.
    passing: AtomicU64,
    /// Whether a copy is made durable as it is written.
    is_forced: bool,
}

impl Hot {
    /// Copies in `area`, a range of the volume in bytes, of blocks of 2^`shift` bytes. `is_forced`
    /// is whether writes of the volume can be durable at once: then no flush of the log has to
    /// write copies.
    pub(super) fn new(area: &Range<u64>, shift: u32, window_ns: u64, is_forced: bool) -> Self {
        let copies = Copies::new(area, shift);
        let heat = Heat::new(copies.slots(), window_ns);
        let (is_filling, passing) = (AtomicBool::new(false), AtomicU64::new(0));
        Self { copies, heat, is_filling, passing, is_forced }
    }
}

/// What follows from a request of this part that has returned.
pub(super) enum Returned {
    Nothing,
    /// A guest's read has to go home, because the copy was not right.
    Read(Box<Request>),
    /// A guest's change past the log has been carried out.
    Change(Box<Request>, Outcome),
}

/// A guest's request whose content also fills a copy.
struct Passing {
    request: Box<Request>,
    fill: Fill,
}

/// One queue's part.
pub(super) struct HotQueue {
    hot: Arc<Hot>,
    store: StoreId,
    /// The size of the disk when the queue was opened, in bytes.
    capacity: u64,
    background: Background,
    gathered: Gathered,
    runs: Runs,
    /// The reads of copies in flight, with the guest's requests, by number.
    reads: HashMap<u64, (Box<Request>, CopyRead)>,
    count: u64,
    /// The guest's requests in flight whose content also fills a copy, and the writes of such
    /// content, by number.
    passing: HashMap<u64, Passing>,
    passed: HashMap<u64, (Fill, u64)>,
    budget: Budget,
    /// The blocks whose copies to make in the background, the most important first, while this
    /// queue does so.
    plan: VecDeque<u64>,
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
            runs: Runs::default(),
            reads: HashMap::new(),
            count: 0,
            passing: HashMap::new(),
            passed: HashMap::new(),
            budget: Budget::default(),
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
    pub(super) fn count(&mut self, request: &Request) {
        let range = request.range();
        let blocks = self.hot.copies.blocks(&range);
        let weight = self.runs.weigh(&range, &request.insight);
        if blocks.end - blocks.start <= COUNTED_BLOCKS_MAX && weight > 0 {
            // Only whole blocks have copies.
            let whole = self.capacity / self.hot.copies.block_size();
            for block in blocks.filter(|block| *block < whole) {
                self.gathered.count(block, weight, &self.hot.heat);
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

    /// Begins to fill a copy with the content of a guest's request that goes home now, if the copy
    /// lacks it. A change has been begun. `is_home` returns whether the log has nothing for a
    /// range. `None` if nothing is filled.
    pub(super) fn begin_pass(
        &mut self,
        request: &Request,
        is_home: &dyn Fn(&Range<u64>) -> bool,
        now_ns: u64,
    ) -> Option<Fill> {
        self.begin_copy(&request.range(), request.operation.modifies(), is_home, now_ns)
    }

    /// Begins to fill what a copy lacks of `range` with content that passes, if the budget is
    /// sufficient, and uses the budget. The other arguments are those of
    /// [`begin_fill`](Self::begin_fill).
    fn begin_copy(
        &mut self,
        range: &Range<u64>,
        is_change: bool,
        is_newest: &dyn Fn(&Range<u64>) -> bool,
        now_ns: u64,
    ) -> Option<Fill> {
        let length = range.end - range.start;
        let may_begin = self.hot.copies.may_lack(range)
            && self.budget.has(length, now_ns)
            && self.hot.passing.load(Ordering::Relaxed) + length <= PASSING_MAX;
        let fill = may_begin.then(|| self.begin_fill(range, is_change, is_newest)).flatten()?;
        self.budget.take(length);
        self.hot.passing.fetch_add(length, Ordering::Relaxed);
        Some(fill)
    }

    /// Begins to fill what a copy lacks of `range`; see [`Copies::begin_fill`]. `is_newest` returns
    /// whether the content to come is the newest one: a change that is in the log alone may have
    /// completed before, or be on its way there.
    fn begin_fill(
        &self,
        range: &Range<u64>,
        is_change: bool,
        is_newest: &dyn Fn(&Range<u64>) -> bool,
    ) -> Option<Fill> {
        let fill = self.hot.copies.begin_fill(range, is_change)?;
        if is_newest(range) {
            return Some(fill);
        }
        self.hot.copies.end_fill(&fill, false);
        None
    }

    /// Sends a guest's request home whose content also fills a copy. Returns the request if its
    /// memory was lost.
    pub(super) fn pass(
        &mut self,
        request: Box<Request>,
        fill: Fill,
        next: &mut Crossing<'_>,
    ) -> Option<Box<Request>> {
        // The guest must not be able to change what becomes a copy.
        let mut own = next.request();
        own.operation = request.operation;
        (own.offset, own.length, own.flags) = (request.offset, request.length, request.flags);
        own.inherit(&request, 0);
        own.buffers.allocate(request.length as usize);
        if request.operation == Operation::Write {
            let before = faults();
            if let Some(memory) = own.buffers.owned_mut() {
                request.buffers.copy_to(0, memory);
            }
            if faults() != before {
                next.recycle(own);
                self.end_pass(&fill, request.length, false);
                return Some(request);
            }
        }
        self.count += 1;
        own.token = token(step::PASS, self.count);
        self.passing.insert(self.count, Passing { request, fill });
        next.submit(own);
        None
    }

    /// The guest's request has been carried out. Its content goes into the copy.
    fn passed(
        &mut self,
        number: u64,
        own: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) -> Returned {
        let Some(Passing { mut request, fill }) = self.passing.remove(&number) else {
            next.recycle(own);
            return Returned::Nothing;
        };
        request.course.follow(&own.course);
        let mut result = outcome;
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok());
        if let (Some(bytes), Operation::Read) = (bytes, request.operation) {
            let before = faults();
            request.buffers.copy_from(0, bytes);
            result = if faults() == before { Ok(()) } else { Err(ErrorKind::Memory) };
        }
        let returned = if request.operation == Operation::Read {
            next.complete(request, result);
            Returned::Nothing
        } else {
            Returned::Change(request, result)
        };
        let Some(bytes) = bytes else {
            self.end_pass(&fill, own.length, false);
            next.recycle(own);
            return returned;
        };
        self.hot.copies.note(&fill, bytes);
        self.passed.insert(number, (fill, own.length));
        self.send_fill(own, &fill, number, next);
        returned
    }

    /// Content of the log has gone home: what copies lack of it goes there, too. `is_newest`
    /// returns whether it is still the newest content of a range.
    pub(super) fn returned_home(
        &mut self,
        request: &Request,
        is_newest: &dyn Fn(&Range<u64>) -> bool,
        next: &mut Crossing<'_>,
    ) {
        let Some(bytes) = request.buffers.owned() else { return };
        for block in self.hot.copies.blocks(&request.range()) {
            let range = self.hot.copies.parts_within(block, &request.range());
            let length = range.end.saturating_sub(range.start);
            if length == 0 {
                continue;
            }
            let now_ns = next.round_ns();
            let Some(fill) = self.begin_copy(&range, false, is_newest, now_ns) else { continue };
            let start = (range.start - request.offset) as usize;
            let bytes = &bytes[start..start + length as usize];
            let mut own = next.request();
            own.length = length;
            own.buffers.allocate(bytes.len());
            own.buffers.copy_from(0, bytes);
            self.hot.copies.note(&fill, bytes);
            self.count += 1;
            self.passed.insert(self.count, (fill, length));
            self.send_fill(own, &fill, self.count, next);
        }
    }

    fn end_pass(&self, fill: &Fill, length: u64, is_written: bool) {
        self.hot.copies.end_fill(fill, is_written);
        self.hot.passing.fetch_sub(length, Ordering::Relaxed);
    }

    /// Writes the content of `own` to its place in a copy.
    fn send_fill(&self, mut own: Box<Request>, fill: &Fill, number: u64, next: &mut Crossing<'_>) {
        own.operation = Operation::Write;
        own.offset = fill.offset;
        own.token = token(step::FILL, number);
        own.flags = Flags::default();
        own.flags.force_unit_access = self.hot.is_forced;
        next.submit_to(self.store, own);
    }

    /// A request of this part has returned.
    pub(super) fn returned(
        &mut self,
        own: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) -> Returned {
        let rest = own.token >> purpose::BITS;
        let number = rest >> step::BITS;
        match rest & ((1 << step::BITS) - 1) {
            step::COPY => {
                let again = self.end_read(number, own, outcome, next);
                return again.map_or(Returned::Nothing, Returned::Read);
            }
            step::PASS => return self.passed(number, own, outcome, next),
            step::HOME => self.end_home(own, outcome, next),
            _ => {
                next.recycle(own);
                if outcome.is_err() {
                    self.hot.copies.fail();
                }
                match self.passed.remove(&number) {
                    Some((fill, length)) => self.end_pass(&fill, length, outcome.is_ok()),
                    None => self.end_fill(outcome, next),
                }
            }
        }
        Returned::Nothing
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

    /// Chooses the blocks that get copies, if it is time, and makes copies of them in the
    /// background as far as the scheduler allows, if it `may_fill`. `is_home` returns whether the
    /// log has nothing for a range.
    pub(super) fn work(
        &mut self,
        may_fill: bool,
        is_home: &dyn Fn(&Range<u64>) -> bool,
        next: &mut Crossing<'_>,
    ) {
        let now_ns = next.round_ns();
        if now_ns >= self.plan_ns {
            self.plan_ns = now_ns.saturating_add(self.hot.heat.interval_ns());
            self.gathered.pass_on(&self.hot.heat);
            self.choose(now_ns);
        }
        next.wake_at(self.plan_ns);
        if self.fill.is_some() {
            return;
        }
        if may_fill {
            self.fill_next(is_home, next);
        } else {
            self.end_filling();
        }
    }

    /// Gives the blocks of a new plan their slots, if one is due and no other queue makes copies.
    fn choose(&mut self, now_ns: u64) {
        if !self.is_filling && !self.hot.is_filling.swap(true, Ordering::AcqRel) {
            self.is_filling = true;
        }
        if !self.is_filling {
            return;
        }
        let copies = &self.hot.copies;
        let Some(plan) = self.hot.heat.plan(now_ns, |wanted| copies.compare(wanted)) else {
            return;
        };
        self.plan.clear();
        for (block, victim) in plan {
            copies.assign(block, victim);
            self.plan.push_back(block);
        }
    }

    /// Makes no more copies: the queue is closed, or the area has failed.
    pub(super) fn end_work(&mut self) {
        if self.fill.is_none() {
            self.end_filling();
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.hot.copies.has_failed()
    }

    fn end_filling(&mut self) {
        self.plan.clear();
        self.background.rest();
        if std::mem::take(&mut self.is_filling) {
            self.hot.is_filling.store(false, Ordering::Release);
        }
    }

    /// Begins the next copy of the plan, if the scheduler allows it.
    fn fill_next(&mut self, is_home: &dyn Fn(&Range<u64>) -> bool, next: &mut Crossing<'_>) {
        let block_size = self.hot.copies.block_size();
        while let Some(block) = self.plan.front().copied() {
            if !self.hot.copies.can_fill(block) {
                self.plan.pop_front();
                continue;
            }
            let now_ns = next.round_ns();
            if now_ns < self.ask_ns {
                return next.wake_at(self.ask_ns);
            }
            let waiting_bytes = self.plan.len() as u64 * block_size;
            // Copies need never be made.
            let step = BackgroundStep {
                bytes: block_size,
                waiting_bytes,
                waiting_steps: self.plan.len() as u64,
                deadline_ns: u64::MAX,
                pause: PAUSE_MAX,
            };
            if let Permission::Wait(until_ns) = self.background.ask(step, next.now_ns()) {
                self.ask_ns = until_ns;
                return next.wake_at(until_ns);
            }
            self.plan.pop_front();
            let range = self.hot.copies.range(block);
            let Some(fill) = self.begin_fill(&range, false, is_home) else {
                self.background.end(next.now_ns());
                continue;
            };
            self.fill = Some(fill);
            let mut own = next.request();
            own.operation = Operation::Read;
            own.token = token(step::HOME, 0);
            own.flags.background = true;
            (own.offset, own.length) = (range.start, block_size);
            own.buffers.allocate(block_size as usize);
            return next.submit(own);
        }
        self.end_filling();
    }

    /// The content of a block was read from home.
    fn end_home(&mut self, own: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok());
        let (Some(fill), Some(bytes)) = (self.fill, bytes) else {
            next.recycle(own);
            return self.end_fill(Err(ErrorKind::Io), next);
        };
        self.hot.copies.note(&fill, bytes);
        self.send_fill(own, &fill, 0, next);
    }

    fn end_fill(&mut self, outcome: Outcome, next: &mut Crossing<'_>) {
        if let Some(fill) = self.fill.take() {
            self.hot.copies.end_fill(&fill, outcome.is_ok());
        }
        self.background.end(next.now_ns());
    }
}

impl Drop for HotQueue {
    /// A slot to which a copy is being written keeps its pin, so that it is never used again: the
    /// kernel may still write to it.
    fn drop(&mut self) {
        for (_, read) in self.reads.values() {
            self.hot.copies.abandon_read(read);
        }
        for Passing { request, fill } in self.passing.values() {
            self.end_pass(fill, request.length, false);
        }
        for (_, length) in self.passed.values() {
            self.hot.passing.fetch_sub(*length, Ordering::Relaxed);
        }
        if self.is_filling {
            self.hot.is_filling.store(false, Ordering::Release);
        }
    }
}
