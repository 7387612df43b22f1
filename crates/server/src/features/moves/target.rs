//! The store that a disk is to have.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fathom_block::Backend;
use fathom_control::{Bytes, DiskDefinition, ErrorBody, ErrorCode};
use fathom_failure::Failure;
use fathom_image::{MarkedMove, MoveMark, MoveSide, Signature};
use fathom_store::{Pool, PoolError, PoolRefusal};

use super::described;
use crate::daemon::Daemon;
use crate::daemon::lasting::NotedMove;
use crate::daemon::stack::refusal;
use crate::daemon::unix_time_s;
use crate::stores::kinds::open_store;
use crate::stores::models::ModelDevices;
use crate::stores::pools::Pools;

/// What the name of a volume ends with until it is complete.
const INCOMPLETE: &str = ".incomplete";
/// How often, and at which interval, it is tried to remove a volume whose queue may still end.
const REMOVALS: u32 = 100;
const REMOVAL_INTERVAL: Duration = Duration::from_millis(50);

/// See the module.
pub(super) struct Target {
    backend: Arc<dyn Backend>,
    /// Whether it reads as zeroes everywhere.
    pub(super) is_blank: bool,
    /// How often it had lost writes when it was opened.
    losses: u64,
    place: TargetPlace,
}

/// Where a target is.
struct TargetPlace {
    definition: DiskDefinition,
    /// What the source is called.
    source: String,
    records: PathBuf,
    /// Whether it is a file that the move has made.
    is_file: bool,
    pool: Option<Pool>,
}

/// How a target is opened.
pub(super) struct TargetOptions {
    /// The bytes of the disk.
    pub(super) capacity: u64,
    /// Whether the content of a device may be lost that is none of Fathom's.
    pub(super) overwrite: bool,
    /// Whether an earlier daemon has begun the move, and whether it has tried to change over.
    pub(super) is_resumed: bool,
    pub(super) is_named: bool,
}

impl Target {
    /// Makes the target, or takes what an earlier daemon has made, and opens it. It is marked as
    /// incomplete.
    ///
    /// # Errors
    /// Why it cannot be made or opened. What has been made is removed.
    pub(super) fn open(
        daemon: &Daemon,
        noted: &NotedMove,
        options: &TargetOptions,
    ) -> Result<Self, ErrorBody> {
        let records = daemon.records_folder();
        let mut place = TargetPlace {
            definition: noted.after.clone(),
            source: described(&noted.before),
            records,
            is_file: false,
            pool: None,
        };
        let is_blank = if noted.after.image.is_some() {
            place.make_image(options)?
        } else {
            place.make_volume(daemon, options)?;
            true
        };
        let opened = open_store(&place.working(), &place.records, &daemon.parts);
        let backend = opened.inspect_err(|_| place.discard())?;
        Ok(Self { losses: backend.losses(), backend, is_blank, place })
    }

    /// The back end.
    pub(super) fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Whether it has lost writes since it was opened.
    pub(super) fn has_lost_writes(&self) -> bool {
        self.backend.has_lost_writes() || self.backend.losses() != self.losses
    }

    /// The copy is complete and durable: the target gets its name, or loses its mark.
    pub(super) fn complete(&self) -> io::Result<()> {
        match &self.place.pool {
            Some(pool) => {
                let (working, name) = (self.place.working_name(), self.place.name());
                pool.rename_volume(&working, name).map_err(Failure::from)?;
                Ok(())
            }
            None => self.place.mark()?.clear(),
        }
    }

    /// The disk does not change over after all: the copy becomes old.
    pub(super) fn take_back(&self) -> io::Result<()> {
        match &self.place.pool {
            Some(pool) => {
                let (working, name) = (self.place.working_name(), self.place.name());
                match pool.rename_volume(name, &working) {
                    // It has not got its name yet.
                    Err(PoolError::Refused(PoolRefusal::NoVolume)) => Ok(()),
                    renamed => Ok(renamed.map_err(Failure::from)?),
                }
            }
            None => self.place.mark_incomplete(),
        }
    }

    /// Removes it. A device keeps its mark.
    pub(super) fn discard(self) {
        let Self { backend, place, .. } = self;
        drop(backend);
        place.discard();
    }
}

impl TargetPlace {
    fn path(&self) -> &Path {
        let definition = &self.definition;
        definition.image.as_deref().or(definition.store.as_deref()).unwrap_or(Path::new(""))
    }

    fn name(&self) -> &str {
        self.definition.volume.as_deref().unwrap_or_default()
    }

    fn working_name(&self) -> String {
        format!("{}{INCOMPLETE}", self.name())
    }

    /// The definition with which it is opened while it is incomplete.
    fn working(&self) -> DiskDefinition {
        let volume = self.pool.as_ref().map(|_| self.working_name());
        DiskDefinition { volume, ..self.definition.clone() }
    }

    fn failed(&self, error: impl std::fmt::Display) -> ErrorBody {
        let message = format!("{} cannot be made: {error}", described(&self.definition));
        refusal(ErrorCode::Failed, message, "name another target, or make the folder writable")
    }

    fn taken(&self) -> ErrorBody {
        let message = format!("{} exists", described(&self.definition));
        refusal(ErrorCode::Conflict, message, "name another target, or remove this one")
    }

    fn mark(&self) -> io::Result<MoveMark> {
        MoveMark::open(self.path(), &self.records, self.definition.key.as_deref())
    }

    fn mark_incomplete(&self) -> io::Result<()> {
        let unix_s = unix_time_s();
        let other = self.source.clone();
        self.mark()?.write(&MarkedMove { side: MoveSide::Incomplete, unix_s, other })
    }

