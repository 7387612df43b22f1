//! A sample of a guest's pages whose content was that of a block of a disk, and what becomes of
//! them.
//!
//! ```text
//!                    found in swap                found in memory
//!   associated ────────────────────▶ out ─────────────────────────▶ judged
//!     ▲   │                           │                               │ the same checksum: silent
//!     │   └── the page is read into,  │ the page is read into,        │ another: changed
//!     │       or the block changes    ▼ or the block changes          │
//!     │       (forgotten)          unjudged                           │
//!     └───────────────────────────────────────────────────────────────┘ silent
//! ```
//! Nothing here reads a page that is out.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// The unit of memory and of blocks, in bytes.
pub(crate) const PAGE: u64 = 4096;
/// The counters of the filter of blocks.
const FILTER: usize = 1 << 16;

/// What is counted of a disk. Counts only grow.
#[derive(Debug, Default)]
pub(crate) struct DiskCounts {
    /// Requests whose pages were looked up in the kernel's index.
    pub examined: AtomicU64,
    pub stale_requests: AtomicU64,
    pub stale_bytes: AtomicU64,
    pub double_requests: AtomicU64,
    pub double_bytes: AtomicU64,
    /// Pages of the sample that were found in swap.
    pub out: Estimate,
    /// Those that came in with the content that they had as a block.
    pub silent: Estimate,
    /// Those that came in with another content.
    pub changed: Estimate,
    /// Blocks that were read again while the page that had them was out.
    pub reread: Estimate,
}

/// A number of events of the sample, and the bytes for which they stand.
#[derive(Debug, Default)]
pub(crate) struct Estimate {
    pub pages: AtomicU64,
    pub bytes: AtomicU64,
}

impl Estimate {
    fn add(&self, weight: u64) {
        self.pages.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(weight, Ordering::Relaxed);
    }
}

/// A block of a disk that a page has.
pub(crate) struct Block {
    pub disk: Arc<DiskCounts>,
    /// Its offset in the disk, in bytes.
    pub offset: u64,
    pub checksum: u64,
}

struct Entry {
    block: Block,
    is_out: bool,
}

/// A disk and the number of a block of it: the key of the index of blocks.
type BlockKey = (usize, u64);

fn key(disk: &Arc<DiskCounts>, block: u64) -> BlockKey {
    (Arc::as_ptr(disk) as usize, block)
}

/// How many blocks of the sample fall on each counter. It answers without a lock that a block is
/// not in the sample.
pub(crate) struct Filter(Box<[AtomicU8]>);

impl Default for Filter {
    fn default() -> Self {
        Self((0..FILTER).map(|_| AtomicU8::new(0)).collect())
    }
}

impl Filter {
    fn counter(&self, (disk, block): BlockKey) -> &AtomicU8 {
        let mixed = (block ^ (disk as u64).rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.0[(mixed >> 48) as usize % FILTER]
    }

    /// Whether the sample may have a page with a part of the block.
    pub(crate) fn may_have(&self, disk: &Arc<DiskCounts>, block: u64) -> bool {
        self.counter(key(disk, block)).load(Ordering::Relaxed) != 0
    }

    /// Only under the lock of the sample. A counter that has reached its end stays there.
    fn change(&self, key: BlockKey, is_more: bool) {
        let counter = self.counter(key);
        let count = counter.load(Ordering::Relaxed);
        if count != u8::MAX {
            let next = if is_more { count + 1 } else { count.saturating_sub(1) };
            counter.store(next, Ordering::Relaxed);
        }
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct PageSample {
    /// By the number of the page in the guest's physical memory.
    entries: HashMap<u64, Entry>,
    /// The page that had a block last. An offset that is no multiple of a page lies in two blocks.
    blocks: HashMap<BlockKey, u64>,
}

impl PageSample {
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn frames(&self) -> Vec<u64> {
        self.entries.keys().copied().collect()
    }

    pub fn is_out(&self, frame: u64) -> Option<bool> {
        self.entries.get(&frame).map(|entry| entry.is_out)
    }

    pub fn has_out(&self) -> bool {
        self.entries.values().any(|entry| entry.is_out)
    }

    /// The page has the content of a block. If it was out, it has come in: for a write to the disk,
    /// which has read the content that it had in swap.
    pub fn associate(&mut self, frame: u64, block: Block, weight: u64, filter: &Filter) {
        self.came_in(frame, block.checksum, weight, filter);
        self.forget_page(frame, filter);
        for number in blocks(block.offset, PAGE) {
            let key = key(&block.disk, number);
            if let Some(before) = self.blocks.get(&key).copied() {
                self.forget_page(before, filter);
            }
            self.blocks.insert(key, frame);
            filter.change(key, true);
        }
        self.entries.insert(frame, Entry { block, is_out: false });
    }

    /// The content of the page is not known any more.
    pub fn forget_page(&mut self, frame: u64, filter: &Filter) {
        let Some(entry) = self.entries.remove(&frame) else { return };
        for number in blocks(entry.block.offset, PAGE) {
            let key = key(&entry.block.disk, number);
            if self.blocks.get(&key) == Some(&frame) {
                self.blocks.remove(&key);
                filter.change(key, false);
            }
        }
    }

    /// A part of the disk gets other content.
    pub fn forget_blocks(
        &mut self,
        disk: &Arc<DiskCounts>,
        (offset, length): (u64, u64),
        filter: &Filter,
    ) {
        let end = offset.saturating_add(length);
        let overlaps = |entry: &Entry| {
            Arc::ptr_eq(&entry.block.disk, disk)
                && entry.block.offset < end
                && offset < entry.block.offset.saturating_add(PAGE)
        };
        let frames: Vec<u64> = if length / PAGE > self.entries.len() as u64 {
            let found = self.entries.iter().filter(|(_, entry)| overlaps(entry));
            found.map(|(frame, _)| *frame).collect()
        } else {
            let found = blocks(offset, length)
                .filter(|block| filter.may_have(disk, *block))
                .filter_map(|block| self.blocks.get(&key(disk, block)).copied());
            found.filter(|frame| self.entries.get(frame).is_some_and(overlaps)).collect()
        };
        for frame in frames {
            self.forget_page(frame, filter);
        }
    }

    /// A block is read. Counts it if the page that had it is out.
    pub fn reread(&self, disk: &Arc<DiskCounts>, offset: u64, weight: u64) {
        let frame = self.blocks.get(&key(disk, offset / PAGE));
        let entry = frame.and_then(|frame| self.entries.get(frame));
        if entry.is_some_and(|entry| entry.is_out && entry.block.offset == offset) {
            disk.reread.add(weight);
        }
    }

    /// The page was found in swap.
    pub fn went_out(&mut self, frame: u64, weight: u64) {
        let Some(entry) = self.entries.get_mut(&frame).filter(|entry| !entry.is_out) else {
            return;
        };
        entry.is_out = true;
        entry.block.disk.out.add(weight);
    }

    /// The page was found in memory, with this content.
    pub fn came_in(&mut self, frame: u64, checksum: u64, weight: u64, filter: &Filter) {
        let Some(entry) = self.entries.get_mut(&frame).filter(|entry| entry.is_out) else {
            return;
        };
        entry.is_out = false;
        if entry.block.checksum == checksum {
            entry.block.disk.silent.add(weight);
        } else {
            entry.block.disk.changed.add(weight);
            self.forget_page(frame, filter);
        }
    }
}

/// The numbers of the blocks of which a range has a part.
pub(crate) fn blocks(offset: u64, length: u64) -> std::ops::Range<u64> {
    offset / PAGE..offset.saturating_add(length).div_ceil(PAGE)
}
