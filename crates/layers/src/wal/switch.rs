//! The switch of a log that carries changes only at times, and the state that its queues share.
//!
//! | state | changes | reads | write-back |
//! |---|---|---|---|
//! | resting | go home; the log is empty | go home | none |
//! | carrying | go to the log | from the log, the rest from home | only if the log is 7/8 full |
//! | returning | go home, but for those that overlap what a scan could find | as carrying | in idle time |
//!
//! A request at rest costs a load of the [`Gate`]'s word, which tells a queue that the state has
//! changed. All else is decided under the lock of the log's state.
//!
//! **What goes past the log.** A change that goes home must not overlap anything that a scan of the
//! log could find (`Regions`): while the log works, no region of it, and after it has failed, no
//! place of it. The change and the record that overlaps it may also be in flight at the same time,
//! if the change was submitted first: then either may be the last. But once both have completed,
//! reads must not find the content of the one first and, after write-back, that of the other. So a
//! round of write-back copies nothing before all changes have completed that had gone past the log
//! when the round began. Changes under the lock are counted by the number of the round. Those at
//! rest are counted by their queue alone: the queue is *loose* until it has seen the end of the
//! rest and none of them is in flight.
//!
//! **Flushes.** Changes that completed through the log are durable. Those that went past it are
//! durable after a flush of home that began when they had completed. So a flush goes home if such a
//! change has completed since the last successful flush of home began, or if a queue is loose.
//!
//! **A trial.** A log volume may have died while the log rested. So a start writes an empty record
//! first, and changes are carried only when it is durable: a log that fails then has failed no
//! change, and holds none.

mod regions;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_persistence::Phase;
use fathom_wal::Record;

use regions::Regions;

/// The size of the regions by which changes on their way to the log are found, as a power of two.
const WAY_SHIFT: u32 = 14;
/// How long changes are held at most while the last of the log is written back, in nanoseconds.
const FINISH_TIME_NS: u64 = 1_000_000_000;
/// The time after which changes may be held again, in nanoseconds.
const FINISH_PAUSE_NS: u64 = 10_000_000_000;
/// The most bytes of the ring whose write-back changes wait for.
const FINISH_LENGTH_MAX: u64 = 8 << 20;

/// Where changes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Mode {
    /// Home. The log is empty.
    Resting = 0,
    /// To the log.
    Carrying = 1,
    /// Home, unless they overlap what a scan could find.
    Returning = 2,
}

impl Phase for Mode {
    /// A log that carries has changes that only it has: it rests only when they have returned.
    fn leads_to(self, next: Self) -> bool {
        (self, next) != (Self::Carrying, Self::Resting)
    }
}

/// A state as queues see it: the mode, whether reads are carried, and the number of the change of
/// state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View(u64);

impl View {
    const READS: u64 = 4;
    const BITS: u32 = 3;

    fn new(mode: Mode, carries_reads: bool, number: u64) -> Self {
        let reads = if carries_reads { Self::READS } else { 0 };
        Self(number << Self::BITS | reads | mode as u64)
    }

    /// Differs from each state, for a queue that has seen none.
    pub(crate) const UNSEEN: Self = Self(u64::MAX);

    /// Whether changes go home, and the log is empty.
    pub(crate) fn is_resting(self) -> bool {
        self.0 & 3 == Mode::Resting as u64
    }

    /// Whether all requests go home, and the log is empty.
    pub(crate) fn is_idle(self) -> bool {
        self.0 & ((1 << Self::BITS) - 1) == Mode::Resting as u64
    }

    /// Whether reads come from copies, if there are some.
    pub(crate) fn carries_reads(self) -> bool {
        self.0 & Self::READS != 0
    }
}

/// What requests read of the state without a lock.
#[derive(Debug)]
pub(crate) struct Gate {
    word: AtomicU64,
}

impl Gate {
    /// The state now. A queue that has got a request after another one completed, in whichever
    /// queue, sees at least the state that the other one's queue saw.
    pub(crate) fn view(&self) -> View {
        View(self.word.load(Ordering::Relaxed))
    }
}

/// The way of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// To the log.
    Log,
    /// Home. Contains the number of the round under which it counts until it completes.
    Home(u64),
    /// It waits for the end of write-back, at most until this time, in nanoseconds.
    Wait(u64),
}

