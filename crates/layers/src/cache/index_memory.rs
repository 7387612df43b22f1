//! The memory of the indexes of caches on stores. How large an index is, its store says, and a
//! store of a few bytes can say anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_failure::Failure;
use fathom_options::Bytes;

use super::format::{PAGE_LENGTH, Superblock};
use super::open::CacheError;
use super::volume::reserve;

/// The bytes that a slot takes besides its checksums, rounded up: see `docs/cache.md`.
const SLOT_BYTES: u64 = 23;

/// The memory of all indexes.
#[derive(Clone, Debug)]
pub(super) struct IndexMemory {
    memory_max: u64,
    used: Arc<AtomicU64>,
}

impl Default for IndexMemory {
    /// Without a limit.
    fn default() -> Self {
        Self::new(u64::MAX)
    }
}

/// The memory of one index, until it is dropped.
#[derive(Debug)]
pub(super) struct IndexPart {
    length: u64,
    used: Arc<AtomicU64>,
}

impl Drop for IndexPart {
    fn drop(&mut self) {
        self.used.fetch_sub(self.length, Ordering::Relaxed);
    }
}

impl IndexMemory {
    pub(super) fn new(memory_max: u64) -> Self {
        Self { memory_max, used: Arc::default() }
    }

    /// Takes the memory for the index of a cache, before it is used.
    ///
    /// # Errors
    /// If too little is left.
    pub(super) fn take(&self, format: &Superblock) -> Result<IndexPart, CacheError> {
        let length = index_length(format);
        if !reserve(&self.used, length, self.memory_max) {
            let left = self.memory_max.saturating_sub(self.used.load(Ordering::Relaxed));
            let message = format!(
                "its index takes {} of memory, and {} are left for those of caches",
                Bytes(length),
                Bytes(left)
            );
            let remedy = "raise `cache_index_percent` of [daemon], or make the cache again, smaller or \
                          with larger blocks";
            return Err(CacheError::Volume(Failure::new(message).advise(remedy)));
        }
        Ok(IndexPart { length, used: Arc::clone(&self.used) })
    }
}

/// The most bytes that the index of a cache takes.
fn index_length(format: &Superblock) -> u64 {
    let slots = u64::from(format.slots) * (SLOT_BYTES + 2 * u64::from(format.granules()));
    // The sequence of each page, and two bits for each region of each disk.
    let pages = u64::from(format.pages()) * size_of::<u64>() as u64;
    let regions = u64::from(format.disks) * u64::from(format.bitmap_pages) * 2 * PAGE_LENGTH as u64;
    slots + pages + regions
}

#[cfg(test)]
mod tests {
    use fathom_persistence::Identity;

    use super::*;

    #[test]
    fn all_indexes_together_have_a_limit() {
        let format = Superblock::new(Identity([1; 16]), 1 << 30, 16384, 4, 1).unwrap();
        let length = index_length(&format);
        // 31 bytes a slot, and little else.
        assert!((30 * 65_000..33 * 65_536).contains(&length), "{length}");
        let memory = IndexMemory::new(2 * length);
        let first = memory.take(&format).unwrap();
        let _second = memory.take(&format).unwrap();
        let refused = memory.take(&format).unwrap_err();
        assert!(refused.to_string().contains("its index takes"), "{refused}");
        drop(first);
        memory.take(&format).unwrap();
    }
}
