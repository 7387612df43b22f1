//! A queue's work: it puts changes into records, and reads from the log and from home.

mod read;
mod records;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{
    Backend, Background, Capabilities, Crossing, ErrorKind, LayerQueue, Operation, Outcome,
    Request, StoreId, Waker,
};
use fathom_reactor::Pending;
use fathom_wal::{Checkpoint, Pin, Segment};

use records::Prepared;

use super::Inner;
use super::agenda::STEP_LENGTH_MAX;
use super::home::WriteBack;
use super::open::Completion;
use super::release::Releasing;
use super::switch::Carry;
use super::volume::FlushAnswer;

/// The most records that a queue writes at a time. Changes that arrive meanwhile are gathered in
/// the next record.
const RECORDS_MAX: usize = 1;

/// The purposes of the layer's own requests, in the low bits of their tokens.
pub(crate) mod purpose {
    pub(crate) const BITS: u32 = 4;
    /// For the layer around this one.
    pub(crate) const OUTER: u64 = 7;
    pub(crate) const PIECE: u64 = 0;
    pub(crate) const RECORD: u64 = 1;
    pub(crate) const LOG_FLUSH: u64 = 2;
    pub(crate) const CHECKPOINT: u64 = 3;
    pub(crate) const COPY: u64 = 4;
    pub(crate) const HOME_FLUSH: u64 = 5;
    pub(crate) const EXTENTS: u64 = 6;
    pub(crate) const RELEASE: u64 = 8;
}

/// A change that is not completely in records.
struct Change {
    request: Box<Request>,
    /// The number of its bytes that are in records.
    done: u64,
    /// When it came, in nanoseconds.
    since_ns: u64,
}

pub(crate) struct WalQueue {
    pub(crate) inner: Arc<Inner>,
    /// The number of the queue, in order of opening.
    pub(crate) number: u64,
    pub(crate) store: StoreId,
    pub(crate) waker: Waker,
    /// Whether the log carries changes only at times.
    pub(super) is_switched: bool,
    pending_in_kernel: Pending,
    /// The disk's store, which is asked for its losses, and the capabilities of the disk beneath.
    pub(super) home: Arc<dyn Backend>,
    pub(super) below: Capabilities,
    pending: VecDeque<Change>,
    /// Since when the log has had no space for the record that is prepared, in nanoseconds.
    full_since_ns: Option<u64>,
    prepared: Option<Prepared>,
    /// Changes in records, each with the sequence of its last record, and flushes, with that of the
    /// last record that has to be durable.
    waiting: VecDeque<(u64, Box<Request>)>,
    /// The sequences of the records that are being written.
    records: Vec<u64>,
    /// The sequence of the record that is being written so that it needs no flush.
    forced: Option<u64>,
    /// The number of the flush of the log volume that this queue has begun.
    flushing: Option<u64>,
    pub(super) checkpoint_in_flight: Option<Checkpoint>,
    pub(super) write_back: Option<WriteBack>,
    /// The bytes of a step of the last round on average.
    pub(super) step_bytes: u64,
    /// The piece of the log that is being released.
    pub(super) releasing: Option<Releasing>,
    /// Decides when copies begin that nothing waits for.
    pub(crate) background: Background,
    /// The scheduler is not asked again before this time, in nanoseconds.
    pub(super) ask_ns: u64,
    pub(crate) is_closed: bool,
    /// Whether the log volume had failed at the last look.
    pub(super) has_failed: bool,
    /// The pins of reads, and the requests for extents that wait for an answer of the disk beneath,
    /// by number.
    pins: HashMap<u64, Pin>,
    extent_requests: HashMap<u64, Box<Request>>,
    count: u64,
    /// Kept to reuse its memory.
    segments: Vec<Segment>,
}

impl WalQueue {
    pub(super) fn new(
        inner: Arc<Inner>,
        store: StoreId,
        waker: Waker,
        pending_in_kernel: Pending,
        (home, below): (Arc<dyn Backend>, Capabilities),
        background: Background,
    ) -> Self {
        // Write-back of recovered records begins without a request.
        waker.wake();
        let (number, is_switched) = inner.shared.access(|state| {
            state.opened += 1;
            state.queues.push((state.opened, waker.clone()));
            if let Some(carry) = &mut state.carry {
                carry.open(state.opened);
            }
            (state.opened, state.carry.is_some())
        });
        Self {
            inner,
            number,
            store,
            waker,
            is_switched,
            pending_in_kernel,
            home,
            below,
            pending: VecDeque::new(),
            full_since_ns: None,
            prepared: None,
            waiting: VecDeque::new(),
            records: Vec::new(),
            forced: None,
            flushing: None,
            checkpoint_in_flight: None,
            write_back: None,
            step_bytes: STEP_LENGTH_MAX,
            releasing: None,
            background,
            ask_ns: 0,
            is_closed: false,
            has_failed: false,
            pins: HashMap::new(),
            extent_requests: HashMap::new(),
            count: 0,
            segments: Vec::new(),
        }
    }

