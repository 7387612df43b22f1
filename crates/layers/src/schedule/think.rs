//! The times between a completed request and the next one: how long a quiet device stays quiet.

/// The number of classes for each power of two of µs, all of the same length.
const PARTS: usize = 8;
/// The length of the shortest classes, in nanoseconds.
const PART_NS: u64 = 1000 / PARTS as u64;
/// The number of classes of times: powers of two up to 2^23 µs, which is 8 s.
const CLASSES: usize = 24 * PARTS;
/// What a new time adds to the count of its class. It is halved several times before it is lost.
const WEIGHT: u32 = 16;
/// The numbers of times at which the counts of the two memories are halved, so that old times lose
/// their weight. The shorter one soon shows that pauses have become shorter. The longer one has
/// times that are rare.
const RECENT: u32 = 128;
const OLDER: u32 = 1024;
/// The number of times from which they are used.
const COUNT_MIN: u32 = 4;
/// The wait before the first times are known, in nanoseconds.
const UNKNOWN_NS: u64 = 2_000_000;
/// The greatest probability of a next request during a step of background work with which the step
/// begins.
const RISK_MAX: f32 = 0.2;
/// What a moment of a pause is worth, if the moment of a process that waits is worth 1.
const VALUE: f32 = 0.25;

/// Quiet times by class, of which old ones lose their weight.
#[derive(Clone, Debug)]
struct Times {
    counts: [u32; CLASSES],
    total: u32,
    /// The sum of the counts at which they are halved.
    total_max: u32,
}

impl Times {
    fn new(most: u32) -> Self {
        Self { counts: [0; CLASSES], total: 0, total_max: most * WEIGHT }
    }

    fn add(&mut self, class: usize) {
        self.counts[class] += WEIGHT;
        self.total += WEIGHT;
        if self.total >= self.total_max {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.total = self.counts.iter().sum();
        }
    }

    /// The count of the times from class `now` on that end by class `end`, and that of all from
    /// `now` on.
    fn ending(&self, now: usize, end: usize) -> (u32, u32) {
        let during: u32 = self.counts[now..=end].iter().sum();
        let later: u32 = self.counts[end + 1..].iter().sum();
        // A step within one class of times is compared with a part of its count only.
        (if now == end { during / 2 } else { during }, during + later)
    }

    /// The longest step that may begin after the device has been quiet for `quiet_ns` nanoseconds,
    /// in nanoseconds.
    fn safe_ns(&self, quiet_ns: u64) -> u64 {
        let now = class(quiet_ns);
        if now == CLASSES - 1 {
            return u64::MAX;
        }
        let longer: u32 = self.counts[now..].iter().sum();
        let mut during = 0;
        for end in now..CLASSES {
            during += self.counts[end];
            let met = if end == now { during / 2 } else { during };
            if met as f32 > RISK_MAX * longer as f32 {
                return start_ns(end).saturating_sub(quiet_ns);
            }
        }
        u64::MAX
    }
}

/// The distribution of the recent quiet times of a device.
#[derive(Clone, Debug)]
pub(super) struct Think {
    recent: Times,
    older: Times,
}

impl Default for Think {
    fn default() -> Self {
        Self { recent: Times::new(RECENT), older: Times::new(OLDER) }
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
        let class = class(time_ns);
        self.recent.add(class);
        self.older.add(class);
    }

    fn is_known(&self) -> bool {
        self.recent.total >= COUNT_MIN * WEIGHT
    }

    /// Whether times of a class are remembered.
    fn has(&self, class: usize) -> bool {
        self.recent.counts[class] + self.older.counts[class] > 0
    }

    /// The end of the longest times that are remembered, in nanoseconds.
    fn longest_ns(&self) -> u64 {
        (0..CLASSES).rev().find(|class| self.has(*class)).map_or(0, |class| start_ns(class + 1))
    }

