//! The dirty log of a live migration: a bit for each page of guest memory that the device wrote.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use fathom_block::{GuestAddress, Mapping, MemoryOwner};

/// The number of bytes that one bit stands for (`VHOST_LOG_PAGE`).
const PAGE: u64 = 4096;
/// The longest log, in bytes: long enough for a process's whole address space.
const LENGTH_MAX: u64 = (1 << 47) / PAGE / 8;

/// The log, shared with the front end, which clears bits as it sends pages.
pub(super) struct DirtyLog {
    bits: Mapping,
}

impl DirtyLog {
    pub(super) fn new(
        file: &File,
        offset: u64,
        length: u64,
        owner: &Arc<MemoryOwner>,
    ) -> io::Result<Self> {
        if length > LENGTH_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a dirty log is too long"));
        }
        Ok(Self { bits: Mapping::new(file, offset, length, owner)? })
    }

    /// Marks the pages of a range. Pages past the log's end are ignored.
    pub(super) fn mark(&self, GuestAddress(address): GuestAddress, length: u64) {
        if length == 0 {
            return;
        }
        let last = address.saturating_add(length - 1) / PAGE;
        for page in address / PAGE..=last {
            let index = (page / 8) as usize;
            if index >= self.bits.length() {
                return;
            }
            let place = self.bits.base().wrapping_add(index);
            // SAFETY: the index is within the mapping, which lives as long as self; a byte is
            // always aligned; the front end accesses it atomically too.
            let byte = unsafe { AtomicU8::from_ptr(place) };
            byte.fetch_or(1 << (page % 8), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn pages_are_marked_to_the_bit_and_never_behind_the_end() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let log = DirtyLog::new(&file, 4096, 2, &Arc::default()).unwrap();
        log.mark(GuestAddress(4095), 2);
        log.mark(GuestAddress(7 * 4096), 4096);
        log.mark(GuestAddress(8 * 4096), 0);
        log.mark(GuestAddress(15 * 4096), u64::MAX);
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, 4096).unwrap();
        assert_eq!(bytes, [0b1000_0011, 0b1000_0000, 0, 0]);
        assert!(DirtyLog::new(&file, 8190, 4, &Arc::default()).is_err());
    }
}
