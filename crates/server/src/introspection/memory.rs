//! A guest's memory, from the terms of the front end to those of introspection.

#![expect(unsafe_code, reason = "it vouches for the memory that it hands on")]

use std::any::Any;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use fathom_frontend::vhost_user::{Memory, MemoryRegion};
use fathom_introspect::{GuestMemory, Region};

/// What makes two tables of memory one guest's: the same files at the same places.
pub(super) type Identity = Vec<RegionIdentity>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegionIdentity {
    device: u64,
    inode: u64,
    file_offset: u64,
    guest_address: u64,
    length: u64,
}

/// What identifies `memory` among all that guests bring.
pub(super) fn identity(memory: &Memory) -> Identity {
    let of_region = |region: MemoryRegion<'_>| {
        let (device, inode) = match region.file.metadata() {
            Ok(metadata) => (metadata.dev(), metadata.ino()),
            // Memory that cannot be identified is like no other.
            Err(_) => (u64::MAX, region.place as u64),
        };
        RegionIdentity {
            device,
            inode,
            file_offset: region.file_offset,
            guest_address: region.guest_address,
            length: region.length,
        }
    };
    memory.regions().map(of_region).collect()
}

/// Whether two tables are those of one guest, to which memory was added, or from which some was
/// taken: one is a part of the other.
pub(super) fn is_changed(before: &Identity, after: &Identity) -> bool {
    let (part, whole) = if before.len() < after.len() { (before, after) } else { (after, before) };
    !part.is_empty() && part.iter().all(|region| whole.contains(region))
}

/// The same memory for introspection, which keeps it mapped.
pub(super) fn to_guest_memory(memory: &Arc<Memory>) -> GuestMemory {
    let of_region = |region: MemoryRegion<'_>| Region {
        start: region.guest_address,
        length: region.length,
        place: region.place,
        file: reopen(region.file).map(|file| (OwnedFd::from(file), region.file_offset)),
    };
    let regions = memory.regions().map(of_region).collect();
    let owner: Arc<dyn Any + Send + Sync> = Arc::<Memory>::clone(memory);
    // SAFETY: the front end has mapped each region whole, readable and writable, and the mappings
    // live as long as the owner. Where the VMM takes the file's pages away, or there are none to be
    // had, the front end's handler puts zeroes in their place (`block::Mapping`).
    unsafe { GuestMemory::new(regions, owner) }
}

/// The same file, with a position of its own: that of the VMM's descriptor is the VMM's. Where the
/// file may not be opened anew, the descriptor itself, whose position QEMU and others never use.
fn reopen(file: &File) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::open(path).or_else(|_| file.try_clone()).ok()
}
