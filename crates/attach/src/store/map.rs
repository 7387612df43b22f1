//! Which slots of the swap file are taken.

/// The slots of a file.
#[derive(Debug, Default)]
pub(super) struct SlotMap {
    taken: Vec<u64>,
    slots: u64,
    used: u64,
    /// Where the search for a free slot begins.
    hand: u64,
}

impl SlotMap {
    /// So many slots, none of which is taken.
    pub fn new(slots: u64) -> Self {
        Self { taken: vec![0; slots.div_ceil(64) as usize], slots, ..Self::default() }
    }

    /// The slots that are taken.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Whether no slot is free.
    pub fn is_full(&self) -> bool {
        self.used == self.slots
    }

    fn has(&self, slot: u64) -> bool {
        self.taken[(slot / 64) as usize] & 1 << (slot % 64) != 0
    }

    /// Takes slots that follow each other: the first free ones from the hand on, and at most so
    /// many. Returns the first and how many.
    pub fn take(&mut self, most: u64) -> Option<(u64, u64)> {
        if self.is_full() || most == 0 {
            return None;
        }
        let first = self.next_free(self.hand).or_else(|| self.next_free(0))?;
        let mut end = first;
        while end < self.slots && end - first < most && !self.has(end) {
            self.occupy(end);
            end += 1;
        }
        self.hand = end;
        Some((first, end - first))
    }

    fn next_free(&self, from: u64) -> Option<u64> {
        let mut slot = from;
        while slot < self.slots {
            // A word that is full is passed at once.
            if slot % 64 == 0 && self.taken[(slot / 64) as usize] == u64::MAX {
                slot += 64;
            } else if self.has(slot) {
                slot += 1;
            } else {
                return Some(slot);
            }
        }
        None
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
            self.taken[(slot / 64) as usize] &= !(1 << (slot % 64));
            self.used -= 1;
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
                    let most = random.u64(..9);
                    match map.take(most) {
                        None => assert!(most == 0 || model.len() as u64 == slots),
                        Some((first, count)) => {
                            assert!((1..=most).contains(&count));
                            assert!((first..first + count).all(|slot| model.insert(slot)));
                            assert!(first + count <= slots);
                        }
                    }
                } else {
                    let slot = random.u64(..slots + 3);
                    map.give(slot);
                    model.remove(&slot);
                }
                assert_eq!(
                    (map.used(), map.is_full()),
                    (model.len() as u64, model.len() as u64 == slots)
                );
            }
            let slot = random.u64(..slots + 1);
            assert_eq!(map.occupy(slot), slot < slots && model.insert(slot));
            assert!(!map.occupy(slot) && !map.occupy(u64::MAX));
        }
    }
}
