//! Which mappings of a VMM are its guest's memory.

use std::ops::Range;

use fathom_guest_memory::MemoryFile;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::refusal::AttachRefusal;
use crate::vmm::{ProcessMap, Vmm};

/// Shared mappings of files in memory that are smaller are no guest's memory: they are rings and
/// tables that a VMM shares with its devices.
const MEMORY_BYTES_MIN: u64 = 1 << 20;
/// The file systems in memory: tmpfs, of which a memfd is, and that of huge pages.
const TMPFS: u64 = 0x0102_1994;
const HUGETLBFS: u64 = 0x9584_58f6;

/// A mapping of the guest's memory in the VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedMemory {
    /// The first address in the VMM.
    pub start: u64,
    /// The address behind the last one.
    pub end: u64,
    /// The offset of the first byte in its file.
    pub offset: u64,
    /// The number of its file.
    pub inode: u64,
    /// The device of its file.
    pub device: u64,
}

impl MappedMemory {
    /// The addresses in the VMM.
    pub fn range(&self) -> Range<u64> {
        self.start..self.end
    }

    /// Its file.
    pub(crate) fn file(&self) -> MemoryFile {
        MemoryFile { device: self.device, inode: self.inode }
    }

    /// Whether both have a part of the same file.
    fn overlaps(&self, other: &Self) -> bool {
        let is_same = self.file() == other.file();
        let (end, other_end) = (self.offset + self.length(), other.offset + other.length());
        is_same && self.offset < other_end && other.offset < end
    }

    /// The length in bytes.
    pub fn length(&self) -> u64 {
        self.end - self.start
    }
}

/// Whether a part of a file is mapped twice.
pub(crate) fn is_mapped_twice(memory: &[MappedMemory]) -> bool {
    (1..memory.len()).any(|at| memory[..at].iter().any(|other| other.overlaps(&memory[at])))
}

/// The mappings of the guest's memory, with their details, in ascending order.
///
/// # Errors
/// When there are none that could be served.
pub(crate) fn find(vmm: &Vmm) -> Result<Vec<ProcessMap>, AttachRefusal> {
    let maps = vmm.detailed_mappings().map_err(|error| AttachRefusal::of_access(vmm, &error))?;
    let is_large = |map: &ProcessMap| map.range.end - map.range.start >= MEMORY_BYTES_MIN;
    let mut memory = Vec::new();
    let mut of_disk = None;
    for map in maps {
        if !(map.is_shared && map.is_writable && map.inode != 0 && is_large(&map)) {
            continue;
        }
        // What cannot be found, such as the memory of a device, is no file in memory.
        let Ok(file) = vmm.open_file(&map, OFlags::PATH) else { continue };
        let Ok(found) = rustix::fs::fstatfs(&file) else { continue };
        match found.f_type as u64 {
            TMPFS => memory.push(map),
            HUGETLBFS => return Err(AttachRefusal::HugePages(map.path)),
            _ => of_disk = of_disk.or(Some(map.path)),
        }
    }
    match (memory.is_empty(), of_disk) {
        (false, _) => Ok(memory),
        (true, Some(path)) => Err(AttachRefusal::NotInMemory(path)),
        (true, None) => Err(AttachRefusal::NotShared),
    }
}

/// The number of a device in the text of `maps`.
pub(crate) fn device_number(text: &str) -> u64 {
    let number = |word| u32::from_str_radix(word, 16).unwrap_or(u32::MAX);
    text.split_once(':')
        .map_or(u64::MAX, |(major, minor)| rustix::fs::makedev(number(major), number(minor)))
}

/// As it is recorded and reported.
pub(crate) fn described(maps: &[ProcessMap]) -> Vec<MappedMemory> {
    let described = |map: &ProcessMap| MappedMemory {
        start: map.range.start,
        end: map.range.end,
        offset: map.offset,
        inode: map.inode,
        device: device_number(&map.device),
    };
    maps.iter().map(described).collect()
}
