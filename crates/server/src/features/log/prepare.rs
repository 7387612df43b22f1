//! The place of a log: it is made and given its space before a log is opened there.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use fathom_block::Backend;
use fathom_failure::Failure;
use fathom_layers::wal::Superblock;
use fathom_persistence::{SUPERBLOCK_LENGTH, Superblock as _};

use super::WalDefinition;
use crate::daemon::stack::check_file_limit;

/// Requires that the store of a cache exists. Only `fathom cache create` makes one.
pub(super) fn require(path: &Path) -> Result<(), Failure> {
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
pub(super) fn make(wal: &WalDefinition) -> Result<(), Failure> {
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

pub(super) fn is_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}

/// Refuses a place on a block device that has neither a log nor leave to make one.
pub(super) fn refuse_unprepared(wal: &WalDefinition) -> Result<(), Failure> {
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
pub(super) fn length(wal: &WalDefinition) -> u64 {
    let size = wal.size.map_or(0, |size| size.0);
    match wal.offload.map_or(0, |offload| offload.copies) {
        0 => size,
        copies => size.next_multiple_of(4096).saturating_add(copies),
    }
}

/// Ensures that the volume, if it is a file, has space for the log: a write to a log must not fail
/// because the file system is full.
pub(super) fn reserve(wal: &WalDefinition, volume: &dyn Backend) -> Result<(), Failure> {
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
