//! Whether requests come faster than they usually do.
//!
//! The sum of what arrives beyond the usual rate, and a margin for chance, is that of Page's test
//! (CUSUM): a little more for long counts as much as a lot for a short time. What the sum reaches
//! by chance, and in usual bursts, is learned.

use super::WINDOWS_MIN;
use super::low::Quantiles;

/// The margin, in standard deviations of the arrivals within a second.
const MARGIN: f64 = 2.0;
/// How far the limit lies above the 90th percentile of the sums, in differences between it and the
/// median. The sums have about an exponential distribution, of which 0.4 % are above.
const SPREADS: f64 = 2.0;
/// The number of windows over which the averages are taken.
const AVERAGED: f64 = 64.0;
/// The windows without a peak before the next one counts.
const CALM_MIN: u32 = 3;
/// The unit of sums in quantiles, which resolve no numbers below one.
const UNIT: f64 = 1000.0;

/// The rate of a disk's arrivals, or of a device's.
#[derive(Clone, Debug, Default)]
pub(super) struct Growth {
    /// The number of windows that were learned.
    windows: u32,
    /// The mean rate, and the variance of a second's arrivals.
    mean: f64,
    variance: f64,
    /// The arrivals beyond the usual ones.
    sum: f64,
    /// The most of it within the window.
    most: f64,
    /// The most of it in each window, and the median and the 90th percentile of these.
    sums: Quantiles,
    median: f64,
    p90: f64,
    /// The number of windows since the last peak.
    calm: u32,
    /// The rate and the most of the last window. It is learned when the next one is without a peak,
    /// too.
    last: Option<(f64, f64)>,
}

impl Growth {
    /// What the sum exceeds by chance hardly ever in any of `count` rates.
    fn limit(&self, count: usize) -> f64 {
        // An exponential distribution falls to a fifth from the median to the 90th percentile, and
        // as much with each further difference of both.
        let spreads = SPREADS + (count.max(1) as f64).ln() / 5_f64.ln();
        self.p90 + spreads * (self.p90 - self.median)
    }

    /// The deviation of a second's arrivals: not less than that of independent ones.
    fn deviation(&self) -> f64 {
        self.variance.max(self.mean).sqrt()
    }

    /// In the last `seconds` the rate was `rate`, one of `count`.
    pub fn step(&mut self, rate: f64, seconds: f64, count: usize) {
        if self.windows < WINDOWS_MIN {
            return;
        }
        let over = rate - self.mean - MARGIN * self.deviation();
        // Bounded, so that it falls below the limit soon after a peak.
        let bound = self.limit(count) + self.deviation();
        self.sum = (self.sum + over * seconds).clamp(0.0, bound);
        self.most = self.most.max(self.sum);
    }

    /// A window of `seconds` has ended. The one before it is learned if there is no peak since
    /// then.
    pub fn learn(&mut self, rate: f64, seconds: f64, is_low: bool) {
        let last = self.last.replace((rate, std::mem::take(&mut self.most)));
        self.calm = if is_low { self.calm.saturating_add(1) } else { 0 };
        let Some((rate, most)) = last.filter(|_| self.calm > CALM_MIN) else { return };
        if self.windows >= WINDOWS_MIN {
            self.sums.add(most * UNIT);
            (self.median, self.p90) = (self.sums.at(0.5) / UNIT, self.sums.at(0.9) / UNIT);
        }
        self.windows = self.windows.saturating_add(1);
        let part = 1.0 / f64::from(self.windows).min(AVERAGED);
        let error = rate - self.mean;
        self.mean += error * part;
        // The variance of a window's rate falls with its length.
        self.variance += (error * (rate - self.mean) * seconds - self.variance) * part;
    }

    /// Whether the rate, one of `count`, grows more than usual. It does not while too little is
    /// known.
    pub fn is_unusual(&self, count: usize) -> bool {
        self.windows >= 2 * WINDOWS_MIN && self.sum > self.limit(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: f64 = 0.1;
    const WINDOW_STEPS: usize = 20;

    /// A rate with independent arrivals, nearly.
    struct Rate {
        growth: Growth,
        random: fastrand::Rng,
        count: usize,
        steps: usize,
        sum: f64,
    }

    impl Rate {
        fn new(seed: u64, count: usize) -> Self {
            let random = fastrand::Rng::with_seed(seed);
            Self { growth: Growth::default(), random, count, steps: 0, sum: 0.0 }
        }

        /// Whether the rate is unusual after a step.
        fn step(&mut self, rate: f64, is_low: bool) -> bool {
            let mean = rate * STEP;
            let around: f64 = (0..3).map(|_| self.random.f64() - 0.5).sum();
            let rate = (mean + 2.0 * around * mean.sqrt()).max(0.0) / STEP;
            self.growth.step(rate, STEP, self.count);
            self.steps += 1;
            self.sum += rate;
            if self.steps % WINDOW_STEPS == 0 {
                let mean = std::mem::take(&mut self.sum) / WINDOW_STEPS as f64;
                self.growth.learn(mean, STEP * WINDOW_STEPS as f64, is_low);
            }
            self.growth.is_unusual(self.count)
        }

        /// The number of steps with an unusual rate.
        fn steps(&mut self, seconds: usize, rate: f64) -> usize {
            (0..10 * seconds).filter(|_| self.step(rate, true)).count()
        }
    }

    #[test]
    fn growth_is_found_soon_and_hardly_ever_without() {
        let mut unusual = 0;
        for seed in 0..40 {
            for rate in [100.0, 4000.0] {
                let mut disk = Rate::new(seed, 2);
                disk.steps(300, rate);
                unusual += disk.steps(600, rate);
                // Twice the rate within 4 s: that many steps until it is found.
                let ramp = |step: usize| rate * (1.0 + 0.025 * step as f64);
                let found = (0..40).find(|step| disk.step(ramp(*step), true)).unwrap();
                assert!(found < if rate > 1000.0 { 14 } else { 38 }, "seed {seed}: {found}");
            }
        }
        // Of 480,000.
        assert!(unusual < 2000, "{unusual}");
    }

    #[test]
    fn usual_bursts_are_learned() {
        for seed in 0..20 {
            let mut disk = Rate::new(seed, 1);
            let mut unusual = [0; 2];
            for second in 0..1200 {
                // One of four seconds on average.
                let rate = if disk.random.u8(..4) == 0 { 900.0 } else { 300.0 };
                unusual[second / 600] += disk.steps(1, rate);
            }
            assert!(unusual[1] < 300, "seed {seed}: {unusual:?} of 6000");
        }
    }

    #[test]
    fn a_peak_is_not_learned_and_its_sum_falls_soon() {
        let mut disk = Rate::new(1, 1);
        disk.steps(300, 1000.0);
        assert!((0..3000).filter(|_| disk.step(1500.0, false)).count() > 2900);
        let after = (0..100).filter(|_| disk.step(1000.0, true)).count();
        assert!(after < 20, "{after}");
        // What stays is usual at some time.
        disk.steps(600, 1500.0);
        assert_eq!(disk.steps(10, 1500.0), 0);
    }

    #[test]
    fn hostile_rates_are_bounded() {
        for seed in 0..100 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut growth = Growth::default();
            for _ in 0..400 {
                let rate = 2_f64.powf(200.0 * random.f64() - 100.0);
                growth.step(rate, 2_f64.powf(60.0 * random.f64() - 30.0), random.usize(..5000));
                growth.learn(rate, 2.0, random.u8(..8) > 0);
                assert!(growth.sum.is_finite() && growth.deviation().is_finite());
                let _ = growth.is_unusual(random.usize(..5000));
            }
        }
    }
}
