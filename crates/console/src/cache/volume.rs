//! The file or block device of a cache: opened exclusively, and made a cache.
use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::unix::fs::{FileExt, FileTypeExt},
    path::Path,
};

use fathom_cache::format::{PAGE_LENGTH, Superblock};
use fathom_failure::Failing as _;
use fathom_image::{Holder, LockError, LockPurpose};
use fathom_persistence::{SUPERBLOCK_LENGTH, Superblock as _, Verdict};
use rustix::fs::OFlags;

use crate::{
    disk::read_up_to,
    failure::{CommandResult, Failure},
    output::progress::Progress,
};

/// The bytes of one write of zeroes.
const CHUNK: u64 = 1 << 20;

/// An open store of a cache, which no other process uses.
pub(super) struct Volume {
    pub file: File,
    /// The size, in bytes.
    pub size: u64,
    /// The kernel's node of a device that has another one, for its lock.
    _node: Option<File>,
}

impl Volume {
    /// Opens an existing store, for writing if `is_changed`.
    pub(super) fn open(path: &Path, is_changed: bool) -> CommandResult<Self> {
        let failed = |error: io::Error| {
            let failure = Failure::io("open", path, &error);
            match error.kind() {
                io::ErrorKind::NotFound => failure
                    .advise(format!("make a cache with `fathom cache create {}`", path.display())),
                io::ErrorKind::ResourceBusy => {
                    let holder = Holder::of(path);
                    Failure::new(format!("{} is {holder}", path.display())).advise(holder.remedy())
                }
                _ => failure,
            }
        };
        let kind = std::fs::metadata(path).map_err(failed)?.file_type();
        if !kind.is_block_device() && !kind.is_file() {
            let text = format!("{} is neither a regular file nor a block device", path.display());
            return Err(Failure::new(text));
        }
        let file = fathom_image::open(path, access(is_changed), OFlags::NONBLOCK.bits() as i32);
        Self::locked(file.map_err(failed)?, path, is_changed)
    }

    /// A store that was made or opened.
    pub(super) fn locked(mut file: File, path: &Path, is_changed: bool) -> CommandResult<Self> {
        let access = access(is_changed);
        let locked = fathom_image::lock(&file, access)
            .and_then(|()| fathom_image::lock_device(&file, access));
        let node = match locked {
            Ok(node) => node,
            Err(LockError::Unsupported(_)) => None,
            Err(LockError::Held) => {
                return Err(Failure::new(format!(
                    "{} is in use by another process",
                    path.display()
                ))
                .advise("take it away from all disks of the daemon first: `fathom cache detach`"));
            }
            Err(error) => {
                return Err(Failure::new(format!("cannot lock {}: {error}", path.display())));
            }
        };
        let size = file.seek(SeekFrom::End(0));
        let size = size.map_err(|error| Failure::io("read", path, &error))?;
        Ok(Self { file, size, _node: node })
    }

    /// The superblock.
    pub(super) fn superblock(&self, path: &Path) -> CommandResult<Superblock> {
        let mut head = read_up_to(&self.file, 0, 2 * PAGE_LENGTH)
            .map_err(|error| Failure::io("read", path, &error))?;
        head.resize(2 * PAGE_LENGTH, 0);
        let format = Superblock::select(&head).map_err(|verdict| {
            let failure = Failure::new(format!("{}: {}", path.display(), verdict.describe::<Superblock>()));
            let shown = path.display();
            match verdict {
                Verdict::Newer(_) => {
                    failure.advise("use the version of Fathom that has made it")
                }
                Verdict::Blank | Verdict::Foreign => {
                    failure.advise(format!("make a cache with `fathom cache create {shown}`"))
                }
                Verdict::Damaged => failure.advise(format!(
                    "all blocks are on their disks: make it again with `fathom cache create --force \
                     {shown}`, unless a disk in the mode write-back has changes in its logs: restore it then"
                )),
            }
        })?;
        if format.length() > self.size {
            let text = format!(
                "{}: the cache has {} bytes, but its store only {}",
                path.display(),
                format.length(),
                self.size
            );
            return Err(Failure::new(text)
                .advise("make the store as large as it was, or make the cache again"));
        }
        Ok(format)
    }

    /// Makes the store an empty cache with free places for logs. Until the end, there is no cache
    /// at all: the pages of an older one must never be read together with new ones.
    pub(super) fn make(&self, format: &Superblock, is_zero: bool, silent: bool) -> io::Result<()> {
        let file = &self.file;
        file.write_all_at(&[0; 2 * PAGE_LENGTH], 0)?;
        file.sync_all()?;
        if !is_zero {
            self.blank_pages(format, silent)?;
            for log in 0..format.logs {
                file.write_all_at(&[0; 2 * SUPERBLOCK_LENGTH], format.log_offset(log))?;
            }
            file.sync_all()?;
        }
        for copy in 0..2 {
            file.write_all_at(&format.encode(), copy * PAGE_LENGTH as u64)?;
            file.sync_all()?;
        }
        Ok(())
    }

    /// Empties the cache. `format` is its superblock with another identity, with which no page of
    /// before is sound. There is a superblock at any time, so that logs are found.
    pub(super) fn clear(&self, format: &Superblock, silent: bool) -> io::Result<()> {
        for copy in [1, 0] {
            self.file.write_all_at(&format.encode(), copy * PAGE_LENGTH as u64)?;
            self.file.sync_all()?;
        }
        self.blank_pages(format, silent)?;
        self.file.sync_all()
    }

    fn blank_pages(&self, format: &Superblock, silent: bool) -> io::Result<()> {
        let end = format.page_offset(format.pages(), 0);
        let zeroes = vec![0; CHUNK as usize];
        let mut progress = Progress::new("Writing empty tables", end).silent(silent);
        let mut at = 2 * PAGE_LENGTH as u64;
        while at < end {
            let length = CHUNK.min(end - at);
            self.file.write_all_at(&zeroes[..length as usize], at)?;
            at += length;
            progress.update(at);
        }
        Ok(())
    }
}

fn access(is_changed: bool) -> LockPurpose {
    if is_changed { LockPurpose::Exclusive } else { LockPurpose::Shared }
}
