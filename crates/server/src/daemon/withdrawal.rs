//! The withdrawal of a disk: its requests in flight complete, its guest and clients are
//! disconnected, and its writes are made durable.
//!
//! Each withdrawal has a separate thread, so that the requester decides how long to wait:
//! requests of a disk whose I/O hangs never complete. Until they complete, the disk stays in the
//! list and keeps its name, its socket and its image.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fathom_insight::change::{Author, ChangeKind};
use fathom_layers::WaitForRoom;
use parking_lot::{Condvar, Mutex};

use super::feature::Leaving;
use super::{Daemon, Served};
use crate::daemon::change_log::Note;
use crate::daemon::stack;
use crate::features::FEATURES;

/// How long the last flush may take.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(30);
/// How long the layers and the store of a disk may take to make their states durable.
const SETTLE_TIME_MAX: Duration = Duration::from_secs(5);
/// A time limit longer than any wait.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

/// A withdrawal, in progress or ended.
pub(crate) struct Withdrawal {
    begun: Instant,
    /// Whether all requests have completed.
    drained: AtomicBool,
    outcome: Mutex<Option<Standing>>,
    ended: Condvar,
}

/// The progress or outcome of a withdrawal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Requests in flight have not completed.
    Draining,
    /// The last flush has not completed.
    Flushing,
    /// It has ended, and the last flush succeeded.
    Clean,
    /// It has ended, and the last flush failed with this error.
    Unflushed(String),
    /// It has ended, and the disk's log was not completely written back, for this reason.
    Behind(String),
}

impl Withdrawal {
    /// Waits until `end` for the withdrawal to end. Returns its progress or outcome.
    pub(crate) fn wait(&self, end: Instant) -> Standing {
        let left = end.saturating_duration_since(Instant::now());
        let mut outcome = self.outcome.lock();
        self.ended.wait_while_for(&mut outcome, |outcome| outcome.is_none(), left);
        match &*outcome {
            Some(outcome) => outcome.clone(),
            None if self.drained.load(Ordering::Acquire) => Standing::Flushing,
            None => Standing::Draining,
        }
    }

    /// The time since the withdrawal began.
    pub(crate) fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    fn finish(&self, outcome: Standing) {
        *self.outcome.lock() = Some(outcome);
        self.ended.notify_all();
    }
}

impl Served {
    /// The withdrawal of the disk, once it has begun.
    pub(crate) fn withdrawal(&self) -> Option<Arc<Withdrawal>> {
        self.withdrawal.lock().clone()
    }
}

/// Lets the features leave a disk, up to the first one that fails.
fn leave(served: &Served, stage: Leaving) -> io::Result<()> {
    FEATURES.iter().try_for_each(|feature| feature.leaving(served, stage))
}

impl Daemon {
    /// Begins to withdraw a disk. Returns the withdrawal in progress if there is one.
    pub(crate) fn withdraw(
        self: &Arc<Self>,
        served: &Arc<Served>,
        author: Author,
    ) -> Arc<Withdrawal> {
        let mut place = served.withdrawal.lock();
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
            let work = std::panic::AssertUnwindSafe(|| daemon.carry_out(&leaving, &ours, author));
            let outcome = std::panic::catch_unwind(work).unwrap_or_else(|_| {
                Standing::Unflushed("its thread failed because of a bug".to_owned())
            });
            ours.finish(outcome);
        });
        if let Err(error) = spawned {
            // A later attempt may succeed.
            *served.withdrawal.lock() = None;
            let reason = format!("no thread could be started: {error}");
            withdrawal.finish(Standing::Unflushed(reason));
        }
        withdrawal
    }

    /// Carries out the withdrawal, on its thread.
    fn carry_out(&self, served: &Served, withdrawal: &Withdrawal, author: Author) -> Standing {
        let name = served.disk.name();
        // All clients are asked to disconnect before any of them is waited for.
        let exports: Vec<_> = self
            .listening()
            .iter()
            .filter_map(|listening| listening.exports.withdraw(name))
            .collect();
        let (server, room) = {
            let mut live = served.live();
            (live.server.take(), live.parts.get::<WaitForRoom>())
        };
        // Nothing can fail at this stage.
        let _ = leave(served, Leaving::Begun);
        // A guest whose disk is removed must not wait for space on it. When the daemon shuts down,
        // such writes remain unanswered instead: the next daemon repeats them.
        if let Some(room) = room.filter(|_| !self.is_stopping()) {
            room.release();
        }
        if let Some(server) = server {
            server.shutdown();
        }
        for export in exports {
            while !export.wait(FOREVER) {}
        }
        let _ = leave(served, Leaving::Drained);
        withdrawal.drained.store(true, Ordering::Release);
        // Changes that are not written back are in the log, where the next daemon finds them. The
        // flush below makes them durable.
        let home = leave(served, Leaving::Home { time_max: FLUSH_TIME_MAX });
        let flushed = stack::flush(&served.disk, FLUSH_TIME_MAX);
        stack::save_states(&served.disk, SETTLE_TIME_MAX);
        // While the daemon shuts down, event listeners still need the list of all disks.
        if !self.is_stopping() {
            let definition = served.live().definition.clone();
            self.note_change(&Note::new(ChangeKind::DiskRemoved, author).of(&definition));
            self.with_state(|state| state.disks.remove(name));
            match (&flushed, &home) {
                (Ok(()), Ok(())) => tracing::info!(disk = name, "removed"),
                (Ok(()), Err(error)) => {
                    tracing::error!(disk = name, %error, "removed, but some changes remain in its log");
                }
                (Err(error), _) => {
                    tracing::error!(disk = name, %error, "the last flush failed at its removal");
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
