//! How a holder wakes the pager: a FIFO beside the table of leases.
//!
//! The word of a page says that it is wanted; the FIFO says which words to look at. It is a hint: a
//! message that is lost, because nobody reads or the FIFO is full, is sent again with the holder's
//! next attempt. A message is two numbers of 64 bits: the first page of the file, and how many.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode};

use super::table::MemoryFile;

/// The bytes of a message. The kernel writes so few at once, or none.
const MESSAGE_BYTES: usize = 16;
/// The most messages that one call reads.
const MESSAGES_MAX: usize = 256;

/// The side of the pager: which pages holders want.
#[derive(Debug)]
pub struct WantedPages {
    file: File,
}

impl WantedPages {
    /// Opens the FIFO of a memory file, and makes it if there is none.
    ///
    /// # Errors
    /// When it cannot be made, or something else is there.
    pub fn open(folder: &Path, memory: MemoryFile) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o711).create(folder)?;
        let path = memory.fifo(folder);
        match rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        // Also for writing: without a writer, it would be readable at its end.
        let file = open(&path, true)?;
        Ok(Self { file })
    }

    /// Reads the messages that are there, without waiting: calls `each` with their pages, which may
    /// be any.
    ///
    /// # Errors
    /// Those of the FIFO.
    pub fn read(&self, mut each: impl FnMut(Range<u64>)) -> io::Result<()> {
        let mut bytes = [0; MESSAGE_BYTES * MESSAGES_MAX];
        let length = match (&self.file).read(&mut bytes) {
            Ok(length) => length,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for message in bytes[..length].chunks_exact(MESSAGE_BYTES) {
            let number = |at: usize| message[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
            each(number(0)..number(0).saturating_add(number(8)));
        }
        Ok(())
    }
}

/// Readable when a holder wants a page.
impl AsFd for WantedPages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The side of a holder.
#[derive(Debug)]
pub(super) struct PagerBell {
    path: PathBuf,
    file: Option<File>,
}

impl PagerBell {
    /// That of a memory file's pager.
    pub fn new(folder: &Path, memory: MemoryFile) -> Self {
        Self { path: memory.fifo(folder), file: None }
    }

    /// Wakes the pager, if there is one, for these pages. It never waits.
    pub fn ring(&mut self, pages: &Range<u64>) {
        let mut message = [0; MESSAGE_BYTES];
        message[..8].copy_from_slice(&pages.start.to_ne_bytes());
        message[8..].copy_from_slice(&pages.end.saturating_sub(pages.start).to_ne_bytes());
        let write = |mut file: &File| file.write(&message).is_ok();
        if self.file.as_ref().is_some_and(write) {
            return;
        }
        // Nobody reads, it is full, or another pager has made another.
        self.file = open(&self.path, false).ok();
        self.file.as_ref().map(write);
    }
}

fn open(path: &Path, is_reader: bool) -> io::Result<File> {
    let mut options = File::options();
    options.read(is_reader).write(true);
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_CLOEXEC);
    // Not of a device or a file, an opening or a write of which has effects.
    if !fs::symlink_metadata(path)?.file_type().is_fifo() {
        return Err(io::Error::new(ErrorKind::InvalidData, "it is no FIFO"));
    }
    options.open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: MemoryFile = MemoryFile { device: 7, inode: 9 };

    fn read(pages: &WantedPages) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        pages.read(|range| found.push((range.start, range.end))).unwrap();
        found
    }

    #[test]
    fn what_a_holder_wants_reaches_the_pager_that_reads() {
        let folder = tempfile::tempdir().unwrap();
        let mut bell = PagerBell::new(folder.path(), MEMORY);
        bell.ring(&(1..2));
        let pages = WantedPages::open(folder.path(), MEMORY).unwrap();
        assert!(read(&pages).is_empty(), "there was no pager");
        bell.ring(&(3..9));
        bell.ring(&(5..6));
        assert_eq!(read(&pages), [(3, 9), (5, 6)]);
        // A pager that dies loses what it has not read; the next one gets what comes then.
        bell.ring(&(7..8));
        drop(pages);
        bell.ring(&(7..8));
        let pages = WantedPages::open(folder.path(), MEMORY).unwrap();
        bell.ring(&(7..8));
        assert_eq!(read(&pages), [(7, 8)]);
        // One that has detached has removed it.
        fs::remove_file(MEMORY.fifo(folder.path())).unwrap();
        drop(pages);
        let pages = WantedPages::open(folder.path(), MEMORY).unwrap();
        bell.ring(&(2..4));
        assert_eq!(read(&pages), [(2, 4)]);
    }

    #[test]
    fn a_fifo_that_is_full_keeps_nobody_waiting_and_a_file_is_no_fifo() {
        let folder = tempfile::tempdir().unwrap();
        let pages = WantedPages::open(folder.path(), MEMORY).unwrap();
        let mut bell = PagerBell::new(folder.path(), MEMORY);
        (0..10_000).for_each(|page| bell.ring(&(page..page + 1)));
        let mut count = 0;
        while let found @ 1.. = read(&pages).len() {
            count += found;
        }
        assert!((256..10_000).contains(&count), "{count}");
        let folder = tempfile::tempdir().unwrap();
        fs::write(MEMORY.fifo(folder.path()), "x").unwrap();
        WantedPages::open(folder.path(), MEMORY).unwrap_err();
        PagerBell::new(folder.path(), MEMORY).ring(&(0..1));
        assert_eq!(fs::read(MEMORY.fifo(folder.path())).unwrap(), b"x");
    }
}
