//! The open volumes of logs: a volume that several disks name is opened once.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use fathom_backend::model::Modelled;
use fathom_backend::{FileBackend, FileOptions};
use fathom_block::Backend;
use fathom_control::ModelDefinition;
use fathom_failure::Failure;
use fathom_layers::wal::LogVolume;
use fathom_nbd::{NbdUri, RemoteDisk, RemoteOptions};
use parking_lot::Mutex;

use super::prepare::{length, make, require, reserve};
use super::{CacheStores, LogVolumes, WalDefinition};
use crate::configuration::image_identity;
use crate::daemon::stack::check_file_limit;
use crate::stores::clusters::{ClusterPlace, Clusters};
use crate::stores::models::ModelDevices;

/// A log volume, while a log on it is open.
#[derive(Default)]
pub(super) struct OpenVolume {
    pub(super) volume: Weak<LogVolume>,
    model: Option<ModelDefinition>,
    /// Whether it is the store of a cache.
    is_cache: bool,
}

impl LogVolumes {
    /// The place of the volume at a path.
    pub(super) fn place(&self, path: PathBuf) -> Arc<Mutex<OpenVolume>> {
        self.places.place(path, |place| place.volume.strong_count() > 0)
    }

    /// The volume in a cluster. `may_make` is whether the disk has no changes in a log.
    pub(super) fn cluster_volume(
        &self,
        wal: &WalDefinition,
        place: &ClusterPlace,
        disk: &str,
        may_make: bool,
        clusters: &Clusters,
    ) -> Result<Arc<LogVolume>, Failure> {
        let open = self.place(wal.log.clone());
        let mut open = open.lock();
        let capacity = length(wal);
        if let Some(volume) = open.volume.upgrade() {
            if volume.backend().capacity() >= capacity {
                return Ok(volume);
            }
            let failure = Failure::new("it is in use and smaller");
            return Err(failure.advise("give each disk a volume of its own"));
        }
        let volume = Arc::new(LogVolume::new(clusters.open(place, capacity, may_make, disk)?));
        *open = OpenVolume { volume: Arc::downgrade(&volume), model: None, is_cache: false };
        Ok(volume)
    }

    /// Whether a log in a volume of a cluster is open.
    pub(crate) fn is_open(&self, place: &ClusterPlace) -> bool {
        let open = self.place(place.path().into());
        let open = open.lock();
        open.volume.strong_count() > 0
    }

    pub(super) fn volume(
        &self,
        wal: &WalDefinition,
        disk: &str,
        records: &Path,
        (models, stores): (&ModelDevices, &CacheStores),
    ) -> Result<Arc<LogVolume>, Failure> {
        if wal.is_in_cache {
            require(&wal.log)?;
        } else {
            make(wal)?;
        }
        let path = wal.log.canonicalize()?;
        let place = self.place(volume_key(&path));
        // Held while this volume is opened, so that two disks do not open it separately.
        let mut place = place.lock();
        if let Some(volume) = place.volume.upgrade() {
            if place.is_cache != wal.is_in_cache {
                let text =
                    if place.is_cache { "it is the store of a cache" } else { "it has logs" };
                return Err(Failure::new(text).advise("choose another place"));
            }
            if place.is_cache {
                return Ok(volume);
            }
            if place.model != wal.model {
                let failure = Failure::new("another disk has a log there with another `model`");
                return Err(failure.advise("use the same model for both"));
            }
            reserve(wal, &**volume.backend())?;
            return Ok(volume);
        }
        if wal.is_in_cache {
            let volume = Arc::new(LogVolume::new(stores.open(&path, disk, records)?));
            *place = OpenVolume { volume: Arc::downgrade(&volume), model: None, is_cache: true };
            return Ok(volume);
        }
        let file = open_shared(&path, format!("the log of {disk}"), records)?;
        let mut backend: Arc<dyn Backend> = Arc::new(file);
        // Only now is the volume locked, so it is no disk's image.
        reserve(wal, &*backend)?;
        if let Some(model) = &wal.model {
            let capacity = backend.capacity();
            backend = Arc::new(Modelled::new(backend, models.make(model, capacity)?));
        }
        let volume = Arc::new(LogVolume::new(backend));
        let model = wal.model.clone();
        *place = OpenVolume { volume: Arc::downgrade(&volume), model, is_cache: false };
        Ok(volume)
    }
}

/// The volume that is an NBD export, at its place among the open ones.
pub(super) fn export_volume(
    open: &Mutex<OpenVolume>,
    export: Result<NbdUri, Failure>,
) -> Result<Arc<LogVolume>, Failure> {
    let mut open = open.lock();
    if let Some(volume) = open.volume.upgrade() {
        return Ok(volume);
    }
    let remote = RemoteDisk::open(&RemoteOptions::new(export?))?;
    if !remote.capabilities().write {
        return Err(Failure::new("the export is read-only").advise("make it writable"));
    }
    let volume = Arc::new(LogVolume::new(Arc::new(remote)));
    *open = OpenVolume { volume: Arc::downgrade(&volume), model: None, is_cache: false };
    Ok(volume)
}

/// The key of a file or device among the open volumes: one that several paths name is opened once.
pub(super) fn volume_key(path: &Path) -> PathBuf {
    match image_identity(path) {
        Some((device, number)) => format!("{device}:{number}").into(),
        None => path.to_owned(),
    }
}

/// Opens a file or device that several disks share. `user` is the name for messages. Without direct
/// I/O, because its alignment would become that of all these disks.
pub(super) fn open_shared(
    path: &Path,
    user: String,
    records: &Path,
) -> Result<FileBackend, Failure> {
    let options = FileOptions {
        path: path.to_owned(),
        direct: false,
        read_only: false,
        block_size: None,
        disk: user,
        records: Some(records.to_owned()),
        foreign_allowed: true,
    };
    let file = FileBackend::open(&options)?;
    check_file_limit(file.capacity(), file.name() == "file")?;
    Ok(file)
}
