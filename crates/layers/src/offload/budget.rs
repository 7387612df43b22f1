//! How much of what passes becomes copies.

/// The bytes of a second, and the most at once.
const RATE: u64 = 64 << 20;
const BURST: u64 = 8 << 20;

/// A queue's budget of bytes. A copy costs processor time and a write of the log's volume, so that a fast disk makes
/// only some of them.
#[derive(Debug)]
pub(super) struct Budget {
    bytes: u64,
    /// Up to when it has been filled, in nanoseconds.
    at_ns: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { bytes: BURST, at_ns: 0 }
    }
}

impl Budget {
    /// Whether `bytes` are left at `now_ns`.
    pub(super) fn has(&mut self, bytes: u64, now_ns: u64) -> bool {
        // At most the time that fills it.
        let passed_ns = now_ns.saturating_sub(self.at_ns).min(1_000_000_000);
        let added = passed_ns * RATE / 1_000_000_000;
        if added > 0 {
            self.bytes = (self.bytes + added).min(BURST);
            self.at_ns = now_ns;
        }
        self.bytes >= bytes
    }

    /// Uses `bytes`.
    pub(super) fn take(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
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
