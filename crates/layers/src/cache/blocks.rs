//! The blocks in the slots of a shard, as queues read them without the shard's lock.
//!
//! Everything here is changed under the lock. A read without it finds a slot, pins it, and then
//! looks again whether the slot has the wanted bytes. A slot gets another block, or other content,
//! only after its entry has lost the old one, and while nobody has pinned it. All changes of a
//! slot's pins have one order: if the read has pinned the slot first, the slot keeps its content;
//! otherwise the read sees the entry without it. So what a read finds is valid until it unpins the
//! slot. What it does not find may be there nevertheless: then the shard is asked under its lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::prefetch;
use fathom_cache::{BlockAccess, DISK_SHIFT, Hits, SlotStates};

use super::format::BLOCK_BITS;
use super::index::Index;
use super::pins::Pins;

/// The bits of a disk's number in an entry.
const DISK_BITS: u32 = 13;
const _: () = assert!(BLOCK_BITS == DISK_SHIFT);

/// See the module.
pub(super) struct Blocks {
    /// The number of granules of a block.
    pub(super) granules: usize,
    pub(super) index: Index,
    /// The block of each mapped slot and its valid granules; of a slot in a list, the next one.
    entries: Box<[AtomicU64]>,
    pub(super) pins: Pins,
    /// What the replacement knows of each slot.
    states: Arc<SlotStates>,
}

/// What a read without the lock has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnlockedLookup {
    /// The slot has the content, and is pinned.
    Hit(u32),
    /// The slot had the content, and is pinned: the caller unpins it and asks the shard.
    Lost(u32),
    /// The caller asks the shard.
    Unknown,
}

