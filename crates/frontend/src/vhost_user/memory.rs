//! The guest memory of a connection, as the daemon has mapped it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use fathom_block::{GuestAddress, Mapping, MemoryOwner};

/// The unit in which memory is examined, in bytes.
const BLANK_PAGE: u64 = 4096;
const ZEROES: [u8; BLANK_PAGE as usize] = [0; BLANK_PAGE as usize];
/// The approximate limit on the pages that are examined outside the densely examined ranges.
const BLANK_PAGES_MAX: u64 = 16_384;
/// The length of a densely examined range, in bytes.
const BLANK_DENSE: u64 = 1 << 20;
/// The longest time that the examination of a memory may take: files on slow disks are not examined
/// to the end.
const BLANK_TIME_MAX: Duration = Duration::from_secs(1);
/// The most non-zero bytes in memory that counts as blank: the flags that the daemon itself writes
/// into rings.
const MARKS_MAX: usize = 512;

/// The memory that every VMM may announce, in bytes.
const ANNOUNCED_MIN: u64 = 1 << 40;
/// The most memory that a VMM may announce on the largest host, in bytes.
const ANNOUNCED_MAX: u64 = 16 << 40;

/// The most memory that one VMM may announce, in bytes. It is four times the host's memory within
/// fixed bounds, because address ranges for memory to be plugged in count too.
pub(super) static ANNOUNCED: LazyLock<u64> = LazyLock::new(|| {
    let info = rustix::system::sysinfo();
    let host = info.totalram.saturating_mul(u64::from(info.mem_unit));
    host.saturating_mul(4).clamp(ANNOUNCED_MIN, ANNOUNCED_MAX)
});

/// A region as the front end announced it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegionLayout {
    /// Its guest-physical address.
    pub guest_address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Its address in the front end's own process, in which ring addresses are given.
    pub user_address: u64,
    /// The offset in its file at which it begins, in bytes.
    pub file_offset: u64,
}

#[derive(Clone)]
struct Region {
    layout: RegionLayout,
    map: Arc<Mapping>,
    file: Arc<File>,
}

/// All of a guest's memory that one connection announced. Cheap to share. When the front end
/// changes its table, a new object replaces this one; the old mapping lives as long as its last
/// holder.
#[derive(Clone, Default)]
pub struct Memory {
    regions: Vec<Region>,
    owner: Arc<MemoryOwner>,
}

/// A region of a guest's memory, for parts of the daemon that read it independently of requests.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRegion<'a> {
    /// The guest-physical address of its first byte.
    pub guest_address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// The address at which its first byte is mapped. All of it can be read as long as the
    /// [`Memory`] lives; pages that are lost meanwhile read as zeroes.
    pub place: *const u8,
    /// The mapped file. Its position is shared with the VMM.
    pub file: &'a File,
    /// The offset in the file at which the region begins, in bytes.
    pub file_offset: u64,
}

impl Memory {
    /// Creates a memory without regions. The connection of its owner is closed when a page is lost.
    pub(super) fn new(owner: Arc<MemoryOwner>) -> Self {
        Self { regions: Vec::new(), owner }
    }

    /// The owner, to which the loss of a page is reported.
    pub(super) fn owner(&self) -> &Arc<MemoryOwner> {
        &self.owner
    }

    /// Whether a region's file has been truncated.
    pub(super) fn is_truncated(&self) -> bool {
        self.regions.iter().any(|region| {
            let end = region.layout.file_offset + region.layout.length;
            region.file.metadata().is_ok_and(|metadata| metadata.len() < end)
        })
    }

    /// Whether the memory holds nothing of a running guest: nearly all examined bytes are zero. The
    /// method examines every byte of a small memory. In a large one it examines the ranges around
    /// `near` and at the beginning of each region, and pages spread over the rest. Returns false if
    /// the examination fails or takes too long.
    ///
    /// It reads the files, because a read through the mapping would allocate the examined pages.
    pub(super) fn is_blank(&self, near: GuestAddress) -> bool {
        self.is_blank_within(near, BLANK_TIME_MAX)
    }

