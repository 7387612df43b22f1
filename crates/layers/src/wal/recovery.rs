//! Makes a log usable again after its volume has failed, while its disk is served.
//!
//! A log fails with the first error of its volume. From then on it begins nothing: no record, no
//! flush, no checkpoint, no round of write-back. Once all that had begun has completed, in every
//! queue, it is *quiet*: nobody but the functions here writes to its region. If the volume works
//! again, they read the superblock and the records as an opening does, and the log takes its place
//! again with what they find:
//! - The superblock must be that of this opening and not older than the last durable one, and all
//!   records must be there that were durable. So a log that another daemon has opened, or that has
//!   been replaced, stays failed.
//! - After a failed flush, and after a loss of writes, what was found is written again before it is
//!   flushed.
//! - Changes in flight at the failure have failed, so their records may have been found or not.
//!
//! A store that is elsewhere may carry out a write after it has given it up. So the places of the
//! records that were not found stay unused until the log has been emptied: until then, the disk
//! rejects changes as before. A superblock that such a store has given up could replace a newer one
//! at any time. So from then on each tail is written to both places before it counts. If one was
//! given up in each place, both could be replaced. Then the log stays failed as long as the store
//! may carry out what was given up.
//!
//! A log whose changes complete before they are durable stays failed, too: what a failed flush has
//! lost must be reported to every later flush.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use fathom_block::{ErrorKind, LayerCause, LayerProblem, StoreAccess};
use fathom_persistence::{SUPERBLOCK_LENGTH, Superblock as _};
use fathom_wal::{Checkpoint, Log};
use parking_lot::Mutex;

use super::open::{read_superblock, rewrite, scan, write_checkpoint};
use super::phase::Phase;
use super::{Completion, Inner, LogState, LogVolume, Wal, WalError};

/// The longest pause between two attempts to [`recover`](LogVolume::recover) the logs of a volume.
pub const RECOVERY_PAUSE_MAX: Duration = Duration::from_secs(10);
/// Why a log stays failed of which a superblock was given up in each place.
const GIVEN_UP: &str = "the volume may still carry out superblocks that it has given up";
/// How often the wait for a quiet log checks.
const QUIET_INTERVAL: Duration = Duration::from_millis(2);

/// See [`Wal::on_failure`].
pub(super) type OnFailure = Box<dyn Fn(&Wal) + Send + Sync>;

/// What a log knows for its recovery.
#[derive(Default)]
pub(super) struct RecoveryState {
    /// While a failed log gets quiet: the queues that may have begun something before it failed.
    busy: Option<Vec<u64>>,
    /// The failure after which the log was recovered, until it has been emptied.
    pub(super) emptied_after: Option<ErrorKind>,
    pub(super) phase: Phase,
    /// Whether a queue has ended with writes in the kernel, which may take effect at any time.
    pub(super) is_stuck: bool,
    /// In which of their places a superblock was given up that the store may still write. While
    /// there is one, each checkpoint is written to both.
    given_up: [bool; 2],
    /// Whether the checkpoint that is being written is the repetition of one that is durable.
    is_repetition: bool,
    /// The `errno` of a loss of acknowledged changes that the operator has not confirmed. The log
    /// has failed meanwhile.
    pub(super) lost: Option<i32>,
}

/// What the logs of a volume share for their recovery.
#[derive(Default)]
pub(super) struct VolumeRecovery {
    logs: Mutex<Vec<Weak<Inner>>>,
    turn: Mutex<()>,
    is_tended: AtomicBool,
    /// Why the last attempt failed.
    failure: Mutex<Option<String>>,
    count: AtomicU64,
}

impl LogState {
    /// The log volume has failed. Returns whether that is new.
    pub(crate) fn fail(&mut self, kind: ErrorKind) -> bool {
        let is_new = self.failed.is_none();
        self.failed.get_or_insert(kind);
        self.has_moved();
        is_new
    }

    /// The error with which changes are rejected that would have to go to the log.
    pub(crate) fn refuses(&self) -> Option<ErrorKind> {
        self.failed.or(self.recovery.emptied_after)
    }

    /// The error of a flush: changes that had been acknowledged may be lost.
    pub(super) fn loss(&self) -> Option<ErrorKind> {
        self.recovery.lost.map(|_| ErrorKind::Io)
    }

