//! Writes the log's changes back home, in any open queue.
//!
//! A round copies the newest content of the oldest records home, flushes home, and writes a
//! checkpoint. One queue has the round; the other queues continue to serve. Changes written
//! meanwhile are in later records, which stay in the log.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use fathom_block::{Crossing, ErrorKind, Operation, Outcome, Request};
use fathom_wal::{Round, Segment, Source};

use super::queue::{WalQueue, purpose};

/// The most bytes of one copy.
const COPY_LENGTH_MAX: u64 = 1 << 20;
/// The most copies in flight.
const COPIES_MAX: usize = 8;
/// The most bytes of the ring that a round writes back.
const ROUND_LENGTH_MAX: u64 = 64 << 20;
/// The time between a failed round and the next attempt, in nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;

/// A write-back round in progress.
pub(super) struct WriteBack {
    last: u64,
    segments: VecDeque<Segment>,
    in_flight: usize,
    is_flushing: bool,
    failed: Option<ErrorKind>,
}

impl WalQueue {
    /// Begins a round if one is due, and continues this queue's round.
    pub(super) fn bring_home(&mut self, next: &mut Crossing<'_>) {
        if self.write_back.is_none() && !self.is_closed && self.below.write {
            self.write_back = self.begin_round(next);
        }
        loop {
            let is_closed = self.is_closed;
            let Some(write_back) = &mut self.write_back else { return };
            let may_copy = write_back.failed.is_none() && !is_closed;
            if may_copy && write_back.in_flight < COPIES_MAX && !write_back.segments.is_empty() {
                write_back.in_flight += 1;
                self.copy(next);
                continue;
            }
            if write_back.in_flight > 0 {
                return;
            }
            if let (true, None) = (write_back.is_flushing, write_back.failed) {
                return self.end_round(next);
            }
            if !may_copy {
                return self.abandon_round(next);
            }
            write_back.is_flushing = true;
            write_back.in_flight = 1;
            let mut own = next.request();
            (own.operation, own.token) = (Operation::Flush, purpose::HOME_FLUSH);
            next.submit(own);
        }
    }

    fn begin_round(&self, next: &mut Crossing<'_>) -> Option<WriteBack> {
        let age_ns = self.inner.age_ns.load(Ordering::Relaxed);
        let size = self.inner.superblock.ring_length;
        let limit = ROUND_LENGTH_MAX.min(size / 2);
        let mut wake_ns = None;
        if self.inner.shared.access(|state| state.log.is_empty()) {
            return None;
        }
        let now_ns = next.now_ns();
        let round = self.inner.shared.access(|state| {
            if state.failed.is_some() {
                return None;
            }
            if state.is_writing_back {
                // If the other queue closes, this one takes over.
                wake_ns = Some(now_ns.saturating_add(age_ns.max(RETRY_NS)));
                return None;
            }
            let is_due =
                state.is_draining || state.is_space_awaited || state.log.used() >= size / 2;
            let mut due_ns = if is_due { 0 } else { state.since_ns.saturating_add(age_ns) };
            if state.home_failed.is_some() {
                due_ns = due_ns.max(state.retry_ns);
            }
            if now_ns < due_ns {
                wake_ns = Some(due_ns);
                return None;
            }
            let round = state.log.round(limit)?;
            (state.is_writing_back, state.is_space_awaited, state.since_ns) = (true, false, now_ns);
            Some(round)
        });
        if let Some(wake_ns) = wake_ns {
            next.wake_at(wake_ns);
        }
        let Round { last, segments } = round?;
        Some(WriteBack {
            last,
            segments: segments.into(),
            in_flight: 0,
            is_flushing: false,
            failed: None,
        })
    }

    /// Copies adjacent segments home.
    fn copy(&mut self, next: &mut Crossing<'_>) {
        let Some(write_back) = &mut self.write_back else { return };
        let Some(mut first) = write_back.segments.pop_front() else { return };
        let mut own = next.request();
        own.token = purpose::COPY;
        own.flags.background = true;
        own.offset = first.offset;
        let zeroes = match first.source {
            Some(Source::Ring(_)) | None => None,
            Some(Source::Discard) if self.below.discard => Some(Operation::Discard),
            Some(Source::Discard | Source::Zeroes { .. }) if self.below.write_zeroes => {
                own.flags.keep_allocated =
                    first.source == Some(Source::Zeroes { keep_allocated: true });
                Some(Operation::WriteZeroes)
            }
            Some(Source::Discard | Source::Zeroes { .. }) => Some(Operation::Write),
        };
        if let Some(operation) = zeroes {
            own.operation = operation;
            own.length = first.length;
            if operation == Operation::Write {
                own.length = first.length.min(COPY_LENGTH_MAX);
                own.buffers.allocate(own.length as usize);
                own.buffers.fill_zero(0, own.length as usize);
                (first.offset, first.length) =
                    (first.offset + own.length, first.length - own.length);
                if first.length > 0 {
                    write_back.segments.push_front(first);
                }
            }
            return next.submit(own);
        }
        let mut run = vec![first];
        own.length = first.length;
        while let Some(&segment) = write_back.segments.front() {
            let fits = matches!(segment.source, Some(Source::Ring(_)))
                && segment.offset == own.offset + own.length
                && own.length + segment.length <= COPY_LENGTH_MAX;
            if !fits {
                break;
            }
            write_back.segments.pop_front();
            own.length += segment.length;
            run.push(segment);
        }
        own.operation = Operation::Write;
        own.buffers.allocate(own.length as usize);
        let start = own.offset;
        let split = next.split(own);
        for segment in run {
            let Some(Source::Ring(position)) = segment.source else { continue };
            let mut piece = next.piece(split, segment.offset - start, segment.length);
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
            return next.submit(parent);
        }
        next.recycle(parent);
        self.part_completed(outcome);
        self.bring_home(next);
    }

    /// A request of the round has completed.
    pub(super) fn part_completed(&mut self, outcome: Outcome) {
        let Some(write_back) = &mut self.write_back else { return };
        write_back.in_flight -= 1;
        if let Err(kind) = outcome {
            write_back.failed.get_or_insert(kind);
        }
    }

    /// The whole round is durable at home.
    fn end_round(&mut self, next: &mut Crossing<'_>) {
        let Some(WriteBack { last, .. }) = self.write_back.take() else { return };
        self.inner.shared.access(|state| {
            state.is_writing_back = false;
            state.home_failed = None;
            state.checkpoint = Some(state.log.checkpoint(last));
        });
        self.inner.rounds.fetch_add(1, Ordering::Relaxed);
        self.inner.shared.wake();
        self.write_checkpoint(next);
    }

    /// The round failed, or its queue closes. The log keeps its content.
    fn abandon_round(&mut self, next: &mut Crossing<'_>) {
        let Some(WriteBack { failed, .. }) = self.write_back.take() else { return };
        let retry_ns = next.now_ns() + RETRY_NS;
        self.inner.shared.access(|state| {
            state.is_writing_back = false;
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
        self.checkpoint_in_flight = None;
        match outcome {
            Ok(()) => {
                let needed = self.inner.volume.next();
                self.inner.shared.access(|state| state.checkpoint_flush = Some(needed));
            }
            Err(kind) => self.fail(kind),
        }
    }
}
