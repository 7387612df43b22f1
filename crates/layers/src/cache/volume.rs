//! A cache volume: the store of cached blocks, shared by the disks that it serves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fathom_block::{Backend, ErrorKind, Shared, Waker};
use fathom_cache::{
    BlockAccess, BlockCounts, CLASSES, Hits, Policy, Replacement, ReplacementOptions,
};
use fathom_persistence::Identity;
use parking_lot::{Mutex, MutexGuard};

use super::blocks::{Blocks, UnlockedLookup};
use super::format::{BLOCK_BITS, DiskRecord, Superblock};
use super::index_memory::IndexPart;
use super::regions::Regions;
use super::shard::Shard;

/// The longest time for which changes of the tables wait to be written, in nanoseconds.
const WRITE_INTERVAL_NS: u64 = 1_000_000_000;
/// How long a region must have had no change until its bit is cleared, in nanoseconds.
const QUIET_NS: u64 = 5_000_000_000;
/// How long the store may take for a request, in nanoseconds.
const STORE_NS: u64 = 2_000_000_000;
/// The most bytes of copies on their way into the cache, of all disks.
const COPIES_MAX: u64 = 64 << 20;
/// The most slots of a shard.
const SHARD_SLOTS_MAX: u32 = 7 << 15;
const _: () = assert!(SHARD_SLOTS_MAX < super::index::SLOTS_MAX);
/// The bytes of a disk whose blocks are in one shard.
const EXTENT: u64 = 1 << 20;

/// The times of a volume, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct CacheTimes {
    /// The longest time for which changes of the tables wait to be written.
    pub write_ns: u64,
    /// How long a region must have had no change until its bit is cleared.
    pub quiet_ns: u64,
    /// How long the store may take for a request. After that, reads are answered by home, and
    /// changes do not wait for the store.
    pub store_ns: u64,
}

impl Default for CacheTimes {
    fn default() -> Self {
        Self { write_ns: WRITE_INTERVAL_NS, quiet_ns: QUIET_NS, store_ns: STORE_NS }
    }
}

/// A disk of a volume.
pub(super) struct DiskState {
    /// The disk's number, from 1 on.
    pub(super) number: u16,
    pub(super) record: Mutex<DiskRecord>,
    /// Whether the disk's page has to be written.
    pub(super) is_record_dirty: AtomicBool,
    pub(super) regions: Shared<Regions>,
    /// Whether a layer serves the disk.
    pub(super) is_attached: AtomicBool,
    /// The size of the disk when a layer began to serve it, in bytes; blocks beyond are dropped.
    pub(super) capacity: AtomicU64,
    /// Whether a flush of home has succeeded since a layer began to serve the disk. What was
    /// written before that, without the cache, may not be durable at home, and no region has a bit
    /// for it. So until then nothing that is read goes into a cache that outlives the daemon.
    pub(super) is_home_flushed: AtomicBool,
}

impl DiskState {
    /// A flush of home has succeeded. It covers the changes that had ended when it began.
    pub(super) fn home_flushed(&self, number: u64) {
        self.regions.access(|regions| regions.end_flush(number));
        self.is_home_flushed.store(true, Ordering::Release);
    }

    /// The disk's page that names this log is durable.
    pub(super) fn note_log(&self, log: Identity) {
        let record = self.record.lock();
        self.regions.access(|regions| {
            regions.is_log_noted = log != Identity::NONE && log == record.log;
        });
    }
}

/// A page that is being written or was written since the last flush.
pub(super) enum WrittenPage {
    /// The page of a disk, and the identity of the log that it names.
    Disk(u16, Identity),
    /// A page with bits of regions: the disk, the page within the disk, the bits.
    Bitmap(u16, u32, Vec<u64>),
    /// A page of a table: the shard, the page within the shard.
    Table(usize, u32),
}

