//! Counts that one thread writes while others read.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Histogram, RESOLUTION, RESOLUTION_BITS, index};

/// The power of two that bounds the counted values: 68 s in nanoseconds. Greater values count as
/// the largest value below it.
const POWER_MAX: u32 = 36;
const VALUE_MAX: u64 = (1 << POWER_MAX) - 1;
const BUCKETS: usize = (POWER_MAX - RESOLUTION_BITS + 1) as usize * RESOLUTION as usize;

/// A distribution of values below 2³⁶; greater values count as the largest of these. One thread
/// writes it with plain loads and stores while others read, so that there are no locks and no
/// contended cache lines.
#[derive(Debug)]
pub struct Cells(Box<[AtomicU64]>);

impl Default for Cells {
    fn default() -> Self {
        Self((0..BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Cells {
    /// Counts `value` `count` times. Only one thread may call this.
    pub fn record(&self, value: u64, count: u64) {
        add(&self.0[index(value.min(VALUE_MAX)) as usize], count);
    }

    /// Adds the counts of `other`. Only the thread that records here may call this.
    pub fn merge(&self, other: &Self) {
        for (target, source) in self.0.iter().zip(&other.0) {
            add(target, source.load(Ordering::Relaxed));
        }
    }

    /// Adds the counts so far to `histogram`.
    pub fn add_to(&self, histogram: &mut Histogram) {
        for (index, cell) in (0..).zip(&self.0) {
            histogram.add(index, cell.load(Ordering::Relaxed));
        }
    }
}

fn add(cell: &AtomicU64, value: u64) {
    cell.store(cell.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_have_the_buckets_of_histograms() {
        let (cells, other) = (Cells::default(), Cells::default());
        let mut expected = Histogram::default();
        let mut value = 0;
        while value <= VALUE_MAX {
            cells.record(value, 2);
            other.record(value, 1);
            expected.record(value, 3);
            value += value / 50 + 1;
        }
        cells.merge(&other);
        let mut found = Histogram::default();
        cells.add_to(&mut found);
        assert_eq!(found, expected);
        cells.record(u64::MAX, 1);
        expected.record(VALUE_MAX, 1);
        let mut found = Histogram::default();
        cells.add_to(&mut found);
        assert_eq!(found, expected);
    }
}