/// What a change may do, as its queue and the log's state have it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conditions {
    /// Whether the log takes changes: it has not failed.
    pub log_works: bool,
    /// Whether the log has space.
    pub has_space: bool,
    /// Whether the change may wait.
    pub may_wait: bool,
    /// Whether it has waited already.
    pub has_waited: bool,
    /// The time, in nanoseconds.
    pub now_ns: u64,
}

/// The state of the switch, under the lock of the log's state.
#[derive(Debug)]
pub(crate) struct Carry {
    gate: Arc<Gate>,
    mode: Mode,
    carries_reads: bool,
    /// Counts the changes of state.
    number: u64,
    regions: Regions,
    /// The changes that have been sent to the log and have not completed, and where they are.
    in_log: u64,
    on_way: Regions,
    /// The changes in flight past the log that counted under the lock, by the number of the round.
    past: BTreeMap<u64, u64>,
    /// The number of the next round. It is greater than [`Carry::AT_REST`].
    round: u64,
    /// The queues that take requests, by number.
    open: Vec<u64>,
    /// The queues that may have changes of a rest in flight.
    loose: Vec<u64>,
    /// Counts, roughly, the changes that completed past the log. It grows with each, except at
    /// rest.
    completed: u64,
    /// The value of `completed` when the last successful flush of home began.
    flushed: u64,
    /// The trial: the sequence of the empty record, and whether reads are carried after it.
    trial: Option<(u64, bool)>,
    /// The sequence of the record of the latest trial.
    tried: Option<u64>,
    /// Whether the age of the log's content begins at the next look of a queue.
    is_restamped: bool,
    /// Until when changes are held; 0 if they are not. And when they may be held again. In
    /// nanoseconds.
    finish_until_ns: u64,
    finish_after_ns: u64,
    pub(crate) counts: SwitchCounts,
}

/// What has gone which way since the layer was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SwitchCounts {
    /// Changes that were sent to the log.
    pub carried: u64,
    /// Changes that went past the log while it was not empty.
    pub bypassed: u64,
    /// Changes of the log that are home.
    pub returned: u64,
    /// Changes that waited for the end of write-back.
    pub held: u64,
}

impl Carry {
    /// The word of a change that went home at rest. Others have the number of their round.
    pub(crate) const AT_REST: u64 = 1;

    /// A switch that rests, with regions of 2^`region_shift` bytes.
    pub(crate) fn new(region_shift: u32) -> Self {
        let gate = Arc::new(Gate { word: AtomicU64::new(View::new(Mode::Resting, false, 0).0) });
        Self {
            gate,
            mode: Mode::Resting,
            carries_reads: false,
            number: 0,
            regions: Regions::new(region_shift),
            in_log: 0,
            on_way: Regions::new(WAY_SHIFT),
            past: BTreeMap::new(),
            round: Self::AT_REST + 1,
            open: Vec::new(),
            loose: Vec::new(),
            // Home may have changes from before.
            completed: 1,
            flushed: 0,
            trial: None,
            tried: None,
            is_restamped: false,
            finish_until_ns: 0,
            finish_after_ns: 0,
            counts: SwitchCounts::default(),
        }
    }

    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    pub(crate) fn carries_reads(&self) -> bool {
        self.carries_reads
    }

    /// The state now.
    pub(crate) fn view(&self) -> View {
        View::new(self.mode, self.carries_reads, self.number)
    }

    /// Publishes a changed state.
    fn publish(&mut self) {
        self.number += 1;
        self.gate.word.store(self.view().0, Ordering::Release);
    }

    /// A record that the opening has found. The log is not empty.
    pub(crate) fn recover(&mut self, record: &Record) {
        self.regions.add_record(record);
        if self.mode == Mode::Resting {
            self.mode.step(Mode::Returning);
            self.is_restamped = true;
            self.publish();
        }
    }

    /// Begins to carry changes, reads, or both.
    pub(crate) fn start(&mut self, changes: bool, reads: bool) {
        let before = (self.mode, self.carries_reads);
        self.trial = None;
        if changes {
            self.mode.step(Mode::Carrying);
            self.finish_until_ns = 0;
        }
        self.carries_reads |= reads;
        if before != (self.mode, self.carries_reads) {
            self.publish();
        }
    }

