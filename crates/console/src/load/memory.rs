//! Memory shared between this process and the server, as guest memory is.
use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, RawFd},
    ptr::{self, NonNull},
};

use rustix::fs::{MemfdFlags, memfd_create};

use super::memory_table::PIECE_UNIT;

/// A mapped anonymous file.
pub struct SharedMemory {
    file: File,
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to no thread; holders of pointers synchronise access to its bytes.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; the methods return nothing but the address.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps at least `length` bytes of zeroes.
    pub fn new(length: usize) -> io::Result<Self> {
        let file = File::from(memfd_create(c"fathom-load", MemfdFlags::CLOEXEC)?);
        let fd = file.as_raw_fd();
        // Whole huge pages at an aligned address, for servers that map huge pages.
        let unit = PIECE_UNIT as usize;
        let length = length.next_multiple_of(unit);
        file.set_len(length as u64)?;
        // SAFETY: a new reservation at an address of the kernel's choice.
        let reserved = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            libc::mmap(ptr::null_mut(), length + unit, libc::PROT_NONE, flags, -1, 0)
        };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let before = (reserved as usize).next_multiple_of(unit) - reserved as usize;
        let start = reserved.wrapping_byte_add(before);
        // SAFETY: the mapping replaces a part of the reservation. The unused rest on both sides is
        // unmapped.
        let address = unsafe {
            if before > 0 {
                libc::munmap(reserved, before);
            }
            libc::munmap(start.wrapping_byte_add(length), unit - before);
            let flags = libc::MAP_SHARED | libc::MAP_POPULATE | libc::MAP_FIXED;
            libc::mmap(start, length, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)
        };
        if address == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            // SAFETY: the middle of the reservation, which is unused.
            unsafe { libc::munmap(start, length) };
            return Err(error);
        }
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { file, address, length })
    }

    /// The first byte's address.
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// The number of bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The descriptor of the mapped file.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new`, with this length, and is unmapped once.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.length) };
    }
}
