//! Writes the log's changes back home, in any open queue.
//!
//! A round copies the newest content of the oldest records home, flushes home, and writes a
//! checkpoint. One queue has the round; the other queues continue to serve. Changes written
//! meanwhile are in later records, which stay in the log. A round begins only when the notes that a
//! layer above makes of its changes are durable.
//!
//! A disk with a scheduler of background work writes back in idle time: a round may begin when half
//! of the age has passed, and each copy is a step that the scheduler allows. All copies begin in
//! time for the age. If changes wait for space, or the log is half full (7/8 for that of a layer
//! `offload`) or has to be emptied, copies do not wait.
//!
//! Home may lose copies and accept writes again before the round ends, because the operator
//! recovers the disk. The flush of home then succeeds. So a round during which home has counted a
//! loss is not complete: the records stay in the log, and the next round writes them again.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{BackgroundStep, Crossing, ErrorKind, Operation, Outcome, Permission, Request};
use fathom_wal::{ContentLocation, Round, Sample, WITNESS_LENGTH};

use super::agenda::{Agenda, Piece};
use super::queue::{WalQueue, purpose};
use super::switch::Carry;
use crate::ChangeNotes;

/// The least average of a step's bytes that is reckoned with.
const STEP_BYTES_MIN: u64 = 4096;
/// The most copies in flight.
const COPIES_MAX: usize = 8;
/// The most bytes of the ring that a round writes back.
const ROUND_LENGTH_MAX: u64 = 64 << 20;
/// For how long write-back of a log that carries changes only at times pauses after each step, in
/// durations of the step, while little of the log is in use. The more is in use, the sooner it is
/// needed again.
pub(crate) const PAUSE_MAX: u32 = 20;
/// The time between a failed round and the next attempt, in nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;

/// A write-back round in progress.
pub(super) struct WriteBack {
    last: u64,
    /// The records before this one have to be durable before the round ends.
    shown: u64,
    /// What home had counted before the first copy; see
    /// [`Backend::losses`](fathom_block::Backend::losses).
    losses: u64,
    /// Whether a change of home that was given up may have taken effect after the round's.
    is_late: bool,
    /// The time since when the log has had the changes, in nanoseconds.
    pub(super) since_ns: u64,
    agenda: Agenda,
    /// Some places that the round has written home.
    sample: Sample,
    /// The notes of the round's changes, and the number of the last one, until they are durable.
    notes: Option<(Arc<dyn ChangeNotes>, u64)>,
    in_flight: usize,
    is_flushing: bool,
    failed: Option<ErrorKind>,
    /// The bytes of the log that are as old as the round but not in it.
    beyond: u64,
    /// The number of the round at the switch, until all changes have completed that had gone past
    /// the log.
    past: Option<u64>,
    /// When the round has to be done, in nanoseconds.
    deadline_ns: u64,
    /// Whether the scheduler has allowed a step that has not begun.
    is_allowed: bool,
    /// Whether a copy or the flush in flight is a step that the scheduler has allowed.
    is_step: bool,
}

impl WriteBack {
    /// Whether copies are in flight.
    pub(super) fn has_copies(&self) -> bool {
        self.in_flight > 0 && !self.is_flushing
    }
}

impl WalQueue {
    /// Begins a round if one is due, and continues this queue's round.
    pub(super) fn bring_home(&mut self, next: &mut Crossing<'_>) {
        let may_begin = self.write_back.is_none() && !self.is_closed && self.below.write;
        if may_begin && !self.waits_for_home(next) {
            self.write_back = self.begin_round(next);
        }
        loop {
            let is_closed = self.is_closed;
            let Some(write_back) = &mut self.write_back else { return };
            let may_copy = write_back.failed.is_none() && !is_closed && !self.has_failed;
            if may_copy {
                if let Some((notes, number)) = &write_back.notes {
                    if !notes.are_durable(*number, &self.waker) {
                        return;
                    }
                    write_back.notes = None;
                }
                if let Some(round) = write_back.past {
                    let may_copy = self.inner.shared.attempt(&self.waker, |state| {
                        let may_copy =
                            state.carry.as_ref().is_none_or(|carry| carry.may_copy(round));
                        may_copy.then_some(())
                    });
                    if may_copy.is_none() {
                        return;
                    }
                    write_back.past = None;
                }
            }
            if may_copy && write_back.in_flight < COPIES_MAX && !write_back.agenda.is_empty() {
                if !self.may_step(next) {
                    return;
                }
                if let Some(write_back) = &mut self.write_back {
                    write_back.in_flight += 1;
                }
                self.copy(next);
                continue;
            }
            if write_back.in_flight > 0 {
                return;
            }
            let is_doubtful = self.home.losses() != write_back.losses || write_back.is_late;
            if write_back.is_flushing && is_doubtful {
                write_back.failed.get_or_insert(ErrorKind::Io);
                return self.abandon_round(next);
            }
            if let (true, None) = (write_back.is_flushing, write_back.failed) {
                let shown = write_back.shown;
                let outcome = self.inner.shared.attempt(&self.waker, |state| {
                    let is_durable = state.log.durable() >= shown;
                    is_durable.then_some(Ok(())).or_else(|| state.failed.map(Err))
                });
                match outcome {
                    Some(Ok(())) => return self.end_round(next),
                    Some(Err(_)) => return self.abandon_round(next),
                    // The flush of the log is in flight.
                    None => return,
                }
            }
            if !may_copy {
                return self.abandon_round(next);
            }
            if !self.may_step(next) {
                return;
            }
            if let Some(write_back) = &mut self.write_back {
                write_back.is_flushing = true;
                write_back.in_flight = 1;
            }
            let mut own = next.request();
            (own.operation, own.token) = (Operation::Flush, purpose::HOME_FLUSH);
            own.flags.background = true;
            next.submit(own);
        }
    }

