//! A part of a cache's index: some slots, and the blocks in them. It does no I/O, and is used under
//! a lock.
//!
//! A slot is free, or it has a block (it is *mapped*), or it waits to become free. A slot whose
//! mapping may be in a table on the volume is *imaged*: after it has lost its block, it becomes
//! free only when a table without the mapping is durable. Otherwise a crash could bring the mapping
//! back for a slot that has got another block. Reads and writes of a slot *pin* it: a pinned slot
//! does not become free, and its content is not replaced.
//!
//! A block is *busy* while a change of it is in flight, or while its content is on the way into the
//! cache. The number of an insertion is valid until a change of the block begins, so that an
//! insertion never brings old content.

mod changes;
mod kept;
mod list;
mod room;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use fathom_cache::{BlockAccess, BlockCounts, CLASSES, Hits, Kept, Replacement};
use hashbrown::HashMap;

use super::blocks::Blocks;
use super::format::{BLOCK_BITS, SlotEntry};
use list::{EMPTY, List};

/// The mapping is in use, and its content is on the volume.
const MAPPED: u8 = 1;
/// The content was written after the last flush of the volume began.
const FRESH: u8 = 2;
/// The flush in flight covers the content.
const CAPTURED: u8 = 4;
/// A flush has covered the content.
const STABLE: u8 = 8;
/// The mapping may be in a table on the volume.
const IMAGED: u8 = 16;
/// The block was read ahead, and nobody has read it since.
const AHEAD: u8 = 32;

/// What is in flight for a block.
#[derive(Default)]
struct Busy {
    /// The changes in flight.
    changes: u32,
    /// Whether several changes were in flight at the same time, so that the last content is
    /// unknown.
    is_contested: bool,
    /// The number of the insertion; 0 is none.
    insertion: u64,
    /// The place of the block before a write of all of it.
    kept: Option<Kept>,
}

/// The answer to a read of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    /// The slot has the content. It is pinned.
    Hit(u32),
    /// It has not all of it. If the number is not 0, the content may be inserted with it.
    Miss(u64),
}

/// The place for an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    /// The slot, which is pinned.
    pub slot: u32,
    /// The granules to write, as bits.
    pub mask: u16,
}

/// The slots that become free when tables are durable.
struct Leaving {
    /// The number of these tables.
    tables: u64,
    slots: List,
}

/// Why the content of a block is not valid any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// It is written.
    Write,
    /// It is discarded or filled with zeroes, or its disk shrinks or leaves.
    Discard,
}

/// See the module. Slots are numbered within the shard.
///
/// The memory for each slot, in bytes: 8 for its entry, 1 for its state, 1 for its pins, 4.3 for
/// its place in the index, at most 8 for the replacement, and 2 for each granule of a block if the
/// mappings are kept on the volume.
pub(super) struct Shard {
    /// The slots, as they are read without the lock.
    blocks: Arc<Blocks>,
    /// The number of slots whose entries are in one page.
    per_page: u32,
    /// Whether the mappings are kept on the volume.
    is_kept: bool,
    /// The checksums of the granules, if the mappings are kept.
    sums: Vec<u16>,
    flags: Vec<u8>,
    busy: HashMap<u64, Busy>,
    /// Long changes in flight: their numbers and keys.
    ranges: Vec<(u64, Range<u64>)>,
    numbers: u64,
    free: List,
    /// The slots from this one on have never been used. They are free.
    unused: u32,
    fresh: Vec<u32>,
    captured: Vec<u32>,
    /// Slots that become free with the next tables, in order.
    leaving: Vec<Leaving>,
    /// The number of the tables that are built next.
    building: u64,
    dirty: BTreeSet<u32>,
    /// The slots that are kept free.
    reserve: usize,
    /// The slots that are free, or will be, because a disk below its share has made room.
    owed: usize,
    replacement: Replacement,
    /// Counts since the start.
    counts: BlockCounts,
    /// The mapped blocks that were read ahead and not read since.
    ahead: u32,
    mapped: u32,
    /// The mapped blocks by class.
    held: [u32; CLASSES],
    /// The mapped blocks by the number of their disk.
    of_disks: Vec<u32>,
}

/// The number of the disk of a block, as an index.
fn disk_of(key: u64) -> usize {
    (key >> BLOCK_BITS) as usize
}

