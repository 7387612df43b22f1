//! What a disk's requests take while the load of the device is low.

use super::window::Times;

/// Buckets for each doubling.
const PER_OCTAVE: f64 = 16.0;
const BUCKETS: usize = 48 * PER_OCTAVE as usize;
/// The number of windows until a window has half its weight.
const HALF_LIFE: f64 = 256.0;
/// The number of requests until the time of a request has half its weight.
const HALF_LIFE_REQUESTS: f64 = 2000.0;
/// The requests on an idle device from which on their time is used.
const ALONE_MIN: f64 = 8.0;
/// The additional margin of what is observed after one window; after many, it is divided by their
/// number.
const FEW: f64 = 5.0;
/// The number of windows over which the averages are taken.
const AVERAGED: f64 = 64.0;

/// Quantiles of numbers, with a resolution of 4 %, in which old numbers lose weight.
#[derive(Clone, Debug, Default)]
pub(super) struct Quantiles {
    /// Empty until there is a number.
    weights: Vec<f32>,
    /// The weight of the next number. It grows, which is the same as a decreasing one of old
    /// numbers.
    weight: f32,
}

impl Quantiles {
    pub fn add(&mut self, value: f64) {
        if self.weights.is_empty() {
            (self.weights, self.weight) = (vec![0.0; BUCKETS], 1.0);
        }
        let octaves = if value > 1.0 { value.log2() } else { 0.0 };
        let bucket = ((octaves * PER_OCTAVE) as usize).min(BUCKETS - 1);
        self.weights[bucket] += self.weight;
        self.weight *= (1.0 / HALF_LIFE).exp2() as f32;
        if self.weight > 1e6 {
            for weight in &mut self.weights {
                *weight /= self.weight;
            }
            self.weight = 1.0;
        }
    }

    /// The number that a share of all numbers does not exceed; 0 if there is none.
    pub fn at(&self, share: f64) -> f64 {
        let all: f64 = self.weights.iter().map(|weight| f64::from(*weight)).sum();
        let mut left = all * share.clamp(0.0, 1.0);
        for (bucket, weight) in self.weights.iter().enumerate().filter(|it| *it.1 > 0.0) {
            let weight = f64::from(*weight);
            if left <= weight {
                return ((bucket as f64 + left / weight) / PER_OCTAVE).exp2();
            }
            left -= weight;
        }
        let last = self.weights.iter().rposition(|weight| *weight > 0.0);
        last.map_or(0.0, |bucket| ((bucket + 1) as f64 / PER_OCTAVE).exp2())
    }
}

/// How many times its bound the 90th percentile is in a peak, whatever the deviation: if the queue
/// is always full, all requests take about equally long.
const SATURATED: f64 = 2.0;

/// What the 90th percentile and the deviation exceed in a peak, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Bound {
    pub p90_ns: f64,
    pub deviation_ns: f64,
}

impl Bound {
    /// Whether both are exceeded, or the 90th percentile by far.
    pub fn is_exceeded(&self, times: Times) -> bool {
        let p90_ns = times.p90_ns as f64;
        let is_wide = times.deviation_ns() as f64 > self.deviation_ns;
        p90_ns > self.p90_ns && (is_wide || p90_ns > SATURATED * self.p90_ns)
    }
}

/// What is known of a disk under a low load.
#[derive(Clone, Debug, Default)]
pub(super) struct Low {
    /// The requests that found the device idle, with less weight for old ones, and the sum of their
    /// times.
    alone: f64,
    alone_ns: f64,
    /// The number of windows.
    pub windows: u32,
    /// The averages over windows: of the mean time, its 90th percentile and the load of the device.
    mean_ns: f64,
    p90_ns: f64,
    pub load: f64,
    /// The 90th percentile and the deviation of each window.
    p90s: Quantiles,
    deviations: Quantiles,
}

impl Low {
    /// Requests that found the device idle have completed.
    pub fn alone(&mut self, count: u64, sum_ns: u64) {
        let kept = (-(count as f64) / HALF_LIFE_REQUESTS).exp2();
        self.alone = self.alone * kept + count as f64;
        self.alone_ns = self.alone_ns * kept + sum_ns as f64;
    }

    /// A window under a low load has ended.
    pub fn window(&mut self, times: Times, load: f64) {
        self.windows = self.windows.saturating_add(1);
        let weight = 1.0 / f64::from(self.windows).min(AVERAGED);
        self.mean_ns += (times.mean_ns as f64 - self.mean_ns) * weight;
        self.p90_ns += (times.p90_ns as f64 - self.p90_ns) * weight;
        self.load += (load - self.load) * weight;
        self.p90s.add(times.p90_ns as f64);
        self.deviations.add(times.deviation_ns() as f64);
    }

    /// The time of a request on an idle device, in nanoseconds; `None` if it is not known.
    pub fn service_ns(&self) -> Option<f64> {
        if self.alone >= ALONE_MIN {
            return Some((self.alone_ns / self.alone).max(1.0));
        }
        (self.windows > 0).then(|| self.mean_ns.max(1.0))
    }

    /// The average times under a low load.
    pub fn times(&self) -> Times {
        Times { mean_ns: self.mean_ns as u64, p90_ns: self.p90_ns as u64 }
    }

    /// The 90th percentile and the deviation that a share of the windows does not exceed, with a
    /// margin.
    pub fn bound(&self, share: f64, margin: f64) -> Bound {
        let over = 1.0 + margin;
        Bound { p90_ns: self.p90s.at(share) * over, deviation_ns: self.deviations.at(share) * over }
    }

    /// The same for what is observed. Few windows say little of a great share of all: the margin is
    /// wider then.
    pub fn bound_observed(&self, share: f64, margin: f64) -> Bound {
        self.bound(share, margin + FEW / f64::from(self.windows.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_exact_to_four_percent_and_follow_changes() {
        for seed in 0..50 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut quantiles = Quantiles::default();
            assert!(quantiles.at(0.5).abs() < 1e-9);
            let most = 2_f64.powf(2.0 + 40.0 * random.f64());
            let mut values: Vec<f64> = (0..200).map(|_| 1.0 + random.f64() * most).collect();
            for value in &values {
                quantiles.add(*value);
            }
            values.sort_by(f64::total_cmp);
            for share in [0.25, 0.5, 0.9, 1.0] {
                // Newer numbers have a little more weight: the neighbours are right, too.
                let index = (share * 199.0) as usize;
                let (less, more) =
                    (values[index.saturating_sub(30)], values[(index + 30).min(199)]);
                let found = quantiles.at(share);
                assert!(found >= less * 0.95 && found <= more * 1.05, "seed {seed}: {found}");
            }
            for _ in 0..5000 {
                quantiles.add(7.0);
            }
            assert!((quantiles.at(0.9) / 7.0 - 1.0).abs() < 0.05);
        }
        let mut extreme = Quantiles::default();
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX] {
            extreme.add(value);
        }
        assert!([0.0, 0.5, 1.0, f64::NAN].iter().all(|share| extreme.at(*share).is_finite()));
    }
}
