//! How long a step of background work keeps a device busy.

/// The part of a new time in the average, as a divisor.
const PART: f64 = 8.0;
/// The greatest caution, and by what it rises and falls. At most about a fifth of the requests
/// after a step are slow before it rises further.
const CAUTION_MAX: f64 = 64.0;
const RISE: f64 = 1.25;
const FALL: f64 = 0.95;
/// The part of the caution and of the latency that is left when quiet times were not enough.
const RELAXED: f64 = 0.75;
/// A waited-for request that takes so many times its usual time, and the time of a step besides its
/// transfer, met the effects of a step.
const SLOW: f64 = 3.0;

/// The times of recent steps of background work at a device.
///
/// A device with a buffer completes writes before it has carried them out, and serves the next
/// reads more slowly. So the time of a step is multiplied by a **caution**, which grows when a
/// waited-for request after a step took much longer than usual, and falls slowly otherwise.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// The usual time of a request besides its transfer, in nanoseconds.
    latency_ns: f64,
    /// The same of a request that has waited for the one before it, in nanoseconds.
    behind_ns: f64,
    /// The usual time for a byte, in nanoseconds.
    byte_ns: f64,
    caution: f64,
    /// The usual time of a waited-for request after a quiet time without background work, in
    /// nanoseconds.
    usual_ns: f64,
    /// The time of the last completion of a background request, in nanoseconds.
    completed_ns: u64,
    /// The time until which the steps keep the device busy, in nanoseconds.
    until_ns: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            latency_ns: 0.0,
            behind_ns: 0.0,
            byte_ns: 0.0,
            caution: 1.0,
            usual_ns: 0.0,
            completed_ns: 0,
            until_ns: 0.0,
        }
    }
}

/// The length from which on requests show the time for a byte, in bytes. The time of a shorter one
/// is mostly that of something else.
const LONG: f64 = 65_536.0;

/// Moves an average towards a new time.
fn average(usual: &mut f64, time: f64) {
    *usual += if *usual == 0.0 { time } else { (time - *usual) / PART };
}

impl Pace {
    /// The time by which a step prolongs the time for which steps keep the device busy, in
    /// nanoseconds. The device sorts requests that wait behind others, so only the first one has
    /// the latency of one alone.
    fn added_ns(&self, bytes: u64, is_adjoining: bool, now_ns: u64) -> f64 {
        let is_behind = is_adjoining || self.until_ns > now_ns as f64;
        let other_ns = if is_behind { self.behind_ns } else { self.latency_ns };
        other_ns + self.byte_ns * self.caution * bytes as f64
    }

    /// The time from `now_ns` until a step of `bytes` would no longer keep the device busy, in
    /// nanoseconds.
    pub(super) fn step_ns(&self, bytes: u64, now_ns: u64) -> u64 {
        let left_ns = (self.until_ns - now_ns as f64).max(0.0);
        (left_ns + self.added_ns(bytes, false, now_ns)) as u64
    }

    /// The most further bytes with which a step ends after at most `time_ns` nanoseconds; 0 before
    /// the first step.
    pub(super) fn bytes(&self, time_ns: u64, now_ns: u64) -> u64 {
        if self.byte_ns == 0.0 {
            return 0;
        }
        let left_ns = time_ns as f64 - (self.until_ns - now_ns as f64).max(0.0) - self.behind_ns;
        (left_ns / (self.byte_ns * self.caution)).max(0.0) as u64
    }

    /// Notes that a request of a step has begun, or one that adjoins it.
    pub(super) fn begin(&mut self, bytes: u64, is_adjoining: bool, now_ns: u64) {
        let added_ns = self.added_ns(bytes, is_adjoining, now_ns);
        self.until_ns = self.until_ns.max(now_ns as f64) + added_ns;
    }

    /// Notes the completion of a request of a step that began at `begun_ns`, and whether background
    /// requests are still in flight.
    pub(super) fn complete(&mut self, begun_ns: u64, bytes: u64, is_last: bool, now_ns: u64) {
        if self.completed_ns > begun_ns {
            // It has waited for the one before it. A discard transfers nothing.
            let time_ns = now_ns.saturating_sub(self.completed_ns) as f64;
            if bytes as f64 >= LONG {
                average(&mut self.byte_ns, (time_ns - self.behind_ns).max(0.0) / bytes as f64);
            } else {
                let other_ns = (time_ns - self.byte_ns * bytes as f64).max(0.0);
                average(&mut self.behind_ns, other_ns);
            }
        } else {
            let time_ns = now_ns.saturating_sub(begun_ns) as f64;
            if self.byte_ns == 0.0 && bytes > 0 {
                // Half of it may be the transfer, until longer steps show more.
                self.byte_ns = time_ns / 2.0 / (bytes as f64).max(LONG);
            }
            average(&mut self.latency_ns, (time_ns - self.byte_ns * bytes as f64).max(1.0));
        }
        self.completed_ns = now_ns;
        if is_last {
            let left_ns = (self.until_ns - now_ns as f64).max(0.0);
            self.until_ns = now_ns as f64 + left_ns * (1.0 - 1.0 / self.caution);
        }
    }

    /// Notes that quiet times were not enough for the background work: steps may be shorter than
    /// expected.
    pub(super) fn relax(&mut self) {
        self.latency_ns *= RELAXED;
        self.behind_ns *= RELAXED;
        self.byte_ns *= RELAXED;
        self.caution = (self.caution * RELAXED).max(1.0);
    }

