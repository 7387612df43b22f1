//! Which slots of the swap file are taken.

/// The words that one search looks at beyond the first free slot. A file with many slots and few
/// free ones must not keep faults waiting.
const WORDS_MAX: usize = 4096;

/// The slots of a file. The lowest are taken first, so that the file takes as much space as it has
/// ever needed at a time.
#[derive(Debug, Default)]
pub(super) struct SlotMap {
    taken: Vec<u64>,
    slots: u64,
    used: u64,
    /// No word below it has a free slot.
    first: usize,
}

impl SlotMap {
    /// So many slots, none of which is taken.
    pub fn new(slots: u64) -> Self {
        let mut taken = vec![0; slots.div_ceil(64) as usize];
        if let Some(last) = taken.last_mut().filter(|_| slots % 64 > 0) {
            // What is not there.
            *last = u64::MAX << (slots % 64);
        }
        Self { taken, slots, ..Self::default() }
    }

    /// The slots that are taken.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Whether no slot is free.
    pub fn is_full(&self) -> bool {
        self.used == self.slots
    }

    /// Takes free slots, in ascending order: at most so many, and at least one if there is one.
    pub fn take(&mut self, most: usize) -> Vec<u64> {
        let mut found = Vec::new();
        let mut looked = 0;
        let mut at = self.first;
        while found.len() < most && at < self.taken.len() && looked < WORDS_MAX {
            let free = !self.taken[at];
            if free == 0 {
                // Before anything is found, there is nothing below.
                if found.is_empty() {
                    self.first = at + 1;
                } else {
                    looked += 1;
                }
                at += 1;
                continue;
            }
            let bit = free.trailing_zeros();
            self.taken[at] |= 1 << bit;
            self.used += 1;
            found.push(at as u64 * 64 + u64::from(bit));
        }
        found
    }

    fn has(&self, slot: u64) -> bool {
        self.taken[(slot / 64) as usize] & 1 << (slot % 64) != 0
    }

    /// Takes a slot. Returns false if it cannot be: there is none, or it is taken.
    pub fn occupy(&mut self, slot: u64) -> bool {
        if slot >= self.slots || self.has(slot) {
            return false;
        }
        self.taken[(slot / 64) as usize] |= 1 << (slot % 64);
        self.used += 1;
        true
    }

    /// Gives a slot back, if it is taken.
    pub fn give(&mut self, slot: u64) {
        if slot < self.slots && self.has(slot) {
            let word = (slot / 64) as usize;
            self.taken[word] &= !(1 << (slot % 64));
            self.used -= 1;
            self.first = self.first.min(word);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn slots_are_taken_once_and_found_when_there_are_any() {
        let mut random = fastrand::Rng::with_seed(8);
        for slots in [0, 1, 63, 64, 65, 200] {
            let mut map = SlotMap::new(slots);
            let mut model: HashSet<u64> = HashSet::new();
            for _ in 0..4000 {
                if random.bool() {
                    let most = random.usize(..9);
                    let found = map.take(most);
                    let free = slots as usize - model.len();
                    assert_eq!(found.len(), most.min(free));
                    // The lowest ones.
                    let lowest = (0..slots).filter(|slot| !model.contains(slot)).take(most);
                    assert!(found.iter().copied().eq(lowest.collect::<Vec<_>>()));
                    assert!(found.into_iter().all(|slot| model.insert(slot)));
                } else {
                    let slot = random.u64(..slots + 3);
                    map.give(slot);
                    model.remove(&slot);
                }
                let used = model.len() as u64;
                assert_eq!((map.used(), map.is_full()), (used, used == slots));
            }
            let slot = random.u64(..slots + 1);
            assert_eq!(map.occupy(slot), slot < slots && model.insert(slot));
            assert!(!map.occupy(slot) && !map.occupy(u64::MAX));
        }
    }

    #[test]
    fn a_search_ends_early_when_it_has_something() {
        let slots = 64 * 3 * WORDS_MAX as u64;
        let mut map = SlotMap::new(slots);
        (0..slots).for_each(|slot| assert!(map.occupy(slot)));
        assert_eq!(map.take(3), [] as [u64; 0]);
        for slot in [7, slots - 1] {
            map.give(slot);
        }
        assert_eq!(map.take(3), [7]);
        assert_eq!(map.take(3), [slots - 1]);
    }
}
