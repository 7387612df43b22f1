//! The log of a live migration: a bit for each page of a guest's memory that was written.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::buffer::{Buffers, GuestAddress};
use crate::mapping::{Mapping, MemoryOwner};

/// The number of bytes that one bit stands for (`VHOST_LOG_PAGE`).
const PAGE: u64 = 4096;
/// The longest log, in bytes: long enough for a process's whole address space.
const LENGTH_MAX: u64 = (1 << 47) / PAGE / 8;

/// The log, shared with the VMM, which clears bits as it sends pages. Whoever writes to the guest's
/// memory marks what was written.
#[derive(Debug)]
pub struct DirtyLog {
    bits: Mapping,
}

impl DirtyLog {
    /// Maps a log of `length` bytes, which begins at `offset` of a file.
    ///
    /// # Errors
    /// When it is too long, or cannot be mapped.
    pub fn new(
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
    pub fn mark(&self, GuestAddress(address): GuestAddress, length: u64) {
        if length == 0 {
            return;
        }
        let last = address.saturating_add(length - 1) / PAGE;
        let access = self.bits.access();
        for page in address / PAGE..=last {
            // The front end accesses the byte atomically too.
            let Some(byte) = access.u8s().get((page / 8) as usize) else { return };
            byte.fetch_or(1 << (page % 8), Ordering::Release);
        }
    }

    /// Marks the pages of all memory that a request has filled.
    pub fn mark_buffers(&self, buffers: &Buffers) {
        for (segment, address) in buffers.segments().iter().zip(buffers.addresses()) {
            if let Some(address) = address {
                self.mark(*address, segment.iov_len as u64);
            }
        }
    }
}
