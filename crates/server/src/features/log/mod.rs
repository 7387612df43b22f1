//! The log volumes of the layers `wal` and `offload`. They are made if missing, and disks whose
//! logs are on the same volume share it.

mod attend;
pub(crate) mod decision;
pub(crate) mod definition;
mod equip;
pub(crate) mod feature;
mod identity;
mod in_cache;
mod offload;
mod owners;
mod recovery;
mod settle;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use fathom_backend::model::Modelled;
use fathom_backend::{FileBackend, FileOptions};
use fathom_block::{Attendance, Backend, BackendProblem, Clock, Disk, Layer};
use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, ModelDefinition};
use fathom_failure::Failure;
use fathom_image::{LogMark, MarkedLog};
use fathom_layers::offload::OffloadOptions;
use fathom_layers::wal::{
    Completion, HomeStore, LogVolume, Settlement, Superblock, WalError, WalOptions,
};
use fathom_layers::{Offload, Opened, Wal};
use fathom_nbd::{NbdUri, RemoteDisk, RemoteOptions};
use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, Stamp, Superblock as _};
use parking_lot::Mutex;

use crate::features::keep::lives::Lives;
pub(crate) use definition::WalDefinition;
pub(crate) use identity::is_named;
pub(crate) use in_cache::CacheStores;
use in_cache::LogLoss;
pub(crate) use offload::{AutoKind, OffloadDefinition};
pub(crate) use settle::settle_disk;
pub use settle::{LogCommand, settle_log};

use crate::configuration::{image_identity, layers};
use crate::daemon::parts::Parts;
use crate::daemon::stack::{check_file_limit, refusal};
use crate::stores::clusters::{ClusterPlace, Clusters};
use crate::stores::models::ModelDevices;

/// The remedy for a block device without a name of its own.
pub(crate) const NAME_DEVICE: &str =
    "give it a name that only this device has: `key = \"NAME\"` of the disk, or `--key NAME`";

/// The open log volumes, by path.
#[derive(Default)]
pub(crate) struct LogVolumes {
    /// The lives of the daemon.
    pub(crate) lives: Lives,
    places: Opened<PathBuf, OpenVolume>,
    known: owners::KnownLogs,
}

/// A log volume, while a log on it is open.
#[derive(Default)]
struct OpenVolume {
    volume: Weak<LogVolume>,
    model: Option<ModelDefinition>,
    /// Whether it is the store of a cache.
    is_cache: bool,
}

/// Whether two definitions have the same log; the settings that can change may differ.
pub(crate) fn is_same_log(one: &WalDefinition, other: &WalDefinition) -> bool {
    let place = |wal: &WalDefinition| wal.log.canonicalize().unwrap_or_else(|_| wal.log.clone());
    // What is carried can change, too.
    let carry = other.offload.map(|offload| offload.carry).unwrap_or_default();
    let offload = one.offload.map(|offload| OffloadOptions { carry, ..offload });
    let same = WalDefinition { log: other.log.clone(), age: other.age, offload, ..one.clone() };
    same == *other && place(one) == place(other)
}

/// The log of a disk, and the mark of the disk's image that names the log.
#[derive(Clone)]
pub(crate) struct DiskLog {
    /// The layer.
    pub wal: Wal,
    /// The layer `offload`, if the log is that of one.
    pub offload: Option<Offload>,
    /// Whether the log is that of a cache in the mode `write-back`.
    pub is_in_cache: bool,
    mark: Arc<LogMark>,
    /// The record of a loss of acknowledged writes, for a log in a cache.
    loss: Option<Arc<LogLoss>>,
    /// A queue of the disk while no front end has one.
    attendance: Arc<Attendance>,
}

impl DiskLog {
    /// The layer with the log.
    pub(crate) fn layer(&self) -> Arc<dyn Layer> {
        match &self.offload {
            Some(offload) => Arc::new(offload.clone()),
            None => Arc::new(self.wal.clone()),
        }
    }

