//! Guest memory that can be written.

use std::fs::File;
use std::io;
use std::sync::Arc;

use fathom_guest_memory::{GuestMemory, Purpose};
use rustix::fs::{MemfdFlags, memfd_create};

/// Regions of guest-physical memory, contiguous in one memory file. Pages that have not been
/// written are not allocated. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    memory: GuestMemory,
}

impl Store {
    /// Memory of zeros. Each region has a guest-physical address and a length, both multiples of a
    /// page.
    ///
    /// # Errors
    /// When the memory file cannot be created or mapped.
    pub fn new(regions: &[(u64, u64)]) -> io::Result<Self> {
        let file = File::from(memfd_create(c"synthetic", MemfdFlags::CLOEXEC)?);
        file.set_len(regions.iter().map(|(_, length)| length).sum())?;
        let (mut memory, mut offset) = (GuestMemory::default(), 0);
        for (start, length) in regions {
            memory.add(*start, *length, file.try_clone()?, offset, &Arc::default())?;
            offset += length;
        }
        Ok(Self { memory })
    }

    /// The same memory, for reads as a guest's.
    pub fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }

    /// The regions: their guest-physical addresses and lengths.
    pub fn regions(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.memory.regions().iter().map(|region| (region.start, region.length))
    }

    /// Writes at a guest-physical address.
    ///
    /// # Panics
    /// When the bytes are not all in one region.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let access = self.memory.access(address, bytes.len() as u64, Purpose::Write);
        access.expect("within the memory").write(0, bytes);
    }

    /// Writes a number at a guest-physical address.
    pub fn write_u64(&self, address: u64, value: u64) {
        self.write(address, &value.to_le_bytes());
    }

    /// Whether there are eight bytes of memory at an address.
    pub fn has_word(&self, address: u64) -> bool {
        self.memory.access(address, 8, Purpose::Look).is_some()
    }

    /// The whole content of the region that contains `address`.
    ///
    /// # Errors
    /// When the content cannot be read, or there is no such region.
    pub fn content(&self, address: u64) -> io::Result<Vec<u8>> {
        let mut regions = self.memory.regions().iter();
        let region = regions.find(|region| (region.start..region.end()).contains(&address));
        let region = region.ok_or(io::ErrorKind::InvalidInput)?;
        let mut bytes = vec![0; region.length as usize];
        region.read_from_file(0, &mut bytes)?;
        Ok(bytes)
    }
}
