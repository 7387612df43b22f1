//! The guest memory of a connection, as mapped here.

use std::fs::File;
use std::io;
use std::sync::Arc;

use fathom_block::GuestAddress;
use vm_memory::{
    FileOffset, GuestAddress as VmAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MemoryRegionAddress,
};

/// A region as the front end announced it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegionLayout {
    /// Where the guest sees it.
    pub guest_address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Where the front end's own process sees it; ring addresses come in these terms.
    pub user_address: u64,
    /// Where it begins in its file, in bytes.
    pub file_offset: u64,
}

#[derive(Clone)]
struct Region {
    layout: RegionLayout,
    host: *mut u8,
    map: Arc<GuestRegionMmap>,
}

// SAFETY: the pointer belongs to the mapping that `map` keeps; guest memory is shared with the
// guest anyway and only ever touched through raw or volatile accesses.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// All of a guest's memory that one connection announced. Cheap to share; a new object replaces it
/// when the front end changes its table, and the old mapping ends with its last holder.
#[derive(Clone, Default)]
pub struct Memory {
    regions: Vec<Region>,
}

/// A region of a guest's memory, for parts of the daemon that read it on their own.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRegion<'a> {
    /// The guest-physical address of its first byte.
    pub guest_address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Where its first byte is mapped as long as the [`Memory`] lives.
    pub place: *const u8,
    /// The file that is mapped there; `None` never in practice.
    pub file: Option<&'a File>,
    /// Where in the file the region begins, in bytes.
    pub file_offset: u64,
}

impl Memory {
    /// The regions, by address.
    pub fn regions(&self) -> impl Iterator<Item = MemoryRegion<'_>> {
        self.regions.iter().map(|region| MemoryRegion {
            guest_address: region.layout.guest_address,
            length: region.layout.length,
            place: region.host,
            file: region.map.file_offset().map(FileOffset::file),
            file_offset: region.layout.file_offset,
        })
    }

    /// Memory of these parts, each a guest-physical address, a length and a file: for tests of what
    /// reads a guest's memory.
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
        // Touching a mapping behind the end of its file would be a fatal signal.
        let file_length = file.metadata()?.len();
        if file_end > file_length {
            return Err(invalid("a memory region is longer than its file"));
        }
        let length = usize::try_from(layout.length).map_err(|_| invalid("a region is too long"))?;
        let map = GuestRegionMmap::from_range(
            VmAddress(layout.guest_address),
            length,
            Some(FileOffset::new(file, layout.file_offset)),
        )
        .map_err(io::Error::other)?;
        let host = map.get_host_address(MemoryRegionAddress(0)).map_err(io::Error::other)?;
        self.regions.push(Region { layout, host, map: Arc::new(map) });
        self.regions.sort_by_key(|region| region.layout.guest_address);
        Ok(())
    }

    /// Takes a region out again. Returns whether it was there.
    pub(super) fn remove(&mut self, guest_address: u64, length: u64) -> bool {
        let before = self.regions.len();
        self.regions.retain(|region| {
            (region.layout.guest_address, region.layout.length) != (guest_address, length)
        });
        self.regions.len() < before
    }

    /// Where `length` bytes at a guest-physical address are mapped here; `None` where they are not
    /// all in one region.
    pub(super) fn translate(&self, address: GuestAddress, length: u64) -> Option<*mut u8> {
        let region = self.region(address)?;
        let offset = address.0 - region.layout.guest_address;
        let fits = offset.checked_add(length)? <= region.layout.length;
        fits.then(|| region.host.wrapping_add(offset as usize))
    }

    /// Like [`translate`](Self::translate), but as much as the region of `address` has: the place
    /// and the count, at most `length`.
    pub(super) fn translate_part(
        &self,
        address: GuestAddress,
        length: u64,
    ) -> Option<(*mut u8, u64)> {
        let region = self.region(address)?;
        let offset = address.0 - region.layout.guest_address;
        let count = length.min(region.layout.length - offset);
        Some((region.host.wrapping_add(offset as usize), count))
    }

    /// The guest-physical address of what the front end's process sees at `user_address`.
    pub(super) fn guest_address(&self, user_address: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|region| {
            let offset = user_address.checked_sub(region.layout.user_address)?;
            (offset < region.layout.length)
                .then(|| GuestAddress(region.layout.guest_address + offset))
        })
    }

    fn region(&self, GuestAddress(address): GuestAddress) -> Option<&Region> {
        // The regions are few and sorted: the last that begins at or below the address.
        let index = self.regions.partition_point(|region| region.layout.guest_address <= address);
        let region = self.regions.get(index.checked_sub(1)?)?;
        (address - region.layout.guest_address < region.layout.length).then_some(region)
    }

    /// The memory as the rest of the rust-vmm crates take it, for parts of the daemon that read it
    /// on their own.
    ///
    /// # Errors
    /// Never in practice: the regions have been checked not to overlap.
    pub fn to_guest_memory(&self) -> io::Result<GuestMemoryMmap> {
        let regions = self.regions.iter().map(|region| Arc::clone(&region.map)).collect();
        GuestMemoryMmap::from_arc_regions(regions).map_err(io::Error::other)
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
    use vm_memory::GuestMemoryBackend as _;

    fn last_address(memory: &Memory) -> u64 {
        memory.to_guest_memory().map(|map| map.last_addr().0).unwrap_or_default()
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
        // A second region in the same place, one that wraps, one that its file does not hold.
        assert!(memory.add(layout, file.try_clone().unwrap()).is_err());
        let wraps = RegionLayout { guest_address: u64::MAX - 100, ..layout };
        assert!(memory.add(wraps, file.try_clone().unwrap()).is_err());
        let short = RegionLayout { guest_address: 0x20_0000, length: 8192, ..layout };
        assert!(memory.add(short, file).is_err());
        assert!(memory.remove(0x10_0000, 4096));
        assert!(!memory.remove(0x10_0000, 4096));
    }
}