impl Shard {
    /// A shard of `slots` free slots.
    pub(super) fn new(
        slots: u32,
        granules: u32,
        per_page: u32,
        is_kept: bool,
        replacement: Replacement,
    ) -> Self {
        let count = slots as usize;
        Self {
            blocks: Arc::new(Blocks::new(slots, granules, Arc::clone(replacement.states()))),
            per_page,
            is_kept,
            sums: vec![0; if is_kept { count * granules as usize } else { 0 }],
            flags: vec![0; count],
            busy: HashMap::new(),
            ranges: Vec::new(),
            numbers: 0,
            free: EMPTY,
            unused: 0,
            fresh: Vec::new(),
            captured: Vec::new(),
            leaving: Vec::new(),
            building: 1,
            dirty: BTreeSet::new(),
            reserve: if is_kept { (count / 128).max(2).min(count / 2) } else { 0 },
            owed: 0,
            replacement,
            counts: BlockCounts::default(),
            ahead: 0,
            mapped: 0,
            held: [0; CLASSES],
            of_disks: Vec::new(),
        }
    }

    /// The slots, as they are read without the lock.
    pub(super) fn blocks(&self) -> &Arc<Blocks> {
        &self.blocks
    }

    /// What one queue needs for hits without the lock.
    pub(super) fn hits(&self) -> Hits {
        self.replacement.hits()
    }

    fn find(&self, key: u64) -> Option<u32> {
        self.blocks.find(key)
    }

    /// The block of a mapped slot.
    fn key(&self, slot: u32) -> u64 {
        self.blocks.key(slot)
    }

    /// The valid granules of a mapped slot, as bits.
    fn valid(&self, slot: u32) -> u16 {
        self.blocks.valid(slot)
    }

    fn is_mapped(&self, slot: u32) -> bool {
        self.flags[slot as usize] & MAPPED != 0
    }

    fn push_free(&mut self, slot: u32) {
        self.free.push(&self.blocks, slot);
    }

    /// Takes a free slot.
    fn pop_free(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop(&self.blocks) {
            return Some(slot);
        }
        (self.unused < self.slots()).then(|| {
            self.unused += 1;
            self.unused - 1
        })
    }

    fn free_count(&self) -> usize {
        (self.free.length + self.slots() - self.unused) as usize
    }

    fn leaving_count(&self) -> usize {
        self.leaving.iter().map(|leaving| leaving.slots.length as usize).sum()
    }

    /// A slot has lost its block, but the tables may have it.
    fn push_leaving(&mut self, slot: u32) {
        self.dirty.insert(slot / self.per_page);
        let tables = self.building;
        if self.leaving.last().is_none_or(|last| last.tables != tables) {
            self.leaving.push(Leaving { tables, slots: EMPTY });
        }
        if let Some(Leaving { slots, .. }) = self.leaving.last_mut() {
            slots.push(&self.blocks, slot);
        }
    }

    fn sums_of(&self, slot: u32) -> &[u16] {
        let at = slot as usize * self.blocks.granules;
        &self.sums[at..at + self.blocks.granules]
    }

    /// The checksum of a granule of a slot.
    pub(super) fn sum(&self, slot: u32, granule: usize) -> u16 {
        self.sums_of(slot)[granule]
    }

    /// Looks up the granules `wanted` of a block, and pins the slot that has them. If the block may
    /// be inserted, and `inserts` is set, its next content is expected.
    #[inline]
    pub(super) fn read(
        &mut self,
        key: u64,
        wanted: u16,
        access: &BlockAccess,
        inserts: bool,
    ) -> Lookup {
        let found = self.find(key);
        if let Some(slot) = found {
            if self.valid(slot) & wanted == wanted && self.blocks.pins.pin(slot) {
                if self.ahead == 0 || !self.first_use(slot, key, access) {
                    self.hit(slot, key, access);
                }
                return Lookup::Hit(slot);
            }
        }
        if !inserts {
            return Lookup::Miss(0);
        }
        if found.is_none() && !self.replacement.admits(key, access) {
            self.counts.refused += 1;
            return Lookup::Miss(0);
        }
        Lookup::Miss(self.expect(key))
    }

    /// The number of an insertion of the granules `mask` of a block that is read ahead; 0 if it has
    /// them, if the policy does not admit the block, or if its content is uncertain.
    pub(super) fn read_ahead(&mut self, key: u64, mask: u16, access: &BlockAccess) -> u64 {
        let wanted = match self.find(key) {
            Some(slot) => mask & !self.valid(slot) != 0,
            None => mask != 0 && self.replacement.has_place(access),
        };
        if wanted { self.expect(key) } else { 0 }
    }

    /// The block in a slot was inserted by a read-ahead.
    pub(super) fn mark_ahead(&mut self, slot: u32) {
        let flags = &mut self.flags[slot as usize];
        if *flags & (MAPPED | AHEAD) == MAPPED {
            *flags |= AHEAD;
            self.ahead += 1;
            self.counts.ahead += 1;
        }
    }

