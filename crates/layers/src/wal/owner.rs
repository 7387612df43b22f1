//! Whose changes a log has, without opening it for a disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use fathom_wal::{SUPERBLOCK_LENGTH, Scanner, Superblock, select};

/// The disk whose changes a log has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogOwner {
    /// The disk's name.
    pub name: String,
    /// The name of the disk's store: see [`WalOptions::home`](super::WalOptions::home).
    pub home: String,
}

/// The owner of the log at `offset` of a file or device if the log has changes; `None` if it has none, or if there
/// is no sound log. Takes no lock: the log may be in use.
///
/// # Errors
/// When it cannot be read.
pub fn owner_of_changes(path: &Path, offset: u64) -> io::Result<Option<LogOwner>> {
    let file = File::open(path)?;
    let Some(superblock) = superblock(&file, offset)? else { return Ok(None) };
    let mut scanner = Scanner::new(&superblock);
    let mut bytes = Vec::new();
    while let Some((at, length)) = scanner.next_read() {
        bytes.resize(length, 0);
        file.read_exact_at(&mut bytes, offset + at)?;
        if scanner.feed(&bytes).is_some_and(|found| !found.record.entries.is_empty()) {
            let owner = superblock.owner;
            return Ok(Some(LogOwner { name: owner.name, home: owner.home }));
        }
    }
    Ok(None)
}

/// The identity of the log at `offset` of a file or device; `None` if there is no sound log. Takes no lock.
///
/// # Errors
/// When it cannot be read.
pub fn identity_of_log(path: &Path, offset: u64) -> io::Result<Option<[u8; 16]>> {
    Ok(superblock(&File::open(path)?, offset)?.map(|superblock| superblock.log))
}

fn superblock(file: &File, offset: u64) -> io::Result<Option<Superblock>> {
    let mut copies = [0; 2 * SUPERBLOCK_LENGTH];
    file.read_exact_at(&mut copies, offset)?;
    let (first, second) = copies.split_at(SUPERBLOCK_LENGTH);
    Ok(select(first, second).ok())
}
