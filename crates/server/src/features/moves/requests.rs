//! What operators ask for, and moves that a start finds.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, MovePhase, MoveRequest, MoveStatus};
use fathom_layers::{MoveOptions, MoveState};

use super::run::{Mover, begin_thread};
use super::target::{Target, TargetOptions};
use super::{DiskMove, MOVES_MAX, Moves, bound, check, described, source};
use crate::daemon::changes::ChangeRight;
use crate::daemon::lasting::NotedMove;
use crate::daemon::stack::refusal;
use crate::daemon::{Daemon, Served};

/// How long a request waits for the end of a move that it has cancelled.
const CANCEL_TIME_MAX: Duration = Duration::from_secs(30);
/// How often a move that a start has found asks for the right to change its disk, and the pause
/// after which it asks again whether the disk's log is home.
const RESUME_ATTEMPTS: u32 = 60;
const RESUME_PAUSE: Duration = Duration::from_secs(1);

/// How a move is carried out.
#[derive(Clone, Copy, Default)]
struct Manner {
    speed: Option<u64>,
    urgent: bool,
    overwrite: bool,
    is_resumed: bool,
}

impl Daemon {
    /// Begins to move a disk, by request.
    pub(super) fn move_disk(
        self: &Arc<Self>,
        name: &str,
        request: &MoveRequest,
    ) -> Result<MoveStatus, ErrorBody> {
        let _change = self.change(name)?;
        let served = self.find(name)?;
        let moves = self.part::<Moves>();
        if moves.of(name).is_some_and(|it| !it.phase().has_ended()) {
            let remedy = format!("wait for it, or end it with `fathom disk move {name} --cancel`");
            return Err(refusal(
                ErrorCode::Conflict,
                format!("the disk {name:?} moves already"),
                remedy,
            ));
        }
        if moves.in_progress().len() >= MOVES_MAX {
            let message = format!("{MOVES_MAX} disks move already");
            return Err(refusal(ErrorCode::Conflict, message, "try again when one has moved"));
        }
        check::check_disk(&served)?;
        let after = check::plan(self, &served, request)?;
        let live = served.live().definition.clone();
        // What the end of the last move could not set again is set at the end of this one.
        let lacking = moves.of(name).filter(|it| it.lacks_layers.load(Ordering::Acquire));
        let before = lacking.map_or(live.clone(), |it| bound::with_bound(&live, &it.noted.before));
        let noted = NotedMove { before, after, is_named: false };
        let manner = Manner {
            speed: request.speed.map(|speed| speed.0),
            urgent: request.urgent,
            overwrite: request.overwrite,
            is_resumed: false,
        };
        self.begin_move(&served, noted, manner).map(|it| it.status())
    }

    /// Makes the target and begins to copy. The caller has the right to change the disk.
    fn begin_move(
        self: &Arc<Self>,
        served: &Arc<Served>,
        noted: NotedMove,
        manner: Manner,
    ) -> Result<Arc<DiskMove>, ErrorBody> {
        let name = noted.before.name.clone();
        if !manner.is_resumed {
            self.lasting.note_move(&noted)?;
        }
        let capacity = served.disk.backend().capacity();
        let options = TargetOptions {
            capacity,
            overwrite: manner.overwrite,
            is_resumed: manner.is_resumed,
            is_named: noted.is_named,
        };
        let opened = Target::open(self, &noted, &options);
        let target = opened.inspect_err(|_| self.lasting.forget_move(&name))?;
        if let Err(error) = served.disk.check_home(&**target.backend()) {
            target.discard();
            self.lasting.forget_move(&name);
            return Err(refusal(
                ErrorCode::Unsupported,
                format!("the disk {name:?} cannot use {}: {error}", described(&noted.after)),
                "name another target, or another `direct`",
            ));
        }
        let options =
            MoveOptions { speed: manner.speed, urgent: manner.urgent, is_blank: target.is_blank };
        let state = MoveState::new(capacity, options);
        let disk_move = DiskMove::new(noted, state);
        let moves = self.part::<Moves>();
        moves.table.lock().insert(name.clone(), Arc::clone(&disk_move));
        let mover = Mover::new(self, Arc::clone(&disk_move), Arc::clone(served), target);
        let begun = self.take_off(served).and_then(|()| mover.begin_copy(self));
        if let Err(refused) = begun {
            disk_move.set(MovePhase::Failed, &refused);
            if let Err(undone) = mover.undo(self, true) {
                let undone = lacking(&name, &disk_move.noted.before, undone);
                disk_move.lacks_layers.store(true, Ordering::Release);
                disk_move.set(MovePhase::Failed, &undone);
                return Err(undone);
            }
            moves.table.lock().remove(&name);
            return Err(refused);
        }
        tracing::info!(
            disk = name.as_str(),
            "begins to move to {}",
            described(&disk_move.noted.after)
        );
        begin_thread(self, mover)?;
        Ok(disk_move)
    }

