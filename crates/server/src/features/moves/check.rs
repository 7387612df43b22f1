//! Which disks can move, and where.

use std::path::Path;

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, ImageFormat, MoveRequest};

use super::described;
use crate::daemon::stack::refusal;
use crate::daemon::{Daemon, Served};

/// Refuses a disk that cannot move as it is.
pub(super) fn check_disk(served: &Served) -> Result<(), ErrorBody> {
    let (name, live) = (served.disk.name(), served.live().definition.clone());
    let refuse = |message: String, remedy: &str| Err(refusal(ErrorCode::Conflict, message, remedy));
    if live.nbd.is_some() {
        let remedy = "copy its export with `nbdcopy` or `qemu-img convert` while it is not used";
        return refuse(format!("the disk {name:?} is at an NBD server, and does not move"), remedy);
    }
    if live.image.is_none() && live.store.is_none() {
        let remedy = "only disks with an image or a volume move";
        return refuse(format!("the disk {name:?} has no content that lasts"), remedy);
    }
    if live.read_only || live.volume.as_ref().is_some_and(|volume| volume.contains('@')) {
        return refuse(
            format!("the disk {name:?} is read-only"),
            "copy it: nobody changes it. `fathom store import` and `export`, or `cp`, do that",
        );
    }
    if served.disk.backend().has_lost_writes() {
        return refuse(
            format!("the disk {name:?} has lost writes"),
            "decide about them first, with `fathom disk recover`",
        );
    }
    if served.withdrawal().is_some() {
        return refuse(format!("the disk {name:?} is being removed"), "nothing is to be done");
    }
    Ok(())
}

/// The definition of a disk after the move that a request asks for.
pub(super) fn plan(
    daemon: &Daemon,
    served: &Served,
    request: &MoveRequest,
) -> Result<DiskDefinition, ErrorBody> {
    let before = served.live().definition.clone();
    let name = before.name.clone();
    let invalid = |message: &str, remedy: &str| Err(refusal(ErrorCode::Invalid, message, remedy));
    let direct = request.direct.unwrap_or(before.direct);
    let blank = DiskDefinition { direct, ..DiskDefinition::default() };
    let block_size = u64::from(served.disk.geometry().block_size);
    let to = match (&request.image, &request.store) {
        (Some(image), None) => {
            if request.volume.is_some() {
                return invalid("an image has no volumes", "name a pool with `store`");
            }
            // What looks like another format is the guest's.
            let format = Some(ImageFormat::Raw);
            let block_size = (block_size != 512).then_some(fathom_control::Bytes(block_size));
            let (image, key) = (Some(image.clone()), request.key.clone());
            DiskDefinition { image, key, format, block_size, ..blank }
        }
        (None, Some(store)) => {
            let volume = Some(request.volume.clone().unwrap_or(name));
            DiskDefinition { store: Some(store.clone()), volume, ..blank }
        }
        _ => return invalid("a disk moves to one store", "name an `image` or a `store`"),
    };
    let path = to.image.as_deref().or(to.store.as_deref()).unwrap_or(Path::new(""));
    if !path.is_absolute() {
        return invalid("the path of the target is not absolute", "write the whole path");
    }
    if to.has_store_of(&before) {
        return invalid("the disk is there already", "name another store");
    }
    // Back where the file says, it is as in the file again.
    let entry = daemon.lasting.entry(&before.name).filter(|entry| entry.has_store_of(&to));
    let after = match entry {
        Some(entry) => before.with_store_of(&entry),
        None => before.with_store_of(&to),
    };
    refuse_used(daemon, served, &after)?;
    daemon.check_bound(served, &after)?;
    Ok(after)
}

/// Refuses a target that another disk has or moves to. A lock shows what other processes use.
fn refuse_used(daemon: &Daemon, served: &Served, after: &DiskDefinition) -> Result<(), ErrorBody> {
    let used = |name: &str, what: &str| {
        let message = format!("the disk {name:?} {what} {}", described(after));
        Err(refusal(ErrorCode::Conflict, message, "name another store"))
    };
    for other in daemon.served() {
        let definition = other.live().definition.clone();
        if definition.has_store_of(after) && other.disk.name() != served.disk.name() {
            return used(&definition.name, "has");
        }
    }
    for other in daemon.part::<super::Moves>().in_progress() {
        if other.noted.after.has_store_of(after) {
            return used(other.name(), "moves to");
        }
    }
    Ok(())
}
