//! The memory of the guest, in mappings of the plugin's own: they stay valid whatever QEMU does.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fathom_intercept::{MEMORY_FILES_MAX, MemoryFile, RegionPlace};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The files that this process has mapped for several to share, by `/proc/self/maps`.
pub fn shared_files() -> Vec<MemoryFile> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    files_of(&maps)
}

fn files_of(maps: &str) -> Vec<MemoryFile> {
    let mut files = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace().skip(1);
        let mut parse = || {
            let access = words.next()?;
            let _offset = words.next()?;
            let (major, minor) = words.next()?.split_once(':')?;
            let (major, minor) =
                (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
            let inode = words.next()?.parse().ok()?;
            let file = MemoryFile { device: libc::makedev(major, minor), inode };
            (access.ends_with('s') && access.starts_with("rw") && inode != 0).then_some(file)
        };
        if let Some(file) = parse() {
            if !files.contains(&file) && files.len() < MEMORY_FILES_MAX {
                files.push(file);
            }
        }
    }
    files
}

/// An open descriptor of this process for a file.
fn open(wanted: MemoryFile) -> Option<File> {
    let folder = std::fs::read_dir("/proc/self/fd").ok()?;
    folder.flatten().map(|entry| entry.path()).find_map(|path| {
        let metadata = std::fs::metadata(&path).ok()?;
        if (metadata.dev(), metadata.ino()) != (wanted.device, wanted.inode) {
            return None;
        }
        let file = File::open(path).ok()?;
        let metadata = file.metadata().ok()?;
        ((metadata.dev(), metadata.ino()) == (wanted.device, wanted.inode)).then_some(file)
    })
}

struct Region {
    address: u64,
    length: u64,
    start: NonNull<u8>,
}

// SAFETY: all accesses to the memory are atomic reads.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn map(place: &RegionPlace) -> Option<Self> {
        let file = open(place.file)?;
        // A file that is shorter would end the process at a read.
        if file.metadata().ok()?.len() < place.offset.checked_add(place.length)? {
            return None;
        }
        let length = usize::try_from(place.length).ok()?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at no fixed address.
        let start = unsafe {
            mmap(std::ptr::null_mut(), length, ProtFlags::READ, flags, file.as_fd(), place.offset)
        };
        let start = NonNull::new(start.ok()?.cast())?;
        Some(Self { address: place.address, length: place.length, start })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map`, to which no reference is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length as usize) };
    }
}

/// The guest's memory.
#[derive(Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
    /// The beginning of the kernel's map of all memory.
    direct: u64,
}

impl GuestMemory {
    /// Maps the regions that can be mapped.
    pub fn map(places: &[RegionPlace], direct: u64) -> Self {
        Self { regions: places.iter().filter_map(Region::map).collect(), direct }
    }

    /// The place in this process of `length` bytes at a virtual address of the guest's kernel.
    fn place(&self, address: u64, length: u64) -> Option<*const u8> {
        let physical = address.wrapping_sub(self.direct);
        self.regions.iter().find_map(|region| {
            let offset = physical.checked_sub(region.address)?;
            let is_inside = offset < region.length && region.length - offset >= length;
            // SAFETY: the offset is within the mapping.
            is_inside.then(|| unsafe { region.start.as_ptr().add(offset as usize) }.cast_const())
        })
    }

    /// The number of 64 bits at an address of the map of all memory.
    pub fn u64(&self, address: u64) -> Option<u64> {
        let place = self.place(address, 8).filter(|_| address % 8 == 0)?;
        // SAFETY: aligned, as regions begin at pages, and within a mapping.
        Some(unsafe { &*place.cast::<AtomicU64>() }.load(Ordering::Relaxed))
    }

    /// The number of 32 bits at an address of the map of all memory.
    pub fn u32(&self, address: u64) -> Option<u32> {
        let place = self.place(address, 4).filter(|_| address % 4 == 0)?;
        // SAFETY: as in `u64`.
        Some(unsafe { &*place.cast::<AtomicU32>() }.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_recognised() {
        let maps = "\
7f0000000000-7f0020000000 rw-s 00000000 00:01 2051                       /memfd:memory (deleted)
7f0020000000-7f0020001000 rw-s 00001000 00:01 2051                       /memfd:memory (deleted)
7f0030000000-7f0030001000 r--s 00000000 08:02 77                         /lib/x
7f0040000000-7f0040001000 rw-p 00000000 08:02 78                         /lib/y
7f0050000000-7f0050001000 rw-s 00000000 00:00 0
";
        let file = MemoryFile { device: libc::makedev(0, 1), inode: 2051 };
        assert_eq!(files_of(maps), [file]);
    }
}
