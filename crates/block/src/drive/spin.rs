//! How long to poll for work before sleeping.
//!
//! A wake-up costs more than a request, so a thread whose client answers quickly polls a little
//! before it sleeps. The polling time grows only while sleeps turn out to have been short, and
//! falls to zero after the first long sleep: an idle connection uses no CPU, and a slow one almost
//! none. A thread that loses its processor while it polls competes with other work, so it does not
//! poll for some time.
//!
//! A thread that sleeps also measures its own wake-up, so work that arrives early seems to arrive
//! late. After sleeps that were not much longer than the longest poll, the thread sometimes tries a
//! poll. The interval between trials grows with each trial that finds no work.

/// The shortest poll, in nanoseconds.
const SPIN_NS_MIN: u64 = 10_000;
/// A sleep of up to this many times the longest poll may have been a short one with a slow wake-up.
const REACH: u64 = 4;
/// The most sleeps between two trials.
const TRIAL_INTERVAL_MAX: u32 = 64;
/// If two steps of a poll are further apart than this, in nanoseconds, the thread may have been
/// preempted between them.
const STEP_NS_MAX: u64 = 25_000;
/// The first pause of polling after a preemption, in nanoseconds.
const YIELD_NS_MIN: u64 = 20_000_000;
/// The longest pause of polling after repeated preemptions, in nanoseconds.
const YIELD_NS_MAX: u64 = 1_280_000_000;

/// The time to poll, adapted after each idle period.
#[derive(Clone, Copy, Debug)]
pub struct Spin {
    /// The longest poll, in nanoseconds; 0 never polls.
    poll_max_ns: u64,
    /// The longest sleep that may have been a short one with a slow wake-up, in nanoseconds.
    reach_ns: u64,
    /// The current polling time, in nanoseconds.
    limit_ns: u64,
    /// The number of sleeps that may have been short before the next trial.
    trial_interval: u32,
    /// The number of such sleeps since the last trial.
    sleeps: u32,
    yield_until_ns: u64,
    /// The last pause of polling, in nanoseconds.
    yield_ns: u64,
    /// The thread's count of preemptions at the last long step.
    preemptions: u64,
}

impl Spin {
    /// Polls for at most `poll_max_ns` nanoseconds; 0 never polls.
    pub fn new(poll_max_ns: u64) -> Self {
        Self {
            poll_max_ns,
            reach_ns: poll_max_ns * REACH,
            limit_ns: 0,
            trial_interval: 1,
            sleeps: 0,
            yield_until_ns: 0,
            yield_ns: 0,
            preemptions: 0,
        }
    }

    /// As [`new`](Self::new), but without trials, for work whose arrival does not depend on the
    /// poll.
    pub fn without_trials(poll_max_ns: u64) -> Self {
        Self { reach_ns: 0, ..Self::new(poll_max_ns) }
    }

    /// The time to poll for work before sleeping, in nanoseconds; 0 if the thread should not poll.
    pub fn limit_ns(self, now_ns: u64) -> u64 {
        if now_ns < self.yield_until_ns { 0 } else { self.limit_ns }
    }

    /// Records a step of a poll. Returns false if the poll has to end. `preemptions` returns the
    /// number of preemptions of the thread. It is called only after a long step, whose cause may
    /// also be the hypervisor or an interrupt.
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

    /// Records that work arrived `idle_ns` nanoseconds after the thread had run out of it, and that
    /// the thread slept meanwhile.
    pub fn slept(&mut self, idle_ns: u64) {
        if idle_ns <= self.poll_max_ns {
            self.limit_ns = (self.limit_ns * 2).max(SPIN_NS_MIN).min(self.poll_max_ns);
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
            self.limit_ns = self.poll_max_ns;
        }
    }

    /// Records that work arrived while the thread polled.
    pub fn found(&mut self) {
        self.trial_interval = 1;
        self.sleeps = 0;
    }
}

/// The number of times that this thread was preempted by another thread.
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
    fn short_sleeps_lengthen_the_poll_and_a_long_one_ends_it() {
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
    fn trials_become_rarer_while_only_the_wake_up_may_be_slow() {
        let mut spin = Spin::new(MOST_NS);
        let mut polls = 0;
        for _ in 0..10_000 {
            spin.slept(2 * MOST_NS);
            polls += u32::from(spin.limit_ns(0) > 0);
        }
        assert!((100..200).contains(&polls), "{polls}");
        // After a successful trial the thread keeps polling.
        while spin.limit_ns(0) == 0 {
            spin.slept(2 * MOST_NS);
        }
        spin.found();
        assert_eq!(spin.limit_ns(0), MOST_NS);
        spin.slept(2 * MOST_NS);
        assert_eq!(spin.limit_ns(0), MOST_NS, "one failed poll among successful ones");
        spin.slept(1_000_000_000);
        assert_eq!(spin.limit_ns(0), 0);
        for _ in 0..1000 {
            spin.slept(MOST_NS * REACH + 1);
            assert_eq!(spin.limit_ns(0), 0, "there are no trials for a slow client");
        }
    }

    #[test]
    fn polling_pauses_for_other_work() {
        let mut spin = Spin::new(MOST_NS);
        spin.slept(20_000);
        assert!(spin.step(1000, 3000, || unreachable!("a short step reads no count")));
        let mut now_ns = 3_000_000;
        // A long step without a preemption does not end the poll.
        assert!(spin.step(3000, now_ns, || 0));
        let mut count = 1;
        assert!(!spin.step(3000, now_ns, || count));
        assert_eq!(spin.limit_ns(now_ns), 0);
        now_ns += YIELD_NS_MIN;
        assert_eq!(spin.limit_ns(now_ns), SPIN_NS_MIN);
        // Repeated preemptions lengthen the pause, up to the limit.
        for _ in 0..20 {
            now_ns += 3_000_000;
            count += 1;
            assert!(!spin.step(now_ns - 1_000_000, now_ns, || count));
            now_ns = spin.yield_until_ns;
        }
        assert_eq!(spin.yield_ns, YIELD_NS_MAX);
        // After a quiet time the pause starts with its minimum again.
        now_ns += 5 * YIELD_NS_MAX;
        assert!(!spin.step(now_ns - 1_000_000, now_ns, || count + 1));
        assert_eq!(spin.yield_ns, YIELD_NS_MIN);
    }
}
