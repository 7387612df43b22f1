//! The log of a disk that is opened, or that gets other layers.

use std::sync::Arc;

use fathom_block::Layer;
use fathom_control::{ErrorBody, ErrorCode};

use super::{DiskLog, LogVolumes, is_same_log};
use crate::configuration::layers;
use crate::daemon::stack::{Equipment, Fitted, LayerKey, Position, refusal};

/// A log that was opened for a disk in use, which had none.
#[derive(Clone)]
struct New;

/// Opens the log of a disk, or keeps the one that it has.
pub(super) fn equip(disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
    let wanted = layers::wal(disk.definition);
    let had = disk.before.as_ref().map(|before| layers::wal(&before.definition));
    let log = match (had, wanted) {
        (Some(_), None) => None,
        (Some(Some(had)), Some(wanted)) if is_same_log(&had, &wanted) => disk.had::<DiskLog>(),
        (Some(Some(_)), Some(_)) => {
            return Err(refusal(
                ErrorCode::Conflict,
                "a disk cannot change from one log to another while it is served",
                "remove its layer `wal` or `offload`, or choose another `mode` of its cache: that writes its changes back. \
                 Then add the other log",
            ));
        }
        (None, _) | (Some(None), Some(_)) => {
            let logs = disk.shared.of::<LogVolumes>();
            // A disk in use changes its store.
            let home = (disk.home, disk.before.is_none());
            let log = logs.open(disk.definition, home, disk.records, disk.shared)?;
            if disk.before.is_some() {
                disk.parts.add(New);
            }
            log
        }
    };
    let Some(log) = log else { return Ok(()) };
    disk.named.push(log.layer());
    if log.is_in_cache {
        let wal = log.wal.clone();
        disk.fitted.push(Fitted {
            key: LayerKey::Log,
            position: Position::Cache,
            make: Box::new(move || Ok(Arc::new(wal.clone()) as Arc<dyn Layer>)),
        });
    }
    disk.parts.add(log);
    Ok(())
}

/// Ends a log that the disk does not get after all: no change is in it.
pub(super) fn abandon(disk: &Equipment<'_>) {
    let Some(log) = disk.parts.get::<DiskLog>() else { return };
    if disk.before.is_none() {
        log.abandon();
    } else if disk.parts.find::<New>().is_some() {
        end(disk, &log);
    }
}

/// The disk has its new layers: a log that it has no more is empty.
pub(super) fn equipped(disk: &Equipment<'_>) {
    let log = disk.parts.get::<DiskLog>();
    match (disk.had::<DiskLog>(), log) {
        (Some(former), None) => end(disk, &former),
        (_, Some(log)) => layers::wal(disk.definition).iter().for_each(|wal| log.apply(wal)),
        (None, None) => {}
    }
}

fn end(disk: &Equipment<'_>, log: &DiskLog) {
    log.end_attendance();
    if let Err(error) = log.end() {
        let disk = disk.definition.name.as_str();
        tracing::error!(disk, %error, "the mark of its image stays, although its log is empty");
    }
}