    /// Gives the log the options that can change.
    pub(crate) fn apply(&self, wal: &WalDefinition) {
        self.wal.set_age(wal.age.0);
        if let (Some(offload), Some(options)) = (&self.offload, wal.offload) {
            offload.set_carry(options.carry);
        }
    }

    /// Writes all changes of the log back within `limit`, and removes the mark, because the image
    /// no longer needs the log. There must be no other user of `disk`.
    pub(crate) fn bring_home(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        match &self.offload {
            Some(offload) => offload.drain(disk, limit)?,
            None => self.wal.drain(disk, limit)?,
        }
        self.end()
    }

    /// Removes the mark of an empty log, because the disk is not served after all.
    pub(crate) fn abandon(&self) {
        if self.wal.status().used == 0 {
            // If this fails, the mark stays although the image is up to date.
            let _ = self.end();
        }
    }

    /// The loss of acknowledged writes that the operator has not confirmed.
    pub(crate) fn problem(&self) -> Option<BackendProblem> {
        self.wal.lost().map(|errno| BackendProblem::WritesLost { errno, earlier: true })
    }

    /// Whether the store of a log in a cache has lost writes since it was opened.
    pub(crate) fn has_lost_store(&self) -> bool {
        self.is_in_cache && self.wal.volume().backend().has_lost_writes()
    }

    /// The operator has confirmed the loss of acknowledged writes.
    pub(crate) fn recover(&self) -> io::Result<()> {
        let Some(errno) = self.wal.lost() else { return Ok(()) };
        if let Some(loss) = &self.loss {
            loss.clear()?;
        }
        self.wal.end_loss().inspect_err(|_| {
            // The disk stays as it was, also in a later daemon.
            let _ = self.loss.as_ref().map(|loss| loss.write(errno));
        })
    }

    /// Ends a log whose changes the operator has given up, and with them the loss that the log may
    /// have.
    pub(crate) fn discard(&self) -> io::Result<()> {
        self.recover()?;
        self.end()
    }

    /// Removes the mark: the log is empty and takes no more changes. Another disk may then have a
    /// log in the place of a log in a cache.
    ///
    /// If the mark cannot be removed, for example because the file system is full, the log notes
    /// that it is void.
    pub(crate) fn end(&self) -> io::Result<()> {
        if self.wal.lost().is_some() {
            return Err(io::Error::other("acknowledged writes may be lost"));
        }
        if let Err(error) = self.mark.clear() {
            if self.wal.part(true).is_err() {
                return Err(error);
            }
            tracing::warn!(%error, "the mark of an image that names its log stays: the log notes that it is void");
            return Ok(());
        }
        if self.is_in_cache {
            if let Err(error) = self.wal.erase() {
                tracing::warn!(%error, "an empty log keeps its place in a cache");
            }
        } else if let Err(error) = self.wal.part(false) {
            // A copy of the image with its mark would still fit the log.
            tracing::warn!(%error, "the end of a log is not noted in it");
        }
        Ok(())
    }
}

impl LogVolumes {
    /// Opens the log of `definition`, if it has one: recovers it or makes it. `home` is the disk's
    /// store, and whether nobody changes it meanwhile. This function blocks.
    pub(crate) fn open(
        &self,
        definition: &DiskDefinition,
        home: (&Arc<dyn Backend>, bool),
        records: &Path,
        parts: &Parts,
    ) -> Result<Option<DiskLog>, ErrorBody> {
        self.settle(definition, home, records, parts, Settlement::Refuse)
    }

