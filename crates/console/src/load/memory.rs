//! Memory that this process and the server share, as guest memory is shared.
use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, RawFd},
    ptr::{self, NonNull},
};

/// An anonymous file, mapped.
pub struct SharedMemory {
    file: File,
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to no thread; access to its bytes is up to those who hold pointers.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; the methods hand out nothing but the address.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps `length` bytes of zeroes.
    pub fn new(length: usize) -> io::Result<Self> {
        // SAFETY: the name is a C string and the flags are valid.
        let fd = unsafe { libc::memfd_create(c"fathom-load".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is open and nobody else's.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(length as u64)?;
        // SAFETY: a new shared mapping at an address of the kernel's choice.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                fd,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
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

    /// The file beneath.
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
