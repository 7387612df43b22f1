//! Latencies drawn with block characters.
use fathom_control::{Histogram, Nanoseconds};

/// Horizontal parts of a block, in eighths.
const EIGHTHS: [char; 8] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉', '█'];
/// Vertical parts of a block, in eighths.
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// One interval of latencies.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// The upper end of the interval.
    pub label: String,
    /// The share of the requests in the interval, for each distribution.
    pub shares: Vec<f64>,
}

/// The possible divisions of a power of two, finest first.
pub const PARTS: [u32; 3] = [4, 2, 1];

/// Distributions side by side, in at most `count` bars and with the finest division of `parts` that
/// fits. If even one bar per power of two is too many, the rest is added to the last bar.
pub fn bars(latencies: &[&Histogram], parts: &[u32], count: usize) -> Vec<Bar> {
    let count = count.max(1);
    let cut = |parts: u32| -> Vec<Vec<u64>> {
        latencies.iter().map(|latency| sums(latency, parts)).collect()
    };
    let ends = |sums: &[Vec<u64>]| {
        let used = |&slot: &usize| sums.iter().any(|sums| sums[slot] > 0);
        let slots = sums.first().map_or(0, Vec::len);
        (0..slots).find(used).zip((0..slots).rev().find(used))
    };
    let fits = |parts: &u32| ends(&cut(*parts)).is_some_and(|(first, last)| last - first < count);
    let parts = parts.iter().copied().find(fits).unwrap_or(1);
    let sums = cut(parts);
    let Some((first, last)) = ends(&sums) else { return Vec::new() };
    let end = last.min(first + count - 1);
    let share = |sums: &[u64], to: usize, slot: usize| {
        let total: u64 = sums.iter().sum();
        sums[slot..=to].iter().sum::<u64>() as f64 / total.max(1) as f64
    };
    (first..=end)
        .map(|slot| {
            let is_cut = slot == end && last > end;
            let to = if is_cut { last } else { slot };
            let label = if is_cut {
                format!("> {}", Nanoseconds(upper_end(slot - 1, parts)))
            } else {
                format!("≤ {}", Nanoseconds(upper_end(slot, parts)))
            };
            Bar { label, shares: sums.iter().map(|sums| share(sums, to, slot)).collect() }
        })
        .collect()
}

/// The number of requests in each part of each power of two.
fn sums(latency: &Histogram, parts: u32) -> Vec<u64> {
    let mut sums = vec![0; 64 * parts as usize];
    for &(index, requests) in &latency.buckets {
        sums[slot(Histogram::value_max(index).max(1), parts)] += requests;
    }
    sums
}

fn slot(value: u64, parts: u32) -> usize {
    let power = value.ilog2();
    let part = (u128::from(value) * u128::from(parts)) >> power;
    (power * parts) as usize + part as usize - parts as usize
}

/// The largest value of a slot.
fn upper_end(slot: usize, parts: u32) -> u64 {
    let (power, part) = (slot as u32 / parts, slot as u32 % parts);
    let end = (u128::from(parts + part + 1) << power).div_ceil(u128::from(parts)) - 1;
    u64::try_from(end).unwrap_or(u64::MAX)
}

/// A horizontal bar, rounded up, so that only 0 is empty.
pub fn horizontal(share: f64, width: usize) -> String {
    let eighths = (share.clamp(0.0, 1.0) * width as f64 * 8.0).ceil() as usize;
    let mut text = "█".repeat(eighths / 8);
    if eighths % 8 > 0 {
        text.push(EIGHTHS[eighths % 8 - 1]);
    }
    text
}

/// A line of the latest values, scaled to their maximum.
pub fn sparkline(values: impl DoubleEndedIterator<Item = f64> + Clone, width: usize) -> String {
    let latest: Vec<f64> = values.rev().take(width).collect();
    let largest = latest.iter().copied().fold(0.0, f64::max);
    let height = |value: f64| match (value / largest * 8.0).ceil() as usize {
        _ if largest <= 0.0 => ' ',
        0 => ' ',
        height => HEIGHTS[height.min(8) - 1],
    };
    let padding = " ".repeat(width - latest.len());
    padding + &latest.iter().rev().map(|&value| height(value)).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_in_a_bar() {
        let mut latency = Histogram::default();
        for (value, count) in [(10_000, 10), (20_000, 70), (40_000, 15), (5_000_000, 5)] {
            latency.record(value, count);
        }
        for count in [1, 2, 3, 20] {
            let bars = bars(&[&latency, &Histogram::default()], &PARTS, count);
            assert!(bars.len() <= count);
            let sum = |index: usize| bars.iter().map(|bar| bar.shares[index]).sum::<f64>();
            assert!((sum(0) - 1.0).abs() < 1e-9 && sum(1).abs() < 1e-9, "{bars:?}");
        }
        assert_eq!(bars(&[&latency], &PARTS, 10)[0].label, "≤ 16.4 µs");
        assert_eq!(bars(&[&latency], &PARTS, 2)[1].label, "> 16.4 µs");
        assert!(bars(&[&latency], &PARTS, 40).len() > 20);
        assert!(bars(&[&Histogram::default()], &PARTS, 5).is_empty());
    }

    #[test]
    fn slots_join_without_gap() {
        for parts in PARTS {
            for slot_number in 0..40 * parts as usize {
                let end = upper_end(slot_number, parts);
                if end >= 8 {
                    assert_eq!(slot(end, parts), slot_number);
                    assert_eq!(slot(end + 1, parts), slot_number + 1);
                }
            }
            assert_eq!(slot(u64::MAX, parts), 64 * parts as usize - 1);
        }
    }

    #[test]
    fn blocks_are_scaled() {
        assert_eq!(horizontal(0.5, 4), "██");
        assert_eq!(horizontal(0.001, 4), "▏");
        assert_eq!(horizontal(0.0, 4), "");
        assert_eq!(sparkline([0.0, 4.0, 8.0].into_iter(), 5), "   ▄█");
        assert_eq!(sparkline([1.0, 8.0, 8.0].into_iter(), 2), "██");
        assert_eq!(sparkline([0.0].into_iter(), 2), "  ");
    }
}