    /// As [`open`](Self::open). A log that would be refused is settled first.
    pub(crate) fn settle(
        &self,
        definition: &DiskDefinition,
        home: (&Arc<dyn Backend>, bool),
        records: &Path,
        parts: &Parts,
        settlement: Settlement,
    ) -> Result<Option<DiskLog>, ErrorBody> {
        let (home, is_quiet) = home;
        let refuses = settlement == Settlement::Refuse;
        let Some(image) = &definition.image else { return Ok(None) };
        let disk = &definition.name;
        let unreadable = |error: io::Error| {
            let shown = image.display();
            let what = format!("it is unknown whether {shown} has changes in a log");
            let folder = fathom_image::marks_folder();
            let remedy = format!(
                "check its file system, or, for a block device, the folder of the marks, {}, which the daemon has to \
                 read and write",
                folder.display()
            );
            ErrorBody::from(Failure::from(error).about(what).advise_else(remedy))
        };
        let key = definition.key.as_deref();
        let mark = LogMark::open_named(image, records, key).map_err(unreadable)?;
        let wal = layers::wal(definition);
        if refuses && mark.is_foreign().map_err(unreadable)? {
            return Err(foreign(image, disk));
        }
        let marked = match mark.read() {
            // It is written anew, or removed.
            Err(_) if !refuses => None,
            read => read.map_err(unreadable)?,
        };
        let elsewhere = |marked: &MarkedLog| elsewhere(image, wal.as_ref(), marked, disk);
        let Some(wal) = &wal else {
            if settlement == Settlement::Discard {
                return mark.clear().map(|()| None).map_err(unreadable);
            }
            if let Some(marked) = marked {
                if !is_void(&marked) {
                    return Err(elsewhere(&marked));
                }
                if let Err(error) = mark.clear() {
                    tracing::warn!(disk, %error, "the void mark of an image that names a log stays");
                }
                return Ok(None);
            }
            if is_device(image) {
                self.known.check(disk, image, &mark.home())?;
            }
            return Ok(None);
        };
        self.known.add(definition, |path| self.place(path));
        self.known.is_used(disk, wal);
        if let Some(reason) = mark.lacks_key() {
            let shown = image.display();
            let message = format!("{shown} cannot be marked as having changes in a log: {reason}");
            return Err(refusal(ErrorCode::Failed, message, NAME_DEVICE));
        }
        mark.migrate().map_err(unreadable)?;
        let failed = |failure: Failure| {
            let shown = wal.log.display();
            failure.about(format_args!("the log of the disk {disk:?} at {shown}"))
        };
        if let Some(marked) = &marked {
            // Otherwise a new log would be made in its place.
            if wal.server().is_none() && matches!(wal.log.try_exists(), Ok(false)) {
                if settlement == Settlement::Discard {
                    return mark.clear().map(|()| None).map_err(unreadable);
                }
                return Err(elsewhere(marked));
            }
        }
        if marked.is_none() && wal.server().is_none() && !wal.is_in_cache {
            refuse_unprepared(wal).map_err(failed)?;
        }
        let volume = match (&wal.cluster, wal.export()) {
            (Some(place), _) => {
                self.cluster_volume(wal, place, disk, marked.is_none(), parts.of::<Clusters>())
            }
            (None, Some(export)) => export_volume(&self.place(wal.log.clone()), export),
            (None, None) => self.volume(
                wal,
                disk,
                records,
                (parts.of::<ModelDevices>(), parts.of::<CacheStores>()),
            ),
        };
        let volume = volume.map_err(failed)?;
        let options = WalOptions {
            name: disk.clone(),
            home: mark.home(),
            home_capacity: home.capacity(),
            home_alignment: home.geometry().alignment,
            offset: wal.offset.0,
            size: wal.size.map_or(0, |size| size.0),
            block_size: 0,
            identity: Identity::draw().map_err(|error| failed(error.into()))?,
            age_ns: wal.age.0,
            // A cache has the write cache of a disk; the layer `wal` makes each change durable.
            completion: if wal.is_in_cache { Completion::Written } else { Completion::Durable },
            expected: marked.as_ref().map(|marked| marked.identity),
            mark: marked.as_ref().and_then(|marked| marked.age),
            times: self.lives.times(image, marked.as_ref().map(|marked| marked.identity)),
            home_store: HomeStore(is_quiet.then(|| Arc::clone(home))),
            clock_start_ns: clock_start_ns(),
        };
        let mut offload = None;
        let opened = if let Some(settings) = wal.offload.filter(|_| refuses) {
            Offload::open(&volume, &options, settings).map(|opened| {
                let wal = opened.wal().clone();
                offload = Some(opened);
                wal
            })
        } else if wal.is_in_cache {
            let places = in_cache::places(&wal.log, volume.backend().capacity());
            let places = places.map_err(failed)?;
            Wal::settle_among(&volume, &places, &options, settlement)
        } else {
            Wal::settle(&volume, &options, settlement)
        };
        let opened = match (opened, &marked) {
            (Err(WalError::NotExpected), Some(_)) if settlement == Settlement::Discard => {
                // Its log is gone. Another one in the place is left alone.
                return mark.clear().map(|()| None).map_err(unreadable);
            }
            (Err(WalError::NotExpected), Some(marked)) => return Err(elsewhere(marked)),
            (opened, _) => opened.map_err(|error| failed(error.failure(disk)))?,
        };
        if refuses && marked.is_none() && opened.status().used > 0 {
            let (shown, path) = (image.display(), wal.log.display());
            return Err(refusal(
                ErrorCode::Failed,
                format!(
                    "the log of the disk {disk:?} at {path} holds changes, but {shown} has no mark of \
                     it: this is another image, or it has been used without the log"
                ),
                format!(
                    "restore the image. If it is a copy without attributes, `fathom log keep {disk}` keeps the \
                     changes; if they may be lost, run `fathom log discard {disk}`"
                ),
            ));
        }
        let path = wal.log.canonicalize().unwrap_or_else(|_| wal.log.clone());
        let age = opened.age();
        let found = MarkedLog {
            identity: opened.identity(),
            age: Some(age),
            offset: opened.offset(),
            path: path.display().to_string(),
        };
        let written = match (mark.write(&found), &marked) {
            (Ok(()), _) => age,
            // The old one names the log, too. The log then keeps its age.
            (Err(error), Some(marked)) => {
                tracing::warn!(disk, %error, "the mark of its image that names its log is not written anew");
                marked.age.unwrap_or(0)
            }
            (Err(error), None) => {
                let shown = image.display();
                let what = format!("{shown} cannot be marked as having changes in a log");
                let remedy = "make space on its file system and its folder writable, or remove the layer \
                              with the log";
                return Err(Failure::from(error).about(what).advise_else(remedy).into());
            }
        };
        self.lives.opened(&opened);
        opened.pair(written).map_err(|error| failed(error.into()))?;
        let held = opened.held();
        if held.records > 0 {
            tracing::info!(disk, log = %path.display(), "the log has {held}, which it writes home");
        }
        let loss = wal.is_in_cache.then(|| LogLoss::of(&path, records, opened.identity()));
        let loss = loss.transpose().map_err(|error| failed(error.into()))?.map(Arc::new);
        let (is_in_cache, mark) = (wal.is_in_cache, Arc::new(mark));
        let attendance = Arc::default();
        let log = DiskLog { wal: opened, offload, is_in_cache, mark, loss, attendance };
        if let Some(errno) = log.loss.as_ref().and_then(|loss| loss.errno()) {
            log.wal.lose(errno);
        }
        if let Some(problem) = log.problem() {
            tracing::error!(disk = disk.as_str(), "{problem}");
        }
        Ok(Some(log))
    }

