//! How long to look for work before sleeping.
//!
//! A wake-up costs more than a request does, so a thread whose client answers at once looks a
//! little longer before it sleeps. The time grows only while sleeps turn out to have been short,
//! and falls to nothing after the first long one: an idle connection uses no CPU, and a slow one
//! next to none. A thread that loses its processor while it looks is in somebody's way: it looks
//! no more for a while.

/// The longest look, in nanoseconds: a round trip or two of a client on the same host.
const SPIN_NS_MAX: u64 = 30_000;
/// The first look, in nanoseconds.
const SPIN_NS_MIN: u64 = 10_000;
/// Two steps of a look that are further apart than this had someone else between them, in
/// nanoseconds.
const STEP_NS_MAX: u64 = 25_000;
/// How long somebody else's work is given way to, in nanoseconds.
const YIELD_NS: u64 = 20_000_000;

/// The time to look, adapted after each idle period.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spin {
    limit_ns: u64,
    yield_until_ns: u64,
}

impl Spin {
    /// How long to look for work before sleeping, in nanoseconds; 0 is not at all.
    pub fn limit_ns(self, now_ns: u64) -> u64 {
        if now_ns < self.yield_until_ns { 0 } else { self.limit_ns }
    }

    /// Learns of a step while looking. False when the look is to end.
    pub fn step(&mut self, before_ns: u64, now_ns: u64) -> bool {
        if now_ns.saturating_sub(before_ns) > STEP_NS_MAX {
            self.yield_until_ns = now_ns + YIELD_NS;
            return false;
        }
        true
    }

    /// Learns that work came `idle_ns` after the thread ran out of it and that it slept meanwhile.
    pub fn slept(&mut self, idle_ns: u64) {
        if idle_ns > SPIN_NS_MAX {
            self.limit_ns = 0;
        } else {
            self.limit_ns = (self.limit_ns * 2).clamp(SPIN_NS_MIN, SPIN_NS_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sleeps_lengthen_the_look_and_a_long_one_ends_it() {
        let mut spin = Spin::default();
        assert_eq!(spin.limit_ns(0), 0);
        spin.slept(20_000);
        assert_eq!(spin.limit_ns(0), SPIN_NS_MIN);
        for _ in 0..9 {
            spin.slept(25_000);
        }
        assert_eq!(spin.limit_ns(0), SPIN_NS_MAX);
        spin.slept(60_000);
        assert_eq!(spin.limit_ns(0), 0);
    }

    #[test]
    fn a_look_gives_way_to_other_work() {
        let mut spin = Spin::default();
        spin.slept(20_000);
        assert!(spin.step(1000, 3000));
        assert!(!spin.step(3000, 3_000_000));
        assert_eq!(spin.limit_ns(3_000_000), 0);
        assert_eq!(spin.limit_ns(3_000_000 + YIELD_NS), SPIN_NS_MIN);
    }
}
