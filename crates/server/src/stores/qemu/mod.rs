//! Images of other formats than raw, by QEMU's own code: a `qemu-storage-daemon` for each, and the
//! crate `nbd` as its client.
//!
//! - The chain of files is read first (`fathom_image::read_chain`), so that QEMU opens no file that
//!   a header names and the operator has not allowed.
//! - `spawn`: the command line, and how the program is confined; `supervisor`: the thread that
//!   starts it, and starts it again.
//! - `disk`: the back end.
//!
//! What QEMU acknowledges may be in its own memory: the metadata of an image, until a flush. If it
//! is killed, the client sends again what was not flushed. If the daemon is killed, QEMU gets
//! `SIGTERM`, and writes its metadata before it ends. Only if both are killed are changes lost that
//! no flush has covered. The next daemon knows it: `pids`.

mod disk;
mod pids;
mod spawn;
mod supervisor;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use fathom_block::Backend;
use fathom_control::{ChainFile, DiskDefinition, ErrorBody, ErrorCode, ImageFormat};
use fathom_failure::Failure;
use fathom_image::{ChainFormat, ChainLink, read_chain};
use parking_lot::Mutex;

pub(crate) use disk::QemuDisk;
pub(crate) use pids::PidFiles;
use spawn::{Spawning, program};

use super::kept::{KeptExport, NotesFolder};
use crate::configuration::layers;
use crate::daemon::parts::Parts;

/// The disks with a storage daemon, by name.
#[derive(Clone, Default)]
pub(crate) struct QemuDisks(Arc<Mutex<BTreeMap<String, Weak<QemuDisk>>>>);

impl QemuDisks {
    /// The one of a disk.
    pub(crate) fn find(&self, disk: &str) -> Option<Arc<QemuDisk>> {
        self.0.lock().get(disk).and_then(Weak::upgrade)
    }
}

/// The format in which QEMU has to serve a disk's image; `None` for a raw one.
pub(crate) fn format(definition: &DiskDefinition) -> Option<ChainFormat> {
    match definition.format? {
        ImageFormat::Raw => None,
        ImageFormat::Qcow2 => Some(ChainFormat::Qcow2),
        ImageFormat::Vmdk => Some(ChainFormat::Vmdk),
        ImageFormat::Vhdx => Some(ChainFormat::Vhdx),
        ImageFormat::Vdi => Some(ChainFormat::Vdi),
    }
}

/// Whether all changes of a disk go through a log: those of the layer `offload` do so only at
/// times.
pub(crate) fn has_whole_log(definition: &DiskDefinition) -> bool {
    layers::wal(definition).is_some_and(|wal| wal.offload.is_none())
}

/// The files of a chain, for the status of a disk.
pub(crate) fn files(chain: &[ChainLink]) -> Vec<ChainFile> {
    let file = |link: &ChainLink| ChainFile {
        path: link.path.display().to_string(),
        format: link.format.name().to_owned(),
    };
    chain.iter().map(file).collect()
}

/// Opens the image of a disk in a format that QEMU serves. Blocks, for some seconds at most, or as
/// long as the file system of the image does.
pub(crate) fn open_qemu(
    definition: &DiskDefinition,
    format: ChainFormat,
    records: &Path,
    shared: &Parts,
) -> Result<Arc<dyn Backend>, ErrorBody> {
    let name = &definition.name;
    let failed = |failure: Failure| {
        let what = format!("the image of the disk {name:?} cannot be opened");
        ErrorBody::new(ErrorCode::Failed, failure.about(what))
    };
    let image = definition.image.as_deref().unwrap_or(Path::new(""));
    let open = || -> Result<Arc<QemuDisk>, Failure> {
        let chain = read_chain(image, format, &definition.backing_folders)?;
        let socket = spawn::socket(records, image)?;
        let files = Arc::new(PidFiles::new(&socket));
        let record = (!definition.read_only).then(|| {
            let (folder, files) = (shared.of::<NotesFolder>(), Arc::clone(&files));
            KeptExport::of_image((name, image), has_whole_log(definition), files, folder, records)
        });
        let spawning = Spawning {
            program: program()?,
            chain,
            is_read_only: definition.read_only,
            is_direct: definition.direct,
            socket,
            files,
        };
        let timeout = definition.timeout.map(|timeout| Duration::from_nanos(timeout.0));
        QemuDisk::open(spawning, timeout, record).map(Arc::new)
    };
    let disk = open().map_err(failed)?;
    let mut disks = shared.of::<QemuDisks>().0.lock();
    disks.retain(|_, disk| disk.strong_count() > 0);
    disks.insert(name.clone(), Arc::downgrade(&disk));
    Ok(disk)
}
