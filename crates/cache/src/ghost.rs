//! A record of blocks that are not in the cache any more, two bytes for each.
//!
//! It is a table of small sets. An entry is a fingerprint of its key and the period in which it was
//! recorded. A set that is full forgets its oldest entry, and all sets forget entries after a fixed
//! number of periods. A key that was not recorded is found with a probability of about a
//! thousandth.

/// The entries of a set. A set of 16 bytes lies within one line of the processor's cache.
const WAYS: usize = 8;
const PERIOD_BITS: u32 = 3;
const PERIODS: u64 = 1 << PERIOD_BITS;
/// The greatest age of an entry, in periods. In the period after it, the entry is removed: later it
/// would be taken for a new one.
const AGE_MAX: u64 = PERIODS - 2;

/// The record.
#[derive(Debug)]
pub struct Ghost {
    sets: Vec<[u16; WAYS]>,
    /// The number of insertions of a period, those of this period, and the periods so far.
    period: u64,
    inserted: u64,
    periods: u64,
    /// The next set from which expired entries are removed.
    swept: usize,
}

impl Ghost {
    /// Makes a record of at most the last `entries` insertions, with room for `room` of them. If
    /// there is less room, sets forget their oldest entries sooner.
    pub fn new(entries: usize, room: usize) -> Self {
        let sets = room.div_ceil(WAYS).max(1);
        let period = (entries as u64 / AGE_MAX).max(1);
        Self { sets: vec![[0; WAYS]; sets], period, inserted: 0, periods: 0, swept: 0 }
    }

    /// The set and the fingerprint of a hash.
    fn place(&self, hash: u64) -> (usize, u16) {
        let set = (u128::from(hash) * self.sets.len() as u128) >> 64;
        // The set depends on the hash's high bits. A fingerprint is not 0, which marks free
        // entries.
        let fingerprint = (hash & 0x1fff).max(1) as u16;
        (set as usize, fingerprint << PERIOD_BITS)
    }

    /// The age of an entry, in periods.
    fn age(&self, entry: u16) -> u64 {
        self.periods.wrapping_sub(u64::from(entry)) & (PERIODS - 1)
    }

    /// Records a hash.
    pub fn insert(&mut self, hash: u64) {
        let (set, fingerprint) = self.place(hash);
        let mut oldest = (0, 0);
        for (way, entry) in self.sets[set].iter().enumerate() {
            let age = if *entry == 0 { PERIODS } else { self.age(*entry) };
            if age >= oldest.1 {
                oldest = (way, age);
            }
        }
        self.sets[set][oldest.0] = fingerprint | (self.periods & (PERIODS - 1)) as u16;
        self.inserted += 1;
        self.sweep();
        if self.inserted == self.period {
            self.inserted = 0;
            self.periods += 1;
            self.swept = 0;
        }
    }

    /// Removes expired entries from the next sets, so that a period visits all of them.
    fn sweep(&mut self) {
        let due = self.inserted.saturating_mul(self.sets.len() as u64) / self.period;
        let periods = self.periods;
        let due = (due as usize).min(self.sets.len());
        for set in &mut self.sets[self.swept.min(due)..due] {
            for entry in set {
                if periods.wrapping_sub(u64::from(*entry)) & (PERIODS - 1) > AGE_MAX {
                    *entry = 0;
                }
            }
        }
        self.swept = due;
    }

    /// Whether a hash is recorded, in the present period or in those before it: `periods` of them,
    /// of which the record has seven.
    pub fn contains(&self, hash: u64, periods: u8) -> bool {
        let (set, fingerprint) = self.place(hash);
        let mask = !(PERIODS as u16 - 1);
        let end = u64::from(periods).min(AGE_MAX + 1);
        let same = |entry: &u16| entry & mask == fingerprint && self.age(*entry) < end;
        self.sets[set].iter().any(same)
    }

    /// Forgets a hash.
    pub fn remove(&mut self, hash: u64) {
        let (set, fingerprint) = self.place(hash);
        let mask = !(PERIODS as u16 - 1);
        for entry in &mut self.sets[set] {
            if *entry & mask == fingerprint {
                *entry = 0;
            }
        }
    }

    /// The memory of the record, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of_val(&self.sets[..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash;

    #[test]
    fn recent_keys_are_found_and_old_ones_forgotten() {
        for entries in [1000, 50_000_u64] {
            let mut ghost = Ghost::new(entries as usize, entries as usize * 5 / 4);
            for key in 0..10 * entries {
                ghost.insert(hash(key));
            }
            let share = |keys: std::ops::Range<u64>, periods: u8| {
                let count = keys.end - keys.start;
                let found = keys.filter(|key| ghost.contains(hash(*key), periods)).count();
                found as f64 / count as f64
            };
            let found = |keys| share(keys, 7);
            // Full sets lose some entries early.
            assert!(found(9 * entries + entries / 2..10 * entries) > 0.97);
            assert!(found(9 * entries..10 * entries) > 0.85);
            assert!(found(0..8 * entries) < 0.004);
            assert!(found(20 * entries..40 * entries) < 0.004);
            let recent = |keys| share(keys, 2);
            assert!(recent(10 * entries - entries / 8..10 * entries) > 0.97);
            assert!(recent(9 * entries..10 * entries - 2 * entries / 5) < 0.004);
            assert!(!ghost.contains(hash(10 * entries - 1), 0));
        }
    }

    #[test]
    fn a_removed_key_is_forgotten() {
        let mut ghost = Ghost::new(100, 100);
        ghost.insert(hash(7));
        assert!(ghost.contains(hash(7), 7));
        ghost.remove(hash(7));
        assert!(!ghost.contains(hash(7), 7));
    }
}