    /// If the block in a slot was read ahead, this is the read for which that was done: the
    /// replacement does not count it as a second one. Returns whether it was.
    fn first_use(&mut self, slot: u32, key: u64, access: &BlockAccess) -> bool {
        let flags = &mut self.flags[slot as usize];
        if *flags & AHEAD == 0 {
            return false;
        }
        *flags &= !AHEAD;
        self.ahead -= 1;
        self.counts.ahead_used += 1;
        self.replacement.first_use(key, access);
        true
    }

    /// The number of a new insertion of a block; 0 if its content is uncertain.
    fn expect(&mut self, key: u64) -> u64 {
        let can_be_mapped = self.blocks.has_place(key);
        if !can_be_mapped || self.ranges.iter().any(|(_, range)| range.contains(&key)) {
            return 0;
        }
        let busy = self.busy.entry(key).or_default();
        if busy.changes > 0 || busy.insertion != 0 {
            return 0;
        }
        self.numbers += 1;
        busy.insertion = self.numbers;
        self.numbers
    }

    /// Ends an insertion. Returns whether it was still valid.
    fn unexpect(&mut self, key: u64, number: u64) -> bool {
        let Some(busy) = self.busy.get_mut(&key) else { return false };
        if busy.insertion != number {
            return false;
        }
        busy.insertion = 0;
        if busy.changes == 0 {
            self.busy.remove(&key);
        }
        true
    }

    /// Gives an insertion up.
    pub(super) fn cancel(&mut self, key: u64, number: u64) {
        self.unexpect(key, number);
    }

    /// Whether an insertion is still valid.
    fn is_expected(&self, key: u64, number: u64) -> bool {
        number != 0 && self.busy.get(&key).is_some_and(|busy| busy.insertion == number)
    }

    /// Begins to insert the granules `mask` of a block. `None` if the insertion is not valid any
    /// more, or if there is no room; the insertion has ended then. A slot whose mapping may be in a
    /// table on the volume gets other content only if `may_replace` returns true.
    pub(super) fn begin_insertion(
        &mut self,
        key: u64,
        number: u64,
        mask: u16,
        may_replace: impl FnOnce() -> bool,
    ) -> Option<Room> {
        let is_expected = self.is_expected(key, number);
        let room = is_expected.then(|| self.room(key, mask, may_replace)).flatten();
        match room {
            Some(Room { slot, .. }) => _ = self.blocks.pins.pin(slot),
            None => self.cancel(key, number),
        }
        room
    }

    /// Ends an insertion into `room`. If the content has been written, `sums` are its checksums.
    /// Returns whether the block was not in the cache before.
    pub(super) fn end_insertion(
        &mut self,
        key: u64,
        number: u64,
        room: Room,
        sums: Option<&[u16]>,
        access: &BlockAccess,
    ) -> bool {
        let Room { slot, mask } = room;
        let at = slot as usize;
        let kept = self.busy.get(&key).and_then(|busy| busy.kept);
        let is_valid = self.unexpect(key, number);
        let is_same = self.is_mapped(slot) && self.key(slot) == key;
        let is_unused = self.is_unused(slot);
        let sums = sums.filter(|_| is_valid);
        let sums = sums.filter(|_| is_same || is_unused && self.map(slot, key));
        let is_new = sums.is_some() && !is_same;
        if let Some(sums) = sums {
            for (granule, sum) in sums.iter().enumerate().filter(|_| self.is_kept) {
                if mask >> granule & 1 == 1 {
                    self.sums[at * self.blocks.granules + granule] = *sum;
                }
            }
            self.blocks.add_valid(slot, mask);
            if !is_same {
                self.admit(slot, key, access, kept);
                self.counts.insertions += 1;
            }
            self.renew(slot);
        } else if is_unused {
            // Not mapped, and in no list. It is pinned.
            _ = self.blocks.pins.loosen(slot);
        }
        self.unpin(slot);
        is_new
    }

    /// Whether the slot was taken for an insertion and has no block.
    fn is_unused(&self, slot: u32) -> bool {
        self.flags[slot as usize] & (MAPPED | IMAGED) == 0 && !self.blocks.pins.is_loose(slot)
    }

    /// Puts a block without valid granules into a slot. Returns false if it cannot be found there.
    fn map(&mut self, slot: u32, key: u64) -> bool {
        let is_mapped = self.blocks.map(slot, key);
        if is_mapped {
            self.flags[slot as usize] |= MAPPED;
            self.mapped += 1;
        }
        is_mapped
    }

    /// The class of the block in a slot, as an index.
    fn class_of(&self, slot: u32) -> usize {
        usize::from(self.replacement.class(slot)).min(CLASSES - 1)
    }