    /// Continues all work that can continue now.
    fn work(&mut self, next: &mut Crossing<'_>) {
        self.apply_flushes(next);
        self.write_checkpoint(next);
        self.adopt(next);
        self.pump(next);
        while self.flush(next) {
            self.apply_flushes(next);
        }
        self.bring_home(next);
        // A round may need durable records.
        while self.flush(next) {
            self.apply_flushes(next);
            self.bring_home(next);
        }
        self.release(next);
        self.park(next);
        if self.has_failed {
            self.report_quiet();
        }
    }

    /// Reports that this queue has nothing in flight any more that it has begun for a log that has
    /// failed.
    fn report_quiet(&self) {
        let is_quiet = self.records.is_empty()
            && self.flushing.is_none()
            && self.checkpoint_in_flight.is_none()
            && self.write_back.is_none()
            && self.releasing.is_none();
        if is_quiet {
            self.inner.shared.access(|state| state.set_quiet(self.number));
        }
    }

    /// Whether what a waiting request needs has been reached: its records are durable, or only
    /// shown. `durable` and `shown` are the sequences of the first records that are not.
    fn is_reached(&self, waiting: &(u64, Box<Request>), durable: u64, shown: u64) -> bool {
        let (last, request) = waiting;
        let needs_durable = self.inner.completion == Completion::Durable
            || request.operation == Operation::Flush
            || request.flags.force_unit_access;
        *last < if needs_durable { durable } else { shown }
    }

    /// Applies the completed flushes, and completes what waited for them or for the writes of
    /// records.
    fn apply_flushes(&mut self, next: &mut Crossing<'_>) {
        let (finished, is_failed) = self.inner.volume.finished();
        let completion = self.inner.completion;
        let now_ns = next.round_ns();
        let mut is_new = false;
        let (durable, shown, failed, changed) = self.inner.shared.access(|state| {
            let mut changed = state.log.flushed(finished);
            if completion == Completion::Written {
                changed |= state.log.show_written();
            }
            if is_failed {
                is_new = state.fail(ErrorKind::Io);
                changed |= is_new;
            }
            if state.checkpoint_flush.is_some_and(|needed| needed <= finished) {
                state.checkpoint_flush = None;
                if state.is_checkpoint_safe() {
                    state.checkpointed(now_ns);
                }
                changed = true;
            }
            if let Some(carry) = &mut state.carry {
                let has_failed = state.failed.is_some() || state.home_failed.is_some();
                changed |= carry.end_finish(has_failed, now_ns);
                changed |= carry.end_trial(state.failed.is_none().then(|| state.log.durable()));
            }
            (state.log.durable(), state.log.shown(), state.failed, changed)
        });
        self.has_failed = failed.is_some();
        if changed {
            self.inner.shared.wake();
        }
        if is_new {
            self.inner.report_failure();
        }
        let mut index = 0;
        while let Some(waiting) = self.waiting.get(index) {
            let outcome = match failed {
                _ if self.is_reached(waiting, durable, shown) => Ok(()),
                Some(kind) => Err(kind),
                // Those behind it need not wait for it.
                None => {
                    index += 1;
                    continue;
                }
            };
            if let Some((_, request)) = self.waiting.remove(index) {
                self.complete_waiting(request, outcome, next);
            }
        }
        if let Some(kind) = failed {
            self.fail_waiting(kind, next);
        }
    }

    /// Completes a request whose records are durable, or written.
    fn complete_waiting(
        &mut self,
        mut request: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) {
        if request.operation != Operation::Flush {
            return self.end_change(request, outcome, next);
        }
        if outcome.is_ok() && self.goes_home(&mut request, next) {
            return next.submit(request);
        }
        next.complete(request, outcome);
    }

    /// Whether a flush has to flush home, too.
    fn goes_home(&self, request: &mut Request, next: &Crossing<'_>) -> bool {
        if !self.is_switched {
            return !self.inner.is_home_flushed.load(Ordering::Acquire);
        }
        let word = self.inner.shared.access(|state| state.carry.as_ref().and_then(Carry::flush));
        *next.word(request) = word.unwrap_or(0);
        word.is_some()
    }