    /// Remembers the logs of disks, before any of the disks is opened.
    pub(crate) fn know<'d>(&self, disks: impl Iterator<Item = &'d DiskDefinition>) {
        disks.for_each(|disk| self.known.add(disk, |path| self.place(path)));
    }

    /// Whether a log has changes of a disk, whose image has no mark. `of` is the disk's name, its
    /// image, and the name of that in logs. `None` if the log does not answer in time, which is a
    /// [doubt](Self::doubt).
    pub(crate) fn has_changes(&self, wal: &WalDefinition, of: (&str, &Path, &str)) -> Option<bool> {
        self.known.has_changes(wal, |path| self.place(path), of)
    }

    /// Why it is not certain that a disk on a device without a mark has all its changes: a message
    /// and a remedy.
    pub(crate) fn doubt(&self, disk: &str) -> Option<(String, String)> {
        self.known.doubt(disk)
    }

    /// The place of the volume at a path.
    fn place(&self, path: PathBuf) -> Arc<Mutex<OpenVolume>> {
        self.places.place(path, |place| place.volume.strong_count() > 0)
    }

    /// The volume in a cluster. `may_make` is whether the disk has no changes in a log.
    fn cluster_volume(
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

    fn volume(
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
fn export_volume(
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
fn volume_key(path: &Path) -> PathBuf {
    match image_identity(path) {
        Some((device, number)) => format!("{device}:{number}").into(),
        None => path.to_owned(),
    }
}

/// Whether the log that a mark names has noted that the mark is void: the image has all changes.
fn is_void(marked: &MarkedLog) -> bool {
    let mut superblocks = [0; 2 * SUPERBLOCK_LENGTH];
    let read =
        File::open(&marked.path).and_then(|log| log.read_exact_at(&mut superblocks, marked.offset));
    let MarkedLog { identity, age, .. } = *marked;
    let is_void = |age| fathom_layers::wal::is_void(&superblocks, Stamp { identity, age });
    read.is_ok() && age.is_some_and(is_void)
}

/// The error for an image with the mark of another one, which it may have replaced.
fn foreign(image: &Path, disk: &str) -> ErrorBody {
    let message = format!(
        "{} has the mark of a log that was written for another image or device at this path",
        image.display()
    );
    let remedy = format!(
        "if it is the same, for example a copy, run `fathom log keep {disk}`; if it is another one, and the \
         changes may be lost, run `fathom log discard {disk}`"
    );
    refusal(ErrorCode::Failed, message, remedy)
}

/// The error for an image whose log is not the one of the definition, or which is to be served
/// without a log.
fn elsewhere(
    image: &Path,
    wal: Option<&WalDefinition>,
    marked: &MarkedLog,
    disk: &str,
) -> ErrorBody {
    let (shown, path) = (image.display(), &marked.path);
    let is_in_cache = wal.is_some_and(|wal| wal.is_in_cache)
        || in_cache::superblock(Path::new(path)).is_ok_and(|format| format.logs > 0);
    let (place, layer) = if is_in_cache {
        ("the log of the cache at", "the layer `cache` in the mode `write-back` and that `store`")
    } else {
        let is_offload = wal.is_some_and(|wal| wal.offload.is_some());
        let layer = if is_offload {
            "the layer `offload` and that log"
        } else {
            "the layer `wal` and that log"
        };
        ("the log at", layer)
    };
    let message =
        format!("{shown} alone may be out of date: its last changes may be in {place} {path}");
    let remedy = format!(
        "serve it with {layer} (is its device mounted?). To remove the layer, first serve the disk with \
         it, then reload without it or shut down the daemon: both write the changes back. If the log is \
         gone and its changes may be lost, run `fathom log discard {disk}`"
    );
    refusal(ErrorCode::Failed, message, remedy)
}

/// Opens a file or device that several disks share. `user` is the name for messages. Without direct
/// I/O, because its alignment would become that of all these disks.
fn open_shared(path: &Path, user: String, records: &Path) -> Result<FileBackend, Failure> {
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

/// Requires that the store of a cache exists. Only `fathom cache create` makes one.
fn require(path: &Path) -> Result<(), Failure> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let remedy =
                "is its device mounted? `fathom cache create --log SIZE` makes a new cache";
            Err(Failure::new("it does not exist").advise(remedy))
        }
        metadata => Ok(metadata.map(drop)?),
    }
}

/// Makes the file of a log if it does not exist.
fn make(wal: &WalDefinition) -> Result<(), Failure> {
    let advise = |error: io::Error, advice: &str| Failure::from(error).advise(advice);
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
        Err(error) => return Err(error.into()),
    };
    if !kind.is_file() && !kind.is_block_device() {
        return Err(Failure::new("it is neither a file nor a block device").advise("name one"));
    }
    Ok(())
}

