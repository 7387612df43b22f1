//! A write-ahead log for a slow disk.
//!
//! Every change is in a log volume before it is acknowledged. Changes are written back home later,
//! in batches and in order of their offsets. With [`Completion::Durable`], a change is durable in
//! the log before it is acknowledged. So a flush has nothing to wait for, and a synchronous write
//! takes as long as the log volume needs for it. With [`Completion::Written`], a flush makes the
//! changes durable that completed before it. The log itself is `fathom_wal`; `docs/wal.md`
//! describes its format.
//!
//! - [`LogVolume`]: the store of logs; the disks with a log on it share its flushes.
//! - `open`: makes a log, or recovers one, before the first queue is opened; `opening`: what
//!   decides whether it may be opened.
//! - `places`: finds the place of a disk's log among several in one volume.
//! - `queue`: one queue's work: it puts changes into records, and reads from the log and from home.
//! - `stamps`: what the log and the image's mark know of each other.
//! - `recovery`: makes a log usable again after its volume has failed.
//! - `home`: writes changes back home, in any open queue; `agenda`: what a round still writes, and
//!   in how many steps.
//!
//! The queues of a disk share a [`Shared`] with the log, which gives all changes one order, and
//! share the flushes of the volume. If a queue ends before it has written a record, another queue
//! fills the record's place, so that no queue waits for a closed one.
//!
//! After the log volume has failed, the disk rejects changes, and flushes if they would have to
//! make changes durable. The log keeps its content, and can be recovered when the volume works
//! again. If the disk beneath fails, changes succeed until the log is full, and then fail with the
//! disk's error. Write-back is tried again each second.

mod agenda;
mod error;
pub(crate) mod home;
mod open;
mod opening;
mod owner;
mod phase;
mod places;
pub(crate) mod queue;
mod recovery;
mod release;
mod stamps;
pub(crate) mod switch;
mod volume;

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fathom_block::{
    Backend, Capabilities, Clock, Disk, ErrorKind, Figure, Geometry, Layer, LayerCause, LayerPart,
    LayerProblem, LayerReport, OpenContext, Request, Shared, Stack, Waker,
};
use fathom_persistence::Identity;
use fathom_reactor::Reactor;
use fathom_wal::{Checkpoint, ContentLocation, Log, Reservation};
use parking_lot::Mutex;

pub use error::WalError;
pub use fathom_wal::{Held, Owner, Superblock, Utc};
pub use open::{Completion, HomeStore, HomeTimes, Life, Settlement, WalOptions};
pub use owner::{identity_of_log, owner_in, owner_of_changes};
pub use places::{LogPlaces, logs_in};
use queue::WalQueue;
pub use recovery::RECOVERY_PAUSE_MAX;
pub(crate) use recovery::emptied;
use recovery::{OnFailure, RecoveryState};
pub use stamps::is_void;
use switch::{Carry, Mode};
pub(crate) use volume::Claim;
pub use volume::LogVolume;

use crate::ChangeNotes;

/// How often a drain checks its progress.
const DRAIN_INTERVAL: Duration = Duration::from_millis(1);
/// The write-back rounds that a log completes before it leaves, while the disk still serves. The
/// last round, while the disk stands still, writes back only the changes of the round before.
const RETIRE_ROUNDS: u64 = 3;
/// The least time that requests in flight get to complete.
const FINISH_TIME_MIN: Duration = Duration::from_secs(2);

/// The state that the queues of one disk share.
pub(crate) struct LogState {
    pub(crate) log: Log,
    /// The error of the log volume. After it, changes are rejected.
    pub(crate) failed: Option<ErrorKind>,
    recovery: RecoveryState,
    /// Records that their queues did not write before they closed.
    orphans: Vec<u64>,
    /// The open queues by number, and the number of queues opened so far.
    queues: Vec<(u64, Waker)>,
    opened: u64,
    /// Whether a queue has a write-back round in progress.
    is_writing_back: bool,
    /// The next checkpoint to write.
    checkpoint: Option<Checkpoint>,
    /// The flush that makes the written checkpoint durable.
    checkpoint_flush: Option<u64>,
    /// The error of the last write-back round, and the earliest time of the next one, in
    /// nanoseconds.
    pub(crate) home_failed: Option<ErrorKind>,
    retry_ns: u64,
    /// The time since when the log has had changes that are not at home, in nanoseconds.
    pub(crate) since_ns: u64,
    /// The records before this one have to become durable as soon as possible. Used only if changes
    /// complete before they are durable.
    wanted: u64,
    /// Whether a change waits for space.
    pub(crate) is_space_awaited: bool,
    /// Whether to write back all changes now.
    is_draining: bool,
    /// The switch of a log that carries changes only at times: the layer `offload`.
    pub(crate) carry: Option<Carry>,
    /// The position up to which the space of records has been released, and whether a queue
    /// releases a piece.
    released: u64,
    is_releasing: bool,
}

