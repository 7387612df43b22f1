//! The counts of one queue, which its thread writes with plain loads and stores while others read.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fathom_cache::{CLASSES, CacheCells, Touch};
use parking_lot::Mutex;

use super::GROUPS;

#[inline]
pub(super) fn add(cell: &AtomicU64, value: u64) {
    cell.store(cell.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

/// A read begins.
#[inline]
pub(super) fn read_begins(cells: &CacheCells, length: u64, hit_bytes: u64, avoided_ns: u64) {
    add(&cells.reads, 1);
    add(&cells.hits, u64::from(hit_bytes == length));
    add(&cells.read_bytes, length);
    add(&cells.hit_bytes, hit_bytes);
    add(&cells.avoided_ns, avoided_ns);
}

/// A read has ended.
#[inline]
pub(super) fn read_ends(cells: &CacheCells, is_hit: bool, time_ns: u64) {
    add(if is_hit { &cells.hit_ns } else { &cells.miss_ns }, time_ns);
}

/// The counts of one control group in one queue.
#[derive(Debug, Default)]
pub(super) struct GroupCell {
    /// The generation of the group's place that they belong to.
    pub(super) generation: AtomicU32,
    pub(super) cell: CacheCells,
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
    pub(super) classes: [CacheCells; CLASSES],
    pub(super) groups: [GroupCell; GROUPS],
    /// The blocks read.
    pub(super) blocks: AtomicU64,
    /// Blocks that are missing in the curves.
    pub(super) dropped: AtomicU64,
    pub(super) counted: Mutex<Counted>,
}
