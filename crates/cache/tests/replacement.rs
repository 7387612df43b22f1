//! The replacement against its contract: no slot is lost or given out twice, whatever the order of
//! calls, and the memory is bounded.

use std::collections::HashMap;

use fathom_cache::{BlockAccess, Policy, Replacement, ReplacementOptions};

const POLICIES: [Policy; 3] = [Policy::None, Policy::Sky, Policy::Auto];

fn options(policy: Policy) -> ReplacementOptions {
    ReplacementOptions { policy }
}

/// A cache with nothing but its index.
struct Cache {
    replacement: Replacement,
    index: HashMap<u64, u32>,
    keys: Vec<Option<u64>>,
    free: Vec<u32>,
}

impl Cache {
    fn new(policy: Policy, slots: u32) -> Self {
        Self {
            replacement: Replacement::new(&options(policy), slots),
            index: HashMap::new(),
            keys: vec![None; slots as usize],
            free: (0..slots).rev().collect(),
        }
    }

    /// Returns whether the request is a hit.
    fn request(&mut self, key: u64, access: &BlockAccess) -> bool {
        if let Some(slot) = self.index.get(&key) {
            self.replacement.hit(*slot, key, access);
            return true;
        }
        if self.replacement.admits(key, access) {
            let slot = self.slot();
            self.keys[slot as usize] = Some(key);
            self.index.insert(key, slot);
            self.replacement.insert(slot, key, access);
        }
        false
    }

    /// A free slot.
    fn slot(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            let slot = self.replacement.victim(None, |slot| self.keys[slot as usize].unwrap());
            let slot = slot.expect("a full cache has a victim");
            let old = self.keys[slot as usize].take().expect("a victim has a block");
            assert_eq!(self.index.remove(&old), Some(slot));
            slot
        })
    }

    /// Writes a block, whose content gets into another slot if it is in the cache. Returns whether
    /// it is.
    fn overwrite(&mut self, key: u64, access: &BlockAccess) -> bool {
        let Some(before) = self.index.remove(&key) else { return self.request(key, access) };
        let kept = self.replacement.remove(before, key).expect("the slot has a block");
        self.keys[before as usize] = None;
        let slot = self.slot();
        self.free.push(before);
        self.keys[slot as usize] = Some(key);
        self.index.insert(key, slot);
        self.replacement.insert_again(slot, key, access, kept);
        true
    }

    fn discard(&mut self, key: u64) {
        if let Some(slot) = self.index.remove(&key) {
            self.replacement.remove(slot, key);
            self.keys[slot as usize] = None;
            self.free.push(slot);
        }
    }
}

#[test]
fn no_slot_is_lost_or_given_out_twice() {
    for seed in 0..120 {
        let mut random = fastrand::Rng::with_seed(seed);
        let slots = random.u32(1..400);
        let mut cache = Cache::new(POLICIES[seed as usize % 3], slots);
        let keys = u64::from(slots) * random.u64(1..4) + 1;
        // In some runs most blocks are taken out again, in others none.
        let discards = random.u32(0..3) * 40;
        for _ in 0..20_000 {
            let access = BlockAccess {
                class: random.u8(..),
                is_write: random.bool(),
                is_sequential: random.bool(),
                miss_ns: random.u32(..) >> random.u32(0..32),
                is_continued: random.u32(0..4) == 0,
            };
            // Small keys are more frequent.
            let key = random.u64(0..keys).min(random.u64(0..keys));
            if random.u32(0..100) < discards {
                cache.discard(key);
            } else {
                cache.request(key, &access);
            }
            assert_eq!(cache.replacement.len() as usize, cache.index.len());
        }
        // Every block leaves once.
        let mut left: Vec<u32> = Vec::new();
        while let Some(slot) = cache
            .replacement
            .victim(None, |slot| cache.keys[slot as usize].expect("it has a block"))
        {
            left.push(slot);
        }
        left.sort_unstable();
        let mut held: Vec<u32> = cache.index.into_values().collect();
        held.sort_unstable();
        assert_eq!(left, held, "seed {seed}");
    }
}