    /// Whether the next copy, or the flush after the last one, may begin now. A disk with a
    /// scheduler has one of them in flight at a time, when the scheduler allows it, unless changes
    /// wait for the round.
    fn may_step(&mut self, next: &mut Crossing<'_>) -> bool {
        let (is_pressed, stands_still, used) = self.inner.shared.access(|state| {
            let stands_still = state.carry.as_ref().is_some_and(Carry::stands_still);
            (self.inner.is_pressed(state), stands_still, state.log.used())
        });
        let pause = self.pause(used);
        let Some(write_back) = &mut self.write_back else { return false };
        if stands_still && !is_pressed && !write_back.is_allowed {
            // The end of carrying and a full log wake the queue.
            return false;
        }
        if is_pressed || !self.background.is_scheduled() {
            // A step that was allowed before ends with this request.
            write_back.is_step |= std::mem::take(&mut write_back.is_allowed);
            return true;
        }
        if write_back.in_flight > 0 {
            return false;
        }
        let (agenda, beyond) = (&write_back.agenda, write_back.beyond);
        let step = BackgroundStep {
            bytes: agenda.next_bytes(),
            waiting_bytes: agenda.bytes() + beyond,
            // The flush is one more.
            waiting_steps: agenda.steps() + beyond.div_ceil(self.step_bytes) + 1,
            deadline_ns: write_back.deadline_ns,
            pause,
        };
        let is_allowed = std::mem::take(&mut write_back.is_allowed) || self.ask(step, next);
        if let Some(write_back) = &mut self.write_back {
            write_back.is_step = is_allowed;
        }
        is_allowed
    }

    /// For how long write-back pauses after a step while `used` bytes of the log are in use, in
    /// durations of the step.
    fn pause(&self, used: u64) -> u32 {
        if !self.is_switched {
            return 0;
        }
        let size = self.inner.superblock.ring_length;
        let share = size.saturating_sub(used) as f64 / size as f64;
        (share * share * f64::from(PAUSE_MAX)) as u32
    }

    /// Asks the scheduler for a step. Before the time that it has named, it is not asked again.
    fn ask(&mut self, step: BackgroundStep, next: &mut Crossing<'_>) -> bool {
        if next.round_ns() >= self.ask_ns {
            match self.background.ask(step, next.now_ns()) {
                Permission::Begin => return true,
                Permission::Wait(until_ns) => self.ask_ns = until_ns,
            }
        }
        next.wake_at(self.ask_ns);
        false
    }

    /// Whether the scheduler lets a round begin before it is due, now that there are changes of
    /// `waiting_bytes` since `since_ns`.
    fn begins_early(&mut self, since_ns: u64, waiting_bytes: u64, next: &mut Crossing<'_>) -> bool {
        let age_ns = self.inner.age_ns.load(Ordering::Relaxed);
        let due_ns = since_ns.saturating_add(age_ns);
        next.wake_at(due_ns);
        if !self.background.is_scheduled() {
            return self.is_switched;
        }
        // Changes that are overwritten soon need not be written back.
        let early_ns = since_ns.saturating_add(if self.is_switched { 0 } else { age_ns / 2 });
        if next.now_ns() < early_ns {
            self.background.rest();
            next.wake_at(early_ns);
            return false;
        }
        let bytes = self.step_bytes.min(waiting_bytes);
        let waiting_steps = waiting_bytes.div_ceil(self.step_bytes);
        let (deadline_ns, pause) = (due_ns, self.pause(waiting_bytes));
        self.ask(BackgroundStep { bytes, waiting_bytes, waiting_steps, deadline_ns, pause }, next)
    }