fn is_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}

/// Refuses a place on a block device that has neither a log nor leave to make one.
fn refuse_unprepared(wal: &WalDefinition) -> Result<(), Failure> {
    if !is_device(&wal.log) {
        return Ok(());
    }
    let mut head = [0; SUPERBLOCK_LENGTH];
    File::open(&wal.log)?.read_exact_at(&mut head, wal.offset.0)?;
    if Superblock::is_place(&head) {
        return Ok(());
    }
    let offset = match wal.offset.0 {
        0 => String::new(),
        offset => format!(" --offset {offset}"),
    };
    let shown = wal.log.display();
    let failure = Failure::new("there is no log on this device, and none is made by itself");
    Err(failure.advise(format!("prepare the place with `fathom log create {shown}{offset}`")))
}

/// The length of a log of a given size with its copies, in bytes.
fn length(wal: &WalDefinition) -> u64 {
    let size = wal.size.map_or(0, |size| size.0);
    match wal.offload.map_or(0, |offload| offload.copies) {
        0 => size,
        copies => size.next_multiple_of(4096).saturating_add(copies),
    }
}

/// Ensures that the volume, if it is a file, has space for the log: a write to a log must not fail
/// because the file system is full.
fn reserve(wal: &WalDefinition, volume: &dyn Backend) -> Result<(), Failure> {
    if wal.size.is_none() {
        return Ok(());
    }
    let (offset, length) = (wal.offset.0, length(wal));
    let end = offset.saturating_add(length);
    if !std::fs::metadata(&wal.log)?.is_file() {
        return Ok(());
    }
    let file = OpenOptions::new().read(true).write(true).open(&wal.log)?;
    // A log further back in the file may have been made first.
    let is_gap = end <= volume.capacity() && is_hole(&file, offset, end);
    if end <= volume.capacity() && !is_gap {
        return Ok(());
    }
    let mut head = [0; 8];
    if file.read_at(&mut head, 0)? > 0 && head != Superblock::MAGIC && head != [0; 8] {
        return Err(Failure::new("it holds other data").advise("choose another file"));
    }
    check_file_limit(end, true)?;
    let flags = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&file, flags, offset, length).map_err(|error| {
        let failure = Failure::from(io::Error::from(error));
        failure.advise("free some space, or choose a smaller `size`")
    })?;
    // A write into space that was only reserved also changes the file's extents, so that its sync
    // writes the file system's journal: three times as slow, for the whole first pass of the log.
    let begin = if is_gap { offset } else { volume.capacity().max(offset) };
    write_zeroes(&file, begin, end, &wal.log)?;
    file.sync_all()?;
    if is_gap {
        return Ok(());
    }
    let end = end.next_multiple_of(u64::from(volume.geometry().block_size));
    Ok(volume.resize(end).map_err(io::Error::other)?)
}

/// Whether a part of a file has never been written.
fn is_hole(file: &File, begin: u64, end: u64) -> bool {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(begin)) {
        Ok(data) => data >= end,
        // There are no data behind the beginning.
        Err(error) => error == rustix::io::Errno::NXIO,
    }
}

/// Writes zeroes to a part of a new file.
fn write_zeroes(file: &File, begin: u64, end: u64, path: &Path) -> io::Result<()> {
    const CHUNK: u64 = 4 << 20;
    let mut reported = Instant::now();
    let zeroes = vec![0; CHUNK as usize];
    for at in (begin..end).step_by(CHUNK as usize) {
        file.write_all_at(&zeroes[..CHUNK.min(end - at) as usize], at)?;
        if reported.elapsed() >= Duration::from_secs(2) {
            reported = Instant::now();
            let (written, length) = ((at - begin) >> 20, (end - begin) >> 20);
            tracing::info!(path = %path.display(), "a log is made: {written} of {length} MiB");
        }
    }
    Ok(())
}

/// The time at which the host's monotonic clock was 0, in nanoseconds since 1970.
fn clock_start_ns() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    (now.as_nanos() as u64).saturating_sub(Clock::System.now_ns())
}
