//! How long to watch a ring before sleeping.
//!
//! A sleeping thread costs its guest a kick and a wake-up, some ten microseconds. A watching thread
//! costs a core. So a thread watches only while that has lately paid: each sleep that turned out
//! shorter than the limit makes the next watch longer, each longer one makes it shorter, down to
//! none at all. An idle disk is not watched.

/// The adaptive limit of one thread.
pub(super) struct Spin {
    limit_ns: u64,
    most_ns: u64,
}

/// The first step up from no watching at all, in nanoseconds.
const STEP_NS: u64 = 4_000;

impl Spin {
    /// Watches for `most_ns` at the longest; 0 never watches.
    pub(super) fn new(most_ns: u64) -> Self {
        Self { limit_ns: 0, most_ns }
    }

    /// How long to watch now, in nanoseconds.
    pub(super) fn limit_ns(&self) -> u64 {
        self.limit_ns
    }

    /// Work came after `idle_ns` without any; `watched` when the thread had not gone to sleep.
    pub(super) fn learn(&mut self, idle_ns: u64, watched: bool) {
        if watched {
            return;
        }
        if idle_ns > self.most_ns {
            // Too long to wait for: watching would have been for nothing.
            self.limit_ns /= 2;
            if self.limit_ns < STEP_NS {
                self.limit_ns = 0;
            }
        } else if self.limit_ns < self.most_ns {
            self.limit_ns = (self.limit_ns * 2).clamp(STEP_NS, self.most_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watching_grows_while_it_would_have_paid_and_ends_when_idle() {
        let mut spin = Spin::new(32_000);
        assert_eq!(spin.limit_ns(), 0);
        for _ in 0..8 {
            spin.learn(10_000, false);
        }
        assert_eq!(spin.limit_ns(), 32_000);
        spin.learn(31_000, true);
        assert_eq!(spin.limit_ns(), 32_000);
        for _ in 0..5 {
            spin.learn(5_000_000, false);
        }
        assert_eq!(spin.limit_ns(), 0);
        let mut never = Spin::new(0);
        never.learn(0, false);
        assert_eq!(never.limit_ns(), 0);
    }
}
