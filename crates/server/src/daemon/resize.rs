//! Changes of a disk's size while it is in use.

use fathom_block::ErrorKind;
use fathom_control::{Bytes, ErrorBody, ErrorCode};

use super::Served;
use crate::daemon::stack::refusal;
use crate::features::FEATURES;
use crate::stores::kinds::StoreKind;

/// Gives a disk another size, in bytes.
pub(crate) fn resize(served: &Served, capacity: u64, shrink: bool) -> Result<(), ErrorBody> {
    let disk = &served.disk;
    let (name, before) = (disk.name(), disk.capacity());
    let unit = u64::from(disk.geometry().block_size.max(disk.geometry().alignment));
    if capacity == 0 || capacity % unit != 0 {
        return Err(refusal(
            ErrorCode::Invalid,
            format!("the disk {name:?} cannot have a size of {capacity} bytes"),
            format!("choose a multiple of {unit}"),
        ));
    }
    if capacity < before && !shrink {
        return Err(refusal(
            ErrorCode::Conflict,
            format!(
                "the disk {name:?} has {}, and the data beyond {} would be lost",
                Bytes(before),
                Bytes(capacity)
            ),
            "shrink the file system first, then try again with --shrink",
        ));
    }
    disk.resize(capacity).map_err(|error| match error {
        ErrorKind::Unsupported if served.live().definition.nbd.is_some() => refusal(
            ErrorCode::Unsupported,
            format!("the export of the disk {name:?} does not have this size"),
            "resize it at its NBD server, then give the disk the same size",
        ),
        ErrorKind::Unsupported => objection(served, capacity < before).unwrap_or_else(|| {
            refusal(
                ErrorCode::Unsupported,
                format!("the size of the disk {name:?} is determined by the device beneath"),
                "resize that device to this size, then try again",
            )
        }),
        ErrorKind::ReadOnly => refusal(
            ErrorCode::Unsupported,
            format!("the disk {name:?} is read-only"),
            "resize the image with `fathom disk resize` while it is not served",
        ),
        ErrorKind::NoSpace | ErrorKind::OutOfRange => refusal(
            ErrorCode::Failed,
            format!("there is no space for {} beneath the disk {name:?}", Bytes(capacity)),
            "choose a smaller size",
        ),
        // The messages report the actual size, not the requested one.
        _ if disk.capacity() == before => refusal(
            ErrorCode::Failed,
            format!("the disk {name:?} keeps its size of {}: {error}", Bytes(before)),
            format!("`fathom disk info {name}` and the log show the cause"),
        ),
        _ => refusal(
            ErrorCode::Failed,
            format!(
                "the disk {name:?} has {} now, but that could not be made durable: {error}",
                Bytes(disk.capacity())
            ),
            format!("`fathom disk info {name}` shows the cause"),
        ),
    })?;
    let mut live = served.live();
    let kind = StoreKind::of(&live.definition);
    if let Some(size) = kind.and_then(|kind| kind.size(&mut live.definition)) {
        *size = Bytes(capacity);
    }
    drop(live);
    tracing::info!(disk = name, "resized from {} to {}", Bytes(before), Bytes(capacity));
    Ok(())
}

/// Why a feature keeps a disk from getting another size.
fn objection(served: &Served, is_smaller: bool) -> Option<ErrorBody> {
    FEATURES.iter().find_map(|feature| feature.objection_to_size(served, is_smaller))
}