    /// The probability of a next request during a step of `step_ns` nanoseconds that begins after
    /// `quiet_ns` nanoseconds, of which the memory with the greater one decides. `None` if no time
    /// that is remembered lasted as long.
    fn risk(&self, quiet_ns: u64, step_ns: u64) -> Option<f32> {
        let (now, end) = (class(quiet_ns), class(quiet_ns.saturating_add(step_ns)));
        if now == CLASSES - 1 {
            // The last class has no end.
            return None;
        }
        let risks = [&self.recent, &self.older].into_iter().filter_map(|times| {
            let (during, longer) = times.ending(now, end);
            (longer > 0).then(|| during as f32 / longer as f32)
        });
        risks.reduce(f32::max)
    }

    /// Whether a step of `step_ns` nanoseconds that could begin after `quiet_ns` nanoseconds with
    /// the probability `risk` of a next request should begin a little later: if the probability
    /// falls by more than the rest of the pause is worth.
    fn is_better_later(&self, quiet_ns: u64, step_ns: u64, risk: f32) -> bool {
        let mut class = class(quiet_ns) + 1;
        loop {
            let later_ns = start_ns(class).saturating_sub(quiet_ns);
            let spent = VALUE * later_ns as f32;
            let saved = |later: f32| (risk - later) * step_ns as f32;
            if class >= CLASSES || spent >= saved(0.0) {
                return false;
            }
            if self.risk(start_ns(class), step_ns).is_some_and(|later| spent < saved(later)) {
                return true;
            }
            class += 1;
        }
    }

    /// The time for which to wait before a step of `step_ns` nanoseconds, if the device has been
    /// quiet for `quiet_ns` nanoseconds; 0 if the step should begin. Of the quiet times that lasted
    /// at least as long, at most a fifth may end during the step. So a step begins in a pause that
    /// is usually long enough. When a pause is longer than all that are remembered, a step begins
    /// if the pause has exceeded them for as long as the step takes.
    pub(super) fn wait_ns(&self, quiet_ns: u64, step_ns: u64) -> u64 {
        if !self.is_known() {
            return UNKNOWN_NS.saturating_sub(quiet_ns);
        }
        match self.risk(quiet_ns, step_ns) {
            None => {
                let begin_ns = self.longest_ns().saturating_add(step_ns);
                return begin_ns.saturating_sub(quiet_ns);
            }
            Some(0.0) => return 0,
            Some(risk) if risk <= RISK_MAX && !self.is_better_later(quiet_ns, step_ns, risk) => {
                return 0;
            }
            Some(_) => {}
        }
        // The risk falls when a class with quiet times has passed.
        let now = class(quiet_ns);
        let next = (now..CLASSES).find(|class| self.has(*class)).unwrap_or(now) + 1;
        start_ns(next).saturating_sub(quiet_ns).max(1000)
    }

