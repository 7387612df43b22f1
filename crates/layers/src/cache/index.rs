//! Finds the slot of a block: a table of four bytes for each entry, which is nearly full.
//!
//! An entry has the number of a slot and 14 bits of the hash of its block, the *tag*. Each block
//! has two buckets of 16 entries, and each of them follows from the other and the tag. So a search
//! reads at most two lines of the processor's cache, a removal leaves nothing behind, and an entry
//! can move to its other bucket without its block being read. If both buckets are full, one of
//! their entries moves. If none can, the insertion fails: that needs many blocks with the same
//! buckets, which only a guest that searches for them can have. Such a guest loses hits.
//!
//! An index is changed under the lock of its shard. A search without the lock may miss an entry
//! that is being moved, or find one that has just been removed: whoever searches so checks what it
//! finds.

use std::sync::atomic::{AtomicU32, Ordering};

use fathom_block::prefetch;

/// The entries of a bucket: one line of the processor's cache.
const WAYS: usize = 16;
/// The bits of a slot's number plus 1; 0 is a free entry.
const SLOT_BITS: u32 = 18;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;
/// The most slots of an index.
pub(super) const SLOTS_MAX: u32 = SLOT_MASK;

#[repr(align(64))]
#[derive(Default)]
struct Bucket([AtomicU32; WAYS]);

impl Bucket {
    #[inline]
    fn get(&self, way: usize) -> u32 {
        self.0[way].load(Ordering::Relaxed)
    }

    fn set(&self, way: usize, entry: u32) {
        self.0[way].store(entry, Ordering::Relaxed);
    }
}

/// See the module.
pub(super) struct Index {
    buckets: Box<[Bucket]>,
}

/// The position of an entry.
#[derive(Clone, Copy)]
struct Place {
    bucket: usize,
    way: usize,
}

impl Index {
    /// An index for at most `slots` slots, with numbers below [`SLOTS_MAX`].
    pub(super) fn new(slots: u32) -> Self {
        debug_assert!(slots <= SLOTS_MAX, "the numbers of slots fit an entry");
        // One entry of 16 remains free.
        let buckets = (slots as usize).div_ceil(WAYS - 1).max(1);
        let buckets = (0..buckets).map(|_| Bucket::default()).collect();
        Self { buckets }
    }