fn hash(key: u64) -> u64 {
    // The finalizer of MurmurHash3.
    let mut word = (key ^ key >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    word = (word ^ word >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    word ^ word >> 33
}

/// The block of an entry, without the valid granules; `None` if the disk or the block has a greater
/// number than an entry can have. Such blocks are not cached: with blocks of 64 KiB those beyond 2
/// PiB.
#[inline]
fn pack(key: u64, granules: usize) -> Option<u64> {
    let block_bits = u64::BITS - DISK_BITS - granules as u32;
    let (disk, block) = (key >> BLOCK_BITS, key & ((1 << BLOCK_BITS) - 1));
    (disk >> DISK_BITS == 0 && block >> block_bits.min(BLOCK_BITS) == 0)
        .then_some(disk << block_bits | block)
}

/// The key of the block of an entry.
#[inline]
fn unpack(entry: u64, granules: usize) -> u64 {
    let block_bits = u64::BITS - DISK_BITS - granules as u32;
    let block = entry >> granules & ((1 << block_bits) - 1);
    entry >> (u64::BITS - DISK_BITS) << BLOCK_BITS | block
}

impl Blocks {
    /// The slots of a shard, without blocks. `states` are those of its replacement.
    pub(super) fn new(slots: u32, granules: u32, states: Arc<SlotStates>) -> Self {
        // Memory of zeroes is used only when it is written.
        let zeroes = vec![0_u64; slots as usize];
        Self {
            granules: granules as usize,
            index: Index::new(slots),
            entries: zeroes.into_iter().map(AtomicU64::new).collect(),
            pins: Pins::new(slots),
            states,
        }
    }

    /// The number of slots.
    pub(super) fn slots(&self) -> u32 {
        self.entries.len() as u32
    }

    #[inline]
    pub(super) fn entry(&self, slot: u32) -> u64 {
        self.entries[slot as usize].load(Ordering::Acquire)
    }

    /// Changes an entry, under the lock. What was written to the slot before is seen by whoever
    /// sees the entry.
    #[inline]
    pub(super) fn set_entry(&self, slot: u32, entry: u64) {
        self.entries[slot as usize].store(entry, Ordering::Release);
    }

    /// The slot of a block.
    #[inline]
    pub(super) fn find(&self, key: u64) -> Option<u32> {
        let block = pack(key, self.granules)?;
        self.index.find(hash(key), |slot| self.entry(slot) >> self.granules == block)
    }

    /// Fetches the part of the index that has a block into the processor's caches.
    #[inline]
    pub(super) fn prefetch_index(&self, key: u64) {
        self.index.prefetch(hash(key));
    }

    /// Fetches what is known of the slot that may have a block into the processor's caches. Returns
    /// the slot.
    #[inline]
    pub(super) fn prefetch_slot(&self, key: u64) -> Option<u32> {
        let slot = self.index.find(hash(key), |_| true)?;
        prefetch(self.entries.as_ptr().wrapping_add(slot as usize));
        self.prefetch_hit(slot);
        Some(slot)
    }

    /// Fetches what a hit needs besides the entry.
    #[inline]
    fn prefetch_hit(&self, slot: u32) {
        self.pins.prefetch(slot);
        prefetch(self.states.address(slot));
    }

    /// Reads the granules `wanted` of a block without the lock. Such a read changes nothing of what
    /// the replacement knows. A block that was read ahead and not read since is not found, because
    /// it has no hit.
    #[inline]
    pub(super) fn read(&self, key: u64, wanted: u16, access: &BlockAccess) -> UnlockedLookup {
        let Some(block) = pack(key, self.granules) else { return UnlockedLookup::Unknown };
        let is_block = |slot| {
            self.prefetch_hit(slot);
            self.entry(slot) >> self.granules == block
        };
        let Some(slot) = self.index.find(hash(key), is_block) else {
            return UnlockedLookup::Unknown;
        };
        self.read_slot(slot, block, wanted, access)
    }

    /// As [`read`](Self::read), if the block is in the slot that was found for it before.
    #[inline]
    pub(super) fn read_at(
        &self,
        slot: u32,
        key: u64,
        wanted: u16,
        access: &BlockAccess,
    ) -> UnlockedLookup {
        match pack(key, self.granules) {
            Some(block) if self.entry(slot) >> self.granules == block => {
                self.read_slot(slot, block, wanted, access)
            }
            _ => UnlockedLookup::Unknown,
        }
    }

    #[inline]
    fn read_slot(
        &self,
        slot: u32,
        block: u64,
        wanted: u16,
        access: &BlockAccess,
    ) -> UnlockedLookup {
        let is_settled = Hits::is_settled(&self.states, slot, access);
        let has_all = self.valid(slot) & wanted == wanted;
        if !is_settled || !has_all {
            return UnlockedLookup::Unknown;
        }
        #[cfg(test)]
        tests::pause();
        if !self.pins.pin_unlocked(slot) {
            return UnlockedLookup::Unknown;
        }
        let entry = self.entry(slot);
        let wanted = u64::from(wanted);
        if entry >> self.granules == block && entry & wanted == wanted {
            UnlockedLookup::Hit(slot)
        } else {
            UnlockedLookup::Lost(slot)
        }
    }

    /// Puts a block without valid granules into a slot. Returns false if it cannot be found there.
    pub(super) fn map(&self, slot: u32, key: u64) -> bool {
        let Some(block) = pack(key, self.granules) else { return false };
        // Whoever finds the slot before it has its entry sees another block.
        let is_mapped = self.index.insert(hash(key), slot);
        if is_mapped {
            self.set_entry(slot, block << self.granules);
        }
        is_mapped
    }

    /// Takes the block out of a slot.
    pub(super) fn unmap(&self, slot: u32) {
        self.index.remove(hash(self.key(slot)), slot);
        self.set_entry(slot, 0);
    }

    /// Whether a block can be in a slot.
    pub(super) fn has_place(&self, key: u64) -> bool {
        pack(key, self.granules).is_some()
    }

    /// The block of a mapped slot.
    pub(super) fn key(&self, slot: u32) -> u64 {
        unpack(self.entry(slot), self.granules)
    }

    /// The valid granules of a mapped slot, as bits.
    #[inline]
    pub(super) fn valid(&self, slot: u32) -> u16 {
        self.entry(slot) as u16 & self.granule_mask()
    }

    /// Adds valid granules.
    pub(super) fn add_valid(&self, slot: u32, mask: u16) {
        self.set_entry(slot, self.entry(slot) | u64::from(mask & self.granule_mask()));
    }

    /// Takes valid granules away.
    pub(super) fn take_valid(&self, slot: u32, mask: u16) {
        self.set_entry(slot, self.entry(slot) & !u64::from(mask & self.granule_mask()));
    }

    /// The bits of an entry for the valid granules.
    #[inline]
    pub(super) fn granule_mask(&self) -> u16 {
        u16::MAX >> (u16::BITS as usize - self.granules)
    }

    /// The memory, in bytes, without that of the replacement.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&self.entries[..]) + self.pins.memory_bytes() + self.index.memory_bytes()
    }
}

#[cfg(test)]
#[path = "blocks_tests.rs"]
mod tests;
