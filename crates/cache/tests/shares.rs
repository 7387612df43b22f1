//! Shares of disks, against a plain count of the blocks of each disk.

use std::collections::HashMap;

use fathom_cache::{BlockAccess, DISK_SHIFT, Policy, Replacement, ReplacementOptions, SHARES_MAX};

const POLICIES: [Policy; 3] = [Policy::None, Policy::Sky, Policy::Auto];

/// A cache that checks each victim.
struct Cache {
    replacement: Replacement,
    index: HashMap<u64, u32>,
    keys: Vec<Option<u64>>,
    free: Vec<u32>,
    /// The blocks of each disk, and its share.
    blocks: Vec<u32>,
    shares: Vec<u32>,
    evictions: u64,
}

fn key(disk: usize, block: u64) -> u64 {
    (disk as u64) << DISK_SHIFT | block
}

impl Cache {
    fn new(policy: Policy, slots: u32, disks: usize) -> Self {
        Self {
            replacement: Replacement::new(&ReplacementOptions { policy }, slots),
            index: HashMap::new(),
            keys: vec![None; slots as usize],
            free: (0..slots).collect(),
            blocks: vec![0; disks],
            shares: vec![0; disks],
            evictions: 0,
        }
    }

    fn set_share(&mut self, disk: usize, share: u32) {
        let of_disk = self.index.iter().filter(|(key, _)| **key >> DISK_SHIFT == disk as u64);
        let slots: Vec<u32> = of_disk.map(|(_, slot)| *slot).collect();
        assert!(self.replacement.set_share(disk as u64, share, slots));
        self.shares[disk] = share;
    }

    fn disk_of(&self, slot: u32) -> usize {
        (self.keys[slot as usize].expect("a victim has a block") >> DISK_SHIFT) as usize
    }

    /// Returns whether the request is a hit.
    fn request(&mut self, disk: usize, block: u64, access: &BlockAccess) -> bool {
        let key = key(disk, block);
        if let Some(slot) = self.index.get(&key) {
            self.replacement.hit(*slot, key, access);
            return true;
        }
        if !self.replacement.admits(key, access) {
            return false;
        }
        let slot = self.free.pop().or_else(|| {
            let keys = &self.keys;
            let slot = self.replacement.victim(Some(key), |slot| keys[slot as usize].unwrap());
            let Some(slot) = slot else {
                // Shares take the whole cache, and this disk has none.
                assert_eq!((self.blocks[disk], self.shares[disk]), (0, 0));
                assert_eq!(self.blocks, self.shares);
                return None;
            };
            let loser = self.disk_of(slot);
            assert!(
                self.blocks[loser] > self.shares[loser]
                    || loser == disk && self.blocks[disk] == self.shares[disk],
                "disk {loser} has {} blocks and a share of {}, and loses one to disk {disk}",
                self.blocks[loser],
                self.shares[loser]
            );
            self.evictions += 1;
            self.blocks[loser] -= 1;
            let old = self.keys[slot as usize].take().unwrap();
            assert_eq!(self.index.remove(&old), Some(slot));
            Some(slot)
        });
        let Some(slot) = slot else { return false };
        self.keys[slot as usize] = Some(key);
        self.index.insert(key, slot);
        self.blocks[disk] += 1;
        self.replacement.insert(slot, key, access);
        false
    }

    fn discard(&mut self, disk: usize, block: u64) {
        let key = key(disk, block);
        if let Some(slot) = self.index.remove(&key) {
            self.replacement.remove(slot, key);
            self.keys[slot as usize] = None;
            self.free.push(slot);
            self.blocks[disk] -= 1;
        }
    }

    fn check(&self) {
        assert_eq!(self.replacement.len(), self.blocks.iter().sum::<u32>());
        for (disk, blocks) in self.blocks.iter().enumerate() {
            let counted = self.replacement.blocks_of(disk as u64);
            assert!(counted.is_none_or(|counted| counted == *blocks), "disk {disk}");
        }
    }
}

