//! Idle and busy periods of a device.

use fathom_histogram::Histogram;

/// When a device counts as idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleOptions {
    /// A device is idle while fewer requests than this are in flight.
    pub threshold: u64,
    /// How long it must have been idle before background work begins, in nanoseconds.
    pub dwell_ns: u64,
}

impl Default for IdleOptions {
    fn default() -> Self {
        Self { threshold: 1, dwell_ns: 1_000_000 }
    }
}

/// The idle and busy periods of a device. The caller reports each beginning and end of requests,
/// with times that do not decrease; earlier times count as the latest one.
#[derive(Clone, Debug)]
pub struct IdleTracker {
    threshold: u64,
    in_flight: u64,
    /// The beginning of the current period, in nanoseconds.
    since_ns: u64,
    idle_ns: u64,
    busy_ns: u64,
    periods: Histogram,
}

impl IdleTracker {
    /// The tracker of a device that is idle at `now_ns`.
    pub fn new(threshold: u64, now_ns: u64) -> Self {
        Self {
            threshold: threshold.max(1),
            in_flight: 0,
            since_ns: now_ns,
            idle_ns: 0,
            busy_ns: 0,
            periods: Histogram::default(),
        }
    }

    /// `count` requests begin. Returns the length of the idle period that ends with them, in
    /// nanoseconds.
    pub fn begin(&mut self, count: u64, now_ns: u64) -> Option<u64> {
        let was_idle = self.is_idle();
        self.in_flight = self.in_flight.saturating_add(count);
        if !was_idle || self.is_idle() {
            return None;
        }
        let length_ns = now_ns.saturating_sub(self.since_ns);
        self.idle_ns = self.idle_ns.saturating_add(length_ns);
        self.periods.record(length_ns, 1);
        self.since_ns = self.since_ns.max(now_ns);
        Some(length_ns)
    }

    /// `count` requests have ended. Returns whether an idle period begins.
    pub fn end(&mut self, count: u64, now_ns: u64) -> bool {
        let was_idle = self.is_idle();
        self.in_flight = self.in_flight.saturating_sub(count);
        if was_idle || !self.is_idle() {
            return false;
        }
        self.busy_ns = self.busy_ns.saturating_add(now_ns.saturating_sub(self.since_ns));
        self.since_ns = self.since_ns.max(now_ns);
        true
    }

    /// Whether the device is idle now.
    pub fn is_idle(&self) -> bool {
        self.in_flight < self.threshold
    }

    /// How long the device has been idle, in nanoseconds; `None` while it is busy.
    pub fn idle_for_ns(&self, now_ns: u64) -> Option<u64> {
        self.is_idle().then(|| now_ns.saturating_sub(self.since_ns))
    }

    /// The requests in flight.
    pub fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// The time of all idle periods and of all busy periods up to `now_ns`, in nanoseconds.
    pub fn times_ns(&self, now_ns: u64) -> (u64, u64) {
        let current_ns = now_ns.saturating_sub(self.since_ns);
        if self.is_idle() {
            (self.idle_ns.saturating_add(current_ns), self.busy_ns)
        } else {
            (self.idle_ns, self.busy_ns.saturating_add(current_ns))
        }
    }

    /// The lengths of the idle periods that have ended, in nanoseconds.
    pub fn periods(&self) -> &Histogram {
        &self.periods
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_are_the_times_below_and_above_the_threshold() {
        let mut tracker = IdleTracker::new(2, 100);
        assert_eq!(tracker.begin(1, 150), None);
        assert_eq!(tracker.idle_for_ns(160), Some(60));
        assert_eq!(tracker.begin(3, 200), Some(100));
        assert_eq!((tracker.idle_for_ns(230), tracker.in_flight()), (None, 4));
        assert!(!tracker.end(2, 240));
        assert_eq!(tracker.times_ns(250), (100, 50));
        assert!(tracker.end(1, 260));
        assert_eq!(tracker.idle_for_ns(265), Some(5));
        assert_eq!(tracker.times_ns(270), (110, 60));
        // A time in the past, and an end without a beginning.
        assert_eq!(tracker.begin(1, 10), Some(0));
        assert!(tracker.end(9, 5));
        assert_eq!(tracker.periods().count(), 2);
        assert_eq!(tracker.in_flight(), 0);
    }

    #[test]
    fn idle_and_busy_times_add_up() {
        for seed in 0..100 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut tracker, mut now_ns) = (IdleTracker::new(random.u64(1..4), 0), 0);
            let (mut idle_ns, mut busy_ns) = (0, 0);
            for _ in 0..200 {
                let step_ns = random.u64(..1000);
                now_ns += step_ns;
                *(if tracker.is_idle() { &mut idle_ns } else { &mut busy_ns }) += step_ns;
                let count = random.u64(..4);
                if random.bool() {
                    tracker.begin(count, now_ns);
                } else {
                    tracker.end(count, now_ns);
                }
                assert_eq!(tracker.times_ns(now_ns), (idle_ns, busy_ns), "seed {seed}");
            }
        }
    }
}