    /// Notes the time of the first waited-for request after a quiet time, with background work in
    /// that time or without.
    pub(super) fn meet(&mut self, time_ns: u64, had_step: bool) {
        let time_ns = time_ns as f64;
        if !had_step {
            self.usual_ns +=
                if self.usual_ns == 0.0 { time_ns } else { (time_ns - self.usual_ns) / PART };
        } else if self.usual_ns > 0.0 {
            // The arm of a hard disk moves back over the distance that it has moved for the step.
            let is_slow = time_ns > SLOW * self.usual_ns + self.latency_ns;
            let factor = if is_slow { RISE } else { FALL };
            self.caution = (self.caution * factor).clamp(1.0, CAUTION_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;
    const MS: u64 = 1_000_000;
    const LENGTH: u64 = 256 << 10;

    /// Completes steps of four adjoining requests. Each takes `latency_ns` for its first request,
    /// and `transfer_ns` for each. Returns the time of the last completion.
    fn steps(pace: &mut Pace, count: u64, latency_ns: u64, transfer_ns: u64) -> u64 {
        let mut now_ns = MS;
        for _ in 0..count {
            let begun_ns = now_ns;
            now_ns += latency_ns;
            for number in 0..4 {
                pace.begin(LENGTH, number > 0, begun_ns);
            }
            for number in 0..4 {
                now_ns += transfer_ns;
                pace.complete(begun_ns, LENGTH, number == 3, now_ns);
            }
            now_ns += MS;
        }
        now_ns
    }

    #[test]
    fn the_time_of_a_step_is_learned() {
        let mut pace = Pace::default();
        assert_eq!(pace.step_ns(LENGTH, MS), 0);
        let now_ns = steps(&mut pace, 100, 12 * MS, 2 * MS);
        let one_ns = pace.step_ns(LENGTH, now_ns);
        assert!((13 * MS..15 * MS).contains(&one_ns), "{one_ns}");
        let four_ns = pace.step_ns(4 * LENGTH, now_ns);
        assert!((19 * MS..21 * MS).contains(&four_ns), "{four_ns}");
        let bytes = pace.bytes(8 * MS, now_ns);
        assert!((3 * LENGTH..5 * LENGTH).contains(&bytes), "{bytes}");
        assert_eq!(pace.bytes(0, now_ns), 0);
    }

    #[test]
    fn discards_and_small_writes_do_not_make_steps_long() {
        for bytes in [0, 512, 4096] {
            let mut pace = Pace::default();
            // The first requests are short, and wait for each other.
            for number in 0..40 {
                let begun_ns = (1 + number / 2 * 30) * MS;
                pace.begin(bytes, number % 2 == 1, begun_ns);
                let end_ns = begun_ns + (10 + 10 * (number % 2)) * MS;
                pace.complete(begun_ns, bytes, number % 2 == 1, end_ns);
            }
            let now_ns = 10_000 * MS;
            assert!(pace.step_ns(LENGTH, now_ns) < 1000 * MS, "{}", pace.step_ns(LENGTH, now_ns));
            (0..10).for_each(|_| pace.relax());
            assert!(pace.step_ns(LENGTH, now_ns) < 60 * MS, "{}", pace.step_ns(LENGTH, now_ns));
        }
    }

    #[test]
    fn a_step_begins_behind_those_before_it() {
        let mut pace = Pace::default();
        let now_ns = steps(&mut pace, 100, 12 * MS, 2 * MS);
        let one_ns = pace.step_ns(LENGTH, now_ns);
        pace.begin(LENGTH, false, now_ns);
        // A request behind others has no latency of its own.
        let both_ns = pace.step_ns(LENGTH, now_ns);
        assert!((one_ns + MS..one_ns + 3 * MS).contains(&both_ns), "{one_ns}, {both_ns}");
        // Its completion is known, so nothing is left.
        pace.complete(now_ns, LENGTH, true, now_ns + MS);
        assert!(pace.step_ns(LENGTH, now_ns + MS) <= one_ns);
    }

    #[test]
    fn moving_an_arm_back_does_not_lengthen_steps() {
        let mut pace = Pace::default();
        let now_ns = steps(&mut pace, 100, 12 * MS, 2 * MS);
        let honest_ns = pace.step_ns(LENGTH, now_ns);
        (0..10).for_each(|_| pace.meet(5 * MS, false));
        (0..10).for_each(|_| pace.meet(25 * MS, true));
        assert_eq!(pace.step_ns(LENGTH, now_ns), honest_ns);
        (0..10).for_each(|_| pace.meet(50 * MS, true));
        assert!(pace.step_ns(LENGTH, now_ns) > honest_ns);
    }

    #[test]
    fn slow_requests_after_steps_lengthen_them() {
        let mut pace = Pace::default();
        let now_ns = steps(&mut pace, 100, 10 * US, 80 * US);
        let honest_ns = pace.step_ns(LENGTH, now_ns);
        (0..10).for_each(|_| pace.meet(70 * US, false));
        (0..10).for_each(|_| pace.meet(150 * US, true));
        assert_eq!(pace.step_ns(LENGTH, now_ns), honest_ns);
        (0..10).for_each(|_| pace.meet(700 * US, true));
        assert!(pace.step_ns(LENGTH, now_ns) > 5 * honest_ns);
        // The device is busy for longer than until the completion.
        pace.begin(LENGTH, false, now_ns);
        pace.complete(now_ns, LENGTH, true, now_ns + 90 * US);
        assert!(pace.step_ns(0, now_ns + 90 * US) > 300 * US);
        (0..200).for_each(|_| pace.meet(70 * US, true));
        assert!(pace.step_ns(LENGTH, now_ns + MS) <= honest_ns + 10 * US);
        (0..1000).for_each(|_| pace.meet(u64::MAX, true));
        assert!(pace.step_ns(LENGTH, now_ns) < u64::MAX / 2);
        (0..100).for_each(|_| pace.relax());
        assert!(pace.step_ns(LENGTH, now_ns + MS) < honest_ns);
    }
}