    /// The same as [`is_blank`](Self::is_blank), with another time limit.
    fn is_blank_within(&self, near: GuestAddress, limit: Duration) -> bool {
        let begun = Instant::now();
        let stride = (self.length() / BLANK_PAGES_MAX).next_multiple_of(BLANK_PAGE).max(BLANK_PAGE);
        let mut page = [0; BLANK_PAGE as usize];
        let mut marks = 0;
        for region in &self.regions {
            let RegionLayout { guest_address, length, file_offset, .. } = region.layout;
            let mut offset = 0;
            while offset < length {
                let count = (length - offset).min(BLANK_PAGE);
                let part = &mut page[..count as usize];
                if region.file.read_exact_at(part, file_offset + offset).is_err() {
                    return false;
                }
                if *part != ZEROES[..part.len()] {
                    marks += part.iter().filter(|byte| **byte != 0).count();
                }
                if marks > MARKS_MAX || begun.elapsed() > limit {
                    return false;
                }
                let dense =
                    offset < BLANK_DENSE || (guest_address + offset).abs_diff(near.0) < BLANK_DENSE;
                offset += if dense { BLANK_PAGE } else { stride };
            }
        }
        true
    }

    /// The regions, by address.
    pub fn regions(&self) -> impl Iterator<Item = MemoryRegion<'_>> {
        self.regions.iter().map(|region| MemoryRegion {
            guest_address: region.layout.guest_address,
            length: region.layout.length,
            place: region.map.base(),
            file: &region.file,
            file_offset: region.layout.file_offset,
        })
    }

    /// Creates a memory from parts, each a guest-physical address, a length and a file. For tests
    /// of readers of a guest's memory.
    ///
    /// # Errors
    /// When a file cannot be mapped, or parts overlap.
    #[doc(hidden)]
    pub fn of_files(parts: Vec<(u64, u64, File)>) -> io::Result<Self> {
        let mut memory = Self::default();
        for (guest_address, length, file) in parts {
            let layout =
                RegionLayout { guest_address, length, user_address: guest_address, file_offset: 0 };
            memory.add(layout, file)?;
        }
        Ok(memory)
    }

    /// Adds a region; its file is mapped shared, for reading and writing.
    pub(super) fn add(&mut self, layout: RegionLayout, file: File) -> io::Result<()> {
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text.to_owned());
        let end = |start: u64| start.checked_add(layout.length);
        let (Some(guest_end), Some(_), Some(file_end)) =
            (end(layout.guest_address), end(layout.user_address), end(layout.file_offset))
        else {
            return Err(invalid("a memory region wraps around"));
        };
        if layout.length == 0 {
            return Err(invalid("a memory region is empty"));
        }
        for region in &self.regions {
            let (start, length) = (region.layout.guest_address, region.layout.length);
            if layout.guest_address < start + length && start < guest_end {
                return Err(invalid("memory regions overlap"));
            }
        }
        if self.length().saturating_add(layout.length) > *ANNOUNCED {
            return Err(invalid(&format!(
                "a VMM may announce {} GiB of memory on this host, and this would be more",
                *ANNOUNCED >> 30
            )));
        }
        // The descriptor is untrusted: its length is checked here, and the mapping survives if the
        // file shrinks later.
        if file_end > file.metadata()?.len() {
            return Err(invalid("a memory region is longer than its file"));
        }
        let map = Mapping::new(&file, layout.file_offset, layout.length, &self.owner)?;
        self.regions.push(Region { layout, map: Arc::new(map), file: Arc::new(file) });
        self.regions.sort_by_key(|region| region.layout.guest_address);
        Ok(())
    }

    /// Removes a region. Returns whether it existed.
    pub(super) fn remove(&mut self, guest_address: u64, length: u64) -> bool {
        let before = self.regions.len();
        self.regions.retain(|region| {
            (region.layout.guest_address, region.layout.length) != (guest_address, length)
        });
        self.regions.len() < before
    }

    /// The address at which `length` bytes at a guest-physical address are mapped; `None` unless
    /// one region contains them all.
    pub(super) fn translate(&self, address: GuestAddress, length: u64) -> Option<*mut u8> {
        let region = self.region(address)?;
        let offset = address.0 - region.layout.guest_address;
        let fits = offset.checked_add(length)? <= region.layout.length;
        fits.then(|| region.map.base().wrapping_add(offset as usize))
    }

    /// Like [`translate`](Self::translate), but only up to the end of the region. Returns the
    /// mapped address and the number of bytes, at most `length`.
    pub(super) fn translate_part(
        &self,
        address: GuestAddress,
        length: u64,
    ) -> Option<(*mut u8, u64)> {
        let region = self.region(address)?;
        let offset = address.0 - region.layout.guest_address;
        let count = length.min(region.layout.length - offset);
        Some((region.map.base().wrapping_add(offset as usize), count))
    }

    /// The guest-physical address of the byte at `user_address` in the front end's process.
    pub(super) fn guest_address(&self, user_address: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|region| {
            let offset = user_address.checked_sub(region.layout.user_address)?;
            (offset < region.layout.length)
                .then(|| GuestAddress(region.layout.guest_address + offset))
        })
    }

    fn region(&self, GuestAddress(address): GuestAddress) -> Option<&Region> {
        // The regions are few and sorted; the right one is the last that begins at or below the
        // address.
        let index = self.regions.partition_point(|region| region.layout.guest_address <= address);
        let region = self.regions.get(index.checked_sub(1)?)?;
        (address - region.layout.guest_address < region.layout.length).then_some(region)
    }

    /// The number of bytes of guest memory.
    pub fn length(&self) -> u64 {
        self.regions.iter().map(|region| region.layout.length).sum()
    }

    /// The number of regions.
    pub fn region_count(&self) -> usize {
        self.regions.len()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn last_address(memory: &Memory) -> u64 {
        memory.regions().last().map_or(0, |region| region.guest_address + region.length - 1)
    }

    /// A guest memory of `length` bytes at guest address 0 and front-end address `user_address`.
    pub(in crate::vhost_user) fn memory(length: u64, user_address: u64) -> Memory {
        let mut memory = Memory::default();
        let file = tempfile::tempfile().unwrap();
        file.set_len(length).unwrap();
        let layout = RegionLayout { guest_address: 0, length, user_address, file_offset: 0 };
        memory.add(layout, file).unwrap();
        memory
    }

    #[test]
    fn memory_without_contents_of_a_guest_is_blank() {
        let near = GuestAddress(40 << 20);
        // Larger than the memory that is examined page by page.
        let length = 4 * BLANK_PAGES_MAX * BLANK_PAGE;
        let memory = memory(length, 0);
        // Without an effective time limit.
        let is_blank = || memory.is_blank_within(near, Duration::from_secs(600));
        assert!(is_blank());
        let write = |address, bytes: &[u8]| {
            let place = memory.translate(GuestAddress(address), bytes.len() as u64).unwrap();
            // SAFETY: the address is mapped for that many bytes, and nothing else uses it.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        };
        // As the daemon itself does in rings.
        write(near.0 + 0x1000, &[1]);
        write(near.0 + 0x3000, &[1]);
        assert!(is_blank());
        let data = [1; 2 * MARKS_MAX];
        for (address, length) in [(0, 4096), (near.0 - 0x7000, 4096), (length / 2, 64 << 10)] {
            write(address, &data.repeat(length / data.len()));
            assert!(!is_blank(), "{address:#x}");
            write(address, &vec![0; length]);
            assert!(is_blank(), "{address:#x}");
        }
        // Elsewhere the examination is sparse: it misses a page between two examined ones.
        write(length / 2 + BLANK_PAGE, &data);
        assert!(is_blank());
    }

    #[test]
    fn addresses_outside_every_region_are_refused() {
        let mut memory = memory(8192, 0x7000_0000);
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let layout = RegionLayout {
            guest_address: 0x10_0000,
            length: 4096,
            user_address: 0x9000_0000,
            file_offset: 0,
        };
        memory.add(layout, file.try_clone().unwrap()).unwrap();
        assert_eq!(last_address(&memory), 0x10_0fff);
        assert!(memory.translate(GuestAddress(0), 8192).is_some());
        assert!(memory.translate(GuestAddress(8191), 2).is_none());
        assert!(memory.translate(GuestAddress(8192), 1).is_none());
        assert!(memory.translate(GuestAddress(u64::MAX), u64::MAX).is_none());
        assert!(memory.translate(GuestAddress(0x10_0ffe), 2).is_some());
        assert_eq!(memory.translate_part(GuestAddress(4096), 9999).map(|part| part.1), Some(4096));
        assert_eq!(memory.guest_address(0x9000_0010), Some(GuestAddress(0x10_0010)));
        assert_eq!(memory.guest_address(0x9000_1000), None);
        // A second region in the same place, a region that wraps around, and a region longer than
        // its file.
        assert!(memory.add(layout, file.try_clone().unwrap()).is_err());
        let wraps = RegionLayout { guest_address: u64::MAX - 100, ..layout };
        assert!(memory.add(wraps, file.try_clone().unwrap()).is_err());
        let short = RegionLayout { guest_address: 0x20_0000, length: 8192, ..layout };
        assert!(memory.add(short, file).is_err());
        assert!(memory.remove(0x10_0000, 4096));
        assert!(!memory.remove(0x10_0000, 4096));
    }
}
