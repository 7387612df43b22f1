//! The log volumes of the layers `wal`. They are made if missing, and disks whose logs are on the
//! same volume share it.

mod definition;

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use fathom_backend::model::Modelled;
use fathom_backend::{FileBackend, FileOptions};
use fathom_block::{Backend, Disk};
use fathom_control::{BackendDefinition, DiskDefinition, ErrorBody, ErrorCode, ModelDefinition};
use fathom_image::{LogMark, MarkedLog};
use fathom_layers::Wal;
use fathom_layers::wal::{LogVolume, WalError, WalOptions};

pub(crate) use definition::WalDefinition;

use crate::configuration::layers;
use crate::models::ModelDevices;
use crate::wiring::refusal;

/// The open log volumes, by path.
#[derive(Default)]
pub(crate) struct LogVolumes {
    places: Mutex<HashMap<PathBuf, Arc<Mutex<Place>>>>,
}

/// A log volume, while a log on it is open.
#[derive(Default)]
struct Place {
    volume: Weak<LogVolume>,
    model: Option<ModelDefinition>,
}

/// Whether two definitions have the same log; the settings that can change may differ.
pub(crate) fn is_same_log(one: &WalDefinition, other: &WalDefinition) -> bool {
    let place = |wal: &WalDefinition| wal.log.canonicalize().unwrap_or_else(|_| wal.log.clone());
    let same = WalDefinition { log: other.log.clone(), age: other.age, ..one.clone() };
    same == *other && place(one) == place(other)
}

/// The log of a disk, and the mark of the disk's image that names the log.
#[derive(Clone)]
pub(crate) struct DiskLog {
    /// The layer.
    pub wal: Wal,
    mark: Arc<LogMark>,
}

impl DiskLog {
    /// Writes all changes of the log back within `limit`, and removes the mark, because the image
    /// no longer needs the log. There must be no other user of `disk`.
    pub(crate) fn bring_home(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        self.wal.drain(disk, limit)?;
        self.end()
    }

    /// Removes the mark of an empty log, because the disk is not served after all.
    pub(crate) fn abandon(&self) {
        if self.wal.status().used == 0 {
            // If this fails, the mark stays although the image is up to date.
            let _ = self.end();
        }
    }

    /// Removes the mark: the log is empty and takes no more changes.
    pub(crate) fn end(&self) -> io::Result<()> {
        self.mark.clear()
    }
}

impl LogVolumes {
    /// Opens the log of `definition`, if it has one: recovers it or makes it. `home_capacity` is
    /// the size of the disk's store. This function blocks.
    pub(crate) fn open(
        &self,
        definition: &DiskDefinition,
        home_capacity: u64,
        records: &Path,
        models: &ModelDevices,
    ) -> Result<Option<DiskLog>, ErrorBody> {
        let Some(BackendDefinition::Image(image)) = definition.backend() else { return Ok(None) };
        let disk = &definition.name;
        let unreadable = |error: io::Error| {
            let shown = image.display();
            let message = format!("it is unknown whether {shown} has changes in a log: {error}");
            refusal(ErrorCode::Failed, message, "check its file system")
        };
        let mark = LogMark::open(&image, records).map_err(unreadable)?;
        let marked = mark.read().map_err(unreadable)?;
        let elsewhere = |marked: &MarkedLog| {
            let (shown, path) = (image.display(), &marked.path);
            let message = format!(
                "{shown} alone may be out of date: its last changes may be in the log at {path}"
            );
            let remedy = format!(
                "serve it with the layer `wal` and that log (is its device mounted?). To remove the \
                 layer, first serve the disk with it, then reload without it or shut down the daemon: \
                 both write the changes back. If the log is gone and its changes may be lost, {}",
                mark.removal()
            );
            refusal(ErrorCode::Failed, message, remedy)
        };
        let Some(wal) = layers::wal(definition) else {
            return marked.map_or(Ok(None), |marked| Err(elsewhere(&marked)));
        };
        let failed = |text: String| {
            // The remedy follows the first semicolon.
            let (message, remedy) = text.split_once("; ").unwrap_or((&text, ""));
            let shown = wal.log.display();
            let message = format!("the log of the disk {disk:?} at {shown}: {message}");
            refusal(ErrorCode::Failed, message, remedy)
        };
        if let Some(marked) = &marked {
            // Otherwise a new log would be made in its place.
            if matches!(wal.log.try_exists(), Ok(false)) {
                return Err(elsewhere(marked));
            }
        }
        let volume =
            self.volume(&wal, disk, records, models).map_err(|error| failed(error.to_string()))?;
        let home = image.canonicalize().unwrap_or_else(|_| image.clone());
        let options = WalOptions {
            name: disk.clone(),
            home: home.display().to_string(),
            home_capacity,
            offset: wal.offset.0,
            size: wal.size.map_or(0, |size| size.0),
            block_size: 0,
            identity: identity().map_err(|error| failed(error.to_string()))?,
            age_ns: wal.age.0,
            expected: marked.as_ref().map(|marked| marked.identity),
        };
        let opened = match (Wal::open(&volume, &options), &marked) {
            (Err(WalError::NotExpected), Some(marked)) => return Err(elsewhere(marked)),
            (opened, _) => opened.map_err(|error| failed(error.to_string()))?,
        };
        if marked.is_none() && opened.status().used > 0 {
            let (shown, path) = (image.display(), wal.log.display());
            return Err(refusal(
                ErrorCode::Failed,
                format!(
                    "the log of the disk {disk:?} at {path} holds changes, but {shown} has no mark of \
                     it: this is another image, or it has been used without the log"
                ),
                "restore the image, or, if those changes may be lost, fill the log's first 8 KiB \
                 with zeroes",
            ));
        }
        let path = wal.log.canonicalize().unwrap_or_else(|_| wal.log.clone());
        let found = MarkedLog { identity: opened.identity(), path: path.display().to_string() };
        if marked.as_ref() != Some(&found) {
            mark.write(&found).map_err(|error| {
                let shown = image.display();
                let message =
                    format!("{shown} cannot be marked as having changes in a log: {error}");
                let remedy = "make its folder writable, or remove the layer `wal`";
                refusal(ErrorCode::Failed, message, remedy)
            })?;
        }
        Ok(Some(DiskLog { wal: opened, mark: Arc::new(mark) }))
    }

