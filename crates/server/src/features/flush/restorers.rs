//! Which guests have to be given their memory again, and when each is tried next.
//!
//! A fixed number of threads try the guests in turn, however many records an earlier daemon has
//! left. An attempt takes as long as QEMU's socket hangs, which is bounded; meanwhile the other
//! threads continue.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// The most threads.
pub(super) const THREADS_MAX: usize = 4;
/// The interval between attempts to give a guest its memory again.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);

/// What a thread does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Restoration {
    /// It tries the guest of this virtual machine.
    Try(String),
    /// It waits: no guest is due.
    Wait(Duration),
    /// It ends: no guest is left for it.
    End,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Restorers {
    /// The virtual machines whose guests have to be given their memory.
    all: BTreeSet<String>,
    /// Those that no thread is trying, each with the time of the next attempt, in the order of
    /// these times.
    waiting: VecDeque<(Instant, String)>,
    threads: usize,
}

impl Restorers {
    /// Adds the guest of `vm`, which is due `now`. Returns whether a thread has to be started; it
    /// counts as started.
    pub(super) fn begin(&mut self, vm: &str, now: Instant) -> bool {
        if !self.all.insert(vm.to_owned()) {
            return false;
        }
        let place = self.waiting.partition_point(|(due, _)| *due <= now);
        self.waiting.insert(place, (now, vm.to_owned()));
        let starts = self.threads < THREADS_MAX;
        self.threads += usize::from(starts);
        starts
    }

    /// Whether the guest of `vm` is one of them.
    pub(super) fn has(&self, vm: &str) -> bool {
        self.all.contains(vm)
    }

    /// What a thread does next. A thread that ends counts as ended.
    pub(super) fn next(&mut self, now: Instant) -> Restoration {
        match self.waiting.pop_front() {
            Some((due, vm)) if due > now => {
                self.waiting.push_front((due, vm));
                Restoration::Wait(due - now)
            }
            Some((_, vm)) => Restoration::Try(vm),
            None => {
                self.threads -= 1;
                Restoration::End
            }
        }
    }

    /// An attempt has ended. `has_memory` is whether the guest need not be tried again.
    pub(super) fn end(&mut self, vm: &str, has_memory: bool, now: Instant) {
        if has_memory {
            self.all.remove(vm);
        } else {
            self.waiting.push_back((now + INTERVAL, vm.to_owned()));
        }
    }

    /// A thread could not be started. Without any thread, a later flush begins again.
    pub(super) fn not_started(&mut self) {
        self.threads -= 1;
        if self.threads == 0 {
            self.all.clear();
            self.waiting.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_guests_are_tried_in_turn_by_a_few_threads() {
        let (mut restorers, mut now) = (Restorers::default(), Instant::now());
        let vms: Vec<String> = (0..1000).map(|number| format!("vm{number}")).collect();
        let started = vms.iter().filter(|vm| restorers.begin(vm, now)).count();
        assert_eq!(started, THREADS_MAX);
        assert!(!restorers.begin("vm5", now), "it is there already");
        // The first guests hang, each with a thread; the rest is tried by one thread.
        let attempt = |restorers: &mut Restorers, now| match restorers.next(now) {
            Restoration::Try(vm) => vm,
            other => panic!("{other:?}"),
        };
        let hanging: Vec<String> = (1..THREADS_MAX).map(|_| attempt(&mut restorers, now)).collect();
        for vm in &vms[THREADS_MAX - 1..] {
            assert_eq!(attempt(&mut restorers, now), *vm);
            restorers.end(vm, vm != "vm999", now);
        }
        assert_eq!(restorers.next(now), Restoration::Wait(INTERVAL));
        // A later one is not behind those that wait.
        now += INTERVAL / 2;
        assert!(!restorers.begin("late", now));
        assert_eq!(attempt(&mut restorers, now), "late");
        restorers.end("late", true, now);
        now += INTERVAL;
        assert_eq!(attempt(&mut restorers, now), "vm999");
        restorers.end("vm999", true, now);
        assert_eq!(restorers.next(now), Restoration::End, "the others have their threads");
        for vm in &hanging {
            restorers.end(vm, true, now);
            assert_eq!(restorers.next(now), Restoration::End);
        }
        assert!(restorers.all.is_empty() && restorers.threads == 0);
        assert!(restorers.begin("vm5", now));
        restorers.not_started();
        assert!(restorers.begin("vm5", now), "a later flush begins again");
    }
}
