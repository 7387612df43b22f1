//! Merges, which the queues of a pool carry out among them: the reads of the fingerprint table, and
//! the comparisons of blocks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;

use fathom_block::{BackendContext, Outcome, Request};

use super::StoreQueue;
use super::device::Purpose;
use crate::index::read_page;
use crate::layout::BLOCK_BYTES;
use crate::merge::{MergeStep, Pair};
use crate::state::State;

/// The pages of the fingerprint table that are read at once.
const READ_PAGES: u32 = 64;
/// The most comparisons in flight, and the most blocks of one.
const RUNS_MAX: usize = 4;
const RUN_MAX: usize = 64;
/// The time between two looks at a walk, in nanoseconds.
const LOOK_NS: u64 = 20_000_000;

/// Adjoining pairs of places that are compared together.
struct MergeRun {
    first: Pair,
    count: usize,
    interval: u64,
    /// The blocks of the victims, when they have been read.
    victims: Vec<u8>,
}

/// What a queue does of a merge.
#[derive(Default)]
pub(super) struct Merging {
    is_active: bool,
    /// Whether pages of the fingerprint table are being read.
    is_reading: bool,
    /// The pairs that were not compared yet, and the runs that are being compared, by number.
    pairs: VecDeque<Pair>,
    runs: BTreeMap<u64, MergeRun>,
}

impl Merging {
    pub(super) fn is_active(&self) -> bool {
        self.is_active
    }

    fn is_idle(&self) -> bool {
        !self.is_reading && self.runs.is_empty()
    }

    /// The numbers that end its reads in the state.
    pub(super) fn intervals(&self) -> impl Iterator<Item = u64> {
        self.runs.values().map(|run| run.interval)
    }
}

impl StoreQueue {
    /// Begins a merge if one is wanted, and goes on with it.
    pub(super) fn merge(&mut self, context: &mut BackendContext<'_>) {
        if !self.merging.is_active && !self.begin_merge(context) {
            return;
        }
        if self.is_closed {
            if self.merging.is_idle() {
                self.leave_merge_undone();
            }
            return;
        }
        while self.merging.runs.len() < RUNS_MAX && self.begin_run(context) {}
        if !self.merging.is_idle() {
            return;
        }
        let step = self.inner.shared.access(|state| state.step_merge(READ_PAGES));
        match step {
            MergeStep::Read { first, count } => {
                let block = self.inner.shared.access(|state| state.index.block(first));
                let own = self.device.read(block, count as usize);
                self.merging.is_reading = true;
                self.device.submit(own, Purpose::MergeTable { page: first }, context);
            }
            MergeStep::Compare => {
                self.merging.pairs = self.inner.shared.access(State::take_pairs).into();
                context.wake_at(0);
            }
            MergeStep::AwaitWalk => {
                // It need not wait since the last one.
                self.inner.walk_at_ns.store(0, Ordering::Relaxed);
                context.wake_at(context.now_ns() + LOOK_NS);
            }
            MergeStep::Done => {
                self.inner.shared.access(|state| state.counts.merges += 1);
                self.leave_merge();
            }
        }
    }

    fn begin_merge(&mut self, context: &mut BackendContext<'_>) -> bool {
        let (wants, is_due) =
            self.inner.shared.access(|state| (state.wants_merge(), state.is_merge_wanted));
        if self.is_closed || !wants {
            return false;
        }
        let (now_ns, pause_ns) = (context.now_ns(), self.inner.options.merge_pause_ns);
        let at_ns = self.inner.merge_at_ns.load(Ordering::Relaxed);
        // The first one is due some time after the first blocks.
        let due_ns = if at_ns == 0 { now_ns.saturating_add(pause_ns).max(1) } else { at_ns };
        if now_ns < due_ns && !is_due {
            self.inner.merge_at_ns.store(due_ns, Ordering::Relaxed);
            context.wake_at(due_ns);
            return false;
        }
        if self.inner.is_merged.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.inner.merge_at_ns.store(now_ns.saturating_add(pause_ns).max(1), Ordering::Relaxed);
        self.merging.is_active = true;
        self.inner.shared.access(State::begin_merge);
        true
    }

