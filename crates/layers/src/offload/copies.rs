//! Copies of blocks that are read often, on the log's volume.
//!
//! The copies fill slots behind the log. Only the index in memory says what is in a slot, so that a start
//! begins without copies. A copy must never be older than the disk:
//!
//! - A change bumps the version of its blocks, and takes what it changes out of their copies, before it is submitted.
//!   A copy is valid by parts, of a granule or more, so that a small change leaves the rest. What is valid of a copy
//!   in the index was not changed since.
//! - A copy is made only while the log is empty: all content is at home. It is published only if no change of
//!   its block was in flight when its read of home began, and none has begun since.
//!
//! Versions and changes in flight are counted by hash in [`Buckets`], so that a change without a copy costs
//! two additions and no lock. A bucket also counts the copies and the copies being made of its blocks: only if
//! there are some, a change locks the index. Both orders are safe: the maker of a copy raises this count before
//! it looks at the version, and compares the version again under the lock of the index; a change bumps the
//! version before it looks at the count, and changes the copy under the lock. A change of a part of a block whose copy
//! is being made prevents that copy.
//!
//! A slot that a read uses is not filled again before the read has ended. Each granule has a checksum in
//! memory, so that a read finds bytes that are not those of the copy.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The unit of a checksum, in bytes.
pub(super) const GRANULE: u64 = 4096;
/// The number of buckets. Changes of blocks in the same bucket only prevent copies.
const BUCKETS: u64 = 1 << 14;
/// A change of more blocks counts as one of all.
const BLOCKS_MAX: u64 = 64;

/// A bucket: changes in flight, copies, and the version, from the lowest bits on.
const IN_FLIGHT: u64 = 1;
const COPY: u64 = 1 << 20;
const VERSION: u64 = 1 << 40;

fn in_flight(word: u64) -> u64 {
    word % COPY
}

fn copies(word: u64) -> u64 {
    word % VERSION / COPY
}

fn version(word: u64) -> u64 {
    word / VERSION
}

/// The checksums of the granules of `bytes`.
fn checksums(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(GRANULE as usize).map(crc32c::crc32c).collect()
}

/// The versions of blocks, by hash, and that of changes of many blocks.
struct Buckets {
    words: Box<[AtomicU64]>,
    many: AtomicU64,
}

impl Buckets {
    fn new() -> Self {
        Self { words: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(), many: AtomicU64::new(0) }
    }

    fn of(&self, block: u64) -> &AtomicU64 {
        let hash = block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        &self.words[(hash % BUCKETS) as usize]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    Free,
    /// A copy is being written.
    Filling,
    /// It has a copy of this block.
    Valid(u64),
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: SlotState,
    /// The parts of the copy that are valid, as bits.
    valid: u64,
    /// The reads that use it.
    pins: u32,
}

struct Index {
    /// The slots of the copies, by block.
    blocks: HashMap<u64, u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// The checksums of all granules, slot by slot.
    sums: Vec<u32>,
    /// Whether the area failed, so that no more copies are made.
    has_failed: bool,
}

/// A copy that is being made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fill {
    pub block: u64,
    slot: u32,
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

/// What copies have done.
#[derive(Debug, Default)]
pub(super) struct CopyCounts {
    pub hits: AtomicU64,
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
    /// The size of a block and of its slot, as a power of two, and that of the parts by which a copy is valid.
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
        let slot = Slot { state: SlotState::Free, valid: 0, pins: 0 };
        Self {
            base: area.start,
            shift,
            // At most 64 parts.
            part_shift: GRANULE.trailing_zeros().max(shift.saturating_sub(6)),
            buckets: Buckets::new(),
            index: Mutex::new(Index {
                blocks: HashMap::new(),
                slots: vec![slot; count as usize],
                free: (0..count).rev().collect(),
                sums: vec![0; granules as usize],
                has_failed: false,
            }),
            counts: CopyCounts::default(),
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The size of a block, in bytes.
    pub(super) fn block_size(&self) -> u64 {
        1 << self.shift
    }

    /// The blocks that `range` touches.
    pub(super) fn blocks(&self, range: &Range<u64>) -> Range<u64> {
        range.start >> self.shift..((range.end - 1) >> self.shift) + 1
    }

    /// The parts of a block that `range` touches, as bits.
    fn parts(&self, block: u64, range: &Range<u64>) -> u64 {
        let begin = block << self.shift;
        let start = range.start.saturating_sub(begin) >> self.part_shift;
        let end = (range.end - begin).min(self.block_size()).div_ceil(1 << self.part_shift);
        u64::MAX >> (64 - (end - start)) << start
    }

    /// Whether so many parts of a block's copy are valid that it is not made again.
    fn is_worth(&self, index: &Index, block: u64) -> bool {
        let parts = 1 << (self.shift - self.part_shift);
        let slot = index.blocks.get(&block);
        slot.is_some_and(|slot| 2 * index.slots[*slot as usize].valid.count_ones() > parts)
    }

    /// The number of slots.
    pub(super) fn slots(&self) -> usize {
        self.index().slots.len()
    }

    /// The number of copies.
    pub(super) fn len(&self) -> usize {
        self.index().blocks.len()
    }

    /// Whether the area failed, so that no more copies are made.
    pub(super) fn has_failed(&self) -> bool {
        self.index().has_failed
    }

    /// Called before a change of `range` is submitted. `is_past` is whether it goes past the log: then it is
    /// in flight until [`end_change`](Self::end_change).
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
            if copies(before) > 0 {
                self.change(&mut self.index(), block, range);
            }
        }
    }

