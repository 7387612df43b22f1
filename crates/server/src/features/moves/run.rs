//! The thread of a move.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use fathom_block::{Attendance, BackgroundScheduler, Disk, DiskOptions};
use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, MovePhase};
use fathom_devices::Placement;
use fathom_insight::change::{Author, ChangeKind};
use fathom_layers::{MoveCopier, MovePart, MoveStage};
use parking_lot::Mutex;

use super::requests::{has_left, lacking};
use super::target::Target;
use super::{DiskMove, Moves, bound, check, described, nanoseconds, source};
use crate::daemon::change_log::Note;
use crate::daemon::changes::ChangeRight;
use crate::daemon::lasting::{NotedMove, RecordedChange};
use crate::daemon::stack::{LayerKey, refusal};
use crate::daemon::{Daemon, Served};
use crate::features::background::BackgroundWork;
use crate::stores::location::{SEARCH_TIME_MAX, placement_within};
use crate::stores::pools::Pools;

/// The interval at which the thread looks at what else has happened.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// How long the disk may serve no requests while the rest is copied.
const FINISH_TIME_MAX: Duration = Duration::from_secs(5);
/// How often a disk tries to change over, and the first pause between two attempts. Each pause is
/// twice the one before.
const ATTEMPTS_MAX: u32 = 8;
const PAUSE: Duration = Duration::from_millis(500);

/// What carries out a move.
pub(super) struct Mover {
    daemon: Weak<Daemon>,
    disk_move: Arc<DiskMove>,
    served: Arc<Served>,
    target: Target,
    attendance: Arc<Attendance>,
}

/// What an attempt to change over has come to.
enum Attempt {
    Moved(String),
    /// The disk is at the source. Another attempt may succeed.
    Again(ErrorBody),
    /// The disk is at the source, and cannot move.
    Refused(ErrorBody),
}

/// Starts the thread of a move. Without a thread, the move ends.
pub(super) fn begin_thread(daemon: &Arc<Daemon>, mover: Mover) -> Result<(), ErrorBody> {
    let name = format!("move-{}", mover.disk_move.name());
    // A thread that cannot be started drops what it was given.
    let place = Arc::new(Mutex::new(Some(mover)));
    let for_thread = Arc::clone(&place);
    let work = move || {
        let mover = for_thread.lock().take();
        if let Some(mover) = mover {
            mover.run();
        }
    };
    let Err(error) = std::thread::Builder::new().name(name).spawn(work) else { return Ok(()) };
    let refused = refusal(
        ErrorCode::Failed,
        format!("no thread could be started: {error}"),
        "end other processes or raise the limit, then try again",
    );
    if let Some(mover) = place.lock().take() {
        mover.disk_move.set(MovePhase::Failed, &refused);
        mover.undo(daemon, true)?;
    }
    Err(refused)
}

impl Mover {
    pub(super) fn new(
        daemon: &Arc<Daemon>,
        disk_move: Arc<DiskMove>,
        served: Arc<Served>,
        target: Target,
    ) -> Self {
        let (daemon, attendance) = (Arc::downgrade(daemon), Arc::default());
        Self { daemon, disk_move, served, target, attendance }
    }

    fn noted(&self) -> &NotedMove {
        &self.disk_move.noted
    }

    /// Opens the queue that copies.
    pub(super) fn begin_copy(&self, daemon: &Daemon) -> Result<(), ErrorBody> {
        let (name, state) = (self.disk_move.name(), Arc::clone(&self.disk_move.state));
        let failed = |error: &dyn std::fmt::Display| {
            let message = format!("the disk {name:?} cannot be copied: {error}");
            refusal(ErrorCode::Failed, message, "see the log, then try again")
        };
        let copier = MoveCopier::new(Arc::clone(&state), Arc::clone(self.target.backend()));
        let options = DiskOptions { name: format!("{name} (move)"), ..DiskOptions::default() };
        let source = self.served.disk.backend();
        let disk = Disk::new(options, vec![Arc::new(copier)], source).map_err(|it| failed(&it))?;
        if let Some(scheduler) = self.scheduler(daemon) {
            disk.schedule_background(scheduler);
        }
        let is_done = move || {
            state.is_stopping()
                || matches!(state.stage(), MoveStage::Failed(_) | MoveStage::Stopped)
        };
        let panicked = || tracing::error!("the copy of a disk has failed because of a bug");
        self.attendance.begin(&disk, is_done, panicked).map(drop).map_err(|error| failed(&error))
    }