    /// Whether it is marked as the incomplete copy of the source.
    fn is_own(&self) -> io::Result<bool> {
        let marked = self.mark()?.read()?;
        let is_own =
            |it: &MarkedMove| it.side == MoveSide::Incomplete && self.source.ends_with(&it.other);
        Ok(marked.is_some_and(|it| is_own(&it)))
    }

    /// Makes the image, or takes a device. Returns whether it reads as zeroes.
    fn make_image(&mut self, options: &TargetOptions) -> Result<bool, ErrorBody> {
        let path = self.path().to_owned();
        let kind = match std::fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            metadata => Some(metadata.map_err(|error| self.failed(error))?),
        };
        if kind.as_ref().is_some_and(|kind| kind.file_type().is_block_device()) {
            self.take_device(&path, options)?;
            return Ok(false);
        }
        if let Some(metadata) = &kind {
            // A file that was made and not marked is empty.
            let is_empty = metadata.len() == 0;
            let is_own = || is_empty || options.is_named || self.is_own().unwrap_or(false);
            if !metadata.is_file() || !options.is_resumed || !is_own() {
                return Err(self.taken());
            }
        }
        self.is_file = true;
        let made = self.make_file(&path, options.capacity);
        made.map_err(|error| self.failed(error)).inspect_err(|_| self.discard())?;
        Ok(true)
    }

    /// Makes an empty file, marks it, and gives it its length. A file that an earlier daemon has
    /// made becomes empty.
    fn make_file(&self, path: &Path, capacity: u64) -> io::Result<()> {
        let mut open = OpenOptions::new();
        open.write(true).create(true).truncate(false).mode(0o600);
        let file = open.custom_flags(libc::O_NOFOLLOW).open(path)?;
        self.mark_incomplete()?;
        file.set_len(0)?;
        file.set_len(capacity)?;
        file.sync_all()?;
        File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
    }

    fn take_device(&self, path: &Path, options: &TargetOptions) -> Result<(), ErrorBody> {
        let refuse = |message: String, remedy: &str| {
            Err(refusal(ErrorCode::Conflict, format!("{}: {message}", path.display()), remedy))
        };
        let mark = self.mark().map_err(|error| self.failed(error))?;
        if let Some(reason) = mark.lacks_key() {
            return refuse(reason.to_owned(), "give the device a name with --key (`key`)");
        }
        let file = File::open(path).map_err(|error| self.failed(error))?;
        let size = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0));
        let size = size.map_err(|error| self.failed(io::Error::from(error)))?;
        if size < options.capacity {
            let message = format!("it has {}, the disk {}", Bytes(size), Bytes(options.capacity));
            return refuse(message, "name a larger device");
        }
        if !options.overwrite && !self.is_own().map_err(|error| self.failed(error))? {
            let found = Signature::of(&file, size).map_err(|error| self.failed(error))?;
            if let Some(found) = found {
                let remedy = "name another device, or lose that with --overwrite (`overwrite`)";
                return refuse(format!("it has a {}", found.0), remedy);
            }
        }
        self.mark_incomplete().map_err(|error| self.failed(error))
    }

    /// Makes the volume.
    fn make_volume(&mut self, daemon: &Daemon, options: &TargetOptions) -> Result<(), ErrorBody> {
        let (definition, path) = (&self.definition, self.path());
        let models = daemon.part::<ModelDevices>();
        let pool = daemon.part::<Pools>().open(path, definition, &self.records, models);
        let pool = pool.map_err(|failure| ErrorBody::new(ErrorCode::Failed, failure))?;
        let (name, working) = (self.name().to_owned(), self.working_name());
        let volumes = pool.volumes();
        let has = |wanted: &str| volumes.iter().any(|volume| volume.name == wanted);
        let refused = |error| ErrorBody::new(ErrorCode::Failed, Failure::from(error));
        if options.is_resumed {
            // An attempt to change over has given it its name, and was not completed.
            if options.is_named && has(&name) && !has(&working) {
                pool.rename_volume(&name, &working).map_err(refused)?;
            }
            match pool.delete_volume(&working) {
                Ok(()) | Err(PoolError::Refused(PoolRefusal::NoVolume)) => {}
                Err(error) => return Err(refused(error)),
            }
        }
        let is_taken = pool.volumes().iter().any(|it| it.name == name || it.name == working);
        if is_taken {
            return Err(self.taken());
        }
        pool.create_volume(&working, options.capacity).map_err(refused)?;
        self.pool = Some(pool);
        Ok(())
    }

    /// Removes what was made.
    fn discard(&self) {
        let shown = described(&self.definition);
        let removed = match &self.pool {
            Some(pool) => delete(pool, &self.working_name()),
            // The mark goes with the file, or after it.
            None if self.is_file => std::fs::remove_file(self.path())
                .and_then(|()| MoveMark::remove_beside(self.path())),
            None => return,
        };
        if let Err(error) = removed {
            tracing::warn!(%error, "what a move has made stays: {shown}");
        }
    }
}

/// Deletes a volume as soon as its last queue has ended.
fn delete(pool: &Pool, name: &str) -> io::Result<()> {
    for _ in 0..REMOVALS {
        match pool.delete_volume(name) {
            Err(PoolError::Refused(PoolRefusal::InUse)) => std::thread::sleep(REMOVAL_INTERVAL),
            Err(error) => return Err(Failure::from(error).into()),
            Ok(()) => return Ok(()),
        }
    }
    Err(io::Error::other("it is still in use"))
}
