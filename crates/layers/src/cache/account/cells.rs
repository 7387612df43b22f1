//! The counts of one queue, which its thread writes with plain loads and stores while others read.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fathom_cache::{CLASSES, Touch};
use parking_lot::Mutex;

use super::GROUPS;

/// Counts of reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Reads.
    pub reads: u64,
    /// Reads that the cache had wholly.
    pub hits: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes read that the cache had.
    pub hit_bytes: u64,
    /// The time that the bytes which the cache had would have taken at home, in nanoseconds, as
    /// estimated from reads that were carried out there.
    pub avoided_ns: u64,
    /// The time of reads that the cache had wholly, in nanoseconds.
    pub hit_ns: u64,
    /// The time of the other reads, in nanoseconds.
    pub miss_ns: u64,
}

impl CacheCounts {
    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.reads += other.reads;
        self.hits += other.hits;
        self.read_bytes += other.read_bytes;
        self.hit_bytes += other.hit_bytes;
        self.avoided_ns += other.avoided_ns;
        self.hit_ns += other.hit_ns;
        self.miss_ns += other.miss_ns;
    }
}

/// [`CacheCounts`] in one line of the processor's cache.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Cell {
    reads: AtomicU64,
    hits: AtomicU64,
    read_bytes: AtomicU64,
    hit_bytes: AtomicU64,
    avoided_ns: AtomicU64,
    hit_ns: AtomicU64,
    miss_ns: AtomicU64,
}

#[inline]
pub(super) fn add(cell: &AtomicU64, value: u64) {
    cell.store(cell.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

impl Cell {
    #[inline]
    pub(super) fn read_begins(&self, length: u64, hit_bytes: u64, avoided_ns: u64) {
        add(&self.reads, 1);
        add(&self.hits, u64::from(hit_bytes == length));
        add(&self.read_bytes, length);
        add(&self.hit_bytes, hit_bytes);
        add(&self.avoided_ns, avoided_ns);
    }

    #[inline]
    pub(super) fn read_ends(&self, is_hit: bool, time_ns: u64) {
        add(if is_hit { &self.hit_ns } else { &self.miss_ns }, time_ns);
    }

    pub(super) fn read(&self) -> CacheCounts {
        let load = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        CacheCounts {
            reads: load(&self.reads),
            hits: load(&self.hits),
            read_bytes: load(&self.read_bytes),
            hit_bytes: load(&self.hit_bytes),
            avoided_ns: load(&self.avoided_ns),
            hit_ns: load(&self.hit_ns),
            miss_ns: load(&self.miss_ns),
        }
    }

    fn reset(&self) {
        let cells = [
            &self.reads,
            &self.hits,
            &self.read_bytes,
            &self.hit_bytes,
            &self.avoided_ns,
            &self.hit_ns,
            &self.miss_ns,
        ];
        for cell in cells {
            cell.store(0, Ordering::Relaxed);
        }
    }
}

/// The counts of one control group in one queue.
#[derive(Debug, Default)]
pub(super) struct GroupCell {
    /// The generation of the group's place that they belong to.
    pub(super) generation: AtomicU32,
    pub(super) cell: Cell,
    /// The blocks read.
    pub(super) blocks: AtomicU64,
}

impl GroupCell {
    /// Begins again for the group that has got the place.
    pub(super) fn begin(&self, generation: u32) {
        self.cell.reset();
        self.blocks.store(0, Ordering::Relaxed);
        self.generation.store(generation, Ordering::Relaxed);
    }
}

/// A block that a curve follows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) hash: u64,
    pub(super) touch: Touch,
    /// The place of its control group, and the generation of the place.
    pub(super) group: u8,
    pub(super) generation: u32,
}

/// What has been moved into the curves so far, and what waits for that.
#[derive(Debug, Default)]
pub(super) struct Counted {
    pub(super) samples: Vec<Sample>,
    pub(super) blocks: u64,
    /// The blocks of each group, and the generation that they belong to.
    pub(super) groups: [(u32, u64); GROUPS],
}

/// The counts of one queue.
#[derive(Debug, Default)]
pub(super) struct Cells {
    pub(super) classes: [Cell; CLASSES],
    pub(super) groups: [GroupCell; GROUPS],
    /// The blocks read.
    pub(super) blocks: AtomicU64,
    /// Blocks that are missing in the curves.
    pub(super) dropped: AtomicU64,
    pub(super) counted: Mutex<Counted>,
}