    /// Ends the move of a disk, or forgets one that has failed.
    pub(super) fn cancel_move(self: &Arc<Self>, name: &str) -> Result<MoveStatus, ErrorBody> {
        let moves = self.part::<Moves>();
        let Some(disk_move) = moves.of(name) else {
            self.find(name)?;
            return Err(refusal(
                ErrorCode::NotFound,
                format!("the disk {name:?} does not move"),
                "nothing is to be done",
            ));
        };
        if disk_move.phase().has_ended() {
            // The next move must not begin meanwhile.
            let _change = self.change(name)?;
            if moves.of(name).is_none_or(|now| !Arc::ptr_eq(&now, &disk_move)) {
                return Err(refusal(
                    ErrorCode::Conflict,
                    format!("another move of the disk {name:?} has begun"),
                    format!("see `fathom disk move {name}`"),
                ));
            }
            // One that a start has found and could not go on with is not tried again.
            self.lasting.forget_move(name);
            disk_move.is_forgotten.store(true, Ordering::Release);
            moves.table.lock().remove(name);
            return Ok(disk_move.status());
        }
        disk_move.cancel();
        if !disk_move.wait(CANCEL_TIME_MAX).has_ended() {
            return Err(refusal(
                ErrorCode::Failed,
                format!("the move of {name:?} ends as soon as its stores answer"),
                "`fathom disk info` shows when it has ended",
            ));
        }
        Ok(disk_move.status())
    }

    /// A disk is served of which an earlier daemon has recorded a move.
    pub(super) fn take_up_move(self: &Arc<Self>, served: &Arc<Served>, noted: NotedMove) {
        let name = served.disk.name().to_owned();
        let live = served.live().definition.clone();
        let is_at_target = live.has_store_of(&noted.after);
        if !is_at_target && !live.has_store_of(&noted.before) {
            tracing::warn!(disk = name.as_str(), "its move is given up: it has another store");
            return self.lasting.forget_move(&name);
        }
        let before = noted.before.clone();
        // Held until the outcome is known, so that no other move begins meanwhile.
        let right = self.right_to_resume(&name, served);
        let taken_up = right.as_ref().map_err(ErrorBody::clone).and_then(|_| {
            let taken_up = if is_at_target {
                self.end_move(served, noted.clone())
            } else {
                self.resume_move(served, &noted)
            };
            // A move that does not go on keeps nothing of the disk.
            taken_up.map_err(|refused| self.put_back(served, &before).err().unwrap_or(refused))
        });
        if let Err(refused) = taken_up {
            let other = self.part::<Moves>().of(&name);
            if right.is_err() && other.is_some_and(|it| !it.phase().has_ended()) {
                return;
            }
            tracing::error!(disk = name.as_str(), "its move does not go on: {}", refused.message);
            let disk_move = self.known_move(served, noted);
            disk_move.lacks_layers.store(true, Ordering::Release);
            let phase = if is_at_target { MovePhase::Moved } else { MovePhase::Failed };
            disk_move.set(phase, &lacking(&name, &before, refused));
        }
    }