    /// A queue has nothing in flight that it has begun for a failed log.
    pub(super) fn set_quiet(&mut self, queue: u64) {
        if let Some(busy) = &mut self.recovery.busy {
            busy.retain(|number| *number != queue);
        }
    }

    /// The log takes changes again if it is empty.
    pub(super) fn end_emptying(&mut self) {
        if self.log.is_empty() {
            self.recovery.emptied_after = None;
            self.has_moved();
        }
    }

    /// The superblock of a checkpoint is durable. Returns whether that is all: if it may be
    /// replaced by an older one, it is written once more.
    pub(super) fn is_checkpoint_safe(&mut self) -> bool {
        if self.recovery.given_up == [false; 2] {
            return true;
        }
        self.recovery.is_repetition = !self.recovery.is_repetition;
        if self.recovery.is_repetition {
            self.checkpoint = self.log.repeat();
        }
        self.checkpoint.is_none()
    }

    /// Begins to wait until a failed log is quiet. Returns whether it is.
    fn get_quiet(&mut self) -> bool {
        let open = || self.queues.iter().map(|(number, _)| *number).collect();
        let is_quiet = self.recovery.busy.get_or_insert_with(open).is_empty();
        if !is_quiet {
            self.wake_queues();
        }
        is_quiet
    }
}

impl Inner {
    /// The log volume has failed.
    pub(crate) fn fail(self: &Arc<Self>, kind: ErrorKind) {
        let is_new = self.shared.access(|state| state.fail(kind));
        self.shared.wake();
        if is_new {
            self.report_failure();
        }
    }

    /// A superblock was given up at `offset` bytes from the start of the region.
    pub(super) fn give_up(&self, offset: u64) {
        if self.volume.backend().may_act_late() {
            let place = (offset / SUPERBLOCK_LENGTH as u64) as usize % 2;
            self.shared.access(|state| state.recovery.given_up[place] = true);
        }
    }

    /// Writes a superblock during a recovery.
    fn write_superblock(
        &self,
        access: &mut StoreAccess,
        checkpoint: &Checkpoint,
    ) -> Result<(), WalError> {
        let written = write_checkpoint(access, self.base, checkpoint);
        if written.is_err() {
            self.give_up(checkpoint.offset);
        }
        Ok(written?)
    }

    /// Reports that the log volume has failed, outside of the lock.
    pub(super) fn report_failure(self: &Arc<Self>) {
        if let Some(call) = self.on_failure.get() {
            call(&Wal { inner: Arc::clone(self) });
        }
    }

    /// Why the log cannot be recovered while its disk is served.
    fn obstacle(&self, state: &LogState) -> Option<&'static str> {
        if self.completion == Completion::Written || !self.is_alone {
            return Some("changes that were not flushed may be lost");
        }
        state.recovery.is_stuck.then_some("a write to it is still in the kernel")
    }

    /// Reads the log again; see the module.
    fn read_again(&self, access: &mut StoreAccess, is_lost: bool) -> Result<Log, WalError> {
        let superblock = read_superblock(access, self.base)??;
        let before = self.shared.access(|state| state.log.superblock().clone());
        if (superblock.log, superblock.epoch) != (before.log, before.epoch) {
            return Err(WalError::Changed("the log has been opened elsewhere since then"));
        }
        // One of two with this tail may have been replaced by an older one.
        if superblock.tail_sequence < before.tail_sequence {
            return Err(WalError::Changed("the volume has an older state of the log"));
        }
        let acts_late = self.volume.backend().may_act_late();
        let given_up = self.shared.access(|state| {
            let given_up = &mut state.recovery.given_up;
            for is_given_up in given_up.iter_mut() {
                *is_given_up &= acts_late;
            }
            *given_up
        });
        if given_up == [true; 2] {
            return Err(WalError::InUse(GIVEN_UP));
        }
        if is_lost {
            let rewritten = rewrite(access, self.base, &superblock);
            if rewritten.is_err() {
                self.give_up(superblock.offset());
            }
            rewritten?;
        }
        let mut log = Log::new(superblock.clone());
        let (opened, mut is_clipped) = (self.opened, false);
        scan(access, self.base, &superblock, |_, found| {
            if found.record.sequence >= opened.sequence && !is_clipped {
                log.clip(opened.capacity);
                is_clipped = true;
            }
            log.recover(found);
        })?;
        if !is_clipped {
            log.clip(opened.capacity);
        }
        let checkpoint = self.shared.access(|state| {
            let expected = state.log.durable_end()..=state.log.head_sequence();
            expected.contains(&log.head_sequence()).then(|| log.succeed(&state.log))
        });
        let checkpoint =
            checkpoint.ok_or(WalError::Changed("the volume lacks content of the log"))?;
        self.write_superblock(access, &checkpoint)?;
        if let Some(checkpoint) = log.repeat() {
            self.write_superblock(access, &checkpoint)?;
        }
        log.checkpointed();
        Ok(log)
    }

    /// The log takes its place again.
    fn renew(self: &Arc<Self>, mut log: Log) {
        self.shared.access(|state| {
            log.take_pins(&mut state.log);
            state.log = log;
            let kind = state.failed.take();
            state.recovery.busy = None;
            state.recovery.emptied_after = kind.filter(|_| !state.log.is_empty());
            state.has_moved();
            state.orphans.clear();
            (state.checkpoint, state.checkpoint_flush) = (None, None);
            state.recovery.is_repetition = false;
            (state.wanted, state.is_space_awaited) = (0, false);
            let tail = state.log.superblock().tail_sequence;
            if let Some(carry) = &mut state.carry {
                carry.recovered(tail);
            }
            state.rest_if_empty();
            state.wake_queues();
        });
        self.shared.wake();
        self.report_unattended();
    }
}