    /// The memory, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&self.buckets[..])
    }

    fn tag(hash: u64) -> u32 {
        hash as u32 >> SLOT_BITS
    }

    fn first(&self, hash: u64) -> usize {
        ((hash >> 32) * self.buckets.len() as u64 >> 32) as usize
    }

    /// The other bucket of an entry in `bucket`.
    fn other(&self, bucket: usize, tag: u32) -> usize {
        let count = self.buckets.len();
        let offset = (u64::from(tag.wrapping_mul(0x9e37_79b1)) * count as u64 >> 32) as usize;
        // The same calculation leads back.
        if offset >= bucket { offset - bucket } else { offset + count - bucket }
    }

    fn buckets_of(&self, hash: u64) -> [usize; 2] {
        let first = self.first(hash);
        [first, self.other(first, Self::tag(hash))]
    }

    /// The entries of a bucket for which `is_wanted` returns true, as bits.
    #[inline]
    fn matching(&self, bucket: usize, is_wanted: impl Fn(u32) -> bool) -> u32 {
        let bucket = &self.buckets[bucket];
        (0..WAYS).fold(0, |bits, way| bits | u32::from(is_wanted(bucket.get(way))) << way)
    }

    #[inline]
    fn place(&self, hash: u64, is_slot: impl Fn(u32) -> bool) -> Option<(Place, u32)> {
        let tag = Self::tag(hash);
        for bucket in self.buckets_of(hash) {
            let mut found = self.matching(bucket, |entry| entry >> SLOT_BITS == tag);
            while found != 0 {
                let way = found.trailing_zeros() as usize;
                found &= found - 1;
                let number = self.buckets[bucket].get(way) & SLOT_MASK;
                if number != 0 && is_slot(number - 1) {
                    return Some((Place { bucket, way }, number - 1));
                }
            }
        }
        None
    }

    /// Fetches the buckets of a hash into the processor's caches.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        for bucket in self.buckets_of(hash) {
            prefetch(&raw const self.buckets[bucket]);
        }
    }

    /// The slot with a hash for which `is_slot` returns true.
    #[inline]
    pub(super) fn find(&self, hash: u64, is_slot: impl Fn(u32) -> bool) -> Option<u32> {
        self.place(hash, is_slot).map(|(_, slot)| slot)
    }

    /// Adds a slot that is not there. Returns false if there is no place for it.
    pub(super) fn insert(&self, hash: u64, slot: u32) -> bool {
        let entry = Self::tag(hash) << SLOT_BITS | (slot + 1) & SLOT_MASK;
        let buckets = self.buckets_of(hash);
        let Some(Place { bucket, way }) = self.free(buckets).or_else(|| self.make_place(buckets))
        else {
            return false;
        };
        self.buckets[bucket].set(way, entry);
        true
    }

    /// A free entry in the emptier one of two buckets.
    fn free(&self, buckets: [usize; 2]) -> Option<Place> {
        let free = buckets.map(|bucket| self.matching(bucket, |entry| entry == 0));
        let which = usize::from(free[1].count_ones() > free[0].count_ones());
        let way = free[which].trailing_zeros() as usize;
        (free[which] != 0).then_some(Place { bucket: buckets[which], way })
    }

    /// Moves an entry of two full buckets to its other bucket. Returns the place where it was.
    fn make_place(&self, buckets: [usize; 2]) -> Option<Place> {
        for bucket in buckets {
            for way in 0..WAYS {
                let entry = self.buckets[bucket].get(way);
                let other = self.other(bucket, entry >> SLOT_BITS);
                if let Some(free) = self.free([other, other]) {
                    self.buckets[free.bucket].set(free.way, entry);
                    return Some(Place { bucket, way });
                }
            }
        }
        None
    }

    /// Removes a slot.
    pub(super) fn remove(&self, hash: u64, slot: u32) {
        if let Some((Place { bucket, way }, _)) = self.place(hash, |other| other == slot) {
            self.buckets[bucket].set(way, 0);
        }
    }

    /// The slots, in no order.
    #[cfg(test)]
    pub(super) fn slots(&self) -> impl Iterator<Item = u32> {
        let entries = self.buckets.iter().flat_map(|bucket| (0..WAYS).map(|way| bucket.get(way)));
        entries.filter(|entry| *entry != 0).map(|entry| (entry & SLOT_MASK) - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// The index holds all slots for random blocks, however often they are replaced.
    #[test]
    fn the_index_is_that_of_a_plain_model() {
        for (seed, slots) in [(1, 1), (2, 14), (3, 16), (4, 1000), (5, 20_000)] {
            let mut random = fastrand::Rng::with_seed(seed);
            let index = Index::new(slots);
            let (mut model, mut hashes) = (HashMap::new(), vec![0; slots as usize]);
            let mut refused = 0;
            for step in 0..slots as usize * 6 {
                // First all slots, then others again and again.
                let slot = if step < slots as usize { step as u32 } else { random.u32(0..slots) };
                let old = std::mem::replace(&mut hashes[slot as usize], random.u64(1..));
                if model.remove(&old) == Some(slot) {
                    index.remove(old, slot);
                    assert_eq!(index.find(old, |other| other == slot), None);
                }
                let hash = hashes[slot as usize];
                if index.insert(hash, slot) {
                    model.insert(hash, slot);
                } else {
                    refused += 1;
                }
                let any = random.usize(0..=step.min(slots as usize - 1));
                let expected = model.get(&hashes[any]).copied();
                let found = index.find(hashes[any], |slot| hashes[slot as usize] == hashes[any]);
                assert_eq!(found, expected);
            }
            assert_eq!(index.slots().count(), model.len());
            assert_eq!(refused, 0, "{slots} slots");
        }
    }

    /// Blocks that a guest has chosen for their hashes are refused, and cost others nothing.
    #[test]
    fn blocks_with_the_same_buckets_are_refused() {
        let index = Index::new(10_000);
        let hash = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        assert!((0..5000).all(|number| index.insert(hash(number), number as u32)));
        let taken = (5000..10_000).filter(|slot| index.insert(7 << 50 | 3 << 18, *slot)).count();
        assert!((1..=2 * WAYS).contains(&taken), "{taken}");
        let others = (0..5000_u64).filter(|number| {
            index.find(hash(*number), |slot| u64::from(slot) == *number).is_some()
        });
        assert_eq!(others.count(), 5000);
    }

    #[test]
    fn an_entry_has_at_most_four_bytes_and_a_third() {
        let index = Index::new(7 << 15);
        assert!(index.memory_bytes() as f64 / f64::from(7 << 15) < 4.27);
    }
}
