//! Moves of disks, as a feature of the daemon.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::Layer;
use fathom_control::{
    DiskDefinition, DiskStatus, ErrorBody, ErrorCode, MovePhase, ProblemKind, endpoints,
};
use fathom_layers::MoveWatch;

use super::{DiskMove, Moves, bound, described, source};
use crate::configuration::Configuration;
use crate::daemon::feature::{Ending, Feature, Leaving};
use crate::daemon::http::routes::Routes;
use crate::daemon::parts::Parts;
use crate::daemon::problems::FoundProblem;
use crate::daemon::stack::{Equipment, Fitted, LayerKey, Position, refusal};
use crate::daemon::stop::Task;
use crate::daemon::{Daemon, Served};

/// See the module.
pub(crate) struct DiskMoves;

/// Refuses layers with state elsewhere while a disk moves: what they have would not be copied.
fn refuse_bound(disk_move: &DiskMove, definition: &DiskDefinition) -> Result<(), ErrorBody> {
    let bound = bound::named(&definition.layers);
    if bound.is_empty() {
        return Ok(());
    }
    let name = disk_move.name();
    Err(refusal(
        ErrorCode::Conflict,
        format!(
            "the disk {name:?} gets no {bound} while it moves to {}",
            described(&disk_move.noted.after)
        ),
        format!("try again when it has moved, or end that with `fathom disk move {name} --cancel`"),
    ))
}

impl Feature for DiskMoves {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Moves::default());
    }

    fn prepare(&self, daemon: &Arc<Daemon>, _configuration: &Configuration) {
        let _ = daemon.part::<Moves>().daemon.set(Arc::downgrade(daemon));
    }

    fn equip(&self, disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
        if disk.before.is_none() {
            source::refuse_marked(disk.definition, disk.records)?;
        }
        let disk_move = disk.shared.of::<Moves>().of(&disk.definition.name);
        let Some(disk_move) = disk_move.filter(|_| disk.before.is_some()) else { return Ok(()) };
        if disk_move.is_watched.load(Ordering::Acquire) {
            refuse_bound(&disk_move, disk.definition)?;
            let state = Arc::clone(&disk_move.state);
            disk.fitted.push(Fitted {
                key: LayerKey::Move,
                position: Position::Lowest,
                make: Box::new(move || {
                    Ok(Arc::new(MoveWatch::new(Arc::clone(&state))) as Arc<dyn Layer>)
                }),
            });
        }
        disk.parts.add(disk_move);
        Ok(())
    }

    fn opened(&self, daemon: &Daemon, served: &Served) {
        let name = served.disk.name().to_owned();
        let Some(noted) = daemon.lasting.noted_move(&name) else { return };
        let Some(weak) = daemon.part::<Moves>().daemon.get().cloned() else { return };
        let take_up = move || {
            let Some(daemon) = weak.upgrade() else { return };
            if let Ok(served) = daemon.find(&name) {
                daemon.take_up_move(&served, noted);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("move".into()).spawn(take_up) {
            let disk = served.disk.name();
            tracing::error!(disk, %error, "its move does not go on: no thread could be started");
        }
    }

    fn objection_to_size(&self, served: &Served, _is_smaller: bool) -> Option<ErrorBody> {
        let disk_move = served.part::<Arc<DiskMove>>().filter(|it| !it.phase().has_ended())?;
        let name = served.disk.name();
        let message = format!(
            "the disk {name:?} keeps its size while it moves to {}",
            described(&disk_move.noted.after)
        );
        Some(refusal(ErrorCode::Conflict, message, "try again when it has moved"))
    }

    fn leaving(&self, served: &Served, stage: Leaving) -> io::Result<()> {
        // At the end of the daemon, the thread of the move sees that itself.
        if let (Leaving::Begun, Some(disk_move)) = (stage, served.part::<Arc<DiskMove>>()) {
            disk_move.state.stop();
        }
        Ok(())
    }

    fn status(&self, served: &Served, status: &mut DiskStatus) {
        status.moving =
            served.part::<Arc<DiskMove>>().filter(|it| !it.is_forgotten()).map(|it| it.status());
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage == Ending::Work {
            for disk_move in daemon.part::<Moves>().in_progress() {
                disk_move.state.stop();
            }
        }
        Vec::new()
    }

    fn routes(&self, routes: &mut Routes) {
        routes.change(&endpoints::MOVE_DISK, |daemon, name, (), request| {
            daemon.move_disk(&name, &request)
        });
        routes.change(&endpoints::CANCEL_MOVE, |daemon, name, (), ()| daemon.cancel_move(&name));
    }

    fn disk_problems(&self, daemon: &Daemon, served: &Served, found: &mut Vec<FoundProblem>) {
        let Some(disk_move) = daemon.part::<Moves>().of(served.disk.name()) else { return };
        let status = disk_move.status();
        let name = served.disk.name();
        let remedy =
            format!("{}. `fathom disk move {name} --cancel` forgets the move", status.remedy);
        if status.phase == MovePhase::Failed {
            let message = format!("it could not be moved to {}: {}", status.to, status.message);
            found.push(FoundProblem::new(ProblemKind::MoveFailed, message, remedy));
        } else if disk_move.lacks_layers.load(Ordering::Acquire) {
            let live = served.live().definition.clone();
            // Somebody may have set them again.
            if bound::with_bound(&live, &disk_move.noted.before) != live {
                found.push(FoundProblem::new(ProblemKind::MoveFailed, status.message, remedy));
            }
        }
    }
}
