//! How long to look for work before sleeping.
//!
//! A wake-up costs more than a request does, so a thread whose client answers at once looks a
//! little longer before it sleeps. The time grows only while sleeps turn out to have been short,
//! and falls to nothing after the first long one: an idle connection uses no CPU, and a slow one
//! next to none. A thread that loses its processor while it looks is in somebody's way: it looks
//! no more for a while.
//!
//! A thread that sleeps measures its own wake-up too, so work that comes soon seems to come late.
//! After sleeps that were not much longer than a look, one look is tried now and then: more rarely
//! each time that it is in vain.

/// The first look, in nanoseconds.
const SPIN_NS_MIN: u64 = 10_000;
/// Sleeps up to so many times the longest look may be short ones with a slow wake-up.
const REACH: u64 = 4;
/// The most sleeps between two looks that are tried.
const TRIAL_INTERVAL_MAX: u32 = 64;
/// Two steps of a look that are further apart than this had someone else between them, in
/// nanoseconds.
const STEP_NS_MAX: u64 = 25_000;
/// How long somebody else's work is given way to at first, in nanoseconds.
const YIELD_NS_MIN: u64 = 20_000_000;
/// How long it is given way to when it is still there each time, in nanoseconds.
const YIELD_NS_MAX: u64 = 1_280_000_000;

/// The time to look, adapted after each idle period.
#[derive(Clone, Copy, Debug)]
pub struct Spin {
    /// The longest look; 0 never looks.
    most_ns: u64,
    /// Sleeps up to this may have been short ones, in nanoseconds.
    reach_ns: u64,
    limit_ns: u64,
    /// How many sleeps that may have been short go before the next look that is tried, and how many
    /// there were.
    trial_interval: u32,
    sleeps: u32,
    yield_until_ns: u64,
    /// How long the last way was given, in nanoseconds.
    yield_ns: u64,
    /// The count at the last long step.
    preemptions: u64,
}

impl Spin {
    /// Looks for `most_ns` at the longest; 0 never looks.
    pub fn new(most_ns: u64) -> Self {
        Self {
            most_ns,
            reach_ns: most_ns * REACH,
            limit_ns: 0,
            trial_interval: 1,
            sleeps: 0,
            yield_until_ns: 0,
            yield_ns: 0,
            preemptions: 0,
        }
    }

    /// As [`new`](Self::new), for what takes as long as it does: no look is tried after a sleep that
    /// was too long.
    pub fn without_trials(most_ns: u64) -> Self {
        Self { reach_ns: 0, ..Self::new(most_ns) }
    }

    /// How long to look for work before sleeping, in nanoseconds; 0 is not at all.
    pub fn limit_ns(self, now_ns: u64) -> u64 {
        if now_ns < self.yield_until_ns { 0 } else { self.limit_ns }
    }

    /// Learns of a step while looking. False when the look is to end. `preemptions` counts how
    /// often the thread has lost its processor to another; it is asked only after a long step,
    /// which may also be the hypervisor's doing, or an interrupt's.
    pub fn step(&mut self, before_ns: u64, now_ns: u64, preemptions: impl FnOnce() -> u64) -> bool {
        if now_ns.saturating_sub(before_ns) > STEP_NS_MAX {
            let count = preemptions();
            let preempted = count != self.preemptions;
            self.preemptions = count;
            if !preempted {
                return true;
            }
            let again = now_ns.saturating_sub(self.yield_until_ns) < 4 * self.yield_ns;
            let yield_ns = if again { self.yield_ns * 2 } else { YIELD_NS_MIN };
            self.yield_ns = yield_ns.min(YIELD_NS_MAX);
            self.yield_until_ns = now_ns + self.yield_ns;
            return false;
        }
        true
    }

