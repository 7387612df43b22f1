//! Checkpoints, walks and unions of change sets, which the queues of a pool carry out among them.

use std::sync::atomic::Ordering;

use fathom_block::{BackendContext, Outcome, Request};

use super::StoreQueue;
use super::device::Purpose;
use crate::change_set::UnionProgress;
use crate::checkpoint::{Checkpoint, CheckpointStep};
use crate::index::read_page;
use crate::layout::BLOCK_BYTES;
use crate::pages::{Fault, from_bytes};
use crate::state::State;
use crate::walk::{Walk, WalkRead};

/// The most writes of a checkpoint in flight.
const WRITES_MAX: usize = 4;
/// The most reads of a walk in flight.
const READS_MAX: usize = 16;
/// The pages of the fingerprint table that a scan reads at once.
const SCAN_PAGES: u32 = 64;

/// The shortest time after which a checkpoint that may not begin now is considered again, in
/// nanoseconds.
const LOOK_NS: u64 = 100_000_000;
/// The time between two steps of a walk that waits for reads, or for a checkpoint, in nanoseconds.
const STEP_NS: u64 = 1_000_000;

impl StoreQueue {
    /// Begins a checkpoint if one is wanted, and goes on with that of this queue.
    pub(super) fn checkpoint(&mut self, context: &mut BackendContext<'_>) {
        if self.checkpoint.is_none() && !self.is_closed {
            self.checkpoint = self.inner.orphan.lock().take().or_else(|| self.begin(context));
        }
        if context.now_ns() < self.resume_ns {
            return context.wake_at(self.resume_ns);
        }
        while self.device.of_checkpoint() < WRITES_MAX {
            let Some(checkpoint) = &mut self.checkpoint else { return };
            let mut own = self.device.take();
            match checkpoint.step(&self.inner.shared, &mut own) {
                CheckpointStep::Submit => self.device.submit(own, Purpose::Checkpoint, context),
                CheckpointStep::Wait => return self.device.give(own),
                CheckpointStep::Pause => {
                    self.device.give(own);
                    self.resume_ns = context.now_ns() + LOOK_NS;
                    return context.wake_at(self.resume_ns);
                }
                CheckpointStep::Done | CheckpointStep::Failed => {
                    self.device.give(own);
                    self.checkpoint = None;
                }
            }
        }
    }

    fn begin(&self, context: &mut BackendContext<'_>) -> Option<Checkpoint> {
        let pause_ns = self.inner.options.checkpoint_ns;
        let now_ns = context.now_ns();
        let due_ns = self.inner.checkpoint_at_ns.load(Ordering::Relaxed);
        let (wants, has_changes, expires_ns) = self.inner.shared.access(|state| {
            let expires_ns = state.contents.expire(now_ns);
            (state.wants_checkpoint(now_ns >= due_ns), state.awaits_checkpoint(), expires_ns)
        });
        if let Some(expires_ns) = expires_ns {
            context.wake_at(expires_ns);
        }
        if !wants {
            if has_changes {
                context.wake_at(due_ns.max(now_ns + LOOK_NS));
            }
            return None;
        }
        self.inner.checkpoint_at_ns.store(now_ns.saturating_add(pause_ns), Ordering::Relaxed);
        Checkpoint::begin(&self.inner.shared)
    }