    /// A flush of home has completed.
    fn home_flushed(&self, request: &mut Request, next: &Crossing<'_>) {
        self.inner.is_home_flushed.store(true, Ordering::Release);
        let word = std::mem::take(next.word(request));
        if word > 0 {
            self.inner.shared.access(|state| {
                if let Some(carry) = &mut state.carry {
                    carry.flushed(word);
                }
            });
        }
    }

    /// Completes a change.
    fn end_change(&self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        if self.is_switched {
            let rests =
                self.inner.shared.access(|state| state.end_change(&request, outcome.is_ok()));
            if rests {
                // Changes may wait for that.
                self.inner.shared.wake();
            }
        }
        next.complete(request, outcome);
    }

    /// Fails the changes without a place in the log.
    fn fail_waiting(&mut self, kind: ErrorKind, next: &mut Crossing<'_>) {
        if let Some(prepared) = self.prepared.take() {
            self.fail_prepared(prepared, kind, next);
        }
        for pending in std::mem::take(&mut self.pending) {
            self.end_change(pending.request, Err(kind), next);
        }
    }

    /// A flush: the changes that have completed become durable.
    fn flush_changes(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        // With `Durable`, they are durable already.
        let (lost, shown) = self.inner.shared.access(|state| {
            let is_behind = state.log.durable() < state.log.shown();
            (state.loss(), is_behind.then(|| state.want_shown()))
        });
        if let Some(kind) = lost {
            return self.complete_waiting(request, Err(kind), next);
        }
        let Some(shown) = shown else {
            // Changes from before the log was opened may not be durable at home.
            return self.complete_waiting(request, Ok(()), next);
        };
        self.waiting.push_back((shown - 1, request));
        self.work(next);
    }

    /// Begins the flush that records wait for, unless another queue has one in flight. Returns
    /// whether that flush has completed already. Records of completed changes wait only if a flush,
    /// a round or a change does.
    fn flush(&mut self, next: &mut Crossing<'_>) -> bool {
        if self.flushing.is_some() || self.is_closed {
            return false;
        }
        let completion = self.inner.completion;
        let needed = self.inner.shared.access(|state| {
            let are_wanted =
                completion == Completion::Durable || state.log.durable() < state.wanted;
            let records = state.log.awaited_flush().filter(|_| are_wanted);
            records.max(state.checkpoint_flush).filter(|_| state.failed.is_none())
        });
        let Some(needed) = needed else { return false };
        match self.inner.volume.request_flush(&self.waker, needed, next.now_ns()) {
            FlushAnswer::Completed => true,
            FlushAnswer::Begin(number) => {
                self.flushing = Some(number);
                let mut own = next.request();
                own.operation = Operation::Flush;
                own.token = number << purpose::BITS | purpose::LOG_FLUSH;
                next.submit_to(self.store, own);
                false
            }
            FlushAnswer::Wait(again_ns) => {
                if again_ns != u64::MAX {
                    next.wake_at(again_ns);
                }
                false
            }
        }
    }

    /// Registers the queue to be woken, if its changes wait for another queue's record or flush.
    fn park(&mut self, next: &mut Crossing<'_>) {
        let is_working = self.flushing.is_some() || !self.records.is_empty();
        if is_working || self.waiting.is_empty() {
            return;
        }
        let has_advanced = self.inner.shared.attempt(&self.waker, |state| {
            let (durable, shown) = (state.log.durable(), state.log.shown());
            let has_reached =
                self.waiting.iter().any(|waiting| self.is_reached(waiting, durable, shown));
            (has_reached || state.failed.is_some()).then_some(())
        });
        if has_advanced.is_some() {
            self.apply_flushes(next);
        }
    }
}