#[test]
fn calls_in_a_wrong_order_do_not_panic() {
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let slots = random.u32(1..50);
        let mut replacement = Replacement::new(&options(POLICIES[seed as usize % 3]), slots);
        let mut kept = None;
        for _ in 0..20_000 {
            let access = BlockAccess { class: random.u8(..), ..BlockAccess::default() };
            let (slot, key) = (random.u32(0..slots + 3), random.u64(0..100));
            match random.u32(0..6) {
                0 => replacement.hit(slot, key, &access),
                1 => _ = replacement.admits(key, &access),
                2 => replacement.insert(slot, key, &access),
                3 => kept = replacement.remove(slot, key).or(kept),
                4 => _ = kept.map(|kept| replacement.insert_again(slot, key, &access, kept)),
                _ => _ = replacement.victim(Some(key), u64::from),
            }
            assert!(replacement.len() <= slots);
        }
    }
}

#[test]
fn a_slot_takes_eight_bytes() {
    for policy in POLICIES {
        let slots = 1 << 24;
        let replacement = Replacement::new(&options(policy), slots);
        let bytes = replacement.memory_bytes() - (1 << 16);
        assert!(bytes <= 8 * slots as usize, "{policy:?}: {:.3}", bytes as f64 / f64::from(slots));
    }
}

#[test]
fn what_is_learned_takes_at_most_one_or_two_mebibytes() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut caches = [Policy::None, Policy::Auto].map(|policy| Cache::new(policy, 100_000));
    for _ in 0..1_000_000 {
        let access = BlockAccess { miss_ns: random.u32(0..10_000_000), ..BlockAccess::default() };
        let key = random.u64(0..400_000);
        for cache in &mut caches {
            cache.request(key, &access);
        }
    }
    let [none, auto] = caches.map(|cache| cache.replacement.learned_bytes());
    assert!(none <= 1 << 20 && auto <= 2 << 20, "{none} {auto}");
}

#[test]
fn a_scan_does_not_displace_what_is_used() {
    for policy in POLICIES {
        let mut cache = Cache::new(policy, 1000);
        let access = BlockAccess { miss_ns: 1_000_000, ..BlockAccess::default() };
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            cache.request(random.u64(0..800), &access);
        }
        // A scan of ten times the cache, while the blocks are still used.
        let mut hits = 0;
        for key in 0..10_000 {
            cache.request(1_000_000 + key, &access);
            hits += u32::from(cache.request(random.u64(0..800), &access));
        }
        assert!(hits > 9_500, "{policy:?}: {hits} of 10000");
    }
}

/// A scan of ten times the cache, while a part of the blocks in use is written, and all are read.
#[test]
fn what_is_written_keeps_its_place() {
    for policy in POLICIES {
        let mut cache = Cache::new(policy, 1000);
        let access = BlockAccess { miss_ns: 1_000_000, ..BlockAccess::default() };
        let write = BlockAccess { is_write: true, ..BlockAccess::default() };
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            cache.request(random.u64(0..800), &access);
        }
        let mut hits = 0;
        for key in 0..10_000 {
            cache.request(1_000_000 + key, &access);
            let key = random.u64(0..800);
            hits += u32::from(match random.u32(0..3) {
                0 => cache.request(key, &access),
                _ => cache.overwrite(key, &write),
            });
        }
        assert!(hits > 9_500, "{policy:?}: {hits} of 10000");
    }
}

/// Writes of a known class are no uses: blocks that are only written leave.
#[test]
fn what_is_only_written_leaves() {
    let mut cache = Cache::new(Policy::Auto, 1000);
    let read = BlockAccess { class: 2, miss_ns: 1_000_000, ..BlockAccess::default() };
    let write = BlockAccess { class: 2, is_write: true, ..BlockAccess::default() };
    for key in (0..500).chain(0..500).chain(0..500) {
        cache.request(key, &read);
    }
    let mut random = fastrand::Rng::with_seed(1);
    for key in 0..50_000 {
        cache.overwrite(random.u64(0..500), &write);
        cache.request(1_000_000 + key % 900, &read);
    }
    let left = (0..500).filter(|key| cache.index.contains_key(key)).count();
    assert!(left < 250, "{left} of 500");
}
