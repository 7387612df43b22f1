//! New files in memory, for what a VMM keeps across a restart of the daemon.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;

/// A new file in memory of `length` zero bytes, under a name that people see in `/proc`.
pub(super) fn memory_file(name: &CStr, length: u64) -> io::Result<File> {
    // SAFETY: the name is a C string; the call returns a new descriptor or -1.
    let descriptor =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours alone.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(length)?;
    Ok(file)
}