    /// Whether home may still carry out a change that was given up. It could replace what a round
    /// writes, which the log would not have any more.
    fn waits_for_home(&mut self, next: &mut Crossing<'_>) -> bool {
        let is_empty = || self.inner.shared.access(|state| state.log.is_empty());
        if !self.home.may_act_late() || is_empty() {
            return false;
        }
        self.background.rest();
        next.wake_at(next.now_ns().saturating_add(RETRY_NS));
        true
    }

    fn begin_round(&mut self, next: &mut Crossing<'_>) -> Option<WriteBack> {
        let size = self.inner.superblock.ring_length;
        let age_ns = self.inner.age_ns.load(Ordering::Relaxed);
        let limit = ROUND_LENGTH_MAX.min(size / 2);
        if self.inner.shared.access(|state| state.log.is_empty()) {
            self.background.rest();
            return None;
        }
        let (now_ns, mut wake_ns) = (next.now_ns(), None);
        // Whether the round may begin, and what it would write back.
        let ready = self.inner.shared.access(|state| {
            if state.failed.is_some() {
                return None;
            }
            if state.is_writing_back {
                // If the other queue closes, this one takes over.
                wake_ns = Some(now_ns.saturating_add(age_ns.max(RETRY_NS)));
                return None;
            }
            if state.home_failed.is_some() && now_ns < state.retry_ns {
                wake_ns = Some(state.retry_ns);
                return None;
            }
            let is_pressed = self.inner.is_pressed(state);
            if !is_pressed && state.carry.as_ref().is_some_and(Carry::stands_still) {
                return None;
            }
            let is_due = is_pressed || now_ns >= state.since_ns.saturating_add(age_ns);
            Some((is_due, state.since_ns, state.log.used()))
        });
        if let Some(wake_ns) = wake_ns {
            next.wake_at(wake_ns);
        }
        let Some((is_due, since_ns, waiting_bytes)) = ready else {
            self.background.rest();
            return None;
        };
        let is_allowed = !is_due && self.begins_early(since_ns, waiting_bytes, next);
        if !is_due && !is_allowed {
            return None;
        }
        let deadline_ns = if is_due { now_ns } else { since_ns.saturating_add(age_ns) };
        let (mut past, mut beyond) = (None, 0);
        let round = self.inner.shared.access(|state| {
            // Another queue may have begun a round meanwhile.
            if state.is_writing_back || state.failed.is_some() {
                return None;
            }
            // With `Written`, the records may not be durable yet.
            state.want_shown();
            let round = state.log.round(limit)?;
            let since_ns = state.since_ns;
            if self.is_switched && round.last + 1 < round.shown {
                beyond = state.log.used().saturating_sub(limit);
            } else {
                // What comes after the round is new.
                state.since_ns = now_ns;
            }
            (state.is_writing_back, state.is_space_awaited) = (true, false);
            past = state.carry.as_mut().map(Carry::begin_round);
            Some((round, since_ns))
        });
        if round.is_none() && is_allowed {
            self.background.end(now_ns);
        }
        let (Round { last, shown, segments }, since_ns) = round?;
        let agenda = Agenda::new(segments, self.below);
        self.step_bytes = (agenda.bytes() / agenda.steps().max(1)).max(STEP_BYTES_MIN);
        Some(WriteBack {
            last,
            shown,
            losses: self.home.losses(),
            is_late: false,
            since_ns,
            agenda,
            sample: Sample::default(),
            // All changes of the round have been noted by now.
            notes: self.inner.notes(),
            in_flight: 0,
            is_flushing: false,
            failed: None,
            beyond,
            past,
            deadline_ns,
            is_allowed,
            is_step: false,
        })
    }

    /// Copies adjacent segments home, or a piece of zeroes.
    fn copy(&mut self, next: &mut Crossing<'_>) {
        let is_pressed = self.inner.shared.access(|state| self.inner.is_pressed(state));
        let Some(write_back) = &mut self.write_back else { return };
        let Some(piece) = write_back.agenda.take() else { return };
        let Piece { operation, keep_allocated, offset, length, run } = piece;
        let mut own = next.request();
        own.token = purpose::COPY;
        own.flags.write_back = true;
        // Changes of guests may wait for the place that it makes.
        own.flags.background = !is_pressed;
        own.flags.keep_allocated = keep_allocated;
        (own.operation, own.offset, own.length) = (operation, offset, length);
        if operation == Operation::Write {
            own.buffers.allocate(length as usize);
            if run.is_empty() {
                own.buffers.fill_zero(0, length as usize);
            }
        }
        if run.is_empty() {
            return next.submit(own);
        }
        let split = next.split(own);
        for segment in run {
            let Some(ContentLocation::Ring(position)) = segment.source else { continue };
            let mut piece = next.piece(split, segment.offset - offset, segment.length);
            piece.operation = Operation::Read;
            piece.offset = self.inner.place(position);
            next.submit_to(self.store, piece);
        }
        next.join(split);
    }

