//! Memory that two processes share, of which all accesses are atomic.

#![allow(unsafe_code)]
// A mapping is aligned to pages, and each offset is checked.
#![allow(clippy::cast_ptr_alignment)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The mapping of a file that never becomes shorter.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: all accesses to the memory are atomic.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first bytes of a file.
    ///
    /// # Errors
    /// Those of the system.
    pub fn of(file: &OwnedFd, length: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at no fixed address.
        let start = unsafe {
            mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, file.as_fd(), 0)
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, length })
    }

    /// The number of 32 bits at an offset, a multiple of 4.
    ///
    /// # Panics
    /// When the mapping does not have it.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset % 4 == 0 && offset + 4 <= self.length);
        // SAFETY: aligned and within the mapping, which lives as long as `self`.
        unsafe { &*self.start.as_ptr().add(offset).cast::<AtomicU32>() }
    }

    /// The number of 64 bits at an offset, a multiple of 8.
    ///
    /// # Panics
    /// When the mapping does not have it.
    pub fn wide(&self, offset: usize) -> &AtomicU64 {
        assert!(offset % 8 == 0 && offset + 8 <= self.length);
        // SAFETY: as in `word`.
        unsafe { &*self.start.as_ptr().add(offset).cast::<AtomicU64>() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping of `of`, to which no reference is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}
