//! A disk that is served no more: its requests in flight completed, its guest and clients let go,
//! what was written made durable.
//!
//! Each withdrawal has a thread of its own, so that whoever asks for it decides how long to wait:
//! a disk whose I/O hangs never gives its requests back. Until they are back, the disk stays in
//! the list and keeps its name, its socket and its image.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Daemon, Served};
use crate::wiring;

/// How long the last flush may take.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(30);
/// Longer than any wait.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

/// A withdrawal, under way or ended.
pub(super) struct Withdrawal {
    begun: Instant,
    /// All requests have come back.
    drained: AtomicBool,
    outcome: Mutex<Option<Standing>>,
    ended: Condvar,
}

/// How a withdrawal stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Requests in flight have not come back.
    Draining,
    /// The last flush has not come back.
    Flushing,
    /// It has ended, and the last flush succeeded.
    Clean,
    /// It has ended, and the last flush failed so.
    Unflushed(String),
    /// It has ended, and not all that the disk's log holds went home, for this reason.
    Behind(String),
}

impl Withdrawal {
    /// Waits until `end` for the withdrawal to end, and says how it stands.
    pub(super) fn wait(&self, end: Instant) -> Standing {
        let left = end.saturating_duration_since(Instant::now());
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let (outcome, _) = self
            .ended
            .wait_timeout_while(outcome, left, |outcome| outcome.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        match &*outcome {
            Some(outcome) => outcome.clone(),
            None if self.drained.load(Ordering::Acquire) => Standing::Flushing,
            None => Standing::Draining,
        }
    }

    /// How long it has been under way.
    pub(super) fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    fn finish(&self, outcome: Standing) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.ended.notify_all();
    }
}

impl Served {
    /// The withdrawal of the disk, once one has begun.
    pub(super) fn withdrawal(&self) -> Option<Arc<Withdrawal>> {
        self.withdrawal.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Daemon {
    /// Begins to withdraw a disk, or finds the withdrawal that is under way.
    pub(super) fn withdraw(self: &Arc<Self>, served: &Arc<Served>) -> Arc<Withdrawal> {
        let mut place = served.withdrawal.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(withdrawal) = &*place {
            return Arc::clone(withdrawal);
        }
        let withdrawal = Arc::new(Withdrawal {
            begun: Instant::now(),
            drained: AtomicBool::new(false),
            outcome: Mutex::default(),
            ended: Condvar::new(),
        });
        *place = Some(Arc::clone(&withdrawal));
        drop(place);
        let (daemon, leaving, ours) =
            (Arc::clone(self), Arc::clone(served), Arc::clone(&withdrawal));
        let name = format!("leave-{}", served.disk.name());
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            let work = std::panic::AssertUnwindSafe(|| daemon.carry_out(&leaving, &ours));
            let outcome = std::panic::catch_unwind(work)
                .unwrap_or_else(|_| Standing::Unflushed("its thread failed, a bug".to_owned()));
            ours.finish(outcome);
        });
        if let Err(error) = spawned {
            // The next attempt may find a thread.
            *served.withdrawal.lock().unwrap_or_else(PoisonError::into_inner) = None;
            let reason = format!("there is no thread for it: {error}");
            withdrawal.finish(Standing::Unflushed(reason));
        }
        withdrawal
    }

    /// The withdrawal, on its thread.
    fn carry_out(&self, served: &Served, withdrawal: &Withdrawal) -> Standing {
        let name = served.disk.name();
        // Everybody is asked to leave before anybody is waited for.
        let exports: Vec<_> = self
            .listening()
            .iter()
            .filter_map(|listening| listening.exports.withdraw(name))
            .collect();
        let (server, room, log) = {
            let mut live = served.live();
            (live.server.take(), live.watchers.room.clone(), live.watchers.log.clone())
        };
        // A guest whose disk is taken away is not to wait for room on it. At the end of the daemon
        // such writes are left unanswered instead: the next daemon carries them out.
        if let Some(room) = room.filter(|_| !self.is_stopping()) {
            room.release();
        }
        if let Some(server) = server {
            server.shutdown();
        }
        for export in exports {
            while !export.wait(FOREVER) {}
        }
        withdrawal.drained.store(true, Ordering::Release);
        // What does not get home is durable in the log, where the next daemon finds it.
        let home = log.map_or(Ok(()), |log| log.bring_home(&served.disk, FLUSH_TIME_MAX));
        let flushed = wiring::flush(&served.disk, FLUSH_TIME_MAX);
        // At the end of the daemon, whoever listens to events still asks for all disks.
        if !self.is_stopping() {
            self.with_state(|state| state.disks.remove(name));
            match (&flushed, &home) {
                (Ok(()), Ok(())) => tracing::info!(disk = name, "removed"),
                (Ok(()), Err(error)) => {
                    tracing::error!(disk = name, %error, "removed, but a part stays in its log");
                }
                (Err(error), _) => {
                    tracing::error!(disk = name, %error, "could not be flushed at its removal");
                }
            }
        }
        match (flushed, home) {
            (Ok(()), Ok(())) => Standing::Clean,
            (Ok(()), Err(error)) => Standing::Behind(error.to_string()),
            (Err(error), _) => Standing::Unflushed(error.to_string()),
        }
    }
}