    /// A write or flush of the checkpoint has completed.
    pub(super) fn checkpoint_written(&mut self, own: Box<Request>, outcome: Outcome) {
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.completed(outcome);
        }
        self.device.give(own);
    }

    /// Looks for the hooks of the fingerprint table, once after the opening.
    pub(super) fn scan(&mut self, context: &mut BackendContext<'_>) {
        if self.device.of_scan() > 0 {
            return;
        }
        if self.is_closed {
            return self.leave_scan();
        }
        if !self.is_scanning {
            let is_done = self.inner.shared.access(|state| state.index.is_scanned());
            if is_done || self.inner.is_scanned.swap(true, Ordering::AcqRel) {
                return;
            }
            self.is_scanning = true;
        }
        let (pages, block) = self.inner.shared.access(|state| {
            let pages = state.next_scan(SCAN_PAGES);
            let block = state.index.block(pages.start);
            (pages, block)
        });
        if pages.is_empty() {
            return self.leave_scan();
        }
        let own = self.device.read(block, pages.len());
        self.device.submit(own, Purpose::Scan { page: pages.start }, context);
    }

    pub(super) fn leave_scan(&mut self) {
        if std::mem::take(&mut self.is_scanning) {
            self.inner.is_scanned.store(false, Ordering::Release);
        }
    }

    /// Pages of the fingerprint table have been read.
    pub(super) fn scanned(&mut self, first: u32, own: Box<Request>, outcome: Outcome) {
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok()).unwrap_or_default();
        for (page, bytes) in (first..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
            let Some(words) = read_page(self.inner.identity, page, bytes) else {
                continue;
            };
            self.inner.shared.access(|state| state.fingerprints_scanned(page, &words));
        }
        self.device.give(own);
    }

    /// Begins a walk if one is wanted, and goes on with it.
    pub(super) fn walk(&mut self, context: &mut BackendContext<'_>) {
        if !self.is_walking && !self.begin_walk(context) {
            return;
        }
        let in_flight = self.device.of_walk();
        if self.is_closed {
            if in_flight == 0 {
                self.leave_walk();
            }
            return;
        }
        let stepped = self.inner.shared.access(|state| {
            if state.end_walk() || state.walk.is_none() {
                return None;
            }
            let reads = state.step_walk(READS_MAX.saturating_sub(in_flight)).ok()?;
            let intervals: Vec<u64> = reads.iter().map(|_| state.begin_read()).collect();
            Some(reads.into_iter().zip(intervals).collect::<Vec<_>>())
        });
        let Some(reads) = stepped else {
            self.leave_walk();
            let pause_ns = self.inner.options.walk_pause_ns;
            let next_ns = context.now_ns().saturating_add(pause_ns);
            self.inner.walk_at_ns.store(next_ns, Ordering::Relaxed);
            return self.inner.shared.wake();
        };
        for (read, interval) in reads {
            let own = self.device.read(read.entry.block, 1);
            let purpose = Purpose::Walk { read, interval, is_copy: false };
            self.device.submit(own, purpose, context);
        }
        // The next step belongs to the next round.
        let is_waiting =
            self.inner.shared.access(|state| state.walk.as_ref().is_some_and(Walk::is_waiting));
        let waits = in_flight > 0 || is_waiting;
        context.wake_at(if waits { context.now_ns() + STEP_NS } else { 0 });
    }

    /// Goes on with the unions of the change sets of deleted snapshots.
    pub(super) fn unite(&mut self, context: &mut BackendContext<'_>) {
        let has_sets = &self.inner.has_retired_sets;
        if self.is_closed || !has_sets.load(Ordering::Relaxed) {
            return;
        }
        // Before the look: a snapshot that is deleted meanwhile sets it again.
        has_sets.store(false, Ordering::SeqCst);
        let stepped = self.inner.shared.access(|state| match state.failed {
            Some(_) => Ok(UnionProgress::Done),
            None => state.unite_sets(),
        });
        let is_done = matches!(stepped, Ok(UnionProgress::Done));
        has_sets.fetch_or(!is_done, Ordering::SeqCst);
        match stepped {
            Ok(UnionProgress::Done) => {}
            Ok(UnionProgress::Waits | UnionProgress::GoesOn) => {
                context.wake_at(context.now_ns() + STEP_NS);
            }
            Err(fault) => {
                let missing = match fault {
                    Fault::Missing(id) => vec![id],
                    Fault::Damaged => Vec::new(),
                };
                if self.load_all(fault, &missing, context) {
                    self.inner.shared.access(State::give_up_union);
                }
            }
        }
    }

    /// Goes on with the count of the fresh blocks of volumes with guarantees.
    pub(super) fn count_fresh(&mut self, context: &mut BackendContext<'_>) {
        if self.is_closed || !self.inner.has_guarantees.load(Ordering::Relaxed) {
            return;
        }
        match self.inner.shared.access(State::step_count) {
            Ok(false) => {}
            Ok(true) => context.wake_at(0),
            Err(fault) => {
                let missing = match fault {
                    Fault::Missing(id) => vec![id],
                    Fault::Damaged => Vec::new(),
                };
                if self.load_all(fault, &missing, context) {
                    self.inner.shared.access(State::skip_count);
                    context.wake_at(0);
                }
            }
        }
    }

    fn begin_walk(&mut self, context: &mut BackendContext<'_>) -> bool {
        if self.is_closed {
            return false;
        }
        let now_ns = context.now_ns();
        let at_ns = self.inner.walk_at_ns.load(Ordering::Relaxed);
        let (wants, is_scarce) = self.inner.shared.access(|state| {
            let wants = state.has_garbage || state.walk.is_some();
            let is_between = !state.is_checkpointing || !state.rules.walks_between_checkpoints;
            (wants && state.failed.is_none() && is_between, state.space.left() == 0)
        });
        if !wants {
            return false;
        }
        if now_ns < at_ns && !is_scarce {
            context.wake_at(at_ns);
            return false;
        }
        if self.inner.is_walked.swap(true, Ordering::AcqRel) {
            return false;
        }
        // Another thread may have begun a checkpoint meanwhile.
        self.is_walking = self.inner.shared.access(State::begin_walk);
        if !self.is_walking {
            self.leave_walk();
        }
        self.is_walking
    }

    fn leave_walk(&mut self) {
        self.is_walking = false;
        self.inner.is_walked.store(false, Ordering::Release);
    }

    /// The queue ends in the middle of the walk.
    pub(super) fn leave_walk_undone(&mut self) {
        self.inner.shared.access(|state| {
            if state.walk.is_some() {
                state.give_up_walk();
                state.has_garbage = true;
            }
        });
        self.leave_walk();
    }

    /// A page has been read for the walk.
    pub(super) fn walk_read(
        &mut self,
        (read, interval, is_copy): (WalkRead, u64, bool),
        own: Box<Request>,
        outcome: Outcome,
        context: &mut BackendContext<'_>,
    ) {
        let is_wrong = Self::is_wrong(&own, outcome, &read.entry);
        if !is_copy && is_wrong && self.has_copy(read.id, &read.entry) {
            self.device.give(own);
            let own = self.device.read(read.entry.copy, 1);
            let purpose = Purpose::Walk { read, interval, is_copy: true };
            return self.device.submit(own, purpose, context);
        }
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok());
        let right = bytes.filter(|bytes| crc32c::crc32c(bytes) == read.entry.checksum);
        let page = right.map(from_bytes);
        let walked = self.inner.shared.access(|state| match &page {
            Some(page) => {
                if is_copy {
                    state.pages.insert(read.id, read.entry, page.clone());
                    state.mend(read.id);
                }
                state.walked(&read, page)
            }
            None => state.not_walked(&read),
        });
        if walked.is_err() && outcome.is_err() {
            self.inner.shared.access(|state| state.has_garbage = true);
        } else if walked.is_err() {
            self.report_wrong(0, &format!("pages of maps ({})", read.id));
        }
        self.device.give(own);
        self.end_interval(interval);
    }
}