    /// The scheduler of the devices of both sides.
    fn scheduler(&self, daemon: &Daemon) -> Option<Arc<dyn BackgroundScheduler>> {
        let place = |definition: &DiskDefinition| -> Option<Placement> {
            let by_image = DiskDefinition {
                image: definition.image.clone().or_else(|| definition.store.clone()),
                ..definition.clone()
            };
            let place = placement_within(&by_image, SEARCH_TIME_MAX);
            place.problem.is_none().then_some(place)
        };
        let (mut both, target) = (place(&self.noted().before)?, place(&self.noted().after)?);
        both.media.extend(target.media);
        let scheduler = daemon.part::<BackgroundWork>().of(&both, true)?;
        Some(scheduler)
    }

    /// Until the move has ended.
    fn run(self) {
        let state = Arc::clone(&self.disk_move.state);
        let mut attempts = 0;
        loop {
            let stage = state.wait_while(&[MoveStage::Copying], LOOK_INTERVAL);
            let Some(daemon) = self.daemon.upgrade() else { return };
            if daemon.is_stopping() {
                // The next start takes the move up.
                return self.attendance.end();
            }
            if self.disk_move.is_cancelled() || self.served.withdrawal().is_some() {
                let message = format!("{} was removed", described(&self.noted().after));
                let cancelled = refusal(ErrorCode::Conflict, message, "");
                return self.fail(&daemon, MovePhase::Cancelled, &cancelled);
            }
            match stage {
                MoveStage::Level => {}
                MoveStage::Failed(failure) => {
                    let remedy = match failure.part {
                        MovePart::Source => "see what the disk's problems are",
                        MovePart::Target => {
                            "make room there, or repair it, then move the disk again"
                        }
                    };
                    let message = format!("the copy has failed: {failure}");
                    let refused = refusal(ErrorCode::Failed, message, remedy);
                    return self.fail(&daemon, MovePhase::Failed, &refused);
                }
                MoveStage::Stopped => {
                    let refused = refusal(ErrorCode::Failed, "the copy has stopped", "try again");
                    return self.fail(&daemon, MovePhase::Failed, &refused);
                }
                MoveStage::Copying | MoveStage::Finishing | MoveStage::Equal => continue,
            }
            match self.change_over(&daemon) {
                Attempt::Moved(left) => return self.succeed(&daemon, &left),
                Attempt::Refused(refused) => {
                    return self.fail(&daemon, MovePhase::Failed, &refused);
                }
                Attempt::Again(refused) => {
                    attempts += 1;
                    if attempts == ATTEMPTS_MAX {
                        return self.fail(&daemon, MovePhase::Failed, &refused);
                    }
                    self.disk_move.set(MovePhase::Copying, &refused);
                    drop(daemon);
                    std::thread::sleep(PAUSE * (1 << (attempts - 1)));
                }
            }
        }
    }

