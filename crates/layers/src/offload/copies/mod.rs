//! Copies of blocks that are read often, on the log's volume.
//!
//! The copies are in slots behind the log. Only the index in memory says what is in a slot, so that
//! a start begins without copies. A block gets a slot when it is read often ([`Copies::assign`]).
//! Then its copy is filled by parts, from what its guest reads and writes at home in any case, or
//! by a read in idle time. A copy must never be older than the disk:
//!
//! - A change bumps the version of its blocks, and takes what it changes out of their copies,
//!   before it is submitted. A copy is valid by parts, of a granule or more, so that a small change
//!   leaves the rest. What is valid of a copy in the index was not changed since.
//! - Parts are filled with what was read from home, or written to it. They become valid only if no
//!   other change of the block was in flight past the log when that request began, none has begun
//!   since, and the log had nothing for them: neither in its map nor on its way. A change on its
//!   way to the log has bumped the version before it counts there no longer, because then it is in
//!   the map.
//!
//! Versions and changes in flight are counted by hash in [`Buckets`], so that a change of a block
//! without a slot costs two additions and no lock. A bucket also counts its blocks with slots: only
//! if there are some, a change locks the index. Both orders are safe: a block has its slot before a
//! fill looks at the version, and the fill compares the version again under the lock of the index;
//! a change bumps the version before it looks at the count, and changes the copy under the lock.
//!
//! What uses a slot pins it. A pinned slot gets no other block, and nothing of it is filled, so
//! that a read of it never finds the bytes of a later fill. Each granule has a checksum in memory,
//! so that a read finds bytes that are not those of the copy.

mod buckets;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use buckets::{Buckets, IN_FLIGHT, SLOT, VERSION, in_flight, slots, version};

/// The unit of a checksum, in bytes.
pub(super) const GRANULE: u64 = 4096;
/// A change of more blocks counts as one of all.
const BLOCKS_MAX: u64 = 64;

/// The checksums of the granules of `bytes`.
fn checksums(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(GRANULE as usize).map(crc32c::crc32c).collect()
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The block that it belongs to.
    block: Option<u64>,
    /// The parts of the copy that are valid, as bits.
    valid: u64,
    /// The reads and the fill that use it.
    pins: u32,
}

struct Index {
    /// The slots of the blocks that have one.
    blocks: HashMap<u64, u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// The slots with valid parts.
    filled: usize,
    /// The checksums of all granules, slot by slot.
    sums: Vec<u32>,
    /// Whether the area failed, so that nothing more is filled.
    has_failed: bool,
}

/// Parts of a copy that are being filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fill {
    pub block: u64,
    slot: u32,
    parts: u64,
    /// The first granule in the slot.
    granule: u64,
    /// Where to write, in bytes from the start of the volume.
    pub offset: u64,
    version: u64,
    version_of_many: u64,
}

/// A read of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyRead {
    block: u64,
    slot: u32,
    /// The first granule in the slot.
    granule: u64,
    /// Where to read, in bytes from the start of the volume, and how much.
    pub offset: u64,
    pub length: u64,
    /// The bytes before those of the request.
    pub skip: u64,
}

/// How the slots compare with the blocks that should have one.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    /// Those that have no slot, or less than half of their copy, in order.
    pub lacking: Vec<u64>,
    /// The share of the copy that each of them has, in order.
    pub shares: Vec<f64>,
    /// Other blocks with slots.
    pub others: Vec<u64>,
}

/// What copies have done.
#[derive(Debug, Default)]
pub(super) struct CopyCounts {
    pub hits: AtomicU64,
    /// Completed fills.
    pub made: AtomicU64,
    /// Reads and writes of copies that failed.
    pub failures: AtomicU64,
    /// Reads whose bytes were not those of the copy.
    pub mismatches: AtomicU64,
}

/// The copies of a disk. See the module.
pub(super) struct Copies {
    /// Where the slots begin, in bytes from the start of the volume.
    base: u64,
    /// The size of a block and of its slot, as a power of two, and that of the parts by which a
    /// copy is valid.
    shift: u32,
    part_shift: u32,
    buckets: Buckets,
    index: Mutex<Index>,
    pub counts: CopyCounts,
}

