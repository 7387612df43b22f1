//! Reads without the lock, in threads, against a plain model of a disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use fathom_cache::{BlockAccess, Policy, Replacement, ReplacementOptions};
use parking_lot::Mutex;

use super::super::format::BLOCK_BITS;
use super::super::shard::{Lookup, Reason, Shard};
use super::{Blocks, UnlockedLookup};

const SLOTS: u32 = 16;
const BLOCKS: u64 = 40;
const GRANULES: usize = 4;

fn key(block: u64) -> u64 {
    1 << BLOCK_BITS | block
}

fn granules(mask: u16) -> impl Iterator<Item = usize> {
    (0..GRANULES).filter(move |granule| mask >> granule & 1 == 1)
}

/// A cache whose content is numbers: for each granule the block, and the version of the block at
/// home.
struct Model {
    shard: Mutex<Shard>,
    blocks: Arc<Blocks>,
    content: Vec<[AtomicU64; GRANULES]>,
    /// The versions of each granule at home, and those whose writes have completed.
    home: Vec<[AtomicU64; GRANULES]>,
    completed: Vec<[AtomicU64; GRANULES]>,
    hits: AtomicU32,
}

impl Model {
    fn new() -> Self {
        let options = ReplacementOptions { policy: Policy::None };
        let shard = Shard::new(SLOTS, GRANULES as u32, 8, false, Replacement::new(&options, SLOTS));
        let versions = || (0..BLOCKS).map(|_| Default::default()).collect();
        Self {
            blocks: Arc::clone(shard.blocks()),
            shard: Mutex::new(shard),
            content: (0..SLOTS).map(|_| Default::default()).collect(),
            home: versions(),
            completed: versions(),
            hits: AtomicU32::new(0),
        }
    }

    fn unpin(&self, slot: u32) {
        if self.blocks.pins.unpin(slot) {
            self.shard.lock().free_loose(slot);
        }
    }

    /// Checks the granules of a pinned slot. The writes of the versions `least` had completed
    /// before.
    fn check(&self, slot: u32, block: u64, wanted: u16, least: [u64; GRANULES]) {
        for granule in granules(wanted) {
            let found = self.content[slot as usize][granule].load(Ordering::Relaxed);
            assert_eq!(found >> 32, block, "the slot has another block");
            assert!(u64::from(found as u32) >= least[granule], "old content");
        }
        self.unpin(slot);
    }

    fn read(&self, block: u64, wanted: u16, access: &BlockAccess) {
        let completed = &self.completed[block as usize];
        let least = completed.each_ref().map(|version| version.load(Ordering::Acquire));
        match self.blocks.read(key(block), wanted, access) {
            UnlockedLookup::Hit(slot) => {
                self.hits.fetch_add(1, Ordering::Relaxed);
                self.check(slot, block, wanted, least);
            }
            UnlockedLookup::Lost(slot) => self.unpin(slot),
            UnlockedLookup::Unknown => {
                let found = self.shard.lock().read(key(block), wanted, access, true);
                match found {
                    Lookup::Hit(slot) => self.check(slot, block, wanted, least),
                    Lookup::Miss(0) => {}
                    Lookup::Miss(number) => self.insert(block, wanted, number, access),
                }
            }
        }
    }

    fn insert(&self, block: u64, mask: u16, number: u64, access: &BlockAccess) {
        let home = &self.home[block as usize];
        let versions = home.each_ref().map(|version| version.load(Ordering::Acquire));
        let room = self.shard.lock().begin_insertion(key(block), number, mask, || true);
        let Some(room) = room else { return };
        for granule in granules(room.mask) {
            let content = block << 32 | versions[granule];
            self.content[room.slot as usize][granule].store(content, Ordering::Relaxed);
        }
        let mut shard = self.shard.lock();
        shard.end_insertion(key(block), number, room, Some(&[0; GRANULES]), access);
    }

    fn write(&self, block: u64, mask: u16, access: &BlockAccess) {
        self.shard.lock().begin_change(key(block), mask, Reason::Write);
        let home = &self.home[block as usize];
        let versions: Vec<(usize, u64)> = granules(mask)
            .map(|granule| (granule, home[granule].fetch_add(1, Ordering::AcqRel) + 1))
            .collect();
        let number = self.shard.lock().end_change(key(block), Some(access));
        // The content comes into the cache later.
        for (granule, version) in versions {
            self.completed[block as usize][granule].fetch_max(version, Ordering::AcqRel);
        }
        if number != 0 {
            self.insert(block, mask, number, access);
        }
    }
}

/// Called between the two looks of a read: now and then other threads get the time to change the
/// slot.
pub(super) fn pause() {
    if fastrand::u8(..) == 0 {
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Threads read, write and insert blocks of a cache that has not room for all of them: a read
/// without the lock finds the content of its block, and none from before a write that has
/// completed.
#[test]
fn a_read_without_the_lock_finds_no_other_and_no_old_content() {
    let model = Model::new();
    let run = |seed: u64, writes: u64| {
        let mut random = fastrand::Rng::with_seed(seed);
        let access = BlockAccess::default();
        for step in 0..60_000_u64 {
            // Some blocks are read often. Later there are others.
            let scale = if random.bool() { 6 } else { BLOCKS };
            let block = (random.u64(0..scale) + step / 20_000 * 7) % BLOCKS;
            let mask = random.u16(1..1 << GRANULES);
            if random.u64(0..100) < writes {
                model.write(block, mask, &BlockAccess { is_write: true, ..access });
            } else {
                model.read(block, mask, &access);
            }
        }
    };
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let run = &run;
            scope.spawn(move || run(seed, 5 * seed));
        }
    });
    let shard = model.shard.lock();
    shard.check();
    let counts = shard.counts();
    assert!(counts.evictions > 100 && counts.overwritten > 10, "{counts:?}");
    assert!(model.hits.into_inner() > 1000);
}
