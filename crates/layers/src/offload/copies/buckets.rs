//! What changes and the makers of copies know of each other without a lock, by hash of the block.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The number of buckets. Changes of blocks in the same bucket only prevent copies.
const BUCKETS: u64 = 1 << 14;

/// A bucket: changes in flight, blocks with a slot, and the version, from the lowest bits on.
pub(super) const IN_FLIGHT: u64 = 1;
pub(super) const SLOT: u64 = 1 << 20;
pub(super) const VERSION: u64 = 1 << 40;

pub(super) fn in_flight(word: u64) -> u64 {
    word % SLOT
}

pub(super) fn slots(word: u64) -> u64 {
    word % VERSION / SLOT
}

pub(super) fn version(word: u64) -> u64 {
    word / VERSION
}

/// The versions of blocks, by hash, and that of changes of many blocks.
pub(super) struct Buckets {
    words: Box<[AtomicU64]>,
    /// How many of the blocks with a slot lack a part of their copy.
    lacking: Box<[AtomicU32]>,
    pub many: AtomicU64,
}

impl Buckets {
    pub(super) fn new() -> Self {
        Self {
            words: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            lacking: (0..BUCKETS).map(|_| AtomicU32::new(0)).collect(),
            many: AtomicU64::new(0),
        }
    }

    fn index(block: u64) -> usize {
        let hash = block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        (hash % BUCKETS) as usize
    }

    pub(super) fn of(&self, block: u64) -> &AtomicU64 {
        &self.words[Self::index(block)]
    }

    /// A block with a slot lacks parts of its copy from now on, or no longer.
    pub(super) fn lacks(&self, block: u64, lacks: bool) {
        let count = &self.lacking[Self::index(block)];
        if lacks {
            count.fetch_add(1, Ordering::Relaxed);
        } else {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether a block may lack a part of its copy: blocks that hash alike count, too.
    pub(super) fn may_lack(&self, block: u64) -> bool {
        self.lacking[Self::index(block)].load(Ordering::Relaxed) > 0
    }
}