    /// The pieces of a copy have been read from the log.
    pub(super) fn copied(
        &mut self,
        parent: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) {
        if outcome.is_ok() {
            if let Some(write_back) = self.write_back.as_mut().filter(|_| !self.is_switched) {
                write_back.sample.add(parent.offset, parent.length, |at| {
                    let mut content = [0; WITNESS_LENGTH as usize];
                    parent.buffers.copy_to(at - parent.offset, &mut content);
                    content
                });
            }
            return next.submit(parent);
        }
        next.recycle(parent);
        self.part_completed(outcome, next.now_ns());
        self.bring_home(next);
    }

    /// The last record of the round in progress.
    pub(crate) fn round_end(&self) -> Option<u64> {
        self.write_back.as_ref().map(|write_back| write_back.last)
    }

    /// A copy or the flush of home has returned.
    pub(super) fn returned_home(&mut self, request: &Request, outcome: Outcome, now_ns: u64) {
        let operation = request.operation;
        let zeroes = matches!(operation, Operation::Discard | Operation::WriteZeroes);
        let outcome = match (&mut self.write_back, outcome) {
            (Some(write_back), Err(_)) if zeroes => {
                write_back.agenda.refuse(operation, request.offset, request.length);
                Ok(())
            }
            (_, outcome) => outcome,
        };
        self.part_completed(outcome, now_ns);
    }

    /// A request of the round has completed.
    fn part_completed(&mut self, outcome: Outcome, now_ns: u64) {
        let Some(write_back) = &mut self.write_back else { return };
        write_back.in_flight -= 1;
        write_back.is_late |= self.home.may_act_late();
        if std::mem::take(&mut write_back.is_step) {
            self.background.end(now_ns);
        }
        if let Err(kind) = outcome {
            write_back.failed.get_or_insert(kind);
        }
    }

    /// The whole round is durable at home.
    fn end_round(&mut self, next: &mut Crossing<'_>) {
        let Some(WriteBack { last, sample, .. }) = self.write_back.take() else { return };
        self.inner.is_home_flushed.store(true, Ordering::Release);
        self.inner.shared.access(|state| {
            state.is_writing_back = false;
            state.home_failed = None;
            state.checkpoint = Some(state.log.checkpoint(last, sample));
        });
        self.inner.rounds.fetch_add(1, Ordering::Relaxed);
        self.inner.shared.wake();
        self.write_checkpoint(next);
    }

    /// The round failed, or its queue closes. The log keeps its content.
    fn abandon_round(&mut self, next: &mut Crossing<'_>) {
        let Some(WriteBack { failed, is_allowed, since_ns, .. }) = self.write_back.take() else {
            return;
        };
        let retry_ns = next.now_ns() + RETRY_NS;
        if is_allowed {
            self.background.end(next.now_ns());
        }
        self.inner.shared.access(|state| {
            state.is_writing_back = false;
            state.since_ns = state.since_ns.min(since_ns);
            if failed.is_some() {
                (state.home_failed, state.retry_ns) = (failed, retry_ns);
            }
        });
        if !self.is_closed {
            next.wake_at(retry_ns);
        }
        self.inner.shared.wake();
    }

    /// Writes the next checkpoint, if there is one.
    pub(super) fn write_checkpoint(&mut self, next: &mut Crossing<'_>) {
        if self.is_closed || self.checkpoint_in_flight.is_some() {
            return;
        }
        let taken = self
            .inner
            .shared
            .access(|state| if state.failed.is_some() { None } else { state.checkpoint.take() });
        let Some(checkpoint) = taken else { return };
        let mut own = next.request();
        own.operation = Operation::Write;
        own.token = purpose::CHECKPOINT;
        own.offset = self.inner.base + checkpoint.offset;
        own.length = checkpoint.bytes.len() as u64;
        own.buffers.allocate(checkpoint.bytes.len());
        own.buffers.copy_from(0, &*checkpoint.bytes);
        self.checkpoint_in_flight = Some(checkpoint);
        next.submit_to(self.store, own);
    }

    pub(super) fn checkpoint_written(&mut self, outcome: Outcome) {
        let offset = self.checkpoint_in_flight.take().map_or(0, |checkpoint| checkpoint.offset);
        match outcome {
            Ok(()) => {
                let needed = self.inner.volume.next();
                self.inner.shared.access(|state| state.checkpoint_flush = Some(needed));
            }
            Err(kind) => {
                self.inner.give_up(offset);
                self.inner.fail(kind);
            }
        }
    }
}