    fn volume(
        &self,
        wal: &WalDefinition,
        disk: &str,
        records: &Path,
        models: &ModelDevices,
    ) -> io::Result<Arc<LogVolume>> {
        make(wal)?;
        let path = wal.log.canonicalize()?;
        let place = {
            let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            let is_used = |place: &mut Arc<Mutex<Place>>| {
                Arc::strong_count(place) > 1
                    || place.lock().is_ok_and(|place| place.volume.strong_count() > 0)
            };
            places.retain(|_, place| is_used(place));
            Arc::clone(places.entry(path.clone()).or_default())
        };
        // Held while this volume is opened, so that two disks do not open it separately.
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(volume) = place.volume.upgrade() {
            if place.model != wal.model {
                let text = "another disk has a log there with another `model`; use the same model for both";
                return Err(io::Error::other(text));
            }
            reserve(wal, &**volume.backend())?;
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
        // Only now is the volume locked, so it is no disk's image.
        reserve(wal, &*backend)?;
        if let Some(model) = &wal.model {
            let capacity = backend.capacity();
            backend = {
                let model = models.make(model, capacity);
                let model = model.map_err(|error| {
                    io::Error::other(format!("{}; {}", error.message, error.remedy))
                })?;
                Arc::new(Modelled::new(backend, model))
            };
        }
        let volume = Arc::new(LogVolume::new(backend));
        *place = Place { volume: Arc::downgrade(&volume), model: wal.model.clone() };
        Ok(volume)
    }
}

/// Makes the file of a log if it does not exist.
fn make(wal: &WalDefinition) -> io::Result<()> {
    let advise = |error: io::Error, advice: &str| io::Error::other(format!("{error}; {advice}"));
    let kind = match std::fs::metadata(&wal.log) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if wal.size.is_none() {
                return Err(advise(error, "add a `size`, so that it can be made"));
            }
            let mut options = OpenOptions::new();
            return match options.write(true).create_new(true).mode(0o600).open(&wal.log) {
                // Another disk has just made it.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                Err(error) => Err(advise(error, "name a file that the daemon may write")),
                Ok(_) => Ok(()),
            };
        }
        Err(error) => return Err(error),
    };
    if !kind.is_file() && !kind.is_block_device() {
        return Err(io::Error::other("it is neither a file nor a block device; name one"));
    }
    Ok(())
}

/// Ensures that the volume, if it is a file, has space for the log: a write to a log must not fail
/// because the file system is full.
fn reserve(wal: &WalDefinition, volume: &dyn Backend) -> io::Result<()> {
    let Some(size) = wal.size else { return Ok(()) };
    let end = wal.offset.0.saturating_add(size.0);
    if end <= volume.capacity() || !std::fs::metadata(&wal.log)?.is_file() {
        return Ok(());
    }
    let file = OpenOptions::new().read(true).write(true).open(&wal.log)?;
    let mut head = [0; fathom_layers::wal::MAGIC.len()];
    if file.read_at(&mut head, 0)? > 0 && head != fathom_layers::wal::MAGIC && head != [0; 8] {
        return Err(io::Error::other("it holds other data; choose another file"));
    }
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), wal.offset.0, size.0)
        .map_err(|error| {
            io::Error::other(format!("{error}; free some space, or choose a smaller `size`"))
        })?;
    file.sync_all()?;
    let end = end.next_multiple_of(u64::from(volume.geometry().block_size));
    volume.resize(end).map_err(io::Error::other)
}

/// Draws the identity of a new log.
fn identity() -> io::Result<[u8; 16]> {
    let mut identity = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut identity)?;
    Ok(identity)
}
