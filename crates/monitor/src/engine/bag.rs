//! Multisets.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Bound;

use super::build::Stateful;

/// An ordered multiset: each item has a count, which is never 0.
#[derive(Clone, Debug)]
pub(super) struct Bag<T>(BTreeMap<T, i64>);

impl<T> Default for Bag<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Ord> Bag<T> {
    /// Changes the count of an item. Returns the counts before and after.
    pub(super) fn add(&mut self, item: T, count: i64) -> (i64, i64) {
        match self.0.entry(item) {
            Entry::Vacant(vacant) => {
                if count != 0 {
                    vacant.insert(count);
                }
                (0, count)
            }
            Entry::Occupied(mut occupied) => {
                let before = *occupied.get();
                let after = before + count;
                if after == 0 {
                    occupied.remove();
                } else {
                    occupied.insert(after);
                }
                (before, after)
            }
        }
    }

    /// The count of an item.
    pub(super) fn count(&self, item: &T) -> i64 {
        self.0.get(item).copied().unwrap_or(0)
    }

    /// The last item before `item`, and its count.
    pub(super) fn before(&self, item: &T) -> Option<(&T, i64)> {
        self.0.range(..item).next_back().map(|(item, &count)| (item, count))
    }

    /// The first item after `item`, and its count.
    pub(super) fn after(&self, item: &T) -> Option<(&T, i64)> {
        let after = (Bound::Excluded(item), Bound::Unbounded);
        self.0.range(after).next().map(|(item, &count)| (item, count))
    }

    /// The last item that is not greater than `item`.
    pub(super) fn last_up_to(&self, item: &T) -> Option<&T> {
        self.0.range(..=item).next_back().map(|(item, _)| item)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&T, i64)> {
        self.0.iter().map(|(item, &count)| (item, count))
    }
}

impl<T> Stateful for Bag<T> {
    fn rows(&self) -> usize {
        self.0.len()
    }
}