impl LogState {
    /// What is shown has to become durable as soon as possible. Returns the sequence of the first
    /// record that is not shown.
    fn want_shown(&mut self) -> u64 {
        self.wanted = self.wanted.max(self.log.shown());
        self.log.shown()
    }

    /// Wakes all queues: the one with a write-back round in progress may have to continue.
    pub(crate) fn wake_queues(&self) {
        for (_, waker) in &self.queues {
            waker.wake();
        }
    }

    /// The written checkpoint is durable.
    fn checkpointed(&mut self, now_ns: u64) {
        self.log.checkpointed();
        self.end_emptying();
        let superblock = self.log.superblock();
        let (tail, size) = (superblock.tail_sequence, superblock.ring_length);
        let used = if self.log.is_empty() { 0 } else { self.log.used() };
        if let Some(carry) = &mut self.carry {
            carry.checkpointed(tail, used, size, now_ns);
        }
        self.rest_if_empty();
    }

    /// Begins a trial of a log that rests, if a queue is open that carries it out. `reads` is
    /// whether reads are carried afterwards, too. Returns whether there is a trial.
    pub(crate) fn try_out(&mut self, reads: bool) -> bool {
        let is_usable = self.refuses().is_none();
        let Some(carry) = &mut self.carry else { return false };
        let may_begin = carry.mode() == Mode::Resting
            && is_usable
            && self.log.is_empty()
            && !self.queues.is_empty();
        if !may_begin {
            return carry.is_tried_out();
        }
        let Ok(Reservation { record, .. }) = self.log.reserve(Vec::new()) else { return false };
        carry.reserved(&record);
        carry.try_out(record.sequence, reads);
        self.orphans.push(record.sequence);
        self.wake_queues();
        true
    }

    /// Whether the log holds no change that home may lack: it is empty, or has failed when it was
    /// tried out.
    pub(crate) fn is_idle(&self) -> bool {
        let tried = self.carry.as_ref().and_then(Carry::tried).filter(|_| self.failed.is_some());
        self.log.is_empty() || tried.is_some_and(|sequence| self.log.is_only(sequence))
    }

    /// A log that carries no more changes rests once it is empty. Returns whether it has begun to.
    pub(crate) fn rest_if_empty(&mut self) -> bool {
        let Some(carry) = &mut self.carry else { return false };
        let rests = carry.may_rest() && self.log.is_empty() && self.failed.is_none();
        if rests {
            carry.rest();
        }
        rests
    }

    /// Whether a change of `range` may be on its way to the log.
    fn is_on_way(&self, range: &Range<u64>) -> bool {
        self.carry.as_ref().is_some_and(|carry| carry.is_on_way(range))
    }

    /// A change that was sent to the log has completed, or, unless it `is_ok`, has failed or will
    /// not complete. Returns whether the log rests now.
    fn end_change(&mut self, request: &Request, is_ok: bool) -> bool {
        if let Some(carry) = &mut self.carry {
            if is_ok {
                carry.end_in_log(&request.range());
            } else {
                carry.abandon_in_log(&request.range());
            }
        }
        self.rest_if_empty()
    }
}

pub(crate) struct Inner {
    pub(crate) volume: Arc<LogVolume>,
    /// Where the region begins in the volume, in bytes.
    base: u64,
    /// The superblock at the opening. Only its constant fields are used.
    pub(crate) superblock: Superblock,
    age_ns: AtomicU64,
    /// The time at which the clock of the queues was 0, in nanoseconds since 1970; 0 if that is not
    /// known.
    clock_start_ns: u64,
    /// Whether the mark of the image could not be written anew.
    has_old_mark: AtomicBool,
    completion: Completion,
    /// Whether the log carries changes only at times, and its store keeps zeroes in little space.
    frees_zeroes: bool,
    pub(crate) shared: Shared<LogState>,
    rounds: AtomicU64,
    /// Whether a flush of home has completed since the log was opened. Before that, home may have
    /// changes that completed without the log and are not durable.
    is_home_flushed: AtomicBool,
    /// The notes that a layer above makes of changes.
    notes: Mutex<Option<Arc<dyn ChangeNotes>>>,
    /// Called when the last queue has closed while the log has work.
    unattended: OnceLock<Unattended>,
    /// Called when the log volume has failed.
    on_failure: OnceLock<OnFailure>,
    /// Called when the log gets changes and had none.
    on_changes: OnceLock<OnChanges>,
    /// Whether nothing but logs uses the volume.
    is_alone: bool,
    opened: Opened,
    _claim: Claim,
}

