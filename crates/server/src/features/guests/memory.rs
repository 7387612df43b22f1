//! The identity of a guest's memory, and its pages, which disks of one guest share.

use std::hash::BuildHasher;
use std::sync::{Arc, Weak};

use fathom_guest_memory::{GuestMemory, Region};
use fathom_intercept::MemoryFile;
use fathom_layers::guest_pages::GuestPages;
use parking_lot::Mutex;

/// The identity of a guest's memory: the same files at the same places.
pub(super) type Identity = Vec<RegionIdentity>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegionIdentity {
    device: u64,
    inode: u64,
    file_offset: u64,
    guest_address: u64,
    length: u64,
    /// The number of the pager for which accesses take leases; 0 without one.
    pager: u64,
}

impl RegionIdentity {
    /// The file that has the region.
    pub(super) fn file(&self) -> MemoryFile {
        MemoryFile { device: self.device, inode: self.inode }
    }
}

/// The identity of `memory`.
pub(super) fn identity(memory: &GuestMemory) -> Identity {
    let of_region = |region: &Region| {
        let (device, inode) = region.file_identity();
        RegionIdentity {
            device,
            inode,
            file_offset: region.file_offset,
            guest_address: region.start,
            length: region.length,
            pager: memory.pager_identity(),
        }
    };
    memory.regions().iter().map(of_region).collect()
}

/// The pages of the guests that run.
#[derive(Default)]
pub(super) struct PagesOfGuests(Mutex<Vec<(Identity, Weak<GuestPages>)>>);

impl PagesOfGuests {
    /// The pages of a memory: the same for each disk of the guest.
    pub(super) fn of(&self, memory: &GuestMemory) -> Arc<GuestPages> {
        let identity = identity(memory);
        let mut all = self.0.lock();
        all.retain(|(_, pages)| pages.strong_count() > 0);
        let found = all.iter().find(|(other, _)| *other == identity);
        if let Some(pages) = found.and_then(|(_, pages)| pages.upgrade()) {
            return pages;
        }
        let seed = std::hash::RandomState::new().hash_one(0_u64);
        let pages = Arc::new(GuestPages::new(memory.clone(), seed));
        all.push((identity, Arc::downgrade(&pages)));
        pages
    }
}

/// Whether two tables are those of one guest before and after memory was added or removed, or its
/// pager came or went: one table is a part of the other.
pub(super) fn is_changed(before: &Identity, after: &Identity) -> bool {
    let without_pager = |identity: &Identity| -> Identity {
        identity.iter().map(|region| RegionIdentity { pager: 0, ..region.clone() }).collect()
    };
    let (before, after) = (&without_pager(before), &without_pager(after));
    let (part, whole) = if before.len() < after.len() { (before, after) } else { (after, before) };
    !part.is_empty() && part.iter().all(|region| whole.contains(region))
}
