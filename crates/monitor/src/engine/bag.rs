//! Multisets.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Bound;

use super::build::Holds;

/// An ordered multiset: things in order, each with its count, which is never 0.
#[derive(Clone, Debug)]
pub(super) struct Bag<T>(BTreeMap<T, i64>);

impl<T> Default for Bag<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Ord> Bag<T> {
    /// Changes the count of a thing. Returns the count before and after.
    pub(super) fn add(&mut self, thing: T, count: i64) -> (i64, i64) {
        match self.0.entry(thing) {
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

    /// The count of a thing.
    pub(super) fn count(&self, thing: &T) -> i64 {
        self.0.get(thing).copied().unwrap_or(0)
    }

    /// The last thing before `thing`, and its count.
    pub(super) fn before(&self, thing: &T) -> Option<(&T, i64)> {
        self.0.range(..thing).next_back().map(|(thing, &count)| (thing, count))
    }

    /// The first thing after `thing`, and its count.
    pub(super) fn behind(&self, thing: &T) -> Option<(&T, i64)> {
        let behind = (Bound::Excluded(thing), Bound::Unbounded);
        self.0.range(behind).next().map(|(thing, &count)| (thing, count))
    }

    /// The last thing that is not greater than `thing`.
    pub(super) fn last_up_to(&self, thing: &T) -> Option<&T> {
        self.0.range(..=thing).next_back().map(|(thing, _)| thing)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&T, i64)> {
        self.0.iter().map(|(thing, &count)| (thing, count))
    }
}

impl<T> Holds for Bag<T> {
    fn rows(&self) -> usize {
        self.0.len()
    }
}