/// The state of a volume that all its queues share.
pub(super) struct Keeper {
    pub(super) queues: Vec<(u64, Waker)>,
    pub(super) opened: u64,
    /// The queue that writes tables now.
    pub(super) writer: Option<u64>,
    /// The queue that loads the tables.
    pub(super) loader: Option<u64>,
    /// The sequence of the durable copy of each page.
    pub(super) sequences: Vec<u64>,
    /// The number of the last complete writing of all tables, and of the last durable one.
    pub(super) tables: u64,
    pub(super) tables_durable: u64,
    /// Whether a request waits for pages with bits of regions.
    pub(super) is_urgent: bool,
    /// When tables are written next, in nanoseconds; 0 if nothing has changed.
    pub(super) due_ns: u64,
    pub(super) failed: Option<ErrorKind>,
    pub(super) disks: BTreeMap<u16, Arc<DiskState>>,
    /// The numbers that no disk has ever had.
    pub(super) unused: BTreeSet<u16>,
    /// Whether all changes are to be written now.
    pub(super) is_saving: bool,
}

impl Keeper {
    /// Wakes all queues: one of them continues the work of a queue that has ended.
    pub(super) fn wake_queues(&self) {
        for (_, waker) in &self.queues {
            waker.wake();
        }
    }
}

/// What misses of all queues change, apart from what their hits read: nothing else is in its lines
/// of the processor's cache.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Apart<T>(pub(super) T);

/// A store with a cache, shared by the disks that it serves.
pub struct CacheVolume {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) format: Superblock,
    /// Whether the content outlives the daemon.
    pub(super) is_kept: bool,
    pub(super) policy: Policy,
    pub(super) times: CacheTimes,
    pub(super) shards: Box<[Mutex<Shard>]>,
    /// The slots of each shard, as they are read without its lock.
    blocks: Box<[Arc<Blocks>]>,
    /// The number of slots of each shard but the last.
    pub(super) shard_slots: u32,
    /// The slots that disks keep however busy others are.
    pub(super) shares: Mutex<BTreeMap<u16, u64>>,
    pub(super) keeper: Shared<Keeper>,
    /// Whether the tables have been loaded.
    pub(super) is_loaded: AtomicBool,
    pub(super) has_failed: AtomicBool,
    /// What the store has not answered in time: reads, and queues with other requests. While there
    /// is any, all reads go home, and nothing is inserted.
    pub(super) late: AtomicU64,
    /// Whether a thread waits for an answer of the store to find out whether there is one.
    pub(super) is_asked: AtomicBool,
    /// Whether mappings have changed since the last writing of the tables.
    pub(super) has_changed: AtomicBool,
    pub(super) copies: Apart<AtomicU64>,
    /// The bytes of read-aheads on their way into the cache, of all disks.
    pub(super) ahead: Apart<AtomicU64>,
    pub(super) load_next: AtomicU64,
    /// Whether the modification time of a disk's store is being read: of one disk at a time,
    /// because a store that hangs must not occupy more than one thread.
    pub(super) is_noting: Arc<AtomicBool>,
    /// The memory of the index, if it has a limit.
    pub(super) index_part: Option<IndexPart>,
}

/// Adds `length` to a count that has at most `max`. Returns whether there was room.
pub(super) fn reserve(count: &AtomicU64, length: u64, max: u64) -> bool {
    let before = count.fetch_add(length, Ordering::Relaxed);
    if before.saturating_add(length) > max {
        count.fetch_sub(length, Ordering::Relaxed);
        return false;
    }
    true
}

