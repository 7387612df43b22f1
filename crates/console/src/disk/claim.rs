//! The exclusive right to change an image, for as long as a [`Claim`] lives.
//!
//! Every command that replaces, truncates or resizes an image takes its lock first: the lock that
//! the daemon and QEMU take, which is visible across users, containers and, on NFS, hosts. Writers
//! without a lock are found among the processes, and by asking the kernel for a lease. The kernel
//! also knows of loop devices and of writers that this user may not see.
use std::{
    fs::{File, Metadata, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use fathom_image::{
    Demand, ImageChange, LockError, LockPurpose, Mark, MarkKind, MarkedImage, Writers,
};

use super::{holders, info::SERVICE_STATE};
use crate::{
    failure::{CommandResult, Failure},
    output::text::clean,
};

/// An image that is open for writing and locked.
pub(super) struct Claim {
    file: File,
    /// The folders of daemons, for its marks.
    folders: Vec<PathBuf>,
}

impl Claim {
    /// Takes the lock of an existing image. Does not change the image.
    pub(super) fn take(path: &Path) -> CommandResult<Self> {
        let failed = |error: io::Error| Failure::io("open", path, &error);
        let mut options = OpenOptions::new();
        // The open of a named pipe must not block.
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let reader = options.open(path).map_err(failed)?;
        if !reader.metadata().map_err(failed)?.is_file() {
            return Err(Failure::new(format!("{} is no regular file", path.display())));
        }
        // This must precede the open for writing, which would count as a writer.
        let writers = fathom_image::writers(&reader);
        let file = options.write(true).open(path).map_err(failed)?;
        lock(&file, path, writers)?;
        if !same(&file.metadata().map_err(failed)?, &std::fs::metadata(path).map_err(failed)?) {
            return Err(Failure::new(format!("{} has just been replaced", path.display()))
                .advise("try again if the new file is to be changed"));
        }
        if let Some(holder) = holders::of(path).into_iter().find(|holder| holder.writes) {
            return Err(in_use(path, &holder.to_string()));
        }
        if writers == Writers::Some {
            return Err(in_use(
                path,
                "a process or a loop device that is not visible to this user",
            ));
        }
        Ok(Self { file, folders: own_folders() })
    }

    /// The same, with marks in these folders of daemons.
    pub(super) fn with_folders(self, folders: Vec<PathBuf>) -> Self {
        Self { folders, ..self }
    }

    /// Takes the lock of a file that this process has just created. On a file system without locks
    /// no other process uses it either.
    pub(super) fn made(file: File, path: &Path) -> CommandResult<Self> {
        match fathom_image::lock(&file, LockPurpose::Alone) {
            Ok(()) | Err(LockError::Unsupported(_)) => Ok(Self { file, folders: own_folders() }),
            Err(error) => Err(Failure::new(format!("cannot lock {}: {error}", path.display()))),
        }
    }

    /// Asks the marks of the image at `path` for a change: refuses it, or removes those that would
    /// be wrong afterwards. The image is claimed, so that no daemon marks it meanwhile.
    pub(super) fn prepare(&self, path: &Path, change: ImageChange) -> CommandResult {
        for kind in MarkKind::ALL.into_iter().filter(|it| it.demand(change) == Demand::Refuse) {
            refuse(kind, &self.marked(path))?;
        }
        self.clear(path, change, Demand::ClearBefore)
    }

    /// Removes the marks that are wrong after a change, which is durable.
    pub(super) fn finish(&self, path: &Path, change: ImageChange) -> CommandResult {
        self.clear(path, change, Demand::ClearAfter)
    }

    fn clear(&self, path: &Path, change: ImageChange, demand: Demand) -> CommandResult {
        for kind in MarkKind::ALL.into_iter().filter(|it| it.demand(change) == demand) {
            kind.clear(&self.marked(path))
                .map_err(|error| Failure::io("remove a mark of", path, &error))?;
        }
        Ok(())
    }

    /// The image, whose marks may be in the folders of daemons.
    pub(super) fn marked<'a>(&'a self, path: &'a Path) -> MarkedImage<'a> {
        MarkedImage { path, file: &self.file, folders: &self.folders }
    }

    /// The image, open for reading and writing.
    pub(super) fn file(&self) -> &File {
        &self.file
    }
}

/// Refuses an image with a mark of this kind.
fn refuse(kind: MarkKind, image: &MarkedImage<'_>) -> CommandResult {
    let shown = image.path.display();
    let problem = match kind.read(image) {
        Ok(None) => return Ok(()),
        Ok(Some(Mark::Log(log))) => format!("{shown} has changes in the log {}", clean(&log.path)),
        Ok(Some(Mark::Cache(_) | Mark::Loss(_) | Mark::Move(_))) => format!("{shown} has {kind}"),
        Err(error) => format!("it is unknown whether {shown} has {kind}: {error}"),
    };
    Err(Failure::new(problem).advise(format!(
        "serve it once more with its log, then remove that layer or shut down the daemon; or, if the changes \
         may be lost, run `fathom log discard DISK`, or, if there is no such disk any more, `fathom log discard \
         --image {shown}`"
    )))
}

/// The folders of daemons in which marks of images may be.
pub(super) fn own_folders() -> Vec<PathBuf> {
    let state = std::env::var_os("STATE_DIRECTORY").map(PathBuf::from);
    state.into_iter().chain([PathBuf::from(SERVICE_STATE)]).collect()
}

fn lock(file: &File, path: &Path, writers: Writers) -> CommandResult {
    let locked = match writers {
        // `fathom_image::writers` has already waited for a holder that is about to end.
        Writers::Some => fathom_image::try_lock(file, LockPurpose::Alone),
        Writers::None | Writers::Unknown => fathom_image::lock(file, LockPurpose::Alone),
    };
    match locked {
        Ok(()) => Ok(()),
        Err(LockError::Held) => {
            let holders = holders::of(path);
            let holder = holders.iter().find(|h| h.locks).or_else(|| holders.first());
            Err(match holder {
                Some(holder) => in_use(path, &holder.to_string()),
                None => in_use(path, "a process that holds its lock and is not visible from here")
                    .advise("`lslocks`, run as root on each host that has this file, shows which"),
            })
        }
        Err(LockError::Unsupported(_)) => Err(Failure::new(format!(
            "cannot determine whether {} is in use: its file system has no locks",
            path.display()
        ))
        .advise(
            "make sure that it is not in use on any host; then remove it with `rm`, or resize it \
             with `truncate --size`",
        )),
        Err(LockError::Io(error)) => Err(Failure::io("lock", path, &error)),
    }
}

pub(super) fn in_use(path: &Path, user: &str) -> Failure {
    Failure::new(format!("{} is in use by {user}", path.display()))
        .advise("stop that process, or remove the disk from the daemon, first")
}

/// Whether two files are the same file.
fn same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}
