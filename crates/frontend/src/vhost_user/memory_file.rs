//! New files in memory, which a VMM keeps across a restart of the daemon.

use std::ffi::CStr;
use std::fs::File;
use std::io;

use rustix::fs::{MemfdFlags, memfd_create};

/// A new file in memory of `length` zero bytes. `name` is visible in `/proc`.
pub(super) fn memory_file(name: &CStr, length: u64) -> io::Result<File> {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_len(length)?;
    Ok(file)
}