    /// The longest step that may begin after the device has been quiet for `quiet_ns` nanoseconds,
    /// in nanoseconds; 0 before the first times are known.
    pub(super) fn safe_ns(&self, quiet_ns: u64) -> u64 {
        if !self.is_known() {
            return 0;
        }
        match self.recent.safe_ns(quiet_ns).min(self.older.safe_ns(quiet_ns)) {
            u64::MAX => quiet_ns.saturating_sub(self.longest_ns()),
            safe_ns => safe_ns,
        }
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
        // A step that does not fit waits until the reader is later than usual by as much.
        let waited = begins_ns(&reader, 10 * MS);
        assert!((15 * MS..=16 * MS).contains(&waited), "{waited}");
        let busy = learned(&[20 * US, 50 * US]);
        let waited = begins_ns(&busy, MS);
        assert!((1050 * US..=1100 * US).contains(&waited), "{waited}");
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
    fn a_step_waits_a_little_in_a_long_pause_if_fewer_requests_come_then() {
        // Of the times longer than 1 ms, a tenth end after 4 ms. The others are long.
        let mut times = [900 * US; 30];
        times[..10].fill(190 * MS);
        times[10] = 4 * MS;
        let mut think = Think::default();
        (0..90).for_each(|number| think.add(times[number % times.len()]));
        assert!(think.risk(MS, 20 * MS).unwrap() < RISK_MAX);
        let waited = begins_ns(&think, 20 * MS);
        assert!((4 * MS..5 * MS).contains(&waited), "{waited}");
        // A short step meets no request.
        assert_eq!(begins_ns(&think, MS / 2), 0);
    }

    #[test]
    fn times_that_are_rare_are_remembered() {
        let mut think = Think::default();
        let add = |think: &mut Think, count: usize, time_ns: u64| {
            (0..count).for_each(|_| think.add(time_ns));
        };
        for _ in 0..3 {
            add(&mut think, 6, 7 * MS);
            for _ in 0..8 {
                add(&mut think, 49, MS);
                add(&mut think, 1, 190 * MS);
            }
        }
        let waited = begins_ns(&think, 20 * MS);
        assert!((7 * MS..9 * MS).contains(&waited), "{waited}");
    }

    #[test]
    fn pauses_that_become_shorter_are_soon_known() {
        let mut think = learned(&[190 * MS]);
        (0..1000).for_each(|_| think.add(190 * MS));
        assert_eq!(begins_ns(&think, 20 * MS), 0);
        (0..40).for_each(|_| think.add(5 * MS));
        assert!(begins_ns(&think, 20 * MS) > 5 * MS);
    }

    #[test]
    fn what_begins_in_a_pause_longer_than_all_others_is_bounded() {
        let think = learned(&[190 * MS]);
        let longest_ns = think.longest_ns();
        assert!((191 * MS..200 * MS).contains(&longest_ns));
        let quiet_ns = longest_ns + 10 * MS;
        assert_eq!(think.wait_ns(quiet_ns, 10 * MS), 0);
        assert_eq!(think.wait_ns(quiet_ns, 100 * MS), 90 * MS);
        assert_eq!(think.safe_ns(quiet_ns), 10 * MS);
    }

    #[test]
    fn silences_longer_than_all_classes_are_used() {
        let think = learned(&[40_000 * MS]);
        let longest_ns = think.longest_ns();
        assert_eq!(think.wait_ns(longest_ns + 20 * MS, 20 * MS), 0);
        assert!(think.safe_ns(longest_ns + 3000 * MS) >= 3000 * MS);
        for quiet_ns in (0..60_000 * MS).step_by(7_000_011) {
            let wait_ns = think.wait_ns(quiet_ns, 20 * MS);
            assert!(wait_ns == 0 || wait_ns >= 1000, "{quiet_ns}: {wait_ns}");
            assert!(quiet_ns < longest_ns + 20 * MS || wait_ns == 0, "{quiet_ns}: {wait_ns}");
        }
        assert_eq!(begins_ns(&think, 20 * MS), 0);
    }

    #[test]
    fn a_step_within_the_safe_time_has_little_risk() {
        let mut times = [30 * US; 10];
        times[9] = 40 * MS;
        for think in [learned(&times), learned(&[4 * MS, 5 * MS]), learned(&[9 * MS])] {
            for quiet_ns in [0, 10 * US, 50 * US, MS, 3 * MS, 8 * MS] {
                let safe_ns = think.safe_ns(quiet_ns);
                if safe_ns > 0 && think.risk(quiet_ns, 0).is_some() {
                    assert!(think.risk(quiet_ns, safe_ns - 1).unwrap() <= RISK_MAX);
                    assert!(think.wait_ns(quiet_ns, safe_ns) > 0);
                }
            }
        }
        assert!((3 * MS..=5 * MS).contains(&learned(&[4 * MS, 5 * MS]).safe_ns(0)));
    }

    #[test]
    fn old_times_lose_their_weight() {
        let mut think = learned(&[20 * US]);
        assert!(begins_ns(&think, 2 * MS) > 0);
        (0..10_000).for_each(|_| think.add(50 * MS));
        assert_eq!(begins_ns(&think, 2 * MS), 0);
        assert!(begins_ns(&Think::default(), MS) == UNKNOWN_NS);
    }
}
