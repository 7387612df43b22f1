//! The kinds of stores that have a disk's bytes, a row each.

use std::path::Path;
use std::sync::Arc;

use fathom_backend::{FileBackend, FileOptions, Memory, Null, OpenError};
use fathom_block::Backend;
use fathom_control::{Bytes, DiskDefinition, ErrorBody, ErrorCode, ImageFormat};
use fathom_failure::Failure;

use crate::daemon::parts::Parts;
use crate::daemon::stack::{check_file_limit, refusal};
use crate::stores::exports::open_export;
use crate::stores::pools::open_volume;
use crate::stores::qemu;

/// Opens the store of a definition. Gets the folder of the records of block devices, and what the
/// features keep for all disks.
type Open = fn(&DiskDefinition, &Path, &Parts) -> Result<Arc<dyn Backend>, ErrorBody>;

/// A kind of store.
pub(crate) struct StoreKind {
    /// The key of a disk that names a store of this kind. Also what messages call it.
    pub(crate) key: &'static str,
    /// Whether a definition has the key.
    is_in: fn(&DiskDefinition) -> bool,
    open: Open,
    /// The size in a definition; `None` if the store itself has it.
    size: Option<fn(&mut DiskDefinition) -> &mut Option<Bytes>>,
}

/// The kinds.
pub(crate) static STORES: [StoreKind; 5] = [
    StoreKind {
        key: "image",
        is_in: |definition| definition.image.is_some(),
        open: open_image,
        size: None,
    },
    StoreKind {
        key: "store",
        is_in: |definition| definition.store.is_some(),
        open: open_volume,
        size: None,
    },
    StoreKind {
        key: "nbd",
        is_in: |definition| definition.nbd.is_some(),
        open: open_export,
        size: None,
    },
    StoreKind {
        key: "memory",
        is_in: |definition| definition.memory.is_some(),
        open: open_memory,
        size: Some(|definition| &mut definition.memory),
    },
    StoreKind {
        key: "null",
        is_in: |definition| definition.null.is_some(),
        open: |definition, _, _| Ok(Arc::new(Null::new(definition.null.map_or(0, |size| size.0)))),
        size: Some(|definition| &mut definition.null),
    },
];

impl StoreKind {
    /// The kinds whose keys a definition has.
    pub(crate) fn all_in(definition: &DiskDefinition) -> impl Iterator<Item = &'static Self> {
        STORES.iter().filter(|kind| (kind.is_in)(definition))
    }

    /// The kind of a definition's store; `None` if it has none or more than one.
    pub(crate) fn of(definition: &DiskDefinition) -> Option<&'static Self> {
        let mut kinds = Self::all_in(definition);
        kinds.next().filter(|_| kinds.next().is_none())
    }

    /// The size in a definition with a store of this kind; `None` if the store itself has it.
    pub(crate) fn size<'d>(&self, definition: &'d mut DiskDefinition) -> Option<&'d mut Bytes> {
        self.size?(definition).as_mut()
    }
}

/// Opens the store of a disk. `records` is the folder of the records of block devices, and `shared`
/// what the features keep for all disks.
pub(crate) fn open_store(
    definition: &DiskDefinition,
    records: &Path,
    shared: &Parts,
) -> Result<Arc<dyn Backend>, ErrorBody> {
    let kind = StoreKind::of(definition).ok_or_else(|| {
        let message = format!("the disk {:?} has no store", definition.name);
        refusal(ErrorCode::Invalid, message, "add an image, or a size in memory")
    })?;
    (kind.open)(definition, records, shared)
}

fn open_image(
    definition: &DiskDefinition,
    records: &Path,
    shared: &Parts,
) -> Result<Arc<dyn Backend>, ErrorBody> {
    if let Some(format) = qemu::format(definition) {
        return qemu::open_qemu(definition, format, records, shared);
    }
    let (name, image) = (&definition.name, definition.image.as_deref().unwrap_or(Path::new("")));
    let options = FileOptions {
        path: image.to_owned(),
        direct: definition.direct,
        read_only: definition.read_only,
        block_size: definition.block_size.and_then(|size| u32::try_from(size.0).ok()),
        disk: name.clone(),
        records: Some(records.to_owned()),
        foreign_allowed: definition.format == Some(ImageFormat::Raw),
    };
    let backend = FileBackend::open(&options).map_err(|error| {
        let code = match error {
            OpenError::Foreign(..) => ErrorCode::ForeignFormat,
            _ => ErrorCode::Failed,
        };
        let what = format!("the disk {name:?} cannot be opened");
        ErrorBody::new(code, Failure::from(error).about(what))
    })?;
    if !definition.read_only {
        let shown = image.display();
        check_file_limit(backend.capacity(), backend.name() == "file").map_err(|failure| {
            failure.about(format_args!("the image {shown} of the disk {name:?}"))
        })?;
    }
    Ok(Arc::new(backend))
}

fn open_memory(
    definition: &DiskDefinition,
    _records: &Path,
    _shared: &Parts,
) -> Result<Arc<dyn Backend>, ErrorBody> {
    let (name, size) = (&definition.name, definition.memory.map_or(0, |size| size.0));
    let memory = Memory::open(size).map_err(|error| {
        refusal(
            ErrorCode::Failed,
            format!("memory for the disk {name:?} cannot be allocated: {error}"),
            "make it smaller",
        )
    })?;
    Ok(Arc::new(memory))
}