impl CacheVolume {
    pub(super) fn assemble(
        backend: Arc<dyn Backend>,
        format: Superblock,
        is_kept: bool,
        policy: Policy,
        times: CacheTimes,
        sequences: Vec<u64>,
    ) -> Self {
        let per_page = format.entries_per_page();
        let shard_slots =
            (SHARD_SLOTS_MAX / per_page * per_page).min(format.slots.next_multiple_of(per_page));
        let count = format.slots.div_ceil(shard_slots);
        let slots = (0..count).map(|number| shard_slots.min(format.slots - number * shard_slots));
        let slots: Vec<u32> = slots.collect();
        let replacements = Replacement::shards(&ReplacementOptions { policy }, &slots);
        let shards = slots.into_iter().zip(replacements).map(|(slots, replacement)| {
            Shard::new(slots, format.granules(), per_page, is_kept, replacement)
        });
        let shards: Vec<Shard> = shards.collect();
        let blocks = shards.iter().map(|shard| Arc::clone(shard.blocks())).collect();
        let keeper = Keeper {
            queues: Vec::new(),
            opened: 0,
            writer: None,
            loader: None,
            sequences,
            tables: 0,
            tables_durable: 0,
            is_urgent: false,
            due_ns: 0,
            failed: None,
            disks: BTreeMap::new(),
            unused: BTreeSet::new(),
            is_saving: false,
        };
        Self {
            backend,
            format,
            is_kept,
            policy,
            times,
            shards: shards.into_iter().map(Mutex::new).collect(),
            blocks,
            shard_slots,
            shares: Mutex::default(),
            keeper: Shared::new(keeper),
            is_loaded: AtomicBool::new(!is_kept),
            has_failed: AtomicBool::new(false),
            late: AtomicU64::new(0),
            is_asked: AtomicBool::new(false),
            has_changed: AtomicBool::new(false),
            copies: Apart::default(),
            ahead: Apart::default(),
            load_next: AtomicU64::new(0),
            is_noting: Arc::default(),
            index_part: None,
        }
    }