    /// Tries to change over.
    fn change_over(&self, daemon: &Daemon) -> Attempt {
        let name = self.disk_move.name();
        let _change = match daemon.change(name) {
            Ok(change) => change,
            Err(refused) => return Attempt::Again(refused),
        };
        let is_served = daemon.find(name).is_ok_and(|now| Arc::ptr_eq(&now, &self.served));
        if !is_served {
            let message = format!("the disk {name:?} is not served any more");
            return Attempt::Refused(refusal(ErrorCode::Conflict, message, ""));
        }
        if let Err(refused) = check::check_disk(&self.served) {
            return Attempt::Refused(refused);
        }
        // Without the layer that notes changes, the copy would lack them.
        let is_mine = daemon.part::<Moves>().of(name);
        let is_mine = is_mine.is_some_and(|now| Arc::ptr_eq(&now, &self.disk_move));
        let is_noted = self.served.live().layers.iter().any(|(key, _)| *key == LayerKey::Move);
        if !is_mine || !is_noted {
            let message = format!("changes of the disk {name:?} were not noted");
            return Attempt::Refused(refusal(ErrorCode::Failed, message, "move it again"));
        }
        let noted = NotedMove { is_named: true, ..self.noted().clone() };
        if let Err(refused) = daemon.lasting.note_move(&noted) {
            return Attempt::Again(refused);
        }
        let after = self.served.live().definition.clone().with_store_of(&noted.after);
        let lasting = daemon.lasting.of(name).map(|it| it.with_store_of(&noted.after));
        let image = self.served.claims().image();
        let recording = daemon.lasting.begin(name, image, lasting.as_ref(), lasting.is_none());
        let mut recording = match recording {
            Ok(recording) => Some(recording),
            Err(refused) => return Attempt::Again(refused),
        };
        self.disk_move.outcome.lock().phase = MovePhase::ChangingOver;
        self.disk_move.is_watched.store(false, Ordering::Release);
        let (begun, mut left) = (Instant::now(), String::new());
        let changed = daemon.rehome(&self.served, after, self.target.backend(), || {
            left = self.commit(daemon, &mut recording)?;
            Ok(())
        });
        match (changed, recording) {
            (Ok(()), recording) => {
                if let Some(recording) = recording {
                    recording.settle();
                }
                self.disk_move.outcome.lock().pause_ns = nanoseconds(begun.elapsed());
                Attempt::Moved(left)
            }
            (Err(refused), recording) => {
                drop(recording);
                self.disk_move.is_watched.store(true, Ordering::Release);
                self.disk_move.state.resume();
                Attempt::Again(refused)
            }
        }
    }

    /// Makes the target equal, and the one that the next start serves. Takes everything back if
    /// that fails. Returns what the source is called now.
    fn commit(
        &self,
        daemon: &Daemon,
        recording: &mut Option<RecordedChange<'_>>,
    ) -> io::Result<String> {
        self.disk_move.state.finish(FINISH_TIME_MAX)?;
        if self.target.has_lost_writes() || self.served.disk.backend().has_lost_writes() {
            return Err(io::Error::other("writes are lost"));
        }
        let left = self.switch(daemon, recording.as_mut());
        left.inspect_err(|_| {
            // The earlier record first: it says where the disk is.
            drop(recording.take());
            let taken_back = [
                ("the target", self.target.take_back()),
                ("the source", source::stay(daemon, self.noted())),
            ];
            for (what, outcome) in taken_back {
                if let Err(error) = outcome {
                    let disk = self.disk_move.name();
                    tracing::error!(disk, %error, "the mark of {what} of its move is wrong");
                }
            }
        })
    }

    fn switch(
        &self,
        daemon: &Daemon,
        recording: Option<&mut RecordedChange<'_>>,
    ) -> io::Result<String> {
        self.target.complete()?;
        if let Some(recording) = recording {
            recording.complete().map_err(|refused| io::Error::other(refused.message))?;
        }
        source::leave(daemon, self.noted())
    }

    /// The disk is at the target.
    fn succeed(self, daemon: &Daemon, left: &str) {
        let name = self.disk_move.name().to_owned();
        self.end_copy(daemon);
        let right = right_to_end(daemon, &name);
        let put_back = self.put_back(daemon, right.as_ref().map(drop));
        drop(right);
        forget(daemon, &self.served, self.noted(), &put_back);
        let to = described(&self.noted().after);
        let text = format!("moved from {} to {to}", described(&self.noted().before));
        let definition = self.served.live().definition.clone();
        let note = Note::new(ChangeKind::DiskChanged, Author::Control).of(&definition);
        daemon.note_change(&note.with_text(&text));
        tracing::info!(disk = name.as_str(), "has moved to {to}");
        if let Err(refused) = put_back {
            tracing::error!(disk = name.as_str(), "{}", refused.message);
            self.disk_move.lacks_layers.store(true, Ordering::Release);
            self.disk_move.set(MovePhase::Moved, &lacking(&name, &self.noted().before, refused));
            return daemon.wake_watch();
        }
        self.disk_move.set(MovePhase::Moved, &has_left(left));
    }

