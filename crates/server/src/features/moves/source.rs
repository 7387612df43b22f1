//! The store that a disk leaves: it keeps the content of the instant at which the disk changed
//! over, and is not served any more without the operator's consent.

use std::io;
use std::path::Path;

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode};
use fathom_failure::Failure;
use fathom_image::{MarkedMove, MoveMark, MoveSide};
use fathom_store::{Pool, PoolError, PoolRefusal};

use super::described;
use crate::daemon::Daemon;
use crate::daemon::lasting::NotedMove;
use crate::daemon::stack::refusal;
use crate::daemon::unix_time_s;
use crate::stores::models::ModelDevices;
use crate::stores::pools::Pools;

/// What the name of a volume ends with that a disk has left.
const LEFT: &str = ".moved";
/// The most names that are tried for it.
const NAMES_MAX: u32 = 1000;

/// Marks the source as left, or gives its volume another name. Returns what it is called now.
pub(super) fn leave(daemon: &Daemon, noted: &NotedMove) -> io::Result<String> {
    let before = &noted.before;
    if let Some(image) = &before.image {
        let unix_s = unix_time_s();
        let other = described(&noted.after);
        let mark = MoveMark::open(image, &daemon.records_folder(), before.key.as_deref());
        let mark = match mark {
            // Somebody has deleted it: nobody can serve it by mistake.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(format!("what was {}, which is deleted,", image.display()));
            }
            mark => mark?,
        };
        mark.write(&MarkedMove { side: MoveSide::Left, unix_s, other })?;
        return Ok(image.display().to_string());
    }
    let pool = pool_of(daemon, before)?;
    let volume = before.volume.as_deref().unwrap_or_default();
    if !pool.volumes().iter().any(|it| it.name == volume) {
        // An earlier daemon has renamed it.
        return Ok(format!("volume {volume}{LEFT} of the pool"));
    }
    for number in 1..=NAMES_MAX {
        let suffix = if number == 1 { String::new() } else { format!("-{number}") };
        let name = format!("{volume}{LEFT}{suffix}");
        match pool.rename_volume(volume, &name) {
            Err(PoolError::Refused(PoolRefusal::NameTaken)) => {}
            renamed => {
                renamed.map_err(Failure::from)?;
                let store = before.store.as_deref().unwrap_or(Path::new(""));
                return Ok(format!("volume {name} of {}", store.display()));
            }
        }
    }
    Err(io::Error::other("all names for what it leaves are taken"))
}

/// Removes the mark that an attempt to leave an image may have written.
pub(super) fn stay(daemon: &Daemon, noted: &NotedMove) -> io::Result<()> {
    let before = &noted.before;
    let Some(image) = &before.image else { return Ok(()) };
    match MoveMark::open(image, &daemon.records_folder(), before.key.as_deref()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        mark => mark?.clear(),
    }
}

fn pool_of(daemon: &Daemon, definition: &DiskDefinition) -> io::Result<Pool> {
    let path = definition.store.as_deref().unwrap_or(Path::new(""));
    let records = daemon.records_folder();
    let models = daemon.part::<ModelDevices>();
    Ok(daemon.part::<Pools>().open(path, definition, &records, models)?)
}

/// Refuses to serve an image that is not the current content of a disk.
pub(super) fn refuse_marked(definition: &DiskDefinition, records: &Path) -> Result<(), ErrorBody> {
    let Some(image) = &definition.image else { return Ok(()) };
    let (shown, key) = (image.display(), definition.key.as_deref());
    let marked = MoveMark::open(image, records, key).and_then(|mark| mark.read());
    let marked = marked.map_err(|error| {
        let message = format!("it is unknown whether the disk of {shown} has moved: {error}");
        refusal(ErrorCode::Failed, message, "check its file system")
    })?;
    let Some(MarkedMove { side, other, .. }) = marked else { return Ok(()) };
    let other = fathom_failure::text::foreign(&other);
    let what = match side {
        MoveSide::Incomplete => format!("{shown} is an incomplete copy of {other}"),
        MoveSide::Left => {
            format!("{shown} has only the former content of a disk that has moved to {other}")
        }
    };
    Err(refusal(
        ErrorCode::Conflict,
        format!("the disk {:?} is not served: {what}", definition.name),
        format!(
            "serve {other}; or, to use this content as it is, run `fathom disk recover {shown}`"
        ),
    ))
}
