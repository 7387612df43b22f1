//! The log volumes of the layers `wal`: made where there are none, and shared by the disks whose logs
//! lie on the same one.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use fathom_backend::model::Modelled;
use fathom_backend::{FileBackend, FileOptions};
use fathom_block::Backend;
use fathom_control::{BackendDefinition, DiskDefinition, ErrorBody, ErrorCode, WalDefinition};
use fathom_layers::Wal;
use fathom_layers::wal::{LogVolume, WalOptions};

use crate::wiring::{make_model, refusal};

/// The log volumes that are open, by path.
#[derive(Default)]
pub(crate) struct LogVolumes {
    open: Mutex<HashMap<PathBuf, Weak<LogVolume>>>,
}

impl LogVolumes {
    /// The log of `definition`, recovered or made, if it has one. `home_capacity` is the size of
    /// its store. It blocks.
    pub(crate) fn open(
        &self,
        definition: &DiskDefinition,
        home_capacity: u64,
        records: &Path,
    ) -> Result<Option<Wal>, ErrorBody> {
        let (Some(wal), Some(BackendDefinition::Image(image))) =
            (definition.wal(), definition.backend())
        else {
            return Ok(None);
        };
        let disk = &definition.name;
        let failed = |text: String| {
            // What to do comes behind the first semicolon.
            let (message, remedy) = text.split_once("; ").unwrap_or((&text, ""));
            let shown = wal.log.display();
            let message = format!("the log of the disk {disk:?} at {shown}: {message}");
            refusal(ErrorCode::Failed, message, remedy)
        };
        let volume = self.volume(wal, disk, records).map_err(|error| failed(error.to_string()))?;
        let home = image.canonicalize().unwrap_or(image);
        let options = WalOptions {
            name: disk.clone(),
            home: home.display().to_string(),
            home_capacity,
            offset: wal.offset.0,
            size: wal.size.map_or(0, |size| size.0),
            block_size: 0,
            identity: identity().map_err(|error| failed(error.to_string()))?,
            age_ns: wal.age.0,
        };
        Wal::open(&volume, &options).map(Some).map_err(|error| failed(error.to_string()))
    }

    fn volume(
        &self,
        wal: &WalDefinition,
        disk: &str,
        records: &Path,
    ) -> io::Result<Arc<LogVolume>> {
        // Held while a volume is opened: two disks must not open the same one.
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, volume| volume.strong_count() > 0);
        reserve(wal)?;
        let path = wal.log.canonicalize()?;
        if let Some(volume) = open.get(&path).and_then(Weak::upgrade) {
            let end = wal.offset.0.saturating_add(wal.size.map_or(0, |size| size.0));
            if end > volume.backend().capacity() {
                volume.backend().resize(end).map_err(io::Error::other)?;
            }
            return Ok(volume);
        }
        let options = FileOptions {
            path: path.clone(),
            direct: false,
            read_only: false,
            block_size: None,
            disk: format!("the log of {disk}"),
            records: Some(records.to_owned()),
            foreign_allowed: true,
        };
        let file =
            FileBackend::open(&options).map_err(|error| io::Error::other(error.to_string()))?;
        let mut backend: Arc<dyn Backend> = Arc::new(file);
        if let Some(model) = &wal.model {
            let capacity = backend.capacity();
            backend = Arc::new(Modelled::new(backend, make_model(model, capacity)));
        }
        let volume = Arc::new(LogVolume::new(backend));
        open.insert(path, Arc::downgrade(&volume));
        Ok(volume)
    }
}

/// Makes the file of a log where there is none, and sees that it has room for the log: a write to a
/// log does not fail because the file system is full.
fn reserve(wal: &WalDefinition) -> io::Result<()> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(wal.size.is_some())
        .truncate(false)
        .mode(0o600)
        .open(&wal.log)
        .map_err(|error| {
            let advice = match (error.kind(), wal.size) {
                (io::ErrorKind::NotFound, None) => "; name a `size`, so that it can be made",
                _ => "; name a file or block device that the daemon may write",
            };
            io::Error::other(format!("{error}{advice}"))
        })?;
    let metadata = file.metadata()?;
    let Some(size) = wal.size.filter(|_| metadata.is_file()) else { return Ok(()) };
    let end = wal.offset.0.saturating_add(size.0);
    if metadata.len() < end {
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), wal.offset.0, size.0)
            .map_err(|error| {
                io::Error::other(format!("{error}; make room, or choose a smaller `size`"))
            })?;
        file.sync_all()?;
    }
    Ok(())
}

/// What tells one log from another.
fn identity() -> io::Result<[u8; 16]> {
    let mut identity = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut identity)?;
    Ok(identity)
}