    /// The shard of a block.
    #[inline]
    pub(super) fn shard_of(&self, key: u64) -> usize {
        let shift = EXTENT.trailing_zeros() - self.format.block_size.trailing_zeros();
        let extent = (key & ((1 << BLOCK_BITS) - 1)) >> shift;
        let mixed = (extent << 16 | key >> BLOCK_BITS).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed >> 32) * self.shards.len() as u64 >> 32) as usize
    }

    /// The end of the blocks after `key` that are in the same shard because they are in the same
    /// extent.
    pub(super) fn shard_end(&self, key: u64) -> u64 {
        let blocks = EXTENT / u64::from(self.format.block_size);
        (key | (blocks - 1)) + 1
    }

    /// Locks a shard.
    #[inline]
    pub(super) fn shard(&self, number: usize) -> MutexGuard<'_, Shard> {
        self.shards[number].lock()
    }

    /// Releases a pin of a shard's slot.
    #[inline]
    pub(super) fn unpin(&self, shard: usize, slot: u32) {
        if self.blocks[shard].pins.unpin(slot) {
            self.shard(shard).free_loose(slot);
        }
    }

    /// The slot that has the granules `wanted` of a block, pinned, if that can be found out without
    /// the lock of the block's shard, and if the replacement has nothing to learn from the read but
    /// for [`Hits`].
    #[inline]
    pub(super) fn hit(
        &self,
        shard: usize,
        key: u64,
        wanted: u16,
        access: &BlockAccess,
    ) -> Option<u32> {
        self.found(shard, self.blocks[shard].read(key, wanted, access))
    }

    /// As [`hit`](Self::hit), if the block is in the slot that was found for it before.
    #[inline]
    pub(super) fn hit_at(
        &self,
        (shard, slot): (usize, u32),
        key: u64,
        wanted: u16,
        access: &BlockAccess,
    ) -> Option<u32> {
        self.found(shard, self.blocks[shard].read_at(slot, key, wanted, access))
    }

    #[inline]
    fn found(&self, shard: usize, found: UnlockedLookup) -> Option<u32> {
        match found {
            UnlockedLookup::Hit(slot) => Some(slot),
            UnlockedLookup::Lost(slot) => {
                self.unpin(shard, slot);
                None
            }
            UnlockedLookup::Unknown => None,
        }
    }

    /// Fetches the part of the index that has a block into the processor's caches.
    #[inline]
    pub(super) fn prefetch_index(&self, key: u64) {
        self.blocks[self.shard_of(key)].prefetch_index(key);
    }

    /// Fetches what is known of the slot that may have a block into the processor's caches. Returns
    /// the shard and the slot.
    #[inline]
    pub(super) fn prefetch_slot(&self, key: u64) -> Option<(usize, u32)> {
        let shard = self.shard_of(key);
        Some((shard, self.blocks[shard].prefetch_slot(key)?))
    }

    /// What one queue needs for hits without locks.
    pub(super) fn hits(&self) -> Hits {
        self.shard(0).hits()
    }

    /// The memory of the index, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let learned = self.shards.first().map_or(0, |_| self.shard(0).learned_bytes());
        let shards = 0..self.shards.len();
        learned + shards.map(|number| self.shard(number).memory_bytes()).sum::<usize>()
    }

    /// The place of a shard's slot in the volume, in bytes.
    #[inline]
    pub(super) fn place(&self, shard: usize, slot: u32) -> u64 {
        self.format.slot_offset(shard as u32 * self.shard_slots + slot)
    }

    /// Whether the index can be used.
    #[inline]
    pub(super) fn is_usable(&self) -> bool {
        self.is_loaded.load(Ordering::Acquire) && !self.has_failed() && !self.is_silent()
    }

    /// Whether requests of the store have a time limit.
    #[inline]
    pub(super) fn is_watched(&self) -> bool {
        self.is_kept && self.times.store_ns != u64::MAX
    }

    /// Whether the store does not answer.
    #[inline]
    pub fn is_silent(&self) -> bool {
        self.late.load(Ordering::Relaxed) > 0
    }

    /// The store has answered what was late.
    pub(super) fn end_late(&self) {
        if self.late.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.keeper.access(|keeper| keeper.wake_queues());
        }
    }

    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// Takes the volume out of service: it does not hold what it should.
    pub(super) fn fail(&self, kind: ErrorKind) {
        self.keeper.access(|keeper| {
            keeper.failed.get_or_insert(kind);
            self.has_failed.store(true, Ordering::Release);
            keeper.wake_queues();
        });
        self.keeper.wake();
    }

    /// Reserves memory for a copy; false if too many bytes are on their way into the cache.
    pub(super) fn reserve_copy(&self, length: u64) -> bool {
        reserve(&self.copies.0, length, COPIES_MAX)
    }

    /// Ends a copy.
    pub(super) fn end_copy(&self, length: u64) {
        self.copies.0.fetch_sub(length, Ordering::Relaxed);
    }

    /// The counts of all shards, and the number of slots with a block.
    pub(super) fn counts(&self) -> (BlockCounts, u64) {
        let (mut counts, mut mapped) = (BlockCounts::default(), 0);
        for number in 0..self.shards.len() {
            let shard = self.shard(number);
            counts.merge(&shard.counts());
            mapped += u64::from(shard.mapped());
        }
        (counts, mapped)
    }

    /// The blocks of each class, and those of the disk with this number.
    pub(super) fn blocks_by_class(&self, disk: u16) -> ([u64; CLASSES], u64) {
        let (mut held, mut of_disk) = ([0; CLASSES], 0);
        for number in 0..self.shards.len() {
            let shard = self.shard(number);
            held.iter_mut()
                .zip(shard.blocks_by_class())
                .for_each(|(all, more)| *all += u64::from(*more));
            of_disk += u64::from(shard.mapped_of(disk));
        }
        (held, of_disk)
    }

    /// The store.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The identity of the cache.
    pub fn identity(&self) -> Identity {
        self.format.cache
    }

    /// The size of a block, in bytes.
    pub fn block_size(&self) -> u32 {
        self.format.block_size
    }

    /// The number of slots.
    pub fn slots(&self) -> u32 {
        self.format.slots
    }

    /// The number of the shard that has a slot.
    pub fn shard_of_slot(&self, slot: u32) -> usize {
        (slot / self.shard_slots) as usize
    }

    /// The number of the shard that has a block of a disk: it is only in slots of this shard.
    pub fn shard_of_block(&self, disk: u16, block: u64) -> usize {
        self.shard_of(u64::from(disk) << BLOCK_BITS | block)
    }

    /// Whether the tables have been loaded.
    pub fn is_loaded(&self) -> bool {
        self.is_loaded.load(Ordering::Acquire)
    }
}

#[cfg(test)]
#[path = "volume_tests.rs"]
mod tests;