/// A log as an opening has found it.
#[derive(Clone, Copy, Debug)]
struct Opened {
    /// The sequence of the first record after it.
    sequence: u64,
    /// The size of the disk. What the records before had beyond it is dropped.
    capacity: u64,
    /// The records before.
    held: Held,
}

/// See [`Wal::on_unattended`].
type Unattended = Box<dyn Fn(&Wal) + Send + Sync>;
/// See [`Wal::on_changes`].
type OnChanges = Box<dyn Fn() + Send + Sync>;

impl Inner {
    /// Whether changes have to be written back without a wait for an idle time. The log of a layer
    /// `offload` is for what a peak writes, and the device waits for relief meanwhile.
    fn is_pressed(&self, state: &LogState) -> bool {
        let eighths = if state.carry.is_some() { 7 } else { 4 };
        let is_full = state.log.used() >= self.superblock.ring_length / 8 * eighths;
        let is_finishing = state.carry.as_ref().is_some_and(Carry::is_finishing);
        let is_emptied = state.refuses().is_some();
        state.is_draining || state.is_space_awaited || is_full || is_finishing || is_emptied
    }

    /// Whether home has the newest content of all of `range`, apart from changes past the log.
    pub(crate) fn is_home(&self, range: &Range<u64>) -> bool {
        self.shared.access(|state| {
            let first = state.log.map().first(range.clone());
            let is_unknown = first.source.is_none() && first.length == range.end - range.start;
            is_unknown && !state.is_on_way(range)
        })
    }

    /// Whether all of `range` has its newest content in the log, in records up to `last`, apart
    /// from changes past the log.
    pub(crate) fn is_logged(&self, range: &Range<u64>, last: u64) -> bool {
        self.shared.access(|state| {
            let mut at = range.start;
            while at < range.end {
                let first = state.log.map().first(at..range.end);
                if !matches!(first.source, Some(ContentLocation::Ring(_))) || first.sequence > last
                {
                    return false;
                }
                at += first.length;
            }
            !state.is_on_way(range)
        })
    }

    /// The notes that a layer above makes of changes, and the number of the last one.
    fn notes(&self) -> Option<(Arc<dyn ChangeNotes>, u64)> {
        let notes = self.notes.lock().clone();
        notes.map(|notes| (Arc::clone(&notes), notes.number()))
    }

    /// Whether an open queue has anything to do that no request asks for.
    fn has_work(&self, state: &LogState) -> bool {
        let has_space = self.frees_zeroes && state.may_release();
        state.failed.is_none() && (!state.log.is_empty() || has_space)
    }

    /// Reports that the last queue has closed, or that there is none, if the log has work.
    fn report_unattended(self: &Arc<Self>) {
        let Some(call) = self.unattended.get() else { return };
        let wal = Wal { inner: Arc::clone(self) };
        if wal.is_unattended() {
            call(&wal);
        }
    }

    /// The place of a ring's position in the volume, in bytes.
    fn place(&self, position: u64) -> u64 {
        self.base + fathom_wal::RING_OFFSET + position % self.superblock.ring_length
    }
}

/// The state of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalStatus {
    /// The bytes of the ring that are in use.
    pub used: u64,
    /// The length of the ring, in bytes.
    pub size: u64,
    /// The error after which the log rejects changes.
    pub log_failed: Option<ErrorKind>,
    /// The error after which the log was recovered, and rejects changes until its content is home.
    pub emptied_after: Option<ErrorKind>,
    /// The error of the last write-back round, if it failed.
    pub home_failed: Option<ErrorKind>,
    /// The number of completed write-back rounds.
    pub rounds: u64,
    /// The flushes of the log volume since it was opened, for all disks on it.
    pub volume_flushes: u64,
}

/// The layer. See the module.
#[derive(Clone)]
pub struct Wal {
    pub(crate) inner: Arc<Inner>,
}