    /// Begins a trial with the empty record `sequence`; see the module.
    pub(crate) fn try_out(&mut self, sequence: u64, reads: bool) {
        (self.trial, self.tried) = (Some((sequence, reads)), Some(sequence));
    }

    /// The sequence of the record of the latest trial.
    pub(crate) fn tried(&self) -> Option<u64> {
        self.tried
    }

    /// Whether there is a trial.
    pub(crate) fn is_tried_out(&self) -> bool {
        self.trial.is_some()
    }

    /// Ends a trial if its record is one of those before `durable`, which are durable, or if the
    /// log has failed (`None`). Returns whether it carries now.
    pub(crate) fn end_trial(&mut self, durable: Option<u64>) -> bool {
        match (self.trial, durable) {
            (Some((sequence, reads)), Some(durable)) if sequence < durable => {
                self.start(true, reads);
                return true;
            }
            (Some(_), None) => self.trial = None,
            _ => {}
        }
        false
    }

    /// Carries no more. The content of the log returns home.
    pub(crate) fn stop(&mut self) {
        let before = (self.mode, self.carries_reads);
        // The record of a trial is dropped like others.
        if self.trial.take().is_some() || self.mode == Mode::Carrying {
            self.mode.step(Mode::Returning);
            self.is_restamped = true;
        }
        self.carries_reads = false;
        if before != (self.mode, self.carries_reads) {
            self.publish();
        }
    }

    /// The log was recovered after a failure of its volume, with the durable tail `tail`. Its
    /// content returns home.
    pub(crate) fn recovered(&mut self, tail: u64) {
        self.trial = None;
        self.counts.returned += self.regions.drop_records(tail);
        // It carries nothing before it is started again.
        self.mode.step(Mode::Returning);
        self.carries_reads = false;
        self.is_restamped = true;
        self.finish_until_ns = 0;
        self.publish();
    }

    /// Whether changes can go home without a look at the log, once the log is empty.
    pub(crate) fn may_rest(&self) -> bool {
        self.mode == Mode::Returning && self.in_log == 0
    }

    /// The log is empty, and nothing is sent to it any more.
    pub(crate) fn rest(&mut self) {
        debug_assert!(self.may_rest() && self.regions.is_empty(), "the log is empty");
        self.mode.step(Mode::Resting);
        self.on_way = Regions::new(WAY_SHIFT);
        self.finish_until_ns = 0;
        self.loose.clone_from(&self.open);
        self.publish();
    }

    /// A queue takes requests.
    pub(crate) fn open(&mut self, queue: u64) {
        self.open.push(queue);
        if self.mode == Mode::Resting && !self.loose.contains(&queue) {
            self.loose.push(queue);
        }
    }

    /// A queue has seen the state. `is_clear` is whether none of its changes of a rest is in
    /// flight. Returns whether a round may have waited for that.
    pub(crate) fn see(&mut self, queue: u64, is_clear: bool) -> bool {
        self.mode != Mode::Resting && is_clear && self.tighten(queue)
    }

    /// A queue takes no more requests. As for [`see`](Self::see).
    pub(crate) fn close(&mut self, queue: u64, is_clear: bool) -> bool {
        self.open.retain(|open| *open != queue);
        is_clear && self.tighten(queue)
    }

    fn tighten(&mut self, queue: u64) -> bool {
        let Some(at) = self.loose.iter().position(|loose| *loose == queue) else { return false };
        self.loose.swap_remove(at);
        self.completed += 1;
        true
    }

    /// Whether the age of the log's content begins now.
    pub(crate) fn take_restamp(&mut self) -> bool {
        std::mem::take(&mut self.is_restamped)
    }

    /// Chooses the way of a change of `range`.
    pub(crate) fn choose(&mut self, range: &Range<u64>, conditions: Conditions) -> Way {
        let Conditions { log_works, has_space, may_wait, has_waited, now_ns } = conditions;
        let carries = self.mode == Mode::Carrying && log_works && has_space;
        let is_kept = carries || self.regions.overlap(range);
        // A log that rejects changes need not reject those beside what it has.
        let may_pass = !log_works && is_kept && {
            !self.is_on_way(range) && !self.regions.overlap_records(range)
        };
        if is_kept && !may_pass {
            if !carries && may_wait && self.holds(now_ns) {
                self.counts.held += u64::from(!has_waited);
                return Way::Wait(self.finish_until_ns);
            }
            self.in_log += 1;
            self.counts.carried += 1;
            // From now on, no change of the same place goes past it.
            self.regions.add(range);
            self.on_way.add(range);
            return Way::Log;
        }
        self.counts.bypassed += 1;
        *self.past.entry(self.round).or_default() += 1;
        Way::Home(self.round)
    }

