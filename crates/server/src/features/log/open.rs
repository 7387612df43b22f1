//! A log is opened with its disk: it is recovered or made, and the image gets the mark that names
//! it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fathom_block::{Backend, Clock};
use fathom_control::{DiskDefinition, ErrorBody, ErrorCode};
use fathom_failure::Failure;
use fathom_image::{LogMark, MarkedLog};
use fathom_layers::wal::{
    Completion, HomeStore, LogPlaces, LogVolume, Settlement, WalError, WalOptions,
};
use fathom_layers::{Offload, Wal};
use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, Stamp};

use super::in_cache::{self, LogLoss};
use super::prepare::{is_device, refuse_unprepared};
use super::volumes::export_volume;
use super::{CacheStores, DiskLog, LogVolumes, NAME_DEVICE, WalDefinition};
use crate::configuration::layers;
use crate::daemon::parts::Parts;
use crate::daemon::stack::refusal;
use crate::stores::clusters::Clusters;
use crate::stores::models::ModelDevices;
use crate::stores::qemu;

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
        (home, is_quiet): (&Arc<dyn Backend>, bool),
        records: &Path,
        parts: &Parts,
        settlement: Settlement,
    ) -> Result<Option<DiskLog>, ErrorBody> {
        let Some(image) = &definition.image else { return Ok(None) };
        let disk = &definition.name;
        let mark = LogMark::open_named(image, records, definition.key.as_deref())
            .map_err(|error| unreadable(image, error))?;
        let opening = Opening {
            volumes: self,
            disk,
            image,
            home,
            is_quiet,
            is_raw: qemu::format(definition).is_none(),
            records,
            parts,
            settlement,
            mark,
        };
        let wal = layers::wal(definition);
        let marked = opening.read_mark()?;
        let Some(wal) = wal else { return opening.without_log(marked.as_ref()).map(|()| None) };
        self.known.add(definition, |path| self.place(path));
        self.known.is_used(disk, &wal);
        opening.with_log(&wal, marked.as_ref())
    }
}

/// A disk whose log is opened.
struct Opening<'a> {
    volumes: &'a LogVolumes,
    disk: &'a str,
    image: &'a Path,
    /// The disk's store.
    home: &'a Arc<dyn Backend>,
    /// Whether nobody changes the store meanwhile.
    is_quiet: bool,
    /// Whether the image changes only when the disk does. QEMU writes to one of another format when
    /// it opens and closes it.
    is_raw: bool,
    /// The folder with the daemon's marks.
    records: &'a Path,
    parts: &'a Parts,
    settlement: Settlement,
    /// The mark of the image, which names the log.
    mark: LogMark,
}