impl Wal {
    /// Calls `call` from now on when the log volume has failed: in a thread that must not be
    /// blocked. Only the first of several calls is kept.
    pub fn on_failure(&self, call: impl Fn(&Self) + Send + Sync + 'static) {
        let _ = self.inner.on_failure.set(Box::new(call));
    }

    /// Acknowledged changes may be lost, because the volume has lost writes of which it was not
    /// known whether they were durable. The log keeps its content. It takes no changes, writes
    /// nothing home, and every flush fails, until the operator has confirmed that
    /// ([`end_loss`](Self::end_loss)). `errno` is the error of the volume.
    pub fn lose(&self, errno: i32) {
        self.inner.shared.access(|state| {
            state.recovery.lost = Some(errno);
            state.fail(ErrorKind::Io);
        });
        self.inner.shared.wake();
    }

    /// The `errno` of a loss of acknowledged changes that has not been confirmed.
    pub fn lost(&self) -> Option<i32> {
        self.inner.shared.access(|state| state.recovery.lost)
    }

    /// Takes changes again after [`lose`](Self::lose).
    ///
    /// # Errors
    /// If the volume has lost writes again, or fails.
    pub fn end_loss(&self) -> io::Result<()> {
        let inner = &self.inner;
        if inner.volume.finished().1 || inner.volume.backend().has_lost_writes() {
            return Err(io::Error::other("the store of its log has failed again"));
        }
        inner.shared.access(|state| {
            if state.recovery.lost.take().is_some() {
                state.failed = None;
                state.recovery.busy = None;
                state.has_moved();
            }
            state.wake_queues();
        });
        inner.shared.wake();
        inner.report_unattended();
        Ok(())
    }

    /// The volume that has the log.
    pub fn volume(&self) -> &Arc<LogVolume> {
        &self.inner.volume
    }

    /// The problem of a log whose volume has failed. `consequence` is what that means for the disk.
    pub(crate) fn failed(&self, consequence: &str) -> LayerProblem {
        let inner = &self.inner;
        let obstacle = inner.shared.access(|state| inner.obstacle(state));
        let remedy = match obstacle {
            None => format!(
                "repair the log volume: the log keeps all changes, and is tried again every {} s",
                RECOVERY_PAUSE_MAX.as_secs()
            ),
            Some(obstacle) => format!(
                "repair the log volume, then serve all disks with a log on it again, because {obstacle}: the log \
                 keeps all changes{}",
                match inner.completion {
                    Completion::Durable => "",
                    Completion::Written => " that were flushed. Then use `fathom disk recover`",
                }
            ),
        };
        let failure = inner.volume.recovery.failure.lock();
        let last = failure.as_ref().filter(|_| obstacle.is_none());
        let last = last.map(|text| format!(" (last attempt: {text})")).unwrap_or_default();
        LayerProblem {
            cause: LayerCause::VolumeFailed,
            message: format!("its log volume failed: {consequence}{last}"),
            remedy,
        }
    }
}