    /// The disk stays at the source.
    fn fail(self, daemon: &Daemon, phase: MovePhase, refused: &ErrorBody) {
        let disk = self.disk_move.name().to_owned();
        let disk_move = Arc::clone(&self.disk_move);
        let (mut phase, mut refused) = (phase, refused.clone());
        if let Err(other) = self.undo(daemon, false) {
            disk_move.lacks_layers.store(true, Ordering::Release);
            let other = lacking(&disk, &disk_move.noted.before, other);
            let message = format!("{}; {}", refused.message, other.message);
            (phase, refused) = (MovePhase::Failed, ErrorBody { message, ..other });
        }
        if phase == MovePhase::Failed {
            tracing::error!(disk = disk.as_str(), "could not be moved: {}", refused.message);
        }
        disk_move.set(phase, &refused);
        daemon.wake_watch();
    }

    /// Ends the copier, and waits for it.
    fn end_copy(&self, daemon: &Daemon) {
        self.disk_move.state.stop();
        self.attendance.end();
        for definition in [&self.noted().before, &self.noted().after] {
            if let Some(pool) = &definition.store {
                daemon.part::<Pools>().leave(pool);
            }
        }
    }

    /// Sets the layers again that were taken off, with the right to change the disk.
    fn put_back(&self, daemon: &Daemon, right: Result<(), &ErrorBody>) -> Result<(), ErrorBody> {
        let before = &self.noted().before;
        if bound::named(&before.layers).is_empty() {
            return Ok(());
        }
        right.map_err(ErrorBody::clone)?;
        daemon.put_back(&self.served, before)
    }

    /// Removes the layer that notes changes and what was made, and sets the layers again that were
    /// taken off. `has_right` says whether the caller has the right to change the disk.
    ///
    /// # Errors
    /// If the disk lacks layers now.
    pub(super) fn undo(self, daemon: &Daemon, has_right: bool) -> Result<(), ErrorBody> {
        let name = self.disk_move.name().to_owned();
        self.disk_move.is_watched.store(false, Ordering::Release);
        self.end_copy(daemon);
        let mut undone = Ok(());
        if self.served.withdrawal().is_none() {
            let right = if has_right { Ok(None) } else { right_to_end(daemon, &name).map(Some) };
            undone = self.put_back(daemon, right.as_ref().map(drop));
            let removed = right.and_then(|_right| {
                let definition = self.served.live().definition.clone();
                daemon.restack(&self.served, definition)
            });
            if let Err(refused) = removed {
                let reason = refused.message;
                tracing::warn!(disk = name.as_str(), "keeps the layer of its move: {reason}");
            }
        }
        let Self { target, disk_move, served, .. } = self;
        let pool = disk_move.noted.after.store.clone();
        target.discard();
        forget(daemon, &served, &disk_move.noted, &undone);
        if let Some(pool) = pool {
            daemon.part::<Pools>().leave(&pool);
        }
        undone
    }
}

/// Waits for the right to change a disk whose move ends, longer than other changes do.
fn right_to_end<'d>(daemon: &'d Daemon, name: &str) -> Result<ChangeRight<'d>, ErrorBody> {
    for _ in 1..ATTEMPTS_MAX {
        match daemon.change(name) {
            Err(refused) if refused.code == ErrorCode::Conflict => {}
            right => return right,
        }
    }
    daemon.change(name)
}

/// Removes the record of a move. If the disk lacks layers, the record stays for them alone, with
/// the store that the disk has: the next start sets them again, or says that it cannot.
fn forget(daemon: &Daemon, served: &Served, noted: &NotedMove, put_back: &Result<(), ErrorBody>) {
    let name = &noted.before.name;
    if put_back.is_ok() {
        return daemon.lasting.forget_move(name);
    }
    let live = served.live().definition.clone();
    let owed = noted.before.clone().with_store_of(&live);
    let noted = NotedMove { before: owed.clone(), after: owed, is_named: true };
    if let Err(refused) = daemon.lasting.note_move(&noted) {
        tracing::error!(disk = name.as_str(), "the layers it lacks: {}", refused.message);
    }
}