    /// A move without a copy, for the status.
    fn known_move(&self, served: &Served, noted: NotedMove) -> Arc<DiskMove> {
        let name = noted.before.name.clone();
        let state = MoveState::new(served.disk.capacity(), MoveOptions::default());
        let disk_move = DiskMove::new(noted, state);
        disk_move.is_watched.store(false, Ordering::Release);
        self.part::<Moves>().table.lock().insert(name, Arc::clone(&disk_move));
        let mut live = served.live();
        live.parts = live.parts.without::<Arc<DiskMove>>();
        live.parts.add(Arc::clone(&disk_move));
        drop(live);
        disk_move
    }

    /// Waits for the right to change a disk whose move an earlier daemon has begun, until it has no
    /// log that its definition does not have.
    fn right_to_resume(&self, name: &str, served: &Served) -> Result<ChangeRight<'_>, ErrorBody> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            match self.change(name) {
                Err(refused) if attempt == RESUME_ATTEMPTS || self.is_stopping() => {
                    return Err(refused);
                }
                Ok(right) if attempt == RESUME_ATTEMPTS || !self.is_drained(served) => {
                    return Ok(right);
                }
                Ok(right) => {
                    drop(right);
                    std::thread::sleep(RESUME_PAUSE);
                }
                Err(_) => {}
            }
        }
    }

    /// The disk has changed over, and perhaps nothing else was done.
    fn end_move(&self, served: &Served, noted: NotedMove) -> Result<(), ErrorBody> {
        let (name, before) = (served.disk.name().to_owned(), noted.before.clone());
        // A record with one store only says that layers are to be set.
        let is_owed = before.has_store_of(&noted.after);
        let left = if is_owed { Ok(described(&before)) } else { source::leave(self, &noted) };
        self.put_back(served, &before)?;
        if is_owed {
            self.lasting.forget_move(&name);
            return Ok(());
        }
        let disk_move = self.known_move(served, noted);
        let outcome = match left {
            Ok(left) => {
                self.lasting.forget_move(&name);
                has_left(&left)
            }
            Err(error) => {
                let shown = described(&before);
                let message = format!("{shown} could not be marked as left: {error}");
                tracing::warn!(disk = name.as_str(), "has moved, and {message}: do not serve it");
                let remedy = format!("do not serve {shown}: it has only the former content");
                refusal(ErrorCode::Failed, message, remedy)
            }
        };
        disk_move.set(MovePhase::Moved, &outcome);
        Ok(())
    }

    fn resume_move(
        self: &Arc<Self>,
        served: &Arc<Served>,
        noted: &NotedMove,
    ) -> Result<(), ErrorBody> {
        check::check_disk(served)?;
        // The file may have other layers by now.
        let live = served.live().definition.clone();
        let before = bound::with_bound(&live, &noted.before);
        let after = before.clone().with_store_of(&noted.after);
        let noted = NotedMove { before, after, is_named: noted.is_named };
        self.check_bound(served, &noted.after)?;
        self.lasting.note_move(&noted)?;
        let manner = Manner { is_resumed: true, ..Manner::default() };
        self.begin_move(served, noted, manner).map(drop)
    }
}

/// A disk did not get the layers again that were taken off for its move.
pub(super) fn lacking(name: &str, before: &DiskDefinition, refused: ErrorBody) -> ErrorBody {
    let bound = bound::named(&before.layers);
    if bound.is_empty() {
        return refused;
    }
    let remedy = format!(
        "{}; then see that it has {bound}: `fathom disk layer {name}`, `fathom cache attach {name}`",
        refused.remedy
    );
    ErrorBody { remedy, ..refused }
}

/// What an ended move says of the store that the disk has left.
pub(super) fn has_left(left: &str) -> ErrorBody {
    let message = format!("{left} has the content of the instant at which the disk moved");
    refusal(ErrorCode::Failed, message, "remove it when it is not needed any more")
}