/// The problem of a log that was recovered, and rejects `what` until it is empty.
pub(crate) fn emptied(what: &str) -> LayerProblem {
    LayerProblem {
        cause: LayerCause::VolumeEmptied,
        message: format!(
            "its log volume had failed and works again: {what} are rejected until all is home"
        ),
        remedy: "wait: this ends automatically".into(),
    }
}

impl LogVolume {
    /// A log on the volume has been opened.
    pub(super) fn add(&self, log: &Wal) {
        let mut logs = self.recovery.logs.lock();
        logs.retain(|log| log.strong_count() > 0);
        logs.push(Arc::downgrade(&log.inner));
    }

    fn logs(&self) -> Vec<Arc<Inner>> {
        self.recovery.logs.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether a log on the volume has failed.
    pub fn has_failed_log(&self) -> bool {
        self.logs().iter().any(|log| log.shared.access(|state| state.failed.is_some()))
    }

    /// How many times a log was recovered.
    pub fn recoveries(&self) -> u64 {
        self.recovery.count.load(Ordering::Relaxed)
    }

    /// Sets whether somebody calls [`recover`](Self::recover) until no log has failed. Returns what
    /// it was.
    pub fn set_tended(&self, is_tended: bool) -> bool {
        self.recovery.is_tended.swap(is_tended, Ordering::AcqRel)
    }

    /// Recovers the logs that have failed; see the module `recovery`. They take no changes before
    /// they are empty. Waits for their requests in flight for at most `wait`, and for the volume as
    /// an opening does. A queue's thread must not call this function. Returns the number of
    /// recovered logs.
    ///
    /// # Errors
    /// If the volume still fails, a log cannot be recovered, or requests are still in flight. Such
    /// a log stays failed, and may be tried again.
    pub fn recover(&self, wait: Duration) -> Result<usize, WalError> {
        let _turn = self.recovery.turn.lock();
        let logs = self.logs();
        let is_lost = self.finished().1 || self.backend().has_lost_writes();
        if is_lost {
            // What a failed flush has lost may be anybody's.
            for log in &logs {
                log.fail(ErrorKind::Io);
            }
        }
        let has_failed = |log: &Arc<Inner>| log.shared.access(|state| state.failed.is_some());
        let failed: Vec<Arc<Inner>> = logs.into_iter().filter(has_failed).collect();
        if failed.is_empty() {
            return Ok(0);
        }
        let result = self.recover_logs(failed, is_lost, wait);
        *self.recovery.failure.lock() = result.as_ref().err().map(ToString::to_string);
        result
    }

    fn recover_logs(
        &self,
        failed: Vec<Arc<Inner>>,
        is_lost: bool,
        wait: Duration,
    ) -> Result<usize, WalError> {
        let (ready, mut error) = select(failed, wait);
        if is_lost || ready.is_empty() {
            // What is lost is recovered for all logs together.
            error.take().map_or(Ok(()), Err)?;
        }
        if self.backend().has_lost_writes() {
            self.backend().recover()?;
        }
        let mut access = StoreAccess::open(self.backend())?;
        let mut recovered = Vec::new();
        for log in ready {
            log.shared.access(|state| state.log.lose_written());
            match log.read_again(&mut access, is_lost) {
                Ok(found) => recovered.push((log, found)),
                Err(other) => error = error.or(Some(other)),
            }
        }
        if is_lost {
            self.forget_failure();
        }
        let count = recovered.len();
        for (log, found) in recovered {
            log.renew(found);
            self.recovery.count.fetch_add(1, Ordering::Relaxed);
        }
        error.map_or(Ok(count), Err)
    }
}

/// The logs that can be recovered and are quiet, for which this waits, and why others are not.
fn select(failed: Vec<Arc<Inner>>, wait: Duration) -> (Vec<Arc<Inner>>, Option<WalError>) {
    let (mut ready, mut error) = (Vec::new(), None);
    let end = Instant::now() + wait;
    // All get quiet at the same time.
    for log in &failed {
        log.shared.access(LogState::get_quiet);
    }
    for log in failed {
        let mut obstacle = log.shared.access(|state| log.obstacle(state));
        while obstacle.is_none() && !log.shared.access(LogState::get_quiet) {
            if Instant::now() >= end {
                obstacle = Some("requests are in flight");
            } else {
                std::thread::sleep(QUIET_INTERVAL);
            }
        }
        match obstacle {
            Some(text) => error = Some(WalError::InUse(text)),
            None => ready.push(log),
        }
    }
    (ready, error)
}
