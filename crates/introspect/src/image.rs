//! A guest's memory in a file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use fathom_guest_memory::GuestMemory;

use crate::paging::addressable;

/// The address at which the memory of QEMU's machines continues, above the devices' addresses.
const HIGH: u64 = 4 << 30;
const ELF_HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const PROGRAMS_MAX: usize = 4096;
const LOAD: u32 = 1;

/// Opens an image of a guest's memory: an ELF file written by QEMU's `dump-guest-memory`, or the
/// raw file of a memory back end. A raw file begins at address 0. Its content after the first `low`
/// bytes (3 GiB on QEMU's `pc`, 2 GiB on `q35`) continues at 4 GiB.
///
/// # Errors
/// When the file cannot be opened or mapped, or its ELF headers are invalid.
pub fn open_image(path: &Path, low: u64) -> io::Result<GuestMemory> {
    let file = Arc::new(File::open(path)?);
    let length = file.metadata()?.len();
    let size = usize::try_from(length).map_err(io::Error::other)?;
    if size == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is empty"));
    }
    let mut head = vec![0; size.min(ELF_HEADER + PROGRAMS_MAX * PROGRAM_HEADER)];
    file.read_exact_at(&mut head, 0)?;
    let parts = if head.starts_with(b"\x7fELF") {
        programs(&head, length)?
    } else {
        let low = length.min(low);
        vec![(0, 0, low), (HIGH, low, length - low)]
    };
    let mut memory = GuestMemory::default();
    for (start, offset, length) in parts.into_iter().filter(|(_, _, length)| *length > 0) {
        memory.add_image(start, length, &file, offset)?;
    }
    Ok(addressable(&memory))
}

/// The parts of an ELF core: guest-physical address, offset in the file, length.
fn programs(head: &[u8], file_length: u64) -> io::Result<Vec<(u64, u64, u64)>> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "the ELF headers are invalid");
    let number = |at: usize, width: usize| {
        let bytes = head.get(at..at.checked_add(width)?)?;
        Some(bytes.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte)))
    };
    let (start, count) = number(32, 8).zip(number(56, 2)).ok_or_else(invalid)?;
    let start = usize::try_from(start).map_err(|_| invalid())?;
    let mut parts = Vec::new();
    for index in 0..(count as usize).min(PROGRAMS_MAX) {
        let at = start.checked_add(index * PROGRAM_HEADER).ok_or_else(invalid)?;
        if number(at, 4).ok_or_else(invalid)? != u64::from(LOAD) {
            continue;
        }
        let field = |offset| number(at + offset, 8).ok_or_else(invalid);
        let (offset, address, length) = (field(8)?, field(24)?, field(32)?);
        let end = offset.checked_add(length).ok_or_else(invalid)?;
        if end > file_length || address.checked_add(length).is_none() {
            return Err(invalid());
        }
        if length > 0 {
            parts.push((address, offset, length));
        }
    }
    if parts.is_empty() { Err(invalid()) } else { Ok(parts) }
}
