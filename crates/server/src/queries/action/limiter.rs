//! A limit to how often something is done.

use crate::configuration::RateLimit;

/// An allowance that grows back with the time of the changes, so that the same changes always have
/// the same done.
#[derive(Debug)]
pub(super) struct Limiter {
    limit: Option<RateLimit>,
    /// What is left, in parts of which one change takes as many as a period has nanoseconds.
    left: u128,
    since_ns: u64,
}

impl Limiter {
    /// A full allowance, or one without a limit.
    pub fn new(limit: Option<RateLimit>) -> Self {
        let mut limiter = Self { limit, left: 0, since_ns: 0 };
        limiter.left = limiter.most();
        limiter
    }

    fn most(&self) -> u128 {
        let whole = |limit: RateLimit| u128::from(limit.count) * Self::price(limit);
        self.limit.map_or(0, whole)
    }

    fn price(limit: RateLimit) -> u128 {
        limit.period.nanoseconds().into()
    }

    /// Whether it may be done at an instant. Instants do not go back.
    pub fn allows(&mut self, time_ns: u64) -> bool {
        let Some(limit) = self.limit else { return true };
        let passed_ns = time_ns.saturating_sub(self.since_ns);
        self.since_ns = self.since_ns.max(time_ns);
        let grown = u128::from(passed_ns) * u128::from(limit.count);
        self.left = self.left.saturating_add(grown).min(self.most());
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
    fn so_many_at_once_and_then_as_time_goes_on() {
        let mut limiter = Limiter::new(RateLimit::parse("3/minute"));
        let at = |limiter: &mut Limiter, seconds: u64, times: usize| {
            (0..times).filter(|_| limiter.allows(seconds * 1_000_000_000)).count()
        };
        assert_eq!(at(&mut limiter, 1000, 10), 3);
        assert_eq!(at(&mut limiter, 1019, 10), 0);
        assert_eq!(at(&mut limiter, 1020, 10), 1, "a third of a minute is over");
        assert_eq!(at(&mut limiter, 1060, 10), 2);
        assert_eq!(at(&mut limiter, 9000, 10), 3, "no more than at first");
        assert_eq!(at(&mut limiter, 8000, 1), 0, "time that goes back gives nothing");
        assert_eq!(at(&mut Limiter::new(None), 0, 1000), 1000);
        let mut limiter = Limiter::new(RateLimit::parse("1000000/second"));
        assert!(limiter.allows(u64::MAX) && limiter.allows(u64::MAX));
    }
}
