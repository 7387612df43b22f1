//! A piece of a file, mapped shared: for what the front end keeps across a restart of the daemon
//! (in-flight requests) or reads while the daemon writes it (dirty log).

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr::NonNull;

/// A new file in memory of `length` zero bytes, under a name that people see in `/proc`.
pub(super) fn memory_file(name: &CStr, length: u64) -> io::Result<File> {
    // SAFETY: the name is a C string; the call returns a new descriptor or -1.
    let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours alone.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(length)?;
    Ok(file)
}

/// A shared mapping. The other side writes it too: only atomic and volatile accesses.
pub(super) struct SharedFile {
    base: NonNull<u8>,
    /// The mapping begins at a page; the wanted piece so many bytes behind.
    skip: usize,
    length: usize,
}

// SAFETY: the mapping is shared memory that is only touched by atomic and volatile accesses.
unsafe impl Send for SharedFile {}
// SAFETY: as above.
unsafe impl Sync for SharedFile {}

impl SharedFile {
    /// Maps `length` bytes of `file` from `offset` on.
    pub(super) fn map(file: &File, offset: u64, length: u64) -> io::Result<Self> {
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text.to_owned());
        let end = offset.checked_add(length).ok_or_else(|| invalid("a mapping wraps around"))?;
        // Touching a mapping behind the end of its file would be a fatal signal.
        if length == 0 || end > file.metadata()?.len() {
            return Err(invalid("a mapping is empty or longer than its file"));
        }
        // SAFETY: a system call without memory.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
        let skip = (offset % page) as usize;
        let length = usize::try_from(length).map_err(|_| invalid("a mapping is too long"))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length + skip,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                (offset - skip as u64) as libc::off_t,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| invalid("a mapping at address 0"))?;
        Ok(Self { base, skip, length })
    }

    /// The place of the first byte.
    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr().wrapping_add(self.skip)
    }

    /// The number of bytes.
    pub(super) fn length(&self) -> usize {
        self.length
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length, and nobody holds the object any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length + self.skip) };
    }
}
