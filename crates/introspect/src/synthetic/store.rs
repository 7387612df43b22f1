//! Guest memory that can be written.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::memory::{GuestMemory, Mapping, Region};

/// Regions of guest-physical memory, contiguous in one memory file. Pages that have not been
/// written are not allocated. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    mapping: Arc<Mapping>,
    file: Arc<File>,
    /// The guest-physical address, the length, and the place in the file of each region.
    regions: Vec<(u64, u64, u64)>,
}

impl Store {
    /// Memory of zeros. Each region has a guest-physical address and a length, both multiples of a
    /// page.
    ///
    /// # Errors
    /// When the memory file cannot be created or mapped.
    pub fn new(regions: &[(u64, u64)]) -> io::Result<Self> {
        let mut length = 0;
        let regions = regions.iter().map(|(start, count)| {
            let region = (*start, *count, length);
            length += count;
            region
        });
        let regions: Vec<_> = regions.collect();
        let file = File::from(memfd_create(c"synthetic", MemfdFlags::CLOEXEC)?);
        file.set_len(length)?;
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let mapping = Arc::new(Mapping::new(&file, length, true)?);
        Ok(Self { mapping, file: Arc::new(file), regions })
    }

    /// The same memory, for reads as a guest's.
    ///
    /// # Panics
    /// When the process has no free descriptor.
    pub fn memory(&self) -> GuestMemory {
        let regions = self.regions.iter().map(|(start, length, offset)| {
            let file = OwnedFd::from(self.file.try_clone().expect("a descriptor"));
            let place = self.mapping.place(*offset).cast_const();
            Region { start: *start, length: *length, place, file: Some((file, *offset)) }
        });
        let regions = regions.collect();
        let owner = Arc::clone(&self.mapping);
        // SAFETY: the regions are parts of the mapping, which the memory owns from here on.
        unsafe { GuestMemory::new(regions, owner) }
    }

    /// The same memory, in which the tunables of a kernel can be replaced.
    ///
    /// # Panics
    /// When the process has no free descriptor.
    pub fn writable_memory(&self) -> GuestMemory {
        // SAFETY: a store is mapped readable and writable as long as its memory is.
        unsafe { self.memory().writable() }
    }

    /// The regions: their guest-physical addresses and lengths.
    pub fn regions(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.regions.iter().map(|(start, length, _)| (*start, *length))
    }

    /// Writes at a guest-physical address, byte by byte if it is not aligned.
    ///
    /// # Panics
    /// When the bytes are not all in one region.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let place = self.place(address, bytes.len() as u64).expect("within the memory");
        if place as usize % 8 == 0 && bytes.len() == 8 {
            let word = u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
            #[expect(clippy::cast_ptr_alignment, reason = "the line before checks the alignment")]
            // SAFETY: eight aligned bytes of the mapping.
            unsafe {
                place.cast::<u64>().write_volatile(word);
            }
            return;
        }
        for (index, byte) in bytes.iter().enumerate() {
            // SAFETY: `place` has checked that this is within the mapping.
            unsafe { place.add(index).write_volatile(*byte) };
        }
    }

    /// Writes a number at a guest-physical address.
    pub fn write_u64(&self, address: u64, value: u64) {
        self.write(address, &value.to_le_bytes());
    }

    /// Whether there are eight bytes of memory at an address.
    pub fn has_word(&self, address: u64) -> bool {
        self.place(address, 8).is_some()
    }

    /// The whole content of the region that contains `address`.
    ///
    /// # Errors
    /// When the content cannot be read, or there is no such region.
    pub fn content(&self, address: u64) -> io::Result<Vec<u8>> {
        let region = self.regions.iter().find(|(start, length, _)| {
            address.checked_sub(*start).is_some_and(|offset| offset < *length)
        });
        let (_, length, offset) = region.ok_or(io::ErrorKind::InvalidInput)?;
        let mut bytes = vec![0; *length as usize];
        std::os::unix::fs::FileExt::read_exact_at(&*self.file, &mut bytes, *offset)?;
        Ok(bytes)
    }

    fn place(&self, address: u64, length: u64) -> Option<*mut u8> {
        self.regions.iter().find_map(|(start, count, offset)| {
            let within = address.checked_sub(*start).filter(|within| within < count)?;
            (count - within >= length).then(|| self.mapping.place(offset + within))
        })
    }
}
