//! Disks that move to another store while they are used.
//!
//! | step | what a kill leaves |
//! |---|---|
//! | the move is recorded, and the target is made and marked as incomplete | the disk at the source. The next start begins the copy again |
//! | layers with state elsewhere are taken off the disk (`bound`) | the same, with or without them. The next start goes on, and sets them again at the end |
//! | the copier copies, and the lowest layer notes what guests change (`fathom_layers::MoveWatch`) | the same |
//! | no queue serves requests: the rest is copied, and the target is durable | the same |
//! | the target's mark is removed, or its volume gets its name | the same |
//! | the record of the disk names the target | the disk at the target: nothing has changed there yet |
//! | the source is marked as left, or its volume gets another name | the same |
//! | the queues serve requests at the target | the same |
//! | the layers are set again, and the record of the move is removed | the same. The next start sets them again |
//!
//! A failure before the last step takes the steps before it back, and the disk goes on at the
//! source. A mark that stays when a step fails twice keeps an image from being served, with a
//! message that says what it is: no copy that is not current is served silently.
//!
//! - `bound`: layers that are taken off for the time of the move.
//! - `check`: which disks can move, and where.
//! - `target`: the store that a disk is to have; `source`: the one that it leaves.
//! - `run`: the thread of a move; `rehome`: how the disk changes over.
//! - `requests`: what operators ask for, and moves that a start finds.

mod bound;
mod check;
pub(crate) mod feature;
mod rehome;
mod requests;
mod run;
mod source;
mod target;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use fathom_control::{DiskDefinition, ErrorBody, MovePhase, MoveStatus};
use fathom_layers::MoveState;
use parking_lot::{Condvar, Mutex};

use crate::daemon::Daemon;
use crate::daemon::lasting::NotedMove;
use crate::daemon::unix_time_ns;

/// The most moves in progress.
const MOVES_MAX: usize = 4;

/// The moves of the daemon: of each disk the one in progress, or the last one.
#[derive(Default)]
pub(crate) struct Moves {
    table: Mutex<BTreeMap<String, Arc<DiskMove>>>,
    daemon: OnceLock<Weak<Daemon>>,
}

/// The move of a disk.
pub(crate) struct DiskMove {
    noted: NotedMove,
    state: Arc<MoveState>,
    begun: Instant,
    begun_unix_time_ns: u64,
    /// Whether the disk has the layer that notes changes.
    is_watched: AtomicBool,
    is_cancelled: AtomicBool,
    /// Whether the disk did not get the layers again that were taken off.
    lacks_layers: AtomicBool,
    /// Whether the operator does not want to hear of it any more.
    is_forgotten: AtomicBool,
    outcome: Mutex<MoveOutcome>,
    ended: Condvar,
}

/// How far a move is, and what has become of it.
#[derive(Clone, Debug, Default)]
struct MoveOutcome {
    phase: MovePhase,
    message: String,
    remedy: String,
    took_ns: u64,
    pause_ns: u64,
}

/// What a store is called in messages and marks.
fn described(definition: &DiskDefinition) -> String {
    match (&definition.image, &definition.store, &definition.volume) {
        (Some(image), ..) => image.display().to_string(),
        (None, Some(store), Some(volume)) => format!("volume {volume} of {}", store.display()),
        _ => "memory".to_owned(),
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Moves {
    /// The move of a disk, in progress or ended.
    fn of(&self, name: &str) -> Option<Arc<DiskMove>> {
        self.table.lock().get(name).cloned()
    }

    /// The moves in progress.
    fn in_progress(&self) -> Vec<Arc<DiskMove>> {
        let table = self.table.lock();
        table.values().filter(|it| !it.phase().has_ended()).cloned().collect()
    }
}

impl DiskMove {
    fn new(noted: NotedMove, state: Arc<MoveState>) -> Arc<Self> {
        Arc::new(Self {
            noted,
            state,
            begun: Instant::now(),
            begun_unix_time_ns: unix_time_ns(),
            is_watched: AtomicBool::new(true),
            is_cancelled: AtomicBool::new(false),
            lacks_layers: AtomicBool::new(false),
            is_forgotten: AtomicBool::new(false),
            outcome: Mutex::default(),
            ended: Condvar::new(),
        })
    }

    fn name(&self) -> &str {
        &self.noted.before.name
    }

    fn phase(&self) -> MovePhase {
        self.outcome.lock().phase
    }

    /// Asks for the end of the move.
    fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        self.state.stop();
    }

    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    fn is_forgotten(&self) -> bool {
        self.is_forgotten.load(Ordering::Acquire)
    }

    fn set(&self, phase: MovePhase, refused: &ErrorBody) {
        let mut outcome = self.outcome.lock();
        outcome.phase = phase;
        outcome.message.clone_from(&refused.message);
        outcome.remedy.clone_from(&refused.remedy);
        outcome.took_ns = nanoseconds(self.begun.elapsed());
        drop(outcome);
        self.ended.notify_all();
    }

    /// Waits until the move has ended, or for `limit`.
    fn wait(&self, limit: Duration) -> MovePhase {
        let mut outcome = self.outcome.lock();
        self.ended.wait_while_for(&mut outcome, |it| !it.phase.has_ended(), limit);
        outcome.phase
    }

    fn status(&self) -> MoveStatus {
        let (outcome, progress) = (self.outcome.lock().clone(), self.state.progress());
        let has_ended = outcome.phase.has_ended();
        let took_ns = if has_ended { outcome.took_ns } else { nanoseconds(self.begun.elapsed()) };
        MoveStatus {
            disk: self.name().to_owned(),
            from: described(&self.noted.before),
            to: described(&self.noted.after),
            phase: outcome.phase,
            total_bytes: progress.total_bytes,
            left_bytes: if outcome.phase == MovePhase::Moved { 0 } else { progress.left_bytes },
            copied_bytes: progress.copied_bytes,
            brake_ns: progress.brake_ns,
            begun_unix_time_ns: self.begun_unix_time_ns,
            took_ns,
            pause_ns: outcome.pause_ns,
            message: outcome.message,
            remedy: outcome.remedy,
        }
    }
}