    /// The replacement gets the block that was mapped to a slot. `kept` is its place before its
    /// content was written.
    fn admit(&mut self, slot: u32, key: u64, access: &BlockAccess, kept: Option<Kept>) {
        match kept {
            Some(kept) => self.replacement.insert_again(slot, key, access, kept),
            None => self.replacement.insert(slot, key, access),
        }
        self.held[self.class_of(slot)] += 1;
        let disk = disk_of(key);
        if disk >= self.of_disks.len() {
            self.of_disks.resize(disk + 1, 0);
        }
        self.of_disks[disk] += 1;
    }

    /// A request for the block in a slot, which may change its class.
    fn hit(&mut self, slot: u32, key: u64, access: &BlockAccess) {
        let before = self.class_of(slot);
        self.replacement.hit(slot, key, access);
        let class = self.class_of(slot);
        if class != before {
            self.held[before] -= 1;
            self.held[class] += 1;
        }
    }

    /// Notes that the content of a slot has changed.
    fn renew(&mut self, slot: u32) {
        if !self.is_kept {
            return;
        }
        let flags = &mut self.flags[slot as usize];
        if *flags & FRESH == 0 {
            *flags = *flags & !(CAPTURED | STABLE) | FRESH;
            self.fresh.push(slot);
        }
    }

    /// Releases a pin.
    pub(super) fn unpin(&mut self, slot: u32) {
        if self.blocks.pins.unpin(slot) {
            self.free_loose(slot);
        }
    }

    /// A slot has lost its last pin, which was to free it.
    pub(super) fn free_loose(&mut self, slot: u32) {
        self.blocks.pins.tighten(slot);
        self.push_free(slot);
    }

    /// Takes the block out of a slot, which the replacement no longer has.
    fn unmap(&mut self, slot: u32) {
        let at = slot as usize;
        let key = self.key(slot);
        self.blocks.unmap(slot);
        self.mapped -= 1;
        self.held[self.class_of(slot)] -= 1;
        self.of_disks[disk_of(key)] -= 1;
        if self.flags[at] & AHEAD != 0 {
            self.ahead -= 1;
            self.counts.ahead_unused += 1;
        }
        self.flags[at] &= IMAGED;
        if self.flags[at] & IMAGED != 0 {
            return self.push_leaving(slot);
        }
        self.release(slot);
    }

    fn release(&mut self, slot: u32) {
        if self.blocks.pins.loosen(slot) {
            self.push_free(slot);
        }
    }

    /// Takes the least useful block out of the cache, for the block `wanting`, or for any. Returns
    /// false if there is none that may leave.
    fn evict(&mut self, wanting: Option<u64>) -> bool {
        let blocks = &self.blocks;
        let key = |slot: u32| blocks.key(slot);
        let Some(slot) = self.replacement.victim(wanting, key) else { return false };
        self.counts.evictions += 1;
        self.unmap(slot);
        true
    }

    /// Guarantees slots to a disk; see [`Replacement::set_share`].
    pub(super) fn set_share(&mut self, disk: u16, slots: u32) -> bool {
        let Self { replacement, blocks, flags, .. } = self;
        let has_block = |slot: &u32| {
            let is_mapped = flags[*slot as usize] & MAPPED != 0;
            is_mapped && blocks.key(*slot) >> BLOCK_BITS == u64::from(disk)
        };
        replacement.set_share(disk.into(), slots, (0..blocks.slots()).filter(has_block))
    }

    /// The number of blocks of a disk that has had a share.
    pub(super) fn blocks_of(&self, disk: u16) -> Option<u32> {
        self.replacement.blocks_of(disk.into())
    }

    /// The number of slots.
    pub(super) fn slots(&self) -> u32 {
        self.blocks.slots()
    }

    /// The number of slots that have a block.
    pub(super) fn mapped(&self) -> u32 {
        self.mapped
    }

    /// The counts.
    pub(super) fn counts(&self) -> BlockCounts {
        self.counts
    }

    /// The mapped blocks by class.
    pub(super) fn blocks_by_class(&self) -> &[u32; CLASSES] {
        &self.held
    }

    /// The mapped blocks of the disk with this number.
    pub(super) fn mapped_of(&self, disk: u16) -> u32 {
        self.of_disks.get(usize::from(disk)).copied().unwrap_or(0)
    }

    /// The memory of what the policy has learned for all shards together, in bytes.
    pub(super) fn learned_bytes(&self) -> usize {
        self.replacement.learned_bytes()
    }

    /// The memory of the index, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&self.sums[..])
            + size_of_val(&self.flags[..])
            + self.blocks.memory_bytes()
            + self.replacement.memory_bytes()
    }
}

#[cfg(test)]
#[path = "shard_tests.rs"]
mod tests;