impl Wal {
    /// The state of the log now.
    pub fn status(&self) -> WalStatus {
        self.inner.shared.access(|state| WalStatus {
            used: state.log.used(),
            size: self.inner.superblock.ring_length,
            log_failed: state.failed,
            emptied_after: state.refuses().filter(|_| state.failed.is_none()),
            home_failed: state.home_failed,
            rounds: self.inner.rounds.load(Ordering::Relaxed),
            volume_flushes: self.inner.volume.flush_count(),
        })
    }

    /// Writes all changes of the log back home within `limit`, in a queue that it opens for this.
    /// `disk` has this layer, and must not take changes any more. A queue's thread must not call
    /// this function.
    ///
    /// # Errors
    /// If the disk or the log volume fails, or `limit` has passed. The remaining changes stay in
    /// the log.
    pub fn drain(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        self.bring_home_until(LogState::is_idle, disk, limit)
    }

    /// Writes changes back until `is_done`. The disk may take changes meanwhile.
    fn bring_home_until(
        &self,
        is_done: impl Fn(&LogState) -> bool,
        disk: &Arc<Disk>,
        limit: Duration,
    ) -> io::Result<()> {
        let end = Instant::now() + limit;
        let shared = &self.inner.shared;
        if self.lost().is_some() {
            // Even if it is empty: without the log, nothing would remember the loss.
            return Err(io::Error::other(
                "acknowledged writes may be lost: first use `fathom disk recover`",
            ));
        }
        if shared.access(|state| is_done(state)) {
            return Ok(());
        }
        let mut reactor = Reactor::new(64)?;
        let mut stack = disk.open_aside(&mut reactor, Clock::System)?;
        // An earlier failure need not occur again.
        shared.access(|state| {
            (state.is_draining, state.home_failed, state.retry_ns) = (true, None, 0);
            state.wake_queues();
        });
        let drained = self.bring_home(is_done, &mut stack, &mut reactor, end);
        shared.access(|state| state.is_draining = false);
        // Requests in flight complete before the queue closes.
        let left = end.saturating_duration_since(Instant::now()).max(FINISH_TIME_MIN);
        stack.finish(&mut reactor, left)?;
        drained
    }

    /// Sets how long a change may be only in the log, in nanoseconds.
    pub fn set_age(&self, age_ns: u64) {
        self.inner.age_ns.store(age_ns, Ordering::Relaxed);
    }

    /// Whether the log has changes that are not home, or space to release, and accepts writes.
    pub fn has_work(&self) -> bool {
        self.inner.shared.access(|state| self.inner.has_work(state))
    }

    /// Whether the log has such work and no queue is open that does it.
    pub fn is_unattended(&self) -> bool {
        self.inner.shared.access(|state| state.queues.is_empty() && self.inner.has_work(state))
    }

    /// Calls `call` from now on when the last queue closes while the log
    /// [has work](Self::has_work): in the thread of that queue, so `call` must not block. Only the
    /// first of several calls is kept.
    pub fn on_unattended(&self, call: impl Fn(&Self) + Send + Sync + 'static) {
        let _ = self.inner.unattended.set(Box::new(call));
    }

    /// Calls `call` from now on when the log gets changes and had none, before they are written: in
    /// the thread of a queue, so `call` must not block. Only the first of several calls is kept.
    pub fn on_changes(&self, call: impl Fn() + Send + Sync + 'static) {
        let _ = self.inner.on_changes.set(Box::new(call));
    }

