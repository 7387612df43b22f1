//! Whose changes a log has, without opening it for a disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use fathom_block::{Backend, StoreAccess};
use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, Superblock as _};
use fathom_wal::{Owner, Scanner, Superblock};

/// The owner of the log at `offset` of a file or device if the log has changes; `None` if it has
/// none, or if there is no sound log. Takes no lock: the log may be in use.
///
/// # Errors
/// When it cannot be read.
pub fn owner_of_changes(path: &Path, offset: u64) -> io::Result<Option<Owner>> {
    let file = File::open(path)?;
    owner(|at, length| read_file(&file, offset + at, length))
}

/// The same for a log at `offset` of an open volume. Blocks.
///
/// # Errors
/// When it cannot be read, or a request is not answered within a minute.
pub fn owner_in(volume: &Arc<dyn Backend>, offset: u64) -> io::Result<Option<Owner>> {
    let capacity = volume.capacity();
    let mut access = StoreAccess::open(volume)?;
    owner(|at, length| {
        let at = offset.saturating_add(at);
        if at.checked_add(length as u64).is_none_or(|end| end > capacity) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        access.read(at, length as u64)
    })
}

/// The identity of the log at `offset` of a file or device; `None` if there is no sound log. Takes
/// no lock.
///
/// # Errors
/// When it cannot be read.
pub fn identity_of_log(path: &Path, offset: u64) -> io::Result<Option<Identity>> {
    let file = File::open(path)?;
    let read = |at, length| read_file(&file, offset + at, length);
    Ok(superblock(read)?.map(|superblock| superblock.log))
}

fn read_file(file: &File, at: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}

/// The owner of the changes in a log. `read` returns bytes of it: their offset from its beginning,
/// and their number.
fn owner(mut read: impl FnMut(u64, usize) -> io::Result<Vec<u8>>) -> io::Result<Option<Owner>> {
    let Some(superblock) = superblock(&mut read)? else { return Ok(None) };
    let mut scanner = Scanner::new(&superblock);
    while let Some((at, length)) = scanner.next_read() {
        let bytes = read(at, length)?;
        if scanner.feed(&bytes).is_some_and(|found| !found.record.entries.is_empty()) {
            return Ok(Some(superblock.owner));
        }
    }
    Ok(None)
}

fn superblock(
    mut read: impl FnMut(u64, usize) -> io::Result<Vec<u8>>,
) -> io::Result<Option<Superblock>> {
    Ok(Superblock::select(&read(0, 2 * SUPERBLOCK_LENGTH)?).ok())
}
