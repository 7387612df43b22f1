//! A map from ranges of bytes to values.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges that do not overlap, each with a value.
#[derive(Debug, Clone)]
pub struct Ranges<T> {
    /// The end and the value of each range, by its start.
    map: BTreeMap<u64, (u64, T)>,
}

impl<T> Default for Ranges<T> {
    fn default() -> Self {
        Self { map: BTreeMap::new() }
    }
}

impl<T: Clone> Ranges<T> {
    /// Sets the value of a range, and replaces earlier values there.
    pub fn insert(&mut self, range: Range<u64>, value: T) {
        if range.is_empty() {
            return;
        }
        self.split(range.start);
        self.split(range.end);
        let covered: Vec<u64> = self.map.range(range.clone()).map(|(start, _)| *start).collect();
        for start in covered {
            self.map.remove(&start);
        }
        self.map.insert(range.start, (range.end, value));
    }

    /// The parts of `range` in order, each with its value or `None`.
    pub fn over(&self, range: Range<u64>) -> Vec<(Range<u64>, Option<&T>)> {
        let mut parts = Vec::new();
        let mut position = range.start;
        let first = self.map.range(..=range.start).next_back().map_or(range.start, |(key, _)| *key);
        for (&start, (end, value)) in self.map.range(first..range.end) {
            let part = start.max(range.start)..(*end).min(range.end);
            if part.is_empty() {
                continue;
            }
            if position < part.start {
                parts.push((position..part.start, None));
            }
            position = part.end;
            parts.push((part, Some(value)));
        }
        if position < range.end {
            parts.push((position..range.end, None));
        }
        parts
    }

    /// All ranges in order.
    pub fn iter(&self) -> impl Iterator<Item = (Range<u64>, &T)> {
        self.map.iter().map(|(start, (end, value))| (*start..*end, value))
    }

    /// Makes a boundary at `place`.
    fn split(&mut self, place: u64) {
        if let Some((_, (end, value))) = self.map.range_mut(..place).next_back() {
            if *end > place {
                let rest = (*end, value.clone());
                *end = place;
                self.map.insert(place, rest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Ranges;

    /// Compares with an array after many overlapping insertions.
    #[test]
    fn ranges_equal_an_array() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut ranges = Ranges::default();
        let mut model = [None; 64];
        for value in 0..2000 {
            let start = random.u64(0..64);
            let end = random.u64(start..=64);
            ranges.insert(start..end, value);
            model[start as usize..end as usize].fill(Some(value));
            let (from, to) = (random.u64(0..32), random.u64(32..64));
            let mut next = from;
            for (part, found) in ranges.over(from..to) {
                assert_eq!(part.start, next);
                assert!(part.clone().all(|place| model[place as usize] == found.copied()));
                next = part.end;
            }
            assert_eq!(next, to);
        }
    }
}
