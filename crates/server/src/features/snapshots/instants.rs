//! When a rule takes its next snapshot: at the multiples of its interval since 1970, so that an
//! interval of an hour means each full hour.
//!
//! Instants at which the daemon does not run, or which the clock leaves out, are not made up for. A
//! clock that is set back does not repeat instants, but for one snapshot after a jump.

use std::time::Duration;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Instants {
    every_ns: u64,
    /// The number of the last instant.
    last: u64,
}

impl Instants {
    /// The instants after `now_ns`, in nanoseconds since 1970. The interval is not 0.
    pub(super) fn new(every_ns: u64, now_ns: u64) -> Self {
        Self { every_ns, last: now_ns / every_ns }
    }

    /// Whether an instant has come; it counts as past then.
    pub(super) fn is_due(&mut self, now_ns: u64) -> bool {
        let number = now_ns / self.every_ns;
        // A clock that was set back by less than an interval comes to the same instant again.
        let is_due = number > self.last || number + 1 < self.last;
        if is_due {
            self.last = number;
        }
        is_due
    }

    /// The time until the next instant, if the clock does not jump.
    pub(super) fn wait(&self, now_ns: u64) -> Duration {
        Duration::from_nanos(self.every_ns - now_ns % self.every_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60_000_000_000;

    #[test]
    fn instants_are_multiples_and_missed_ones_are_not_made_up_for() {
        let mut instants = Instants::new(10 * MINUTE, 25 * MINUTE);
        assert_eq!(instants.wait(25 * MINUTE), Duration::from_secs(300));
        assert!(!instants.is_due(29 * MINUTE));
        assert!(instants.is_due(30 * MINUTE) && !instants.is_due(30 * MINUTE));
        assert_eq!(instants.wait(30 * MINUTE), Duration::from_secs(600));
        // The clock jumps by two hours.
        assert!(instants.is_due(151 * MINUTE) && !instants.is_due(152 * MINUTE));
        // It is corrected by a second, and set back by an hour.
        assert!(instants.is_due(160 * MINUTE) && !instants.is_due(160 * MINUTE - 1));
        assert!(!instants.is_due(160 * MINUTE));
        assert!(instants.is_due(100 * MINUTE) && !instants.is_due(101 * MINUTE));
        assert!(instants.is_due(110 * MINUTE));
    }

    /// A run of a daemon whose clock jumps: about as many snapshots as intervals have passed, and
    /// one more for a jump.
    #[test]
    fn a_clock_that_jumps_makes_a_snapshot_for_each_jump_at_most() {
        fathom_sim::each_seed(300, |seed| {
            let mut random = fastrand::Rng::with_seed(seed);
            let every = MINUTE * random.u64(1..100);
            let mut wall = random.u64(..1 << 60);
            let mut instants = Instants::new(every, wall);
            let (mut passed, mut taken, mut jumps) = (0, 0, 0);
            for _ in 0..300 {
                let wait = instants.wait(wall).as_nanos() as u64;
                assert!((1..=every).contains(&wait), "the thread sleeps, and not too long");
                // It sleeps, or is woken early.
                let slept = if random.u8(..8) == 0 { random.u64(..wait) } else { wait };
                (wall, passed) = (wall + slept, passed + slept);
                if random.u8(..10) == 0 {
                    jumps += 1;
                    wall = match random.u8(..3) {
                        0 => random.u64(..1 << 60),
                        1 => wall.saturating_sub(random.u64(..3 * every)),
                        _ => wall + random.u64(..3 * every),
                    };
                }
                taken += u64::from(instants.is_due(wall));
            }
            let intervals = passed / every;
            assert!(taken <= intervals + jumps + 1, "{taken} in {intervals}, {jumps} jumps");
            assert!(taken + 3 * jumps + 1 >= intervals, "{taken} in {intervals}, {jumps} jumps");
        });
    }
}
