//! The times between a completed request and the next one: how long a quiet device stays quiet.

/// The number of classes for each power of two of µs, all of the same length.
const PARTS: usize = 8;
/// The length of the shortest classes, in nanoseconds.
const PART_NS: u64 = 1000 / PARTS as u64;
/// The number of classes of times: powers of two up to 2^23 µs, which is 8 s.
const CLASSES: usize = 24 * PARTS;
/// What a new time adds to the count of its class. It is halved several times before it is lost.
const WEIGHT: u32 = 16;
/// The sum of the counts at which they are halved, so that old times lose their weight.
const COUNT_MAX: u32 = 128 * WEIGHT;
/// The sum of the counts from which they are used.
const COUNT_MIN: u32 = 4 * WEIGHT;
/// The wait before the first times are known, in nanoseconds.
const UNKNOWN_NS: u64 = 2_000_000;
/// The greatest probability of a next request during a step of background work with which the step
/// begins, as a divisor.
const RISK: u32 = 5;

/// The distribution of the recent quiet times of a device.
#[derive(Clone, Debug)]
pub(super) struct Think {
    counts: [u32; CLASSES],
    total: u32,
}

impl Default for Think {
    fn default() -> Self {
        Self { counts: [0; CLASSES], total: 0 }
    }
}

/// The class of a time.
fn class(time_ns: u64) -> usize {
    let parts = (time_ns / PART_NS).max(PARTS as u64);
    let power = (parts / PARTS as u64).ilog2();
    let part = (parts >> power) as usize - PARTS;
    (power as usize * PARTS + part).min(CLASSES - 1)
}

/// The beginning of a class, in nanoseconds.
fn start_ns(class: usize) -> u64 {
    (((PARTS + class % PARTS) as u64) << (class / PARTS)) * PART_NS
}

impl Think {
    /// Adds a quiet time that has ended.
    pub(super) fn add(&mut self, time_ns: u64) {
        self.counts[class(time_ns)] += WEIGHT;
        self.total += WEIGHT;
        if self.total >= COUNT_MAX {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.total = self.counts.iter().sum();
        }
    }

    /// The time for which to wait before a step of `step_ns` nanoseconds, if the device has been quiet
    /// for `quiet_ns` nanoseconds; 0 if the step should begin. Of the quiet times that lasted at least
    /// as long, at most a fifth may end during the step. So a step begins in a pause that is usually
    /// long enough, and when the pause is longer than those of the recent past.
    pub(super) fn wait_ns(&self, quiet_ns: u64, step_ns: u64) -> u64 {
        if self.total < COUNT_MIN {
            return UNKNOWN_NS.saturating_sub(quiet_ns);
        }
        let now = class(quiet_ns);
        let end = class(quiet_ns.saturating_add(step_ns));
        let longer: u32 = self.counts[now..].iter().sum();
        let during: u32 = self.counts[now..=end].iter().sum();
        // A step within one class of times is compared with a part of its count only.
        let during = if now == end { during / 2 } else { during };
        if during * RISK <= longer || longer == 0 {
            return 0;
        }
        // The risk falls when a class with quiet times has passed.
        let next = (now..CLASSES).find(|class| self.counts[*class] > 0).unwrap_or(now) + 1;
        start_ns(next).saturating_sub(quiet_ns).max(1000)
    }

    /// The longest step that may begin after the device has been quiet for `quiet_ns` nanoseconds, in
    /// nanoseconds; 0 before the first times are known.
    pub(super) fn safe_ns(&self, quiet_ns: u64) -> u64 {
        if self.total < COUNT_MIN {
            return 0;
        }
        let now = class(quiet_ns);
        let longer: u32 = self.counts[now..].iter().sum();
        let mut during = 0;
        for end in now..CLASSES {
            during += self.counts[end];
            let met = if end == now { during / 2 } else { during };
            if met * RISK > longer {
                return start_ns(end).saturating_sub(quiet_ns);
            }
        }
        u64::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;
    const MS: u64 = 1_000_000;

    fn learned(times: &[u64]) -> Think {
        let mut think = Think::default();
        (0..32).for_each(|number| think.add(times[number % times.len()]));
        think
    }

    /// The time after which a step begins, if no request comes.
    fn begins_ns(think: &Think, step_ns: u64) -> u64 {
        let mut quiet_ns = 0;
        for _ in 0..100 {
            match think.wait_ns(quiet_ns, step_ns) {
                0 => return quiet_ns,
                wait_ns => quiet_ns += wait_ns,
            }
        }
        panic!("the step never begins");
    }

    #[test]
    fn classes_are_in_order_and_begin_where_they_say() {
        for index in 0..CLASSES - 1 {
            assert_eq!(class(start_ns(index)), index);
            assert_eq!(class(start_ns(index + 1) - 1), index);
        }
        assert_eq!((class(0), class(u64::MAX)), (0, CLASSES - 1));
    }

    #[test]
    fn a_step_begins_at_once_in_a_long_pause_and_after_a_short_one() {
        let reader = learned(&[4 * MS, 5 * MS]);
        assert_eq!(begins_ns(&reader, 2 * MS), 0);
        // A step that does not fit waits until the reader is later than usual.
        let waited = begins_ns(&reader, 10 * MS);
        assert!((5 * MS..=8 * MS).contains(&waited), "{waited}");
        let busy = learned(&[20 * US, 50 * US]);
        let waited = begins_ns(&busy, MS);
        assert!((50 * US..=100 * US).contains(&waited), "{waited}");
    }

    #[test]
    fn it_depends_on_the_time_already_quiet() {
        // Nine short pauses, and one long one.
        let mut times = [30 * US; 10];
        times[9] = 40 * MS;
        let reader = learned(&times);
        let waited = begins_ns(&reader, 5 * MS);
        assert!((30 * US..=100 * US).contains(&waited), "{waited}");
        // Near the end of the long pause, it waits again.
        assert!(reader.wait_ns(38 * MS, 5 * MS) > 0);
    }

    #[test]
    fn a_step_within_the_safe_time_begins_at_once() {
        let mut times = [30 * US; 10];
        times[9] = 40 * MS;
        for think in [learned(&times), learned(&[4 * MS, 5 * MS]), learned(&[9 * MS])] {
            for quiet_ns in [0, 10 * US, 50 * US, MS, 3 * MS, 8 * MS] {
                let safe_ns = think.safe_ns(quiet_ns);
                if (1..u64::MAX).contains(&safe_ns) {
                    assert_eq!(think.wait_ns(quiet_ns, safe_ns - 1), 0);
                    assert!(think.wait_ns(quiet_ns, safe_ns) > 0);
                }
            }
        }
        assert_eq!(learned(&[20 * US]).safe_ns(MS), u64::MAX);
        assert!((3 * MS..=5 * MS).contains(&learned(&[4 * MS, 5 * MS]).safe_ns(0)));
    }

    #[test]
    fn old_times_lose_their_weight() {
        let mut think = learned(&[20 * US]);
        assert!(begins_ns(&think, 2 * MS) > 0);
        (0..400).for_each(|_| think.add(50 * MS));
        assert_eq!(begins_ns(&think, 2 * MS), 0);
        assert!(begins_ns(&Think::default(), MS) == UNKNOWN_NS);
    }
}
