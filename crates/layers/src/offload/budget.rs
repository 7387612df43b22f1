//! How much of what passes becomes copies.

use crate::bucket::{Bucket, Rate};

/// The bytes of a second, and the most at once.
const RATE: u64 = 64 << 20;
const BURST: u64 = 8 << 20;

/// A queue's budget of bytes. A copy costs processor time and a write of the log's volume, so that
/// a fast disk makes only some of them.
#[derive(Debug, Default)]
pub(super) struct Budget {
    used: Bucket,
    /// Up to when it has drained, in nanoseconds.
    at_ns: u64,
}

/// The rate at which a request of `bytes` is within the budget.
fn rate(bytes: u64) -> Rate {
    let maximum = BURST.saturating_sub(bytes) as f64;
    Rate { average: RATE as f64, maximum, burst_seconds: 1.0 }
}

impl Budget {
    /// Whether `bytes` are left at `now_ns`.
    pub(super) fn has(&mut self, bytes: u64, now_ns: u64) -> bool {
        self.used.leak(&rate(0), now_ns.saturating_sub(self.at_ns));
        self.at_ns = self.at_ns.max(now_ns);
        bytes < BURST && self.used.wait_ns(&rate(bytes)) == 0
    }

    /// Uses `bytes`.
    pub(super) fn take(&mut self, bytes: u64) {
        self.used.charge(&rate(0), bytes as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_that_of_its_rate() {
        let mut budget = Budget::default();
        let (mut taken, mut now_ns) = (0, 0);
        while now_ns < 10_000_000_000 {
            if budget.has(4096, now_ns) {
                budget.take(4096);
                taken += 4096;
            }
            now_ns += 7_001;
        }
        let most = 10 * RATE + BURST;
        assert!((most - most / 100..=most).contains(&taken), "{taken} of {most}");
    }
}
