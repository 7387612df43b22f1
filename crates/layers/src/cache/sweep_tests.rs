use std::collections::BTreeSet;

use fathom_backend::Null;
use fathom_cache::{BlockAccess, Policy};
use fathom_persistence::Identity;

use super::super::format::Superblock;
use super::super::shard::Lookup;
use super::super::volume::CacheTimes;
use super::*;

/// A cache of about 600,000 slots in several shards.
fn volume() -> CacheVolume {
    let length = 600_000 << 12;
    let format = Superblock::new(Identity([1; 16]), length, 4096, 2, 1).unwrap();
    let store = Arc::new(Null::new(length));
    CacheVolume::assemble(store, format, false, Policy::None, CacheTimes::default(), Vec::new())
}

fn has(volume: &CacheVolume, key: u64) -> bool {
    let number = volume.shard_of(key);
    let found = volume.shard(number).read(key, 1, &BlockAccess::default(), false);
    match found {
        Lookup::Hit(slot) => {
            volume.unpin(number, slot);
            true
        }
        Lookup::Miss(_) => false,
    }
}

fn insert(volume: &CacheVolume, key: u64) {
    let access = BlockAccess { miss_ns: 1_000_000, ..BlockAccess::default() };
    let mut shard = volume.shard(volume.shard_of(key));
    let Lookup::Miss(number) = shard.read(key, 1, &access, true) else { return };
    let Some(room) = shard.begin_insertion(key, number, 1, || true) else { return };
    shard.end_insertion(key, number, room, Some(&[0]), &access);
}

/// Whatever a range is, its blocks leave and no others, and each step has a bound.
#[test]
fn the_blocks_of_a_range_leave_in_bounded_steps() {
    let volume = volume();
    let slots = u64::from(volume.format.slots);
    assert!(volume.shards.len() > 2);
    let mut random = fastrand::Rng::with_seed(1);
    let blocks = 1_u64 << 22;
    let key = |disk: u64, block: u64| disk << BLOCK_BITS | block;
    let mapped = || -> u64 {
        (0..volume.shards.len()).map(|number| u64::from(volume.shard(number).mapped())).sum()
    };
    let mut expected = BTreeSet::new();
    let (mut by_block, mut by_slot, mut longest) = (0, 0, 0);
    for _ in 0..40 {
        for _ in 0..2000 {
            let key = key(random.u64(1..3), random.u64(..blocks));
            insert(&volume, key);
            if has(&volume, key) {
                expected.insert(key);
            }
        }
        assert_eq!(mapped(), expected.len() as u64);
        let disk = random.u64(1..3);
        let length = 1 << random.u32(11..23);
        let first = random.u64(..blocks);
        let keys = key(disk, first)..key(disk, first + length);
        let mut sweep = Sweep::new(&volume, keys.clone(), Reason::Discard);
        let (mut is_out, mut steps) = (false, 0);
        while !is_out {
            let (before, allowed) = (mapped(), random.u64(1..4096));
            let mut work = allowed;
            is_out = sweep.advance(&volume, &mut work);
            steps += 1;
            assert!(before - mapped() <= allowed - work, "a step looks at no more than it may");
            assert!(is_out || work == 0);
        }
        let is_by_block = length * BLOCK_WORK < slots;
        assert_eq!(sweep.is_by_block, is_by_block);
        if is_by_block {
            by_block += 1;
        } else {
            by_slot += 1;
        }
        longest = longest.max(steps);
        let (gone, kept): (BTreeSet<u64>, _) = expected.iter().partition(|key| keys.contains(key));
        assert!(gone.iter().all(|key| !has(&volume, *key)));
        expected = kept;
        assert_eq!(mapped(), expected.len() as u64);
    }
    assert!(expected.iter().all(|key| has(&volume, *key)));
    assert!(by_block > 5 && by_slot > 5 && longest > 10, "{by_block} {by_slot} {longest}");
    volume.take_out(key(1, 0)..key(1, (1 << BLOCK_BITS) - 1), Reason::Discard);
    expected.retain(|key| key >> BLOCK_BITS == 2);
    assert_eq!(mapped(), expected.len() as u64);
    assert!(expected.iter().all(|key| has(&volume, *key)));
}