    /// A change that was sent to the log has completed.
    pub(crate) fn end_in_log(&mut self, range: &Range<u64>) {
        self.on_way.remove(range);
        self.abandon_in_log(range);
    }

    /// A change that was sent to the log has failed, or its queue ends. Its record may still become
    /// part of the log, so that it stays on its way until the next rest.
    pub(crate) fn abandon_in_log(&mut self, range: &Range<u64>) {
        self.in_log -= 1;
        self.regions.remove(range);
    }

    /// Whether a change of `range` may be on its way to the log.
    pub(crate) fn is_on_way(&self, range: &Range<u64>) -> bool {
        self.on_way.overlap(range)
    }

    /// A change of the round `round` has completed past the log. Returns whether a round may have
    /// waited for it.
    pub(crate) fn end_past(&mut self, round: u64) -> bool {
        self.completed += 1;
        self.leave_past(round, 1)
    }

    /// `count` changes of a round are not in flight any more.
    pub(crate) fn leave_past(&mut self, round: u64, count: u64) -> bool {
        let Some(left) = self.past.get_mut(&round) else { return false };
        *left = left.saturating_sub(count);
        if *left > 0 {
            return false;
        }
        self.past.remove(&round);
        round < self.round
    }

    /// Begins a round of write-back. Returns its number.
    pub(crate) fn begin_round(&mut self) -> u64 {
        self.round += 1;
        self.round - 1
    }

    /// Whether all changes have completed that had gone past the log when a round began.
    pub(crate) fn may_copy(&self, round: u64) -> bool {
        self.loose.is_empty() && self.past.keys().next().is_none_or(|first| *first > round)
    }

    /// Whether write-back waits, unless the log has to be emptied.
    pub(crate) fn stands_still(&self) -> bool {
        self.mode == Mode::Carrying || self.trial.is_some()
    }

    /// Whether changes wait for the end of write-back.
    pub(crate) fn is_finishing(&self) -> bool {
        self.finish_until_ns > 0
    }

    /// Whether changes may wait at `now_ns`.
    pub(crate) fn holds(&self, now_ns: u64) -> bool {
        now_ns < self.finish_until_ns
    }

    /// Changes wait no longer, if their time has passed or `is_over`. Returns whether some may have
    /// waited.
    pub(crate) fn end_finish(&mut self, is_over: bool, now_ns: u64) -> bool {
        let ends = self.is_finishing() && (is_over || now_ns >= self.finish_until_ns);
        if ends {
            self.finish_until_ns = 0;
        }
        ends
    }

    /// A record was reserved.
    pub(crate) fn reserved(&mut self, record: &Record) {
        self.regions.add_record(record);
    }

    /// The superblock with the tail `tail` is durable. The log still uses `used` of `size` bytes.
    /// If little is left, changes that would go to the log wait while it is written back, so that
    /// this ends even if a guest changes the same place all the time.
    pub(crate) fn checkpointed(&mut self, tail: u64, used: u64, size: u64, now_ns: u64) {
        self.counts.returned += self.regions.drop_records(tail);
        let is_little = used <= FINISH_LENGTH_MAX.min(size / 8);
        if self.mode == Mode::Returning
            && is_little
            && used > 0
            && !self.is_finishing()
            && now_ns >= self.finish_after_ns
        {
            self.finish_until_ns = now_ns.saturating_add(FINISH_TIME_NS);
            self.finish_after_ns = now_ns.saturating_add(FINISH_PAUSE_NS);
        }
    }

    /// A flush has made the log durable. Returns the word for its way home if it has to go there.
    pub(crate) fn flush(&self) -> Option<u64> {
        (!self.loose.is_empty() || self.completed > self.flushed).then_some(self.completed)
    }

    /// The flush of home with that word has succeeded.
    pub(crate) fn flushed(&mut self, word: u64) {
        self.flushed = self.flushed.max(word);
    }
}
