//! The leaky bucket: limits the use of one resource.
//!
//! The rules are those of QEMU's throttling (its `docs/throttle.txt`). A request is admitted if the
//! level of the bucket is at most the size of the bucket. Its cost is then added to the level. The
//! level falls at the average rate. So the amount admitted in an interval is at most the average
//! rate times the interval, plus the size of the bucket, plus one request.

/// The number of nanoseconds in a second.
const SECOND_NS: f64 = 1e9;
/// The size of the bucket of a rate without bursts, in seconds of the rate. With a size of 0, every
/// second request of a client would wait.
const SLACK: f64 = 0.1;

/// The limits of one resource, in bytes or requests per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rate {
    /// The amount per second in the long run; 0 for no limit.
    pub average: f64,
    /// The amount per second in a burst; 0 for none.
    pub maximum: f64,
    /// The longest burst, in seconds; at least 1.
    pub burst_seconds: f64,
}

impl Rate {
    /// Whether there is a limit.
    pub fn is_limited(&self) -> bool {
        self.average > 0.0
    }

    /// The level at which requests begin to wait.
    fn size(&self) -> f64 {
        if self.maximum > 0.0 {
            self.maximum * self.burst_seconds.max(1.0)
        } else {
            self.average * SLACK
        }
    }

    /// Whether the rate of a burst needs its own bucket. The size of the first bucket limits a
    /// burst of one second.
    fn bounds_burst(&self) -> bool {
        self.maximum > 0.0 && self.burst_seconds > 1.0
    }
}

/// The state of one resource.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bucket {
    /// The admitted amount that has not yet drained at the average rate.
    level: f64,
    /// The admitted amount that has not yet drained at the rate of a burst.
    burst_level: f64,
}

impl Bucket {
    /// Drains the bucket by `elapsed_ns` nanoseconds.
    pub fn leak(&mut self, rate: &Rate, elapsed_ns: u64) {
        let seconds = elapsed_ns as f64 / SECOND_NS;
        self.level = (self.level - rate.average * seconds).max(0.0);
        if rate.bounds_burst() {
            self.burst_level = (self.burst_level - rate.maximum * seconds).max(0.0);
        } else {
            self.burst_level = 0.0;
        }
    }

    /// The time until the next request is admitted, in nanoseconds; 0 for now.
    pub fn wait_ns(&self, rate: &Rate) -> u64 {
        if !rate.is_limited() {
            return 0;
        }
        let excess = self.level - rate.size();
        if excess > 0.0 {
            return nanoseconds(excess / rate.average);
        }
        let excess = self.burst_level - rate.maximum * SLACK;
        if rate.bounds_burst() && excess > 0.0 {
            return nanoseconds(excess / rate.maximum);
        }
        0
    }

    /// Adds the cost of an admitted request.
    pub fn charge(&mut self, rate: &Rate, amount: f64) {
        if rate.is_limited() {
            self.level += amount;
            if rate.bounds_burst() {
                self.burst_level += amount;
            }
        }
    }

    /// Takes back the cost of an admitted request that is not carried out.
    pub fn give_back(&mut self, rate: &Rate, amount: f64) {
        if rate.is_limited() {
            self.level = (self.level - amount).max(0.0);
            self.burst_level = (self.burst_level - amount).max(0.0);
        }
    }

    /// Prepares the bucket for another rate. The bucket keeps its level, unless one of the rates is
    /// no limit.
    pub fn change(&mut self, from: &Rate, to: &Rate) {
        if !from.is_limited() || !to.is_limited() {
            *self = Self::default();
        }
    }
}

/// Whole nanoseconds of `seconds`, rounded up; at least 1.
fn nanoseconds(seconds: f64) -> u64 {
    ((seconds * SECOND_NS).ceil() as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// The number of requests of cost 1 that are admitted in `seconds` if one is always ready.
    fn admitted(bucket: &mut Bucket, rate: &Rate, seconds: u64) -> u64 {
        let (mut now_ns, mut count) = (0, 0);
        loop {
            let wait_ns = bucket.wait_ns(rate);
            if now_ns + wait_ns >= seconds * SECOND {
                bucket.leak(rate, seconds * SECOND - now_ns);
                return count;
            }
            bucket.leak(rate, wait_ns);
            now_ns += wait_ns;
            bucket.charge(rate, 1.0);
            count += 1;
        }
    }

    #[test]
    fn the_long_run_has_the_average() {
        let rate = Rate { average: 1000.0, ..Rate::default() };
        let mut bucket = Bucket::default();
        assert_eq!(admitted(&mut bucket, &rate, 1), 1100, "a second, and the slack");
        for _ in 0..10 {
            assert_eq!(admitted(&mut bucket, &rate, 1), 1000);
        }
    }

    #[test]
    fn a_burst_of_a_second_takes_the_maximum_at_once() {
        let rate = Rate { average: 100.0, maximum: 2000.0, burst_seconds: 1.0 };
        let mut bucket = Bucket::default();
        assert_eq!(admitted(&mut bucket, &rate, 1), 2000 + 100);
        assert_eq!(admitted(&mut bucket, &rate, 1), 100);
        // The bucket fills again at the average rate.
        bucket.leak(&rate, 30 * SECOND);
        assert_eq!(admitted(&mut bucket, &rate, 1), 2000 + 100);
    }

    #[test]
    fn a_longer_burst_has_its_own_rate() {
        // 2,000 per second for as long as 100 per second drain 60 × 2,000: 63.2 seconds.
        let rate = Rate { average: 100.0, maximum: 2000.0, burst_seconds: 60.0 };
        let mut bucket = Bucket::default();
        assert_eq!(admitted(&mut bucket, &rate, 1), 2000 + 200);
        for second in 0..61 {
            let count = admitted(&mut bucket, &rate, 1);
            assert!((1999..=2001).contains(&count), "{count} in second {second}");
        }
        admitted(&mut bucket, &rate, 2);
        assert_eq!(admitted(&mut bucket, &rate, 1), 100);
    }

    #[test]
    fn no_limit_never_waits() {
        let rate = Rate::default();
        let mut bucket = Bucket::default();
        bucket.charge(&rate, 1e12);
        assert_eq!(bucket.wait_ns(&rate), 0);
        assert_eq!(bucket, Bucket::default());
    }

    #[test]
    fn another_rate_keeps_the_level() {
        let slow = Rate { average: 10.0, ..Rate::default() };
        let fast = Rate { average: 100.0, ..Rate::default() };
        let mut bucket = Bucket::default();
        bucket.charge(&slow, 31.0);
        assert_eq!(bucket.wait_ns(&slow), 3 * SECOND);
        bucket.change(&slow, &fast);
        assert_eq!(bucket.wait_ns(&fast), 210_000_000);
        bucket.change(&fast, &Rate::default());
        bucket.change(&Rate::default(), &slow);
        assert_eq!(bucket.wait_ns(&slow), 0);
    }
}
