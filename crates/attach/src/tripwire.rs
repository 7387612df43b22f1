//! The pager's own view of the guest's memory, in which a missing page stays missing.
//!
//! A touch of a hole through an ordinary mapping makes a page of zeroes, which the guest would then
//! read instead of its own. This mapping is registered with `UFFD_FEATURE_SIGBUS`, so that such a
//! touch is an error and changes nothing.

#![expect(unsafe_code, reason = "a mapping of the guest's memory")]

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::userfault::{MISSING_SHMEM, SIGBUS, UserFault};

/// A page, in bytes.
const PAGE: u64 = 4096;
/// How many missing pages are tried. Fewer than a socket has room for.
const TRIALS: u32 = 4;

/// A mapping of a part of the guest's memory, for reading.
#[derive(Debug)]
pub(crate) struct Tripwire {
    base: NonNull<u8>,
    length: usize,
    offset: u64,
    file: File,
    _faults: UserFault,
}

// SAFETY: the mapping is only read, by the kernel, and unmapped with its owner.
unsafe impl Send for Tripwire {}

impl Tripwire {
    /// Maps `length` bytes of `file` from `offset`, both of whole pages.
    ///
    /// # Errors
    /// When it cannot be mapped or registered.
    pub fn map(device: BorrowedFd<'_>, file: File, offset: u64, length: u64) -> io::Result<Self> {
        let faults = UserFault::own(device, MISSING_SHMEM | SIGBUS)?;
        let length = length as usize;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), length, ProtFlags::READ, flags, &file, offset)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let start = base.as_ptr() as u64;
        // If it fails, dropping the value unmaps.
        let registered = faults.register(&(start..start + length as u64));
        let tripwire = Self { base, length, offset, file, _faults: faults };
        registered.map(|()| tripwire)
    }

    /// Copies the page at `at` of the mapping into `socket`, which has to have room for it.
    ///
    /// # Errors
    /// `EFAULT` if the page is missing.
    pub fn copy_page(&self, at: u64, socket: &UnixStream) -> io::Result<()> {
        if at % PAGE != 0 || at >= self.length as u64 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the page lies in the mapping. Only the kernel reads it, so a missing page is an
        // error, and no reference to memory that the guest changes arises.
        let written = unsafe {
            libc::write(
                std::os::fd::AsRawFd::as_raw_fd(socket),
                self.base.as_ptr().add(at as usize).cast(),
                PAGE as usize,
            )
        };
        match written {
            -1 => Err(io::Error::last_os_error()),
            bytes if bytes as u64 == PAGE => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// The file that it maps.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The first missing page of the mapping, from its beginning in bytes.
    pub fn first_hole(&self) -> io::Result<Option<u64>> {
        let hole = match rustix::fs::seek(&self.file, SeekFrom::Hole(self.offset)) {
            Ok(hole) => hole.saturating_sub(self.offset),
            Err(Errno::NXIO) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok((hole < self.length as u64).then_some(hole))
    }

    /// Whether a touch of a missing page is an error and leaves it missing. `None` if none is
    /// missing, so that it could not be tried.
    pub fn holds(&self) -> io::Result<Option<bool>> {
        let (_read, write) = UnixStream::pair()?;
        for _ in 0..TRIALS {
            let Some(hole) = self.first_hole()? else { return Ok(None) };
            match self.copy_page(hole, &write) {
                Err(error) if Errno::from_io_error(&error) == Some(Errno::FAULT) => {
                    return Ok(Some(true));
                }
                Err(error) => return Err(error),
                // The guest may have touched it in between.
                Ok(()) => {}
            }
        }
        Ok(Some(false))
    }
}

impl Drop for Tripwire {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing refers to it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_touch_of_a_hole_is_an_error_and_leaves_the_hole() {
        let Ok(device) = crate::userfault::open_device() else {
            println!("Skipped: /dev/userfaultfd may not be opened");
            return;
        };
        let memory = rustix::fs::memfd_create("tripwire", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let memory = File::from(memory);
        memory.set_len(16 * PAGE).unwrap();
        memory.write_all_at(&[7; 8192], 2 * PAGE).unwrap();
        let device = std::os::fd::AsFd::as_fd(&device);
        let tripwire =
            Tripwire::map(device, memory.try_clone().unwrap(), 2 * PAGE, 8 * PAGE).unwrap();
        let (mut read, write) = UnixStream::pair().unwrap();
        assert_eq!(tripwire.first_hole().unwrap(), Some(2 * PAGE));
        for _ in 0..3 {
            assert_eq!(tripwire.holds().unwrap(), Some(true));
        }
        assert_eq!(tripwire.first_hole().unwrap(), Some(2 * PAGE), "the page has come into being");
        tripwire.copy_page(PAGE, &write).unwrap();
        let mut page = [0; 4096];
        read.read_exact(&mut page).unwrap();
        assert_eq!(page, [7; 4096]);
        assert!(tripwire.copy_page(8 * PAGE, &write).is_err());
        memory.write_all_at(&vec![1; 14 * 4096], 2 * PAGE).unwrap();
        assert_eq!(tripwire.holds().unwrap(), None, "there is nothing left to try");
    }
}