impl LayerQueue for WalQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        match request.operation {
            Operation::Read => self.read(request, next),
            Operation::Write | Operation::WriteZeroes | Operation::Discard => {
                self.pending.push_back(Change { request, done: 0, since_ns: next.round_ns() });
                if self.records.len() < RECORDS_MAX {
                    self.work(next);
                }
            }
            Operation::Flush => self.flush_changes(request, next),
            Operation::Extents => self.extents(request, next),
            Operation::GetId => next.submit(request),
        }
    }

    fn complete(&mut self, mut request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        if request.operation == Operation::Flush && outcome.is_ok() {
            self.home_flushed(&mut request, next);
        }
        next.complete(request, outcome);
    }

    fn returned(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let (which, number) =
            (request.token & ((1 << purpose::BITS) - 1), request.token >> purpose::BITS);
        match which {
            purpose::RECORD => {
                self.records.retain(|record| *record != number);
                let is_forced = self.forced == Some(number);
                if is_forced {
                    self.forced = None;
                    self.inner.volume.end_forced(Some(outcome));
                }
                match outcome {
                    Ok(()) => {
                        // Any flush that begins after this covers the record.
                        let needed = if is_forced { 0 } else { self.inner.volume.written() };
                        self.inner.shared.access(|state| state.log.written(number, needed));
                    }
                    Err(kind) => self.inner.fail(kind),
                }
            }
            purpose::LOG_FLUSH => {
                self.flushing = None;
                self.inner.volume.end(number, outcome);
            }
            purpose::CHECKPOINT => self.checkpoint_written(outcome),
            purpose::RELEASE => self.released(outcome),
            purpose::COPY | purpose::HOME_FLUSH => {
                self.returned_home(&request, outcome, next.now_ns());
            }
            purpose::EXTENTS => {
                if let Some(mut parent) = self.extent_requests.remove(&number) {
                    parent.extents.extend_from_slice(&request.extents);
                    next.complete(parent, outcome);
                }
            }
            _ => {}
        }
        next.recycle(request);
        if which != purpose::PIECE && which != purpose::EXTENTS {
            self.work(next);
            if self.is_closed {
                // It does not continue what this has made possible, for example a flush: another
                // queue does.
                self.inner.shared.access(|state| state.wake_queues());
            }
        }
    }

    fn gathered(&mut self, parent: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        if parent.operation != Operation::Read {
            return self.copied(parent, outcome, next);
        }
        self.end_read(parent, outcome, next);
    }

    fn advance(&mut self, next: &mut Crossing<'_>) {
        self.work(next);
    }

    /// Changes that wait for space in the log are given back. What is in a record goes on.
    fn withdraw(&mut self, next: &mut Crossing<'_>) {
        if self.prepared.is_some() || !self.pending.is_empty() {
            self.fail_waiting(ErrorKind::Withdrawn, next);
        }
    }

    fn close(&mut self, next: &mut Crossing<'_>) {
        self.is_closed = true;
        self.work(next);
    }

    fn reopen(&mut self, next: &mut Crossing<'_>) {
        self.is_closed = false;
        self.work(next);
    }
}

impl Drop for WalQueue {
    /// Other queues take over this queue's records, checkpoint and round. Its thread has already
    /// waited for the kernel. The kernel may still write the data of requests that it has not
    /// completed, so no other queue writes to their places.
    fn drop(&mut self) {
        let is_stuck = self.pending_in_kernel.count() > 0;
        let (mut is_last, mut is_new) = (false, false);
        let others = self.inner.shared.access(|state| {
            state.queues.retain(|(number, _)| *number != self.number);
            state.set_quiet(self.number);
            if let Some(carry) = &mut state.carry {
                carry.close(self.number, true);
            }
            let pending = self.pending.iter().map(|pending| &pending.request);
            let whole = self.prepared.iter().flat_map(|prepared| &prepared.whole);
            let waiting = self.waiting.iter().map(|(_, request)| request);
            for request in pending.chain(whole).chain(waiting) {
                if request.operation.modifies() {
                    state.end_change(request, false);
                }
            }
            if is_stuck && (!self.records.is_empty() || self.checkpoint_in_flight.is_some()) {
                state.recovery.is_stuck = true;
                is_new = state.fail(ErrorKind::Io);
            }
            state.orphans.append(&mut self.records);
            for (_, pin) in self.pins.drain() {
                state.log.unpin(pin);
            }
            if let Some(checkpoint) = self.checkpoint_in_flight.take() {
                state.checkpoint = Some(checkpoint);
            }
            if let Some(write_back) = self.write_back.take() {
                state.since_ns = state.since_ns.min(write_back.since_ns);
                // A flush that ends late writes nothing: another queue may begin a round meanwhile.
                state.is_writing_back = is_stuck && write_back.has_copies();
                if state.is_writing_back {
                    state.home_failed = Some(ErrorKind::Io);
                }
            }
            is_last = state.queues.is_empty();
            if state.log.is_empty() { Vec::new() } else { state.queues.clone() }
        });
        // Wakes the other queues, even idle ones, because one of them has to continue the
        // write-back.
        for (_, waker) in others {
            waker.wake();
        }
        self.released(Err(ErrorKind::Io));
        if self.forced.is_some() {
            self.inner.volume.end_forced(None);
        }
        if let Some(number) = self.flushing {
            self.inner.volume.abandon(number);
        }
        self.inner.shared.wake();
        if is_new {
            self.inner.report_failure();
        }
        if is_last {
            self.inner.report_unattended();
        }
    }
}
