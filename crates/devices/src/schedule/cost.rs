//! How long steps take, learned from those that have ended.

/// The share of the weight that earlier steps keep when another one is added.
const KEPT: f64 = 63.0 / 64.0;
/// The least standard deviation of the steps' lengths for which the cost of a step by itself is
/// told from that of its bytes, in means.
const SPREAD_MIN: f64 = 0.1;

/// The durations of steps as a line over their bytes: a step takes a time of its own, such as the
/// seek of a hard disk, and a time for each byte.
#[derive(Clone, Debug, Default)]
pub(super) struct StepCost {
    /// The decayed sums of 1, the bytes, the durations in nanoseconds, and the products.
    count: f64,
    bytes: f64,
    duration_ns: f64,
    bytes_squared: f64,
    bytes_duration: f64,
}

impl StepCost {
    /// A step of `bytes` has taken `duration_ns`.
    pub(super) fn add(&mut self, bytes: u64, duration_ns: u64) {
        let (bytes, duration_ns) = (bytes as f64, duration_ns as f64);
        for (sum, value) in [
            (&mut self.count, 1.0),
            (&mut self.bytes, bytes),
            (&mut self.duration_ns, duration_ns),
            (&mut self.bytes_squared, bytes * bytes),
            (&mut self.bytes_duration, bytes * duration_ns),
        ] {
            *sum = *sum * KEPT + value;
        }
    }

    /// The time of `steps` steps with `bytes` in all, in nanoseconds; 0 before any has ended. If
    /// all steps so far were about equally long, it is the longer one of two: as if all of their
    /// time were that of their bytes, and none.
    pub(super) fn of(&self, steps: u64, bytes: u64) -> u64 {
        if self.bytes <= 0.0 {
            return 0;
        }
        let (steps, all_bytes) = (steps as f64, bytes as f64);
        let (bytes, duration_ns) = (self.bytes / self.count, self.duration_ns / self.count);
        let most_ns = duration_ns / bytes;
        let variance = self.bytes_squared / self.count - bytes * bytes;
        if variance <= (bytes * SPREAD_MIN).powi(2) {
            return (steps * duration_ns).max(all_bytes * most_ns) as u64;
        }
        let covariance = self.bytes_duration / self.count - bytes * duration_ns;
        let byte_ns = (covariance / variance).clamp(0.0, most_ns);
        let step_ns = (duration_ns - byte_ns * bytes).max(0.0);
        (steps * step_ns + all_bytes * byte_ns) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_long_steps_are_told_apart() {
        let mut cost = StepCost::default();
        assert_eq!(cost.of(5, 5 << 20), 0);
        let step = |bytes: u64| 8_000_000 + bytes * 10;
        for _ in 0..100 {
            cost.add(1 << 20, step(1 << 20));
        }
        // Until others have come, it is unknown whether shorter steps take less time.
        assert!(cost.of(3, 3 << 20).abs_diff(3 * step(1 << 20)) < 1000);
        assert!(cost.of(3, 3 << 12).abs_diff(3 * step(1 << 20)) < 1000);
        assert!(cost.of(3, 30 << 20).abs_diff(30 * step(1 << 20)) < 1000);
        for _ in 0..4 {
            cost.add(4096, step(4096));
        }
        for (steps, bytes) in [(1, 4096), (1000, 1000 * 4096), (7, 7 << 20), (100, 1 << 20)] {
            let (expected, learned) = (steps * 8_000_000 + bytes * 10, cost.of(steps, bytes));
            assert!(learned.abs_diff(expected) < expected / 1000, "{learned} {expected}");
        }
    }

    /// Durations that say nothing of the bytes, or the contrary, give neither a negative time nor
    /// an infinite one.
    #[test]
    fn strange_durations_give_a_time_that_is_possible() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut cost = StepCost::default();
            for _ in 0..random.usize(1..300) {
                let bytes = if random.bool() { random.u64(1..1 << 20) } else { 4096 };
                let bits = random.u32(1..40);
                let duration_ns = random.u64(0..1 << bits);
                cost.add(bytes, duration_ns);
            }
            let mean_ns = cost.duration_ns / cost.count;
            let mean = (cost.bytes / cost.count) as u64;
            assert!(
                cost.of(1, mean).abs_diff(mean_ns as u64) as f64 <= mean_ns / mean as f64 + 1.0
            );
            assert!(cost.of(u64::MAX, u64::MAX) >= cost.of(1, 1));
        }
    }
}
