//! Distributions that can be added, subtracted and sent.

use serde::{Deserialize, Serialize};

use super::RESOLUTION;

/// A distribution: counts of values in buckets of a fixed, logarithmic width. See the crate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    /// Buckets that are not empty, as `[index, count]`, in ascending order of index.
    pub buckets: Vec<(u32, u64)>,
}

impl Histogram {
    /// The bucket that `value` lies in.
    pub fn index(value: u64) -> u32 {
        super::index(value)
    }

    /// The largest value that lies in bucket `index`.
    pub fn value_max(index: u32) -> u64 {
        let index = u64::from(index);
        if index < RESOLUTION {
            return index;
        }
        let shift = index / RESOLUTION - 1;
        let part = u128::from(RESOLUTION + index % RESOLUTION + 1);
        if shift > 64 {
            return u64::MAX;
        }
        u64::try_from((part << shift) - 1).unwrap_or(u64::MAX)
    }

    /// Counts `value` `count` times.
    pub fn record(&mut self, value: u64, count: u64) {
        self.add(Self::index(value), count);
    }

    pub(super) fn add(&mut self, index: u32, count: u64) {
        if count == 0 {
            return;
        }
        // Most callers add in ascending order.
        match self.buckets.last_mut() {
            Some(last) if last.0 == index => last.1 = last.1.saturating_add(count),
            Some(last) if last.0 > index => {
                match self.buckets.binary_search_by_key(&index, |bucket| bucket.0) {
                    Ok(at) => self.buckets[at].1 = self.buckets[at].1.saturating_add(count),
                    Err(at) => self.buckets.insert(at, (index, count)),
                }
            }
            Some(_) | None => self.buckets.push((index, count)),
        }
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (index, count) in &other.buckets {
            self.add(*index, *count);
        }
    }

    /// The counts since the sample `before` of the same histogram.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut earlier = before.buckets.iter().peekable();
        let mut buckets = Vec::new();
        for (index, count) in &self.buckets {
            while earlier.next_if(|bucket| bucket.0 < *index).is_some() {}
            let old = earlier.next_if(|bucket| bucket.0 == *index).map_or(0, |bucket| bucket.1);
            if *count > old {
                buckets.push((*index, count - old));
            }
        }
        Self { buckets }
    }

    /// The number of counted values.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, bucket| sum.saturating_add(bucket.1))
    }

    /// The value that `percent` (0 to 100) of all values do not exceed, up to the resolution; 0 for
    /// an empty histogram.
    pub fn percentile(&self, percent: f64) -> u64 {
        let total = self.count();
        let rank = ((percent / 100.0 * total as f64).ceil() as u64).clamp(1, total.max(1));
        let mut seen = 0_u64;
        for (index, count) in &self.buckets {
            seen = seen.saturating_add(*count);
            if seen >= rank {
                return Self::value_max(*index);
            }
        }
        0
    }

    /// The number of values that do not exceed `limit`, up to the resolution: the bucket that
    /// contains `limit` counts in full.
    pub fn count_to(&self, limit: u64) -> u64 {
        let last = Self::index(limit);
        self.buckets
            .iter()
            .take_while(|bucket| bucket.0 <= last)
            .fold(0, |sum, bucket| sum.saturating_add(bucket.1))
    }

    /// The largest value, up to the resolution; 0 for an empty histogram.
    pub fn max(&self) -> u64 {
        self.buckets.last().map_or(0, |bucket| Self::value_max(bucket.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_join_without_gap_or_overlap() {
        for index in 0..1919 {
            let last = Histogram::value_max(index);
            assert_eq!(Histogram::index(last), index);
            assert_eq!(Histogram::index(last + 1), index + 1);
        }
        assert_eq!(Histogram::value_max(1919), u64::MAX);
        assert_eq!(Histogram::index(u64::MAX), 1919);
        assert_eq!(Histogram::value_max(u32::MAX), u64::MAX);
    }

    proptest! {
        #[test]
        fn percentiles_are_within_the_resolution(
            mut values in prop::collection::vec(0_u64..1 << 40, 1..200),
            percent in 0.0_f64..100.0,
        ) {
            let mut histogram = Histogram::default();
            for value in &values {
                histogram.record(*value, 1);
            }
            values.sort_unstable();
            let rank = ((percent / 100.0 * values.len() as f64).ceil() as usize).max(1) - 1;
            let exact = values[rank];
            let found = histogram.percentile(percent);
            prop_assert!(found >= exact && found <= exact + exact / 31 + 1);
            prop_assert_eq!(histogram.count(), values.len() as u64);
        }

        #[test]
        fn a_difference_has_the_values_added_between_two_samples(
            first in prop::collection::vec(0_u64..100_000, 0..50),
            second in prop::collection::vec(0_u64..100_000, 0..50),
        ) {
            let (mut before, mut between) = (Histogram::default(), Histogram::default());
            for value in &first {
                before.record(*value, 1);
            }
            for value in &second {
                between.record(*value, 1);
            }
            let mut after = before.clone();
            after.merge(&between);
            prop_assert_eq!(after.since(&before), between);
            prop_assert_eq!(after.since(&after), Histogram::default());
        }
    }
}