impl Copies {
    /// As many slots as fit `area`, a range of the volume in bytes, for blocks of 2^`shift` bytes.
    pub(super) fn new(area: &Range<u64>, shift: u32) -> Self {
        let count = (area.end.saturating_sub(area.start) >> shift).min(u64::from(u32::MAX)) as u32;
        let granules = (u64::from(count) << shift) / GRANULE;
        Self {
            base: area.start,
            shift,
            // At most 64 parts.
            part_shift: GRANULE.trailing_zeros().max(shift.saturating_sub(6)),
            buckets: Buckets::new(),
            index: Mutex::new(Index {
                blocks: HashMap::new(),
                slots: vec![Slot { block: None, valid: 0, pins: 0 }; count as usize],
                free: (0..count).rev().collect(),
                filled: 0,
                sums: vec![0; granules as usize],
                has_failed: false,
            }),
            counts: CopyCounts::default(),
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock()
    }

    /// The size of a block, in bytes.
    pub(super) fn block_size(&self) -> u64 {
        1 << self.shift
    }

    /// The bytes of a block.
    pub(super) fn range(&self, block: u64) -> Range<u64> {
        block << self.shift..(block + 1) << self.shift
    }

    /// The blocks that `range` touches.
    pub(super) fn blocks(&self, range: &Range<u64>) -> Range<u64> {
        range.start >> self.shift..((range.end - 1) >> self.shift) + 1
    }

    /// The block in which all of `range` lies.
    fn block(&self, range: &Range<u64>) -> Option<u64> {
        let blocks = self.blocks(range);
        (blocks.end - blocks.start == 1).then_some(blocks.start)
    }

    /// All parts of a block, as bits.
    fn all_parts(&self) -> u64 {
        u64::MAX >> (64 - (1 << (self.shift - self.part_shift)))
    }

    /// The parts of a block that `range` touches, as bits.
    fn parts(&self, block: u64, range: &Range<u64>) -> u64 {
        let begin = block << self.shift;
        let start = range.start.saturating_sub(begin) >> self.part_shift;
        let end = (range.end - begin).min(self.block_size()).div_ceil(1 << self.part_shift);
        u64::MAX >> (64 - (end - start)) << start
    }

    /// The whole parts of a block in `range`. It is empty if there are none.
    pub(super) fn parts_within(&self, block: u64, range: &Range<u64>) -> Range<u64> {
        let part = 1 << self.part_shift;
        let of = self.range(block);
        let start = range.start.max(of.start).next_multiple_of(part);
        start..(range.end.min(of.end) / part * part).max(start)
    }

    /// The share of a block's copy that is valid.
    fn share(&self, index: &Index, block: u64) -> f64 {
        let valid = index.blocks.get(&block).map_or(0, |slot| index.slots[*slot as usize].valid);
        f64::from(valid.count_ones()) / f64::from(self.all_parts().count_ones())
    }

    /// The number of slots.
    pub(super) fn slots(&self) -> usize {
        self.index().slots.len()
    }

    /// The number of blocks of which there are copies, of all of them or of parts.
    pub(super) fn len(&self) -> usize {
        self.index().filled
    }

    /// Whether the area failed, so that nothing more is filled.
    pub(super) fn has_failed(&self) -> bool {
        self.index().has_failed
    }

    /// The area is used again after it has failed.
    pub(super) fn restart(&self) {
        self.index().has_failed = false;
    }

    /// Gives `block` a slot, unless it has one: a free one, or that of `victim`. It may get none,
    /// because a request uses that of `victim`.
    pub(super) fn assign(&self, block: u64, victim: Option<u64>) {
        let mut index = self.index();
        if index.blocks.contains_key(&block) {
            return;
        }
        if let (Some(victim), true) = (victim, index.free.is_empty()) {
            self.remove(&mut index, victim);
        }
        let Some(slot) = index.free.pop() else { return };
        index.slots[slot as usize] = Slot { block: Some(block), valid: 0, pins: 0 };
        index.blocks.insert(block, slot);
        self.buckets.of(block).fetch_add(SLOT, Ordering::SeqCst);
        self.buckets.lacks(block, true);
    }

    /// Takes the block's slot away.
    fn remove(&self, index: &mut Index, block: u64) {
        let Some(slot) = index.blocks.get(&block).copied() else { return };
        self.set_valid(index, block, slot, 0);
        self.buckets.lacks(block, false);
        self.buckets.of(block).fetch_sub(SLOT, Ordering::SeqCst);
        index.blocks.remove(&block);
        let place = &mut index.slots[slot as usize];
        place.block = None;
        if place.pins == 0 {
            index.free.push(slot);
        }
    }

    /// Sets which parts of a block's copy are valid.
    fn set_valid(&self, index: &mut Index, block: u64, slot: u32, valid: u64) {
        let before = std::mem::replace(&mut index.slots[slot as usize].valid, valid);
        match (before == 0, valid == 0) {
            (true, false) => index.filled += 1,
            (false, true) => index.filled -= 1,
            _ => {}
        }
        let all = self.all_parts();
        if (before == all) != (valid == all) {
            self.buckets.lacks(block, before == all);
        }
    }

    /// Called before a change of `range` is submitted. `is_past` is whether it goes past the log:
    /// then it is in flight until [`end_change`](Self::end_change).
    pub(super) fn begin_change(&self, range: &Range<u64>, is_past: bool) {
        let step = VERSION + if is_past { IN_FLIGHT } else { 0 };
        let blocks = self.blocks(range);
        if blocks.end - blocks.start > BLOCKS_MAX {
            self.buckets.many.fetch_add(step, Ordering::SeqCst);
            let mut index = self.index();
            let changed: Vec<u64> =
                index.blocks.keys().filter(|block| blocks.contains(block)).copied().collect();
            for block in changed {
                self.remove(&mut index, block);
            }
            return;
        }
        for block in blocks {
            let before = self.buckets.of(block).fetch_add(step, Ordering::SeqCst);
            if slots(before) == 0 {
                continue;
            }
            let mut index = self.index();
            if let Some(slot) = index.blocks.get(&block).copied() {
                let valid = index.slots[slot as usize].valid & !self.parts(block, range);
                self.set_valid(&mut index, block, slot, valid);
            }
        }
    }

    /// A change that went past the log has completed.
    pub(super) fn end_change(&self, range: &Range<u64>) {
        let blocks = self.blocks(range);
        if blocks.end - blocks.start > BLOCKS_MAX {
            self.buckets.many.fetch_sub(IN_FLIGHT, Ordering::SeqCst);
            return;
        }
        for block in blocks {
            self.buckets.of(block).fetch_sub(IN_FLIGHT, Ordering::SeqCst);
        }
    }

    /// Whether a request of `range` may fill parts of a copy. It takes no lock.
    pub(super) fn may_lack(&self, range: &Range<u64>) -> bool {
        self.block(range).is_some_and(|block| self.buckets.may_lack(block))
    }

    /// Whether a block's copy lacks something, and nothing uses it.
    pub(super) fn can_fill(&self, block: u64) -> bool {
        let index = self.index();
        let slot = index.blocks.get(&block).map(|slot| index.slots[*slot as usize]);
        slot.is_some_and(|slot| slot.pins == 0 && slot.valid != self.all_parts())
    }

    /// Begins to fill what `range`, of whole parts of one block, has of the block's copy. The
    /// request that has the content has not been submitted. `is_change` is whether it is a change
    /// past the log, which has been begun. Afterwards, the caller looks whether the log has
    /// something for `range`. `None` if the copy lacks nothing of it, or cannot be filled now.
    pub(super) fn begin_fill(&self, range: &Range<u64>, is_change: bool) -> Option<Fill> {
        let block = self.block(range)?;
        let part = 1_u64 << self.part_shift;
        if range.start % part != 0 || range.end % part != 0 {
            return None;
        }
        let mut index = self.index();
        let slot = *index.blocks.get(&block)?;
        let parts = self.parts(block, range);
        let Slot { valid, pins, .. } = index.slots[slot as usize];
        if index.has_failed || pins > 0 || valid & parts == parts {
            return None;
        }
        let many = self.buckets.many.load(Ordering::SeqCst);
        let word = self.buckets.of(block).load(Ordering::SeqCst);
        if in_flight(word) != u64::from(is_change) || in_flight(many) > 0 {
            return None;
        }
        self.set_valid(&mut index, block, slot, valid & !parts);
        index.slots[slot as usize].pins = 1;
        let within = range.start - (block << self.shift);
        Some(Fill {
            block,
            slot,
            parts,
            granule: within / GRANULE,
            offset: self.base + (u64::from(slot) << self.shift) + within,
            version: version(word),
            version_of_many: version(many),
        })
    }

    /// The number of a slot's first granule.
    fn granule(&self, slot: u32) -> usize {
        ((u64::from(slot) << self.shift) / GRANULE) as usize
    }

    /// Notes the checksums of the bytes of a fill, before they are written.
    pub(super) fn note(&self, fill: &Fill, bytes: &[u8]) {
        let sums = checksums(bytes);
        let first = self.granule(fill.slot) + fill.granule as usize;
        self.index().sums[first..first + sums.len()].copy_from_slice(&sums);
    }

    /// Ends a fill. Its parts are used if it `is_written` and no other change of the block has
    /// begun since. Returns whether they are.
    pub(super) fn end_fill(&self, fill: &Fill, is_written: bool) -> bool {
        let mut index = self.index();
        let word = self.buckets.of(fill.block).load(Ordering::SeqCst);
        let many = self.buckets.many.load(Ordering::SeqCst);
        let is_current = version(word) == fill.version && version(many) == fill.version_of_many;
        let Slot { block, valid, .. } = index.slots[fill.slot as usize];
        let is_used = is_written && is_current && block == Some(fill.block);
        if is_used {
            self.set_valid(&mut index, fill.block, fill.slot, valid | fill.parts);
            self.counts.made.fetch_add(1, Ordering::Relaxed);
        }
        Self::unpin(&mut index, fill.slot);
        is_used
    }

    /// A copy could not be written. Nothing more is filled.
    pub(super) fn fail(&self) {
        self.counts.failures.fetch_add(1, Ordering::Relaxed);
        self.index().has_failed = true;
    }

    /// Begins a read of `range` from a copy, if there is one of all of it.
    pub(super) fn begin_read(&self, range: &Range<u64>) -> Option<CopyRead> {
        let block = self.block(range)?;
        if slots(self.buckets.of(block).load(Ordering::SeqCst)) == 0 {
            return None;
        }
        let mut index = self.index();
        let slot = *index.blocks.get(&block)?;
        let wanted = self.parts(block, range);
        if index.slots[slot as usize].valid & wanted != wanted {
            return None;
        }
        index.slots[slot as usize].pins += 1;
        let within = range.start - (block << self.shift);
        let granule = within / GRANULE;
        let end = (within + range.end - range.start).next_multiple_of(GRANULE);
        Some(CopyRead {
            block,
            slot,
            granule,
            offset: self.base + (u64::from(slot) << self.shift) + granule * GRANULE,
            length: end - granule * GRANULE,
            skip: within % GRANULE,
        })
    }

    /// Ends a read of a copy. `bytes` are those that were read, or `None` after an error. Returns
    /// whether they are those of the copy; otherwise the block loses its slot.
    pub(super) fn end_read(&self, read: &CopyRead, bytes: Option<&[u8]>) -> bool {
        let sums = bytes.map(checksums);
        let mut index = self.index();
        let first = self.granule(read.slot) + read.granule as usize;
        let is_right =
            sums.as_ref().is_some_and(|sums| index.sums[first..first + sums.len()] == sums[..]);
        let count = match (is_right, bytes) {
            (true, _) => &self.counts.hits,
            (false, Some(_)) => &self.counts.mismatches,
            (false, None) => &self.counts.failures,
        };
        count.fetch_add(1, Ordering::Relaxed);
        if !is_right && index.blocks.get(&read.block) == Some(&read.slot) {
            self.remove(&mut index, read.block);
        }
        Self::unpin(&mut index, read.slot);
        is_right
    }

    /// A read of a copy never ends: its queue has.
    pub(super) fn abandon_read(&self, read: &CopyRead) {
        Self::unpin(&mut self.index(), read.slot);
    }

    fn unpin(index: &mut Index, slot: u32) {
        let place = &mut index.slots[slot as usize];
        place.pins -= 1;
        if place.pins == 0 && place.block.is_none() {
            index.free.push(slot);
        }
    }

    /// Compares the slots with the blocks that should have one.
    pub(super) fn compare(&self, wanted: &[u64]) -> Comparison {
        let index = self.index();
        let shares: Vec<f64> = wanted.iter().map(|block| self.share(&index, *block)).collect();
        let lacking = wanted.iter().zip(&shares).filter(|(_, share)| **share <= 0.5);
        let lacking = lacking.map(|(block, _)| *block).collect();
        let set: HashSet<&u64> = wanted.iter().collect();
        let others = index.blocks.keys().filter(|block| !set.contains(block)).copied().collect();
        Comparison { lacking, shares, others }
    }
}
