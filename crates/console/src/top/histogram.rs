//! Latencies drawn in blocks.
use fathom_control::{Histogram, Nanoseconds};

/// The eighths of a block.
const EIGHTHS: [char; 8] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉', '█'];
/// The heights of a block.
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The latencies between two powers of two.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// The upper end.
    pub label: String,
    /// The share of the requests, of each distribution.
    pub shares: Vec<f64>,
}

/// Distributions by powers of two, at most `count` bars; what does not fit is added to the last.
pub fn bars(latencies: &[&Histogram], count: usize) -> Vec<Bar> {
    let powers: Vec<[u64; 64]> = latencies.iter().map(|latency| powers(latency)).collect();
    let used = |power: &usize| powers.iter().any(|sums| sums[*power] > 0);
    let (Some(first), Some(last)) = ((0..64).find(used), (0..64).rev().find(used)) else {
        return Vec::new();
    };
    let end = last.min(first + count.max(1) - 1);
    let share = |sums: &[u64; 64], from: usize, to: usize| {
        let total: u64 = sums.iter().sum();
        sums[from..=to].iter().sum::<u64>() as f64 / total.max(1) as f64
    };
    (first..=end)
        .map(|power| {
            let is_cut = power == end && last > end;
            let to = if is_cut { last } else { power };
            let label = if is_cut {
                format!("> {}", Nanoseconds(1 << power))
            } else {
                format!("≤ {}", Nanoseconds((2u64 << power.min(62)) - 1))
            };
            Bar { label, shares: powers.iter().map(|sums| share(sums, power, to)).collect() }
        })
        .collect()
}

/// How many requests lie between each two powers of two.
fn powers(latency: &Histogram) -> [u64; 64] {
    let mut sums = [0; 64];
    for &(index, requests) in &latency.buckets {
        sums[Histogram::value_max(index).max(1).ilog2() as usize] += requests;
    }
    sums
}

/// A horizontal bar; what is not nothing shows.
pub fn horizontal(share: f64, width: usize) -> String {
    let eighths = (share.clamp(0.0, 1.0) * width as f64 * 8.0).ceil() as usize;
    let mut text = "█".repeat(eighths / 8);
    if eighths % 8 > 0 {
        text.push(EIGHTHS[eighths % 8 - 1]);
    }
    text
}

/// A line of the latest values, scaled to the largest of them.
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
            let bars = bars(&[&latency, &Histogram::default()], count);
            assert!(bars.len() <= count);
            let sum = |index: usize| bars.iter().map(|bar| bar.shares[index]).sum::<f64>();
            assert!((sum(0) - 1.0).abs() < 1e-9 && sum(1).abs() < 1e-9, "{bars:?}");
        }
        assert_eq!(bars(&[&latency], 20)[0].label, "≤ 16.4 µs");
        assert_eq!(bars(&[&latency], 2)[1].label, "> 16.4 µs");
        assert!(bars(&[&Histogram::default()], 5).is_empty());
    }

    #[test]
    fn blocks_are_as_long_and_high_as_they_should() {
        assert_eq!(horizontal(0.5, 4), "██");
        assert_eq!(horizontal(0.001, 4), "▏");
        assert_eq!(horizontal(0.0, 4), "");
        assert_eq!(sparkline([0.0, 4.0, 8.0].into_iter(), 5), "   ▄█");
        assert_eq!(sparkline([1.0, 8.0, 8.0].into_iter(), 2), "██");
        assert_eq!(sparkline([0.0].into_iter(), 2), "  ");
    }
}
