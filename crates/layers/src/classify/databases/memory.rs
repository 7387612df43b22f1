//! The memory of pages: what a page was when it was last transferred, so that a read's part is
//! known before its data comes.
//!
//! An entry is one word, so that the queues of a disk share the table without a lock: a queue reads
//! a whole entry or another whole entry. A full set of entries loses one of them. The key is a
//! hash, of which an entry has 29 bits; a wrong entry is a wrong hint.

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_database::{DatabasePage, DatabasePart};

/// The number of entries, 8 bytes each: for 4 GiB of pages of 4 KiB. The kernel allocates their
/// memory when they are used.
const ENTRIES: usize = 1 << 20;
/// The entries in which a page may be.
const WAYS: usize = 4;

const PART_SHIFT: u32 = 32;
const TAG_SHIFT: u32 = 35;

/// What the pages of a disk are.
pub(super) struct PageMemory {
    entries: OnceLock<Box<[AtomicU64]>>,
    /// Random, so that no guest can choose pages that displace others.
    seed: u64,
}

impl PageMemory {
    pub(super) fn new() -> Self {
        Self { entries: OnceLock::new(), seed: RandomState::new().hash_one(0) }
    }

    /// The key of page `number` of the file with this key.
    pub(super) fn key(&self, file: u64, number: u64) -> u64 {
        // Neighbours must not be in sets that are alike: one more round spreads them.
        mix(mix(mix(self.seed, file), number), self.seed)
    }

    fn set(&self, key: u64) -> Option<&[AtomicU64]> {
        let place = key as usize % (ENTRIES / WAYS) * WAYS;
        self.entries.get()?.get(place..place + WAYS)
    }

    /// The page with a key, if it is remembered.
    pub(super) fn get(&self, key: u64) -> Option<DatabasePage> {
        let words = self.set(key)?.iter().map(|entry| entry.load(Ordering::Relaxed));
        let word = words.into_iter().find(|word| is_of(*word, key))?;
        let part = DatabasePart::from_number((word >> PART_SHIFT) as u8 & 7);
        Some(DatabasePage { part, index: word as u32 })
    }

    /// Remembers the page with a key.
    pub(super) fn put(&self, key: u64, page: DatabasePage) {
        self.entries.get_or_init(|| {
            // The words are zeroes of a fresh allocation, which are not touched here.
            let words = vec![0_u64; ENTRIES];
            words.into_iter().map(AtomicU64::new).collect()
        });
        let Some(set) = self.set(key) else { return };
        let word = tag(key) << TAG_SHIFT | (page.part as u64) << PART_SHIFT | u64::from(page.index);
        let loaded = |entry: &AtomicU64| entry.load(Ordering::Relaxed);
        let place = set
            .iter()
            .position(|entry| is_of(loaded(entry), key))
            .or_else(|| set.iter().position(|entry| loaded(entry) == 0))
            .unwrap_or(tag(key) as usize % WAYS);
        // An entry that is right already is not written, so that its cache line stays shared.
        if loaded(&set[place]) != word {
            set[place].store(word, Ordering::Relaxed);
        }
    }
}

fn tag(key: u64) -> u64 {
    key >> TAG_SHIFT
}

fn is_of(word: u64, key: u64) -> bool {
    word != 0 && word >> TAG_SHIFT == tag(key)
}

/// Folds a word into a hash.
pub(super) fn mix(hash: u64, word: u64) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let product = u128::from(hash ^ word) * u128::from(FACTOR ^ hash.rotate_left(32) | 1);
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_remembered_and_replaced() {
        let memory = PageMemory::new();
        let page = |index| DatabasePage { part: DatabasePart::Index, index };
        assert_eq!(memory.get(memory.key(1, 2)), None);
        for number in 0..100_000 {
            memory.put(memory.key(1, number), page(number as u32));
        }
        let known = (0..100_000).filter(|number| {
            let found = memory.get(memory.key(1, *number));
            assert!(found.is_none_or(|found| found.part == DatabasePart::Index));
            found == Some(page(*number as u32))
        });
        assert!(known.count() > 99_900);
        memory.put(memory.key(1, 5), DatabasePage::OTHER);
        assert_eq!(memory.get(memory.key(1, 5)), Some(DatabasePage::OTHER));
        assert_eq!(memory.get(memory.key(2, 5)), None);
        for number in 0..8 * ENTRIES as u64 / WAYS as u64 {
            memory.put(memory.key(3, number), page(7));
        }
        assert_eq!(memory.entries.get().unwrap().len(), ENTRIES);
    }
}