    /// Finds out whether the log has changes that are not home, without keeping it open; `None`
    /// once it is closed.
    pub fn observer(&self) -> impl Fn() -> Option<bool> + Send + Sync + 'static {
        let inner = Arc::downgrade(&self.inner);
        move || Some(inner.upgrade()?.shared.access(|state| !state.log.is_empty()))
    }

    /// Sets the layer above that makes notes of changes. From now on, changes are brought home only
    /// when their notes are durable.
    pub fn set_notes(&self, notes: Arc<dyn ChangeNotes>) {
        *self.inner.notes.lock() = Some(notes);
    }

    /// The ranges of the disk whose newest content is in the log, in bytes and in order of their
    /// offsets.
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        self.inner.shared.access(|state| {
            for segment in state.log.map().until(u64::MAX) {
                let end = segment.offset + segment.length;
                match ranges.last_mut() {
                    Some(last) if last.end == segment.offset => last.end = end,
                    _ => ranges.push(segment.offset..end),
                }
            }
        });
        ranges
    }

    /// Opens a part for a queue of the layer `name`.
    pub(crate) fn open_part(
        &self,
        name: &'static str,
        context: &mut OpenContext<'_>,
    ) -> io::Result<WalQueue> {
        let below = context.below();
        if below.capabilities.write && !below.capabilities.flush {
            return Err(io::Error::other("a log needs a disk that can be flushed"));
        }
        let store = context.open_store(self.inner.volume.backend())?;
        let waker = context.waker()?;
        let pending = context.pending();
        let background = context.background(name)?;
        let home = (Arc::clone(context.home()), below.capabilities);
        let inner = Arc::clone(&self.inner);
        Ok(WalQueue::new(inner, store, waker, pending, home, background))
    }

    /// The identity of the log.
    pub fn identity(&self) -> Identity {
        self.inner.superblock.log
    }

    fn bring_home(
        &self,
        is_done: impl Fn(&LogState) -> bool,
        stack: &mut Stack,
        reactor: &mut Reactor,
        end: Instant,
    ) -> io::Result<()> {
        loop {
            stack.wait(reactor, Some(DRAIN_INTERVAL))?;
            let (is_done, failure) = self
                .inner
                .shared
                .access(|state| (is_done(state), state.failed.or(state.home_failed)));
            if is_done {
                return Ok(());
            }
            if let Some(failure) = failure {
                return Err(io::Error::other(failure));
            }
            if Instant::now() >= end {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

impl Layer for Wal {
    fn name(&self) -> &'static str {
        "wal"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        // A change is durable in the log before it completes, or before a flush does.
        Capabilities { flush: true, force_unit_access: below.write, ..below }
    }

    fn geometry(&self, below: Geometry) -> Geometry {
        // Reads of the ring have the log volume's alignment.
        let alignment = below.alignment.max(self.inner.volume.backend().geometry().alignment);
        let block_size = below.block_size.max(alignment);
        let physical_block_size = below.physical_block_size.max(block_size);
        Geometry { alignment, block_size, physical_block_size, ..below }
    }

    fn resizing(&self, from: u64, to: u64) -> Result<(), ErrorKind> {
        // After a shrink and a later growth, changes that the log holds beyond the end would
        // reappear.
        if to < from { Err(ErrorKind::Unsupported) } else { Ok(()) }
    }

    fn status(&self) -> LayerReport {
        let status = Wal::status(self);
        let mut problems = Vec::new();
        if self.lost().is_some() {
            // That is a problem of the disk.
        } else if status.log_failed.is_some() {
            problems.push(self.failed("the disk rejects changes"));
        } else if status.emptied_after.is_some() {
            problems.push(emptied("changes"));
        } else if let Some(kind) = status.home_failed {
            problems.push(not_written_back(status.used, status.size, kind));
        }
        problems.extend(self.old_mark());
        let figures = vec![
            Figure::gauge("used_bytes", "Bytes of the log in use.", status.used),
            Figure::gauge("size_bytes", "Bytes of the log.", status.size),
            Figure::counter("rounds_total", "Completed write-back rounds.", status.rounds),
            Figure::counter(
                "recoveries_total",
                "Recoveries of logs on the volume after it had failed.",
                self.inner.volume.recoveries(),
            ),
            Figure::counter(
                "volume_flushes_total",
                "Flushes of the log volume, for all disks with a log on it.",
                status.volume_flushes,
            ),
        ];
        LayerReport { figures, problems }
    }

    fn stores(&self) -> Vec<Arc<dyn Backend>> {
        vec![Arc::clone(self.inner.volume.backend())]
    }

    fn retire(&self, disk: &Arc<Disk>, limit: Duration) {
        let begun = self.inner.rounds.load(Ordering::Relaxed);
        let is_done = |state: &LogState| {
            let rounds = self.inner.rounds.load(Ordering::Relaxed) - begun;
            state.is_idle() || rounds >= RETIRE_ROUNDS
        };
        // `leave` reports an error that persists.
        let _ = self.bring_home_until(is_done, disk, limit);
    }

    fn leave(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        self.drain(disk, limit)
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(self.open_part("wal", context)?))
    }
}

/// The problem of a log of `size` bytes, of which `used` are in use, whose last write-back round
/// failed.
pub(crate) fn not_written_back(used: u64, size: u64, kind: ErrorKind) -> LayerProblem {
    let share = used * 100 / size.max(1);
    LayerProblem {
        cause: LayerCause::NotWrittenBack,
        message: format!("its log, {share} % full, is not written back: {kind}"),
        remedy: "repair the disk beneath: write-back then continues automatically".into(),
    }
}

/// A part of a log volume, in bytes.
type Region = Range<u64>;