    fn leave_merge(&mut self) {
        if std::mem::take(&mut self.merging.is_active) {
            self.inner.is_merged.store(false, Ordering::Release);
        }
    }

    /// The queue ends in the middle of a merge.
    pub(super) fn leave_merge_undone(&mut self) {
        if self.merging.is_active {
            self.merging.pairs.clear();
            self.inner.shared.access(|state| {
                state.give_up_merge();
                // Another queue begins it again.
                state.is_merge_wanted = true;
            });
            self.leave_merge();
        }
    }

    /// Pages of the fingerprint table have been read.
    pub(super) fn merge_table_read(&mut self, first: u32, own: Box<Request>, outcome: Outcome) {
        self.merging.is_reading = false;
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok()).unwrap_or_default();
        let mut pages = bytes.chunks_exact(BLOCK_BYTES);
        for page in first..first + READ_PAGES {
            let words = pages.next().and_then(|bytes| read_page(self.inner.identity, page, bytes));
            self.inner.shared.access(|state| state.look_through(page, words.as_deref()));
        }
        self.device.give(own);
    }

    /// Begins to compare the next pairs. Returns false if there are none.
    fn begin_run(&mut self, context: &mut BackendContext<'_>) -> bool {
        let Some(first) = self.merging.pairs.pop_front() else { return false };
        let mut count = 1;
        let goes_on = |pair: &Pair, count: u64| {
            *pair == Pair { victim: first.victim + count, keep: first.keep + count }
        };
        while count < RUN_MAX
            && self.merging.pairs.front().is_some_and(|pair| goes_on(pair, count as u64))
        {
            self.merging.pairs.pop_front();
            count += 1;
        }
        let interval = self.inner.shared.access(State::begin_read);
        let number = self.number();
        let run = MergeRun { first, count, interval, victims: Vec::new() };
        self.merging.runs.insert(number, run);
        let own = self.device.read(self.inner.first_segment + first.victim, count);
        self.device.submit(own, Purpose::MergeVictims { run: number }, context);
        true
    }

    /// The blocks of victims have been read: those that are to be kept are next.
    pub(super) fn merge_victims_read(
        &mut self,
        number: u64,
        own: Box<Request>,
        outcome: Outcome,
        context: &mut BackendContext<'_>,
    ) {
        let Some(run) = self.merging.runs.get_mut(&number) else { return };
        run.victims.extend(own.buffers.owned().filter(|_| outcome.is_ok()).unwrap_or_default());
        let (block, count) = (self.inner.first_segment + run.first.keep, run.count);
        self.device.give(own);
        let own = self.device.read(block, count);
        self.device.submit(own, Purpose::MergeKept { run: number }, context);
    }

    /// The blocks that are to be kept have been read.
    pub(super) fn merge_kept_read(&mut self, number: u64, own: Box<Request>, outcome: Outcome) {
        let Some(run) = self.merging.runs.remove(&number) else { return };
        let kept = own.buffers.owned().filter(|_| outcome.is_ok()).unwrap_or_default();
        let blocks = run.victims.chunks_exact(BLOCK_BYTES).zip(kept.chunks_exact(BLOCK_BYTES));
        let is_trusted = !self.inner.options.rules.compares_equals;
        self.inner.shared.access(|state| {
            for (index, (victim, keep)) in (0..).zip(blocks) {
                let pair = Pair { victim: run.first.victim + index, keep: run.first.keep + index };
                if victim == keep || is_trusted {
                    state.merge(pair);
                } else {
                    state.counts.unequal_blocks += 1;
                }
            }
        });
        self.device.give(own);
        self.end_interval(run.interval);
    }
}
