//! How long to poll for work before sleeping.
//!
//! A wake-up costs more than a request, so a thread whose client answers quickly polls a little
//! before it sleeps. The polling time grows only while sleeps turn out to have been short, and
//! falls to zero after the first long sleep: an idle connection uses no CPU, and a slow one almost
//! none.
//!
//! A thread that loses its processor while it polls may compete with other work. The time that it
//! loses is a debt, which the time that it polls pays back at a slow rate. Threads of the kernel
//! run for moments, and their debts are paid at once. Work that takes more than a small share of
//! the processor makes the debt grow: then the thread does not poll for some time, which gets
//! longer while that repeats itself.
//!
//! A thread that sleeps also measures its own wake-up, so work that arrives early seems to arrive
//! late. After sleeps that were not much longer than the longest poll, the thread sometimes tries a
//! poll. The interval between trials grows with each trial that finds no work.

#![expect(unsafe_code, reason = "the usage of a thread")]

/// The shortest poll, in nanoseconds.
const SPIN_NS_MIN: u64 = 10_000;
/// A sleep of up to this many times the longest poll may have been a short one with a slow wake-up.
const REACH: u64 = 8;
/// The most sleeps between two trials.
const TRIAL_INTERVAL_MAX: u32 = 64;
/// If two steps of a poll are further apart than this, in nanoseconds, the thread may have been
/// preempted between them.
const STEP_NS_MAX: u64 = 25_000;
/// The debt at which polling pauses, in nanoseconds: more than a few moments of the kernel, less
/// than two time slices of another thread.
const DEBT_NS_MAX: u64 = 2_000_000;
/// Polling pays a debt of one in so many nanoseconds: the greatest share of the processor that may
/// be lost.
const PAYMENT: u64 = 8;
/// The first pause of polling, in nanoseconds.
const YIELD_NS_MIN: u64 = 20_000_000;
/// The longest pause of polling, in nanoseconds. The thread finds out within a second that it has
/// the processor for itself again.
const YIELD_NS_MAX: u64 = 640_000_000;

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
    /// The time lost to other threads and not paid back, in nanoseconds times [`PAYMENT`].
    debt: u64,
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
            debt: 0,
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
        let step_ns = now_ns.saturating_sub(before_ns);
        if step_ns <= STEP_NS_MAX {
            self.debt = self.debt.saturating_sub(step_ns);
            return true;
        }
        let count = preemptions();
        let preempted = count != self.preemptions;
        self.preemptions = count;
        if !preempted {
            return true;
        }
        self.debt = self.debt.saturating_add(step_ns.saturating_mul(PAYMENT));
        if self.debt < DEBT_NS_MAX * PAYMENT {
            return true;
        }
        self.debt = 0;
        let again = now_ns.saturating_sub(self.yield_until_ns) < 4 * self.yield_ns;
        let yield_ns = if again { self.yield_ns * 2 } else { YIELD_NS_MIN };
        self.yield_ns = yield_ns.min(YIELD_NS_MAX);
        self.yield_until_ns = now_ns + self.yield_ns;
        false
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

    /// A thread that polls beside another one: each `period_ns` it loses its processor for
    /// `lost_ns`.
    struct Shared {
        spin: Spin,
        now_ns: u64,
        count: u64,
        period_ns: u64,
        lost_ns: u64,
        next_ns: u64,
    }

    impl Shared {
        fn new(period_ns: u64, lost_ns: u64) -> Self {
            let mut spin = Spin::new(MOST_NS);
            (0..9).for_each(|_| spin.slept(20_000));
            let now_ns = 1_000_000_000;
            Self { spin, now_ns, count: 0, period_ns, lost_ns, next_ns: now_ns + period_ns }
        }

        /// Polls whenever it may, for `time_ns`. Returns the time for which it polled.
        fn run(&mut self, time_ns: u64) -> u64 {
            let (end_ns, mut polled_ns) = (self.now_ns + time_ns, 0);
            while self.now_ns < end_ns {
                let before_ns = self.now_ns;
                self.now_ns += 2000;
                if self.spin.limit_ns(before_ns) == 0 {
                    continue;
                }
                polled_ns += 2000;
                if self.now_ns >= self.next_ns {
                    self.now_ns += self.lost_ns;
                    self.count += 1;
                    self.next_ns = self.now_ns + self.period_ns;
                }
                let count = self.count;
                let _ = self.spin.step(before_ns, self.now_ns, || count);
            }
            polled_ns
        }
    }

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn moments_of_the_kernel_do_not_end_polling() {
        for (period_ns, lost_ns) in
            [(50_000_000, 50_000), (5_000_000, 100_000), (1_000_000, 30_000)]
        {
            let mut shared = Shared::new(period_ns, lost_ns);
            let polled_ns = shared.run(10 * SECOND_NS);
            let lost_ns = 10 * SECOND_NS / period_ns * lost_ns;
            assert!(polled_ns + lost_ns > 10 * SECOND_NS - period_ns, "{period_ns} {polled_ns}");
        }
    }

    #[test]
    fn polling_pauses_for_other_work_and_goes_on_within_a_second_after_it() {
        // Time slices of another thread, and the moments in which another queue's thread works.
        for (period_ns, lost_ns) in
            [(1_500_000, 1_500_000), (3_000_000, 3_000_000), (30_000, 40_000)]
        {
            let mut shared = Shared::new(period_ns, lost_ns);
            let polled_ns = shared.run(10_000_000);
            assert!(polled_ns < 6_000_000, "it pauses soon: {polled_ns}");
            let polled_ns = shared.run(10 * SECOND_NS);
            assert!(polled_ns < 10 * SECOND_NS / 50, "it hardly polls: {polled_ns}");
            assert_eq!(shared.spin.yield_ns, YIELD_NS_MAX);
            // The other thread ends.
            shared.lost_ns = 0;
            shared.run(SECOND_NS);
            assert_eq!(shared.run(SECOND_NS), SECOND_NS);
            // A long time later, pauses begin with the shortest again.
            shared.run(5 * YIELD_NS_MAX);
            (shared.period_ns, shared.lost_ns) = (3_000_000, 3_000_000);
            while shared.spin.limit_ns(shared.now_ns) > 0 {
                shared.run(100_000);
            }
            assert_eq!(shared.spin.yield_ns, YIELD_NS_MIN);
        }
    }

    /// A client at depth 1, which sends its next request a moment after the answer. A thread that
    /// sleeps also waits for its wake-up. Ten times a second, a thread of the kernel runs for a
    /// moment.
    #[test]
    fn whatever_the_start_a_quick_client_is_polled_for_within_a_second() {
        let fresh = Spin::new(MOST_NS);
        let rare = Spin { trial_interval: TRIAL_INTERVAL_MAX, ..fresh };
        let yield_until_ns = SECOND_NS + YIELD_NS_MAX;
        let paused = Spin { yield_ns: YIELD_NS_MAX, yield_until_ns, ..fresh };
        let indebted = Spin { debt: DEBT_NS_MAX * PAYMENT - 1, ..fresh };
        let starts = [("fresh", fresh), ("rare", rare), ("paused", paused), ("in debt", indebted)];
        for (name, start) in starts {
            for wake_ns in [3_000, 25_000, 60_000, 200_000] {
                let mut spin = start;
                let (mut now_ns, mut count, mut moment_ns) = (SECOND_NS, 0, SECOND_NS);
                let (mut found, mut slept) = (0, 0);
                while now_ns < 3 * SECOND_NS {
                    let start_ns = now_ns;
                    // The client takes 4 µs, and the request 3 µs.
                    if spin.limit_ns(now_ns) >= 4000 {
                        let before_ns = now_ns;
                        now_ns += 4000;
                        if now_ns > moment_ns {
                            (now_ns, count) = (now_ns + 40_000, count + 1);
                            moment_ns = now_ns + SECOND_NS / 10;
                        }
                        let _ = spin.step(before_ns, now_ns, || count);
                        spin.found();
                        found += u64::from(start_ns > 2 * SECOND_NS);
                    } else {
                        now_ns += 4000 + wake_ns;
                        spin.slept(now_ns - start_ns);
                        slept += u64::from(start_ns > 2 * SECOND_NS);
                    }
                    now_ns += 3000;
                }
                assert!(found > 100 * slept, "{name}, {wake_ns}: {found} found, {slept} slept");
            }
        }
    }
}
