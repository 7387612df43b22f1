//! Converts a guest's memory from the front end's type to that of introspection.

#![expect(unsafe_code, reason = "it guarantees the validity of the mappings")]

use std::any::Any;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use fathom_frontend::vhost_user::{Memory, MemoryRegion};
use fathom_introspect::{GuestMemory, Region};

/// The identity of a guest's memory: the same files at the same places.
pub(super) type Identity = Vec<RegionIdentity>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegionIdentity {
    device: u64,
    inode: u64,
    file_offset: u64,
    guest_address: u64,
    length: u64,
}

/// The identity of `memory`.
pub(super) fn identity(memory: &Memory) -> Identity {
    let of_region = |region: MemoryRegion<'_>| {
        let (device, inode) = match region.file.metadata() {
            Ok(metadata) => (metadata.dev(), metadata.ino()),
            // Memory that cannot be identified equals no other memory.
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

/// Whether two tables are those of one guest before and after memory was added or removed: one
/// table is a part of the other.
pub(super) fn is_changed(before: &Identity, after: &Identity) -> bool {
    let (part, whole) = if before.len() < after.len() { (before, after) } else { (after, before) };
    !part.is_empty() && part.iter().all(|region| whole.contains(region))
}

/// Converts memory for introspection, which keeps it mapped.
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
    // live as long as the owner. If the VMM removes pages of the file, or if no pages are
    // available, the front end's handler substitutes zeroes (`block::Mapping`).
    unsafe { GuestMemory::new(regions, owner).writable() }
}

/// Opens the same file with a position of its own, because the descriptor's position belongs to the
/// VMM. If the file cannot be reopened, duplicates the descriptor, whose position QEMU and other
/// VMMs never use.
fn reopen(file: &File) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::open(path).or_else(|_| file.try_clone()).ok()
}
