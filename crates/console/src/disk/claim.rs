//! The right to change an image: nobody else uses it for as long as a [`Claim`] lives.
//!
//! Everything that replaces, cuts or resizes an image takes its lock first: the one that the daemon
//! and QEMU take, which is seen across users, containers and, on NFS, hosts. What writes without a
//! lock is found among the processes, and by asking the kernel for a lease, which also knows of
//! writers that this user may not see, and of loop devices.
use std::{
    fs::{File, Metadata, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
};

use fathom_image::{Access, LockError, Writers};

use super::holders;
use crate::failure::{Failure, Outcome};

/// An image, open for writing, that is locked.
pub(super) struct Claim {
    file: File,
}

impl Claim {
    /// Takes the lock of an image that exists. Nothing of it is changed.
    pub(super) fn take(path: &Path) -> Outcome<Self> {
        let failed = |error: io::Error| Failure::io("open", path, &error);
        let mut options = OpenOptions::new();
        // A named pipe must not block.
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let reader = options.open(path).map_err(failed)?;
        if !reader.metadata().map_err(failed)?.is_file() {
            return Err(Failure::new(format!("{} is no regular file", path.display())));
        }
        // Before this process itself has the image open for writing.
        let writers = fathom_image::writers(&reader);
        let file = options.write(true).open(path).map_err(failed)?;
        lock(&file, path, writers)?;
        if !same(&file.metadata().map_err(failed)?, &std::fs::metadata(path).map_err(failed)?) {
            return Err(Failure::new(format!("{} was replaced just now", path.display()))
                .advise("try again, if it is still to be changed"));
        }
        if let Some(holder) = holders::of(path).into_iter().find(|holder| holder.writes) {
            return Err(in_use(path, &holder.to_string()));
        }
        if writers == Writers::Some {
            return Err(in_use(path, "a process or a loop device that this user cannot see"));
        }
        Ok(Self { file })
    }

    /// Takes the lock of a file that this process has just made. Where there are no locks, it is
    /// nobody else's all the same.
    pub(super) fn made(file: File, path: &Path) -> Outcome<Self> {
        match fathom_image::lock(&file, Access::Exclusive) {
            Ok(()) | Err(LockError::Unsupported(_)) => Ok(Self { file }),
            Err(error) => Err(Failure::new(format!("cannot lock {}: {error}", path.display()))),
        }
    }

    /// The image, open for reading and writing.
    pub(super) fn file(&self) -> &File {
        &self.file
    }
}

fn lock(file: &File, path: &Path, writers: Writers) -> Outcome {
    let locked = match writers {
        // A holder that is about to end has been waited for.
        Writers::Some => fathom_image::try_lock(file, Access::Exclusive),
        Writers::None | Writers::Unknown => fathom_image::lock(file, Access::Exclusive),
    };
    match locked {
        Ok(()) => Ok(()),
        Err(LockError::Held) => {
            let holders = holders::of(path);
            let holder = holders.iter().find(|h| h.locks).or_else(|| holders.first());
            Err(match holder {
                Some(holder) => in_use(path, &holder.to_string()),
                None => in_use(path, "somebody who has locked it and cannot be seen from here")
                    .advise("`lslocks`, run as root on each host that has this file, shows who"),
            })
        }
        Err(LockError::Unsupported(_)) => Err(Failure::new(format!(
            "it cannot be told whether {} is in use: its file system has no locks",
            path.display()
        ))
        .advise(
            "make sure that nobody uses it, on any host; then remove it with `rm`, or resize it \
             with `truncate --size`",
        )),
        Err(LockError::Io(error)) => Err(Failure::io("lock", path, &error)),
    }
}

fn in_use(path: &Path, user: &str) -> Failure {
    Failure::new(format!("{} is in use by {user}", path.display()))
        .advise("stop that process, or remove the disk from the daemon, first")
}

/// Whether two files are one.
fn same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}
