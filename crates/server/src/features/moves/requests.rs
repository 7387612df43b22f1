//! What operators ask for, and moves that a start finds.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fathom_control::{ErrorBody, ErrorCode, MovePhase, MoveRequest, MoveStatus};
use fathom_layers::{MoveOptions, MoveState};

use super::run::{Mover, begin_thread};
use super::target::{Target, TargetOptions};
use super::{DiskMove, MOVES_MAX, Moves, check, described, source};
use crate::daemon::lasting::NotedMove;
use crate::daemon::stack::refusal;
use crate::daemon::{Daemon, Served};

/// How long a request waits for the end of a move that it has cancelled.
const CANCEL_TIME_MAX: Duration = Duration::from_secs(30);
/// How long a move that a start has found waits for the right to change its disk.
const RESUME_ATTEMPTS: u32 = 60;

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
        let before = served.live().definition.clone();
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
        let definition = served.live().definition.clone();
        let begun = self.restack(served, definition).and_then(|()| mover.begin_copy(self));
        if let Err(refused) = begun {
            disk_move.set(MovePhase::Failed, &refused);
            mover.undo(self, true);
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
        if live.has_store_of(&noted.after) {
            // It has changed over, and perhaps nothing else was done.
            match source::leave(self, &noted) {
                Ok(_) => self.lasting.forget_move(&name),
                Err(error) => tracing::warn!(
                    disk = name.as_str(),
                    %error,
                    "has moved, and {} is not marked as left: do not serve it",
                    described(&noted.before)
                ),
            }
            return;
        }
        if !live.has_store_of(&noted.before) {
            tracing::warn!(disk = name.as_str(), "its move is given up: it has another store");
            return self.lasting.forget_move(&name);
        }
        let begun = self.resume_move(&name, served, &noted);
        if let Err(refused) = begun {
            let disk_move = DiskMove::new(noted, MoveState::new(0, MoveOptions::default()));
            disk_move.is_watched.store(false, Ordering::Release);
            disk_move.set(MovePhase::Failed, &refused);
            self.part::<Moves>().table.lock().insert(name.clone(), disk_move);
            tracing::error!(disk = name.as_str(), "its move does not go on: {}", refused.message);
        }
    }

    fn resume_move(
        self: &Arc<Self>,
        name: &str,
        served: &Arc<Served>,
        noted: &NotedMove,
    ) -> Result<(), ErrorBody> {
        let mut attempt = 0;
        let _change = loop {
            attempt += 1;
            match self.change(name) {
                Err(refused) if attempt == RESUME_ATTEMPTS || self.is_stopping() => {
                    return Err(refused);
                }
                Err(_) => {}
                Ok(change) => break change,
            }
        };
        check::check_disk(served)?;
        let manner = Manner { is_resumed: true, ..Manner::default() };
        self.begin_move(served, noted.clone(), manner).map(drop)
    }
}
