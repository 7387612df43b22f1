//! A rate limit of an action.

use crate::features::queries::definition::RateLimit;

/// An allowance that regenerates with the time of the changes, so that the same changes always give
/// the same actions.
#[derive(Debug)]
pub(super) struct Limiter {
    limit: Option<RateLimit>,
    /// The remaining allowance. A change uses as many units as a period has nanoseconds.
    left: u128,
    since_ns: u64,
}

impl Limiter {
    /// A full allowance; for `None` an unlimited one.
    pub fn new(limit: Option<RateLimit>) -> Self {
        let mut limiter = Self { limit, left: 0, since_ns: 0 };
        limiter.left = limiter.full();
        limiter
    }

    fn full(&self) -> u128 {
        let whole = |limit: RateLimit| u128::from(limit.count) * Self::price(limit);
        self.limit.map_or(0, whole)
    }

    fn price(limit: RateLimit) -> u128 {
        limit.period.nanoseconds().into()
    }

    /// Uses the allowance for a change at an instant. Returns whether it was sufficient. Earlier
    /// instants than the last count as the last.
    pub fn allows(&mut self, time_ns: u64) -> bool {
        let Some(limit) = self.limit else { return true };
        let passed_ns = time_ns.saturating_sub(self.since_ns);
        self.since_ns = self.since_ns.max(time_ns);
        let grown = u128::from(passed_ns) * u128::from(limit.count);
        self.left = self.left.saturating_add(grown).min(self.full());
        match self.left.checked_sub(Self::price(limit)) {
            Some(left) => {
                self.left = left;
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_allowed_and_then_a_rate() {
        let mut limiter = Limiter::new(RateLimit::parse("3/minute"));
        let at = |limiter: &mut Limiter, seconds: u64, times: usize| {
            (0..times).filter(|_| limiter.allows(seconds * 1_000_000_000)).count()
        };
        assert_eq!(at(&mut limiter, 1000, 10), 3);
        assert_eq!(at(&mut limiter, 1019, 10), 0);
        assert_eq!(at(&mut limiter, 1020, 10), 1, "a third of a minute has passed");
        assert_eq!(at(&mut limiter, 1060, 10), 2);
        assert_eq!(at(&mut limiter, 9000, 10), 3, "at most the initial allowance");
        assert_eq!(at(&mut limiter, 8000, 1), 0, "an earlier time regenerates nothing");
        assert_eq!(at(&mut Limiter::new(None), 0, 1000), 1000);
        let mut limiter = Limiter::new(RateLimit::parse("1000000/second"));
        assert!(limiter.allows(u64::MAX) && limiter.allows(u64::MAX));
    }
}