    /// Takes what `range` has of a block out of its copy.
    fn change(&self, index: &mut Index, block: u64, range: &Range<u64>) {
        let Some(slot) = index.blocks.get(&block) else { return };
        let valid = &mut index.slots[*slot as usize].valid;
        *valid &= !self.parts(block, range);
        if *valid == 0 {
            self.remove(index, block);
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

    fn remove(&self, index: &mut Index, block: u64) {
        let Some(slot) = index.blocks.remove(&block) else { return };
        self.buckets.of(block).fetch_sub(COPY, Ordering::SeqCst);
        Self::release(index, slot);
    }

    /// The slot has no copy any more.
    fn release(index: &mut Index, slot: u32) {
        let place = &mut index.slots[slot as usize];
        place.state = SlotState::Free;
        if place.pins == 0 {
            index.free.push(slot);
        }
    }

    /// Begins a copy of `block`, in a free slot, or in that of `victim`. The log must be empty. `None` if it
    /// cannot be made now.
    pub(super) fn begin_fill(&self, block: u64, victim: Option<u64>) -> Option<Fill> {
        let mut index = self.index();
        if index.has_failed || self.is_worth(&index, block) {
            return None;
        }
        // What is left of an older one is given up.
        self.remove(&mut index, block);
        if let (Some(victim), true) = (victim, index.free.is_empty()) {
            self.remove(&mut index, victim);
        }
        let many = self.buckets.many.load(Ordering::SeqCst);
        let slot = index.free.pop()?;
        let before = self.buckets.of(block).fetch_add(COPY, Ordering::SeqCst);
        if in_flight(before) > 0 || in_flight(many) > 0 {
            self.buckets.of(block).fetch_sub(COPY, Ordering::SeqCst);
            index.free.push(slot);
            return None;
        }
        index.slots[slot as usize].state = SlotState::Filling;
        let version_of_many = version(many);
        Some(Fill { block, slot, version: version(before), version_of_many })
    }

    /// The number of a slot's first granule.
    fn granule(&self, slot: u32) -> usize {
        ((u64::from(slot) << self.shift) / GRANULE) as usize
    }

    /// Where a copy is written, in bytes from the start of the volume.
    pub(super) fn place(&self, fill: &Fill) -> u64 {
        self.base + (u64::from(fill.slot) << self.shift)
    }

    /// Notes the checksums of the bytes of a copy, before they are written.
    pub(super) fn note(&self, fill: &Fill, bytes: &[u8]) {
        let (first, sums) = (self.granule(fill.slot), checksums(bytes));
        self.index().sums[first..first + sums.len()].copy_from_slice(&sums);
    }

    /// Ends a copy. It is used if it `is_written` and its block has not been changed since it was begun.
    /// Returns whether it is used.
    pub(super) fn end_fill(&self, fill: &Fill, is_written: bool) -> bool {
        let mut index = self.index();
        let word = self.buckets.of(fill.block).load(Ordering::SeqCst);
        let many = self.buckets.many.load(Ordering::SeqCst);
        let is_current = version(word) == fill.version && version(many) == fill.version_of_many;
        if !is_written || !is_current {
            self.buckets.of(fill.block).fetch_sub(COPY, Ordering::SeqCst);
            Self::release(&mut index, fill.slot);
            return false;
        }
        let slot = &mut index.slots[fill.slot as usize];
        slot.state = SlotState::Valid(fill.block);
        slot.valid =
            self.parts(fill.block, &(fill.block << self.shift..(fill.block + 1) << self.shift));
        index.blocks.insert(fill.block, fill.slot);
        self.counts.made.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// A copy could not be written. No more copies are made.
    pub(super) fn fail(&self) {
        self.counts.failures.fetch_add(1, Ordering::Relaxed);
        self.index().has_failed = true;
    }

    /// Begins a read of `range` from a copy, if there is one of all of it.
    pub(super) fn begin_read(&self, range: &Range<u64>) -> Option<CopyRead> {
        let blocks = self.blocks(range);
        if blocks.end - blocks.start > 1 {
            return None;
        }
        let block = blocks.start;
        if copies(self.buckets.of(block).load(Ordering::SeqCst)) == 0 {
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

    /// Ends a read of a copy. `bytes` are those that were read, or `None` after an error. Returns whether they
    /// are those of the copy; otherwise the copy is removed.
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
        if place.pins == 0 && place.state == SlotState::Free {
            index.free.push(slot);
        }
    }

    /// Which of `wanted`, in order, have no copy, or have lost half of it to changes; and which copies are of other
    /// blocks.
    pub(super) fn compare(&self, wanted: &[u64]) -> (Vec<u64>, Vec<u64>) {
        let index = self.index();
        let missing =
            wanted.iter().filter(|block| !self.is_worth(&index, **block)).copied().collect();
        let set: HashSet<&u64> = wanted.iter().collect();
        let others = index.blocks.keys().filter(|block| !set.contains(block)).copied().collect();
        (missing, others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHIFT: u32 = 13;
    const PARTS: usize = 2;

    fn bytes(content: u8) -> Vec<u8> {
        vec![content; 1 << SHIFT]
    }

    fn block(number: u64) -> Range<u64> {
        number << SHIFT..(number + 1) << SHIFT
    }

    #[test]
    fn a_copy_is_used_only_if_its_block_was_not_changed_meanwhile() {
        let copies = Copies::new(&(8192..8192 + (4 << SHIFT)), SHIFT);
        // A change that is in flight when the copy is begun.
        copies.begin_change(&block(3), true);
        assert_eq!(copies.begin_fill(3, None), None);
        copies.end_change(&block(3));
        // One that begins, or begins and ends, meanwhile, whichever way.
        for is_past in [true, false] {
            let fill = copies.begin_fill(3, None).unwrap();
            copies.begin_change(&(block(3).start + 512..block(3).start + 1024), is_past);
            if is_past {
                copies.end_change(&block(3));
            }
            assert!(!copies.end_fill(&fill, true));
        }
        // A long discard.
        let fill = copies.begin_fill(3, None).unwrap();
        copies.begin_change(&(0..1 << 40), true);
        assert_eq!(copies.begin_fill(4, None), None);
        copies.end_change(&(0..1 << 40));
        assert!(!copies.end_fill(&fill, true));
        assert_eq!(copies.len(), 0);
        let fill = copies.begin_fill(3, None).unwrap();
        copies.note(&fill, &bytes(7));
        assert!(copies.end_fill(&fill, true));
        assert!(copies.begin_read(&block(3)).is_some());
    }

    /// A read that uses a slot keeps it, and a wrong byte is found.
    #[test]
    fn a_slot_in_use_is_not_filled_again() {
        let copies = Copies::new(&(0..1 << SHIFT), SHIFT);
        let fill = copies.begin_fill(0, None).unwrap();
        copies.note(&fill, &bytes(7));
        assert!(copies.end_fill(&fill, true));
        let read = copies.begin_read(&(512..1024)).unwrap();
        assert_eq!((read.offset, read.length, read.skip), (0, 4096, 512));
        copies.begin_change(&block(0), false);
        assert_eq!((copies.len(), copies.begin_fill(1, None)), (0, None));
        // The read began before the change.
        assert!(copies.end_read(&read, Some(&bytes(7)[..4096])));
        let fill = copies.begin_fill(1, None).unwrap();
        copies.note(&fill, &bytes(8));
        assert!(copies.end_fill(&fill, true));
        let read = copies.begin_read(&block(1)).unwrap();
        let mut wrong = bytes(8);
        wrong[5000] ^= 1;
        assert!(!copies.end_read(&read, Some(&wrong)) && copies.len() == 0);
        assert_eq!(copies.counts.mismatches.load(Ordering::Relaxed), 1);
        // The slot is free again, and a copy leaves for another.
        let fill = copies.begin_fill(2, None).unwrap();
        assert!(copies.end_fill(&fill, true));
        assert_eq!(copies.begin_fill(4, None), None);
        assert!(copies.begin_fill(4, Some(2)).is_some());
    }

    /// Random changes, reads and copies: a copy in the index is always that of the newest content.
    #[test]
    fn copies_are_never_old() {
        let mut found = [0; 2];
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let copies = Copies::new(&(0..3 << SHIFT), SHIFT);
            // Of the halves of each block.
            let mut versions = [[0_u8; PARTS]; 6];
            let (mut fills, mut in_flight, mut reads) = (Vec::new(), Vec::new(), Vec::new());
            let mut slots: HashMap<u64, [u8; PARTS]> = HashMap::new();
            let part = |number: u64, part: usize| {
                let start = block(number).start + part as u64 * GRANULE;
                start..start + GRANULE
            };
            let content = |versions: [u8; PARTS]| {
                versions.into_iter().flat_map(|it| vec![it; GRANULE as usize]).collect::<Vec<u8>>()
            };
            for _ in 0..300 {
                let (number, half) = (random.u64(..6), random.usize(..PARTS));
                let at = number as usize;
                match random.u8(..7) {
                    0 => {
                        copies.begin_change(&part(number, half), true);
                        in_flight.push((number, half));
                    }
                    1 if !in_flight.is_empty() => {
                        let (number, half) = in_flight.swap_remove(random.usize(..in_flight.len()));
                        let version = &mut versions[number as usize][half];
                        *version = version.wrapping_add(1);
                        copies.end_change(&part(number, half));
                    }
                    2 => {
                        copies.begin_change(&part(number, half), false);
                        versions[at][half] = versions[at][half].wrapping_add(1);
                    }
                    3 => {
                        if let Some(fill) = copies.begin_fill(number, Some(random.u64(..6))) {
                            let place = copies.place(&fill);
                            assert!(!reads.iter().any(|(_, at)| *at == place), "the slot is used");
                            copies.note(&fill, &content(versions[at]));
                            slots.insert(place, versions[at]);
                            fills.push(fill);
                        }
                    }
                    4 if !fills.is_empty() => {
                        let fill = fills.swap_remove(random.usize(..fills.len()));
                        copies.end_fill(&fill, random.bool());
                    }
                    5 => {
                        // A half, or all of it.
                        let range = if random.bool() { part(number, half) } else { block(number) };
                        if let Some(read) = copies.begin_read(&range) {
                            let place = read.offset >> SHIFT << SHIFT;
                            for half in 0..PARTS {
                                let part = part(number, half);
                                if range.start <= part.start && part.end <= range.end {
                                    assert_eq!(
                                        slots[&place][half], versions[at][half],
                                        "seed {seed}"
                                    );
                                }
                            }
                            found[usize::from(range.end - range.start == GRANULE)] += 1;
                            reads.push((read, place));
                        }
                    }
                    _ if !reads.is_empty() => {
                        let (read, place) = reads.swap_remove(random.usize(..reads.len()));
                        let content = content(slots[&place]);
                        let start = (read.offset - place) as usize;
                        let bytes = &content[start..start + read.length as usize];
                        assert!(copies.end_read(&read, Some(bytes)));
                    }
                    _ => {}
                }
            }
            let used: HashSet<_> = fills.iter().map(|fill| fill.slot).collect();
            assert_eq!(used.len(), fills.len(), "each copy has its slot");
        }
        assert!(found.iter().all(|count| *count > 100), "{found:?} reads of whole and half copies");
    }

    /// A change of a part leaves the rest, until half of the copy is lost.
    #[test]
    fn a_small_change_leaves_the_rest_of_a_copy() {
        let shift = 16;
        let copies = Copies::new(&(0..2 << shift), shift);
        let fill = copies.begin_fill(1, None).unwrap();
        assert!(copies.end_fill(&fill, true));
        let begin = 1 << shift;
        let is_there = |granules: Range<u64>| {
            let range = begin + granules.start * GRANULE..begin + granules.end * GRANULE;
            copies.begin_read(&range).inspect(|read| copies.abandon_read(read)).is_some()
        };
        assert!(is_there(0..16));
        // The end of granule 2, and granule 3.
        copies.begin_change(&(begin + 3 * GRANULE - 512..begin + 4 * GRANULE), false);
        assert!(is_there(0..2) && is_there(4..16));
        assert!(!is_there(2..3) && !is_there(3..4) && !is_there(0..16));
        assert_eq!((copies.len(), copies.begin_fill(1, None)), (1, None));
        assert!(copies.compare(&[1]).0.is_empty());
        // It is made again when half of it is gone.
        copies.begin_change(&(begin + 8 * GRANULE..begin + 14 * GRANULE), false);
        assert_eq!(copies.compare(&[1]).0, [1]);
        assert!(is_there(0..2));
        let fill = copies.begin_fill(1, None).unwrap();
        assert!(!is_there(0..1));
        assert!(copies.end_fill(&fill, true) && is_there(0..16));
        copies.begin_change(&(0..2 << shift), false);
        assert_eq!(copies.len(), 0);
    }
}