impl Opening<'_> {
    /// Whether a log is refused that the operator would have to decide about.
    fn refuses(&self) -> bool {
        self.settlement == Settlement::Refuse
    }

    fn unreadable(&self, error: io::Error) -> ErrorBody {
        unreadable(self.image, error)
    }

    /// The error for a log that cannot be used.
    fn failed(&self, wal: &WalDefinition, failure: Failure) -> ErrorBody {
        let (disk, shown) = (self.disk, wal.log.display());
        failure.about(format_args!("the log of the disk {disk:?} at {shown}")).into()
    }

    /// The log that the mark of the image names.
    fn read_mark(&self) -> Result<Option<MarkedLog>, ErrorBody> {
        let is_foreign = || self.mark.is_foreign().map_err(|error| self.unreadable(error));
        if self.refuses() && is_foreign()? {
            return Err(foreign(self.image, self.disk));
        }
        match self.mark.read() {
            // It is written anew, or removed.
            Err(_) if !self.refuses() => Ok(None),
            read => read.map_err(|error| self.unreadable(error)),
        }
    }

    /// Removes the mark: the changes of the log that it names may be lost.
    fn discard_mark(&self) -> Result<(), ErrorBody> {
        self.mark.clear().map_err(|error| self.unreadable(error))
    }

    /// The definition has no log.
    fn without_log(&self, marked: Option<&MarkedLog>) -> Result<(), ErrorBody> {
        let Self { disk, image, .. } = *self;
        if self.settlement == Settlement::Discard {
            return self.discard_mark();
        }
        match marked {
            Some(marked) if !is_void(marked) => Err(elsewhere(image, None, marked, disk)),
            Some(_) => {
                if let Err(error) = self.mark.clear() {
                    tracing::warn!(disk, %error, "the void mark of an image that names a log stays");
                }
                Ok(())
            }
            None if is_device(image) => self.volumes.known.check(disk, image, &self.mark.home()),
            None => Ok(()),
        }
    }

    /// Opens the log of the definition. `None` if the log that is to be discarded is gone.
    fn with_log(
        self,
        wal: &WalDefinition,
        marked: Option<&MarkedLog>,
    ) -> Result<Option<DiskLog>, ErrorBody> {
        let failed = |failure| self.failed(wal, failure);
        if let Some(reason) = self.mark.lacks_key() {
            let shown = self.image.display();
            let message = format!("{shown} cannot be marked as having changes in a log: {reason}");
            return Err(refusal(ErrorCode::Failed, message, NAME_DEVICE));
        }
        self.mark.migrate().map_err(|error| self.unreadable(error))?;
        // Without its file, a new log would be made in its place.
        let is_gone = || wal.server().is_none() && matches!(wal.log.try_exists(), Ok(false));
        match marked {
            Some(marked) if is_gone() => return self.without_its_log(wal, marked),
            None if wal.server().is_none() && !wal.is_in_cache => {
                refuse_unprepared(wal).map_err(failed)?;
            }
            _ => {}
        }
        let volume = self.volume(wal, marked.is_none()).map_err(failed)?;
        let options = self.options(wal, marked).map_err(|error| failed(error.into()))?;
        let places =
            wal.is_in_cache.then(|| in_cache::places(&wal.log, volume.backend().capacity()));
        let places = places.transpose().map_err(failed)?;
        let opened = self.open_layer(wal, &volume, &options, places.as_ref());
        let (opened, offload) = match (opened, marked) {
            (Err(WalError::NotExpected), Some(marked)) => {
                // Another log in the place is left alone.
                return self.without_its_log(wal, marked);
            }
            (opened, _) => opened.map_err(|error| failed(error.failure(self.disk)))?,
        };
        if self.refuses() && marked.is_none() && opened.status().used > 0 {
            return Err(unmarked(self.image, wal, self.disk));
        }
        let path = wal.log.canonicalize().unwrap_or_else(|_| wal.log.clone());
        let age = self.write_mark(&path, &opened, marked)?;
        self.volumes.lives.opened(&opened);
        opened.pair(age).map_err(|error| failed(error.into()))?;
        self.opened(wal, &path, opened, offload).map(Some)
    }

    /// The log that the mark names is not there.
    fn without_its_log(
        &self,
        wal: &WalDefinition,
        marked: &MarkedLog,
    ) -> Result<Option<DiskLog>, ErrorBody> {
        if self.settlement == Settlement::Discard {
            return self.discard_mark().map(|()| None);
        }
        Err(elsewhere(self.image, Some(wal), marked, self.disk))
    }

    /// The volume that has the log. `may_make` is whether the disk has no changes in a log.
    fn volume(&self, wal: &WalDefinition, may_make: bool) -> Result<Arc<LogVolume>, Failure> {
        let Self { volumes, disk, records, parts, .. } = *self;
        match (&wal.cluster, wal.export()) {
            (Some(place), _) => {
                volumes.cluster_volume(wal, place, disk, may_make, parts.of::<Clusters>())
            }
            (None, Some(export)) => export_volume(&volumes.place(wal.log.clone()), export),
            (None, None) => {
                let stores = (parts.of::<ModelDevices>(), parts.of::<CacheStores>());
                volumes.volume(wal, disk, records, stores)
            }
        }
    }

    fn options(&self, wal: &WalDefinition, marked: Option<&MarkedLog>) -> io::Result<WalOptions> {
        let expected = marked.map(|marked| marked.identity);
        Ok(WalOptions {
            name: self.disk.to_owned(),
            home: self.mark.home(),
            home_capacity: self.home.capacity(),
            home_alignment: self.home.geometry().alignment,
            offset: wal.offset.0,
            size: wal.size.map_or(0, |size| size.0),
            block_size: 0,
            identity: Identity::draw()?,
            age_ns: wal.age.0,
            // A cache has the write cache of a disk; the layer `wal` makes each change durable.
            completion: if wal.is_in_cache { Completion::Written } else { Completion::Durable },
            expected,
            mark: marked.and_then(|marked| marked.age),
            times: self.volumes.lives.times(self.image, expected).filter(|_| self.is_raw),
            home_store: HomeStore(self.is_quiet.then(|| Arc::clone(self.home))),
            clock_start_ns: clock_start_ns(),
        })
    }

    /// Opens the layer. A log that is settled only needs its `wal`. `places` are those of the logs
    /// in a cache.
    fn open_layer(
        &self,
        wal: &WalDefinition,
        volume: &Arc<LogVolume>,
        options: &WalOptions,
        places: Option<&LogPlaces>,
    ) -> Result<(Wal, Option<Offload>), WalError> {
        if let Some(settings) = wal.offload.filter(|_| self.refuses()) {
            let offload = Offload::open(volume, options, settings)?;
            return Ok((offload.wal().clone(), Some(offload)));
        }
        let opened = match places {
            Some(places) => Wal::settle_among(volume, places, options, self.settlement),
            None => Wal::settle(volume, options, self.settlement),
        };
        Ok((opened?, None))
    }

    /// Has the mark name the opened log at `path`. Returns the log's age in the mark.
    fn write_mark(
        &self,
        path: &Path,
        opened: &Wal,
        marked: Option<&MarkedLog>,
    ) -> Result<u64, ErrorBody> {
        let (disk, age) = (self.disk, opened.age());
        let found = MarkedLog {
            identity: opened.identity(),
            age: Some(age),
            offset: opened.offset(),
            path: path.display().to_string(),
        };
        match (self.mark.write(&found), marked) {
            (Ok(()), _) => Ok(age),
            // The old one names the log, too. The log then keeps its age.
            (Err(error), Some(marked)) => {
                tracing::warn!(disk, %error, "the mark of its image that names its log is not written anew");
                Ok(marked.age.unwrap_or(0))
            }
            (Err(error), None) => {
                let shown = self.image.display();
                let what = format!("{shown} cannot be marked as having changes in a log");
                let remedy = "make space on its file system and its folder writable, or remove the layer \
                              with the log";
                Err(Failure::from(error).about(what).advise_else(remedy).into())
            }
        }
    }

    /// The opened log at `path`, with its mark and the record of its losses.
    fn opened(
        self,
        wal: &WalDefinition,
        path: &Path,
        opened: Wal,
        offload: Option<Offload>,
    ) -> Result<DiskLog, ErrorBody> {
        let disk = self.disk;
        let held = opened.held();
        if held.records > 0 {
            tracing::info!(disk, log = %path.display(), "the log has {held}, which it writes home");
        }
        let is_in_cache = wal.is_in_cache;
        let loss = is_in_cache.then(|| LogLoss::of(path, self.records, opened.identity()));
        let loss = loss.transpose().map_err(|error| self.failed(wal, error.into()))?.map(Arc::new);
        let (mark, attendance) = (Arc::new(self.mark), Arc::default());
        let log = DiskLog { wal: opened, offload, is_in_cache, mark, loss, attendance };
        if let Some(errno) = log.loss.as_ref().and_then(|loss| loss.errno()) {
            log.wal.lose(errno);
        }
        if let Some(problem) = log.problem() {
            tracing::error!(disk, "{problem}");
        }
        Ok(log)
    }
}

/// The error for an image whose mark cannot be read or removed.
fn unreadable(image: &Path, error: io::Error) -> ErrorBody {
    let shown = image.display();
    let what = format!("it is unknown whether {shown} has changes in a log");
    let folder = fathom_image::marks_folder();
    let remedy = format!(
        "check its file system, or, for a block device, the folder of the marks, {}, which the daemon has to \
         read and write",
        folder.display()
    );
    Failure::from(error).about(what).advise_else(remedy).into()
}

/// The error for a log with changes whose image has no mark.
fn unmarked(image: &Path, wal: &WalDefinition, disk: &str) -> ErrorBody {
    let (shown, path) = (image.display(), wal.log.display());
    refusal(
        ErrorCode::Failed,
        format!(
            "the log of the disk {disk:?} at {path} holds changes, but {shown} has no mark of \
             it: this is another image, or it has been used without the log"
        ),
        format!(
            "restore the image. If it is a copy without attributes, `fathom log keep {disk}` keeps the \
             changes; if they may be lost, run `fathom log discard {disk}`"
        ),
    )
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

/// The time at which the host's monotonic clock was 0, in nanoseconds since 1970.
fn clock_start_ns() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    (now.as_nanos() as u64).saturating_sub(Clock::System.now_ns())
}