/// No disk ever loses a block of its share to another one, whatever the others do, and also while
/// shares change.
#[test]
fn no_disk_loses_its_share() {
    let mut evictions = 0;
    for seed in 0..150 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (slots, disks) = (random.u32(1..600), random.usize(1..8));
        let mut cache = Cache::new(POLICIES[seed as usize % 3], slots, disks);
        let mut scans = vec![0; disks];
        let discards = random.u32(0..3) * 20;
        for step in 0..20_000 {
            let disk = random.usize(0..disks);
            if random.u32(0..2000) == 0 || step == 0 {
                let others: u32 = cache.shares.iter().sum::<u32>() - cache.shares[disk];
                cache.set_share(disk, random.u32(0..=slots - others));
            }
            let access = BlockAccess {
                class: random.u8(0..8),
                is_sequential: random.bool(),
                miss_ns: random.u32(..) >> random.u32(0..32),
                ..BlockAccess::default()
            };
            let block = random.u64(0..400).min(random.u64(0..400));
            match random.u32(0..100) {
                number if number < discards => cache.discard(disk, block),
                number if number < 80 => _ = cache.request(disk, block, &access),
                _ => {
                    // A part of a scan.
                    for _ in 0..random.u32(1..20) {
                        scans[disk] += 1;
                        cache.request(disk, 1000 + scans[disk], &access);
                    }
                }
            }
            if step % 64 == 0 {
                cache.check();
            }
        }
        cache.check();
        evictions += cache.evictions;
    }
    assert!(evictions > 1_000_000, "{evictions}");
}

/// A share that its disk does not use is lent, and comes back as the disk fills it.
#[test]
fn a_share_is_lent_and_comes_back() {
    for policy in POLICIES {
        let mut cache = Cache::new(policy, 1000, 2);
        let access = BlockAccess { miss_ns: 1_000_000, ..BlockAccess::default() };
        cache.set_share(0, 600);
        for block in 0..5000 {
            cache.request(1, block % 900, &access);
        }
        assert_eq!(cache.blocks, [0, 900]);
        // The neighbour stays busy: with a scan, and with the blocks that it has used so far.
        let mut random = fastrand::Rng::with_seed(1);
        let mut hits = 0;
        for round in 0..20_000 {
            cache.request(1, random.u64(0..900), &access);
            cache.request(1, 10_000 + round, &access);
            let is_hit = cache.request(0, random.u64(0..600), &access);
            hits += u32::from(round >= 10_000 && is_hit);
        }
        assert_eq!(cache.blocks[0], 600, "{policy:?}");
        assert_eq!(hits, 10_000, "{policy:?}: all of its blocks are in its share");
        cache.set_share(0, 0);
        for round in 0..20_000 {
            cache.request(1, random.u64(0..900), &access);
            cache.request(1, 100_000 + round, &access);
        }
        assert!(cache.blocks[0] < 300, "{policy:?}: {:?}", cache.blocks);
    }
}

/// Slots beyond the shares go to the disk that uses its blocks again.
#[test]
fn what_is_not_guaranteed_goes_where_it_helps() {
    for policy in POLICIES {
        let mut cache = Cache::new(policy, 1000, 3);
        cache.set_share(0, 100);
        cache.set_share(1, 100);
        let access = BlockAccess { miss_ns: 1_000_000, ..BlockAccess::default() };
        let mut random = fastrand::Rng::with_seed(1);
        for round in 0..40_000 {
            cache.request(0, round, &access);
            cache.request(1, random.u64(0..700), &access);
            cache.request(2, 5 + round, &access);
        }
        assert!(cache.blocks[1] > 650 && cache.blocks[0] >= 100, "{policy:?}: {:?}", cache.blocks);
        cache.check();
    }
}

#[test]
fn too_many_shares_are_refused() {
    let mut replacement = Replacement::new(&ReplacementOptions::default(), 1000);
    for disk in 0..SHARES_MAX as u64 {
        assert!(replacement.set_share(disk, 1, []));
        assert!(replacement.set_share(disk, 2, []));
    }
    assert!(!replacement.set_share(1000, 1, []));
    assert!(replacement.set_share(1000, 0, []), "it needs no share");
    assert_eq!((replacement.blocks_of(5), replacement.blocks_of(1000)), (Some(0), None));
}