    /// Learns that work came `idle_ns` after the thread ran out of it and that it slept meanwhile.
    pub fn slept(&mut self, idle_ns: u64) {
        if idle_ns <= self.most_ns {
            self.limit_ns = (self.limit_ns * 2).max(SPIN_NS_MIN).min(self.most_ns);
            return;
        }
        self.limit_ns = 0;
        if idle_ns > self.reach_ns {
            return;
        }
        self.sleeps += 1;
        if self.sleeps >= self.trial_interval {
            self.sleeps = 0;
            self.trial_interval = (self.trial_interval * 2).min(TRIAL_INTERVAL_MAX);
            self.limit_ns = self.most_ns;
        }
    }

    /// Learns that work came while the thread looked.
    pub fn found(&mut self) {
        self.trial_interval = 1;
        self.sleeps = 0;
    }
}

/// How often this thread has lost its processor to another.
pub fn preemptions() -> u64 {
    // SAFETY: an all-zero rusage is a valid value of that plain structure.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure lives through the call.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nivcsw as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST_NS: u64 = 30_000;

    #[test]
    fn short_sleeps_lengthen_the_look_and_a_long_one_ends_it() {
        let mut spin = Spin::new(MOST_NS);
        assert_eq!(spin.limit_ns(0), 0);
        spin.slept(20_000);
        assert_eq!(spin.limit_ns(0), SPIN_NS_MIN);
        for _ in 0..9 {
            spin.slept(25_000);
        }
        assert_eq!(spin.limit_ns(0), MOST_NS);
        spin.slept(MOST_NS * REACH + 1);
        assert_eq!(spin.limit_ns(0), 0);
        let mut never = Spin::new(0);
        never.slept(0);
        assert_eq!(never.limit_ns(0), 0);
    }

    #[test]
    fn a_look_is_tried_more_and_more_rarely_where_the_wake_up_may_be_what_is_slow() {
        let mut spin = Spin::new(MOST_NS);
        let mut looks = 0;
        for _ in 0..10_000 {
            spin.slept(2 * MOST_NS);
            looks += u32::from(spin.limit_ns(0) > 0);
        }
        assert!((100..200).contains(&looks), "{looks}");
        // A look that is not in vain is kept up.
        while spin.limit_ns(0) == 0 {
            spin.slept(2 * MOST_NS);
        }
        spin.found();
        assert_eq!(spin.limit_ns(0), MOST_NS);
        spin.slept(2 * MOST_NS);
        assert_eq!(spin.limit_ns(0), MOST_NS, "one in vain among many that are not");
        spin.slept(1_000_000_000);
        assert_eq!(spin.limit_ns(0), 0);
        for _ in 0..1000 {
            spin.slept(MOST_NS * REACH + 1);
            assert_eq!(spin.limit_ns(0), 0, "nothing is tried for a client that is slow");
        }
    }

    #[test]
    fn a_look_gives_way_to_other_work() {
        let mut spin = Spin::new(MOST_NS);
        spin.slept(20_000);
        assert!(spin.step(1000, 3000, || unreachable!("a short step asks nobody")));
        let mut now_ns = 3_000_000;
        // A long step without a preemption is nobody's work.
        assert!(spin.step(3000, now_ns, || 0));
        let mut count = 1;
        assert!(!spin.step(3000, now_ns, || count));
        assert_eq!(spin.limit_ns(now_ns), 0);
        now_ns += YIELD_NS_MIN;
        assert_eq!(spin.limit_ns(now_ns), SPIN_NS_MIN);
        // Still in the way: longer and longer, up to a bound.
        for _ in 0..20 {
            now_ns += 3_000_000;
            count += 1;
            assert!(!spin.step(now_ns - 1_000_000, now_ns, || count));
            now_ns = spin.yield_until_ns;
        }
        assert_eq!(spin.yield_ns, YIELD_NS_MAX);
        // A quiet time later it begins anew.
        now_ns += 5 * YIELD_NS_MAX;
        assert!(!spin.step(now_ns - 1_000_000, now_ns, || count + 1));
        assert_eq!(spin.yield_ns, YIELD_NS_MIN);
    }
}
