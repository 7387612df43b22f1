//! The changes in flight of a volume. Those of one block are carried out one after the other, so
//! that the order in which batches complete does not matter.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges of blocks that do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    /// The end of each range, by its start.
    ranges: BTreeMap<u64, u64>,
}

impl Locks {
    /// Locks a range of blocks, which is not empty. Returns false if a part of it is locked.
    pub(crate) fn lock(&mut self, range: &Range<u64>) -> bool {
        let before = self.ranges.range(..range.end).next_back();
        if before.is_some_and(|(_, end)| *end > range.start) {
            return false;
        }
        self.ranges.insert(range.start, range.end);
        true
    }

    /// Unlocks a range that was locked.
    pub(crate) fn unlock(&mut self, range: &Range<u64>) {
        self.ranges.remove(&range.start);
    }

    /// Whether a change reaches behind this block.
    pub(crate) fn reach_behind(&self, block: u64) -> bool {
        self.ranges.values().next_back().is_some_and(|end| *end > block)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_overlap_exclude_each_other() {
        let mut locks = Locks::default();
        assert!(locks.lock(&(10..20)) && locks.lock(&(20..21)) && locks.lock(&(5..10)));
        for range in [10..11, 19..30, 0..6, 0..100, 20..21, 12..13] {
            assert!(!locks.lock(&range), "{range:?}");
        }
        assert!(locks.reach_behind(20) && !locks.reach_behind(21));
        locks.unlock(&(10..20));
        assert!(locks.lock(&(12..13)) && !locks.lock(&(10..20)) && locks.lock(&(13..20)));
        for range in [12..13, 13..20, 20..21, 5..10] {
            locks.unlock(&range);
        }
        assert!(locks.is_empty());
    }
}
