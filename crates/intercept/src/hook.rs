//! The hooks of an interceptor: the number of their stops, and whether they are in place.
//!
//! A hook at which the guest stops too often is taken away for a while. What an interceptor has
//! noted before is void then: a page may become dirty without a stop, and belong to another file.
//! So the table has no writers while the hook is away, and is empty when it is back.

use std::sync::atomic::Ordering;

use crate::writers::Writers;

/// A place in the guest's kernel at which an interceptor stops the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Where pages become dirty.
    Pages,
    /// Where system calls begin and end.
    Calls,
}

impl Hook {
    /// All hooks.
    pub const ALL: [Self; 2] = [Self::Pages, Self::Calls];

    const fn place(self) -> usize {
        match self {
            Self::Pages => 0,
            Self::Calls => 1,
        }
    }

    /// The place of the number of stops.
    const fn stops(self) -> usize {
        24 + 8 * self.place()
    }

    /// The place of the state: twice the number of removals, and 1 while the hook is away. It is
    /// read for each page, so it does not share a cache line with the number of stops.
    const fn state(self) -> usize {
        128 + 16 * self.place()
    }

    /// The place of the instant at which it is put back.
    const fn return_ns(self) -> usize {
        self.state() + 8
    }
}

/// The state of a hook.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HookState {
    /// The number of stops so far.
    pub stops: u64,
    /// How often the hook was taken away.
    pub removals: u64,
    /// Whether it is away.
    pub is_away: bool,
    /// When it will be put back, or was last put back, in nanoseconds of the host's monotonic
    /// clock; 0 if it was never taken away.
    pub return_ns: u64,
}

impl Writers {
    /// Counts a stop of the guest at a hook. Returns the number of stops so far.
    pub fn count_stop(&self, hook: Hook) -> u64 {
        self.wide(hook.stops()).fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// The number of stops of the guest.
    pub fn stops(&self) -> u64 {
        Hook::ALL.iter().fold(0_u64, |sum, hook| sum.saturating_add(self.hook(*hook).stops))
    }

    /// Whether a hook is away.
    pub fn is_away(&self, hook: Hook) -> bool {
        self.wide(hook.state()).load(Ordering::Acquire) % 2 == 1
    }

    /// The state of a hook.
    pub fn hook(&self, hook: Hook) -> HookState {
        let state = self.wide(hook.state()).load(Ordering::Acquire);
        HookState {
            stops: self.wide(hook.stops()).load(Ordering::Relaxed),
            removals: state / 2,
            is_away: state % 2 == 1,
            return_ns: self.wide(hook.return_ns()).load(Ordering::Relaxed),
        }
    }

    /// Says that a hook is taken away until an instant. Called before the hook is.
    pub fn take_away(&self, hook: Hook, return_ns: u64) {
        self.wide(hook.return_ns()).store(return_ns, Ordering::Relaxed);
        let state = self.wide(hook.state());
        state.store(state.load(Ordering::Relaxed).wrapping_add(2) | 1, Ordering::Release);
    }

    /// Says that a hook will be put back later than said before.
    pub fn postpone(&self, hook: Hook, return_ns: u64) {
        self.wide(hook.return_ns()).store(return_ns, Ordering::Relaxed);
    }

    /// Says that a hook is about to be put back. The table must be empty if it is that of pages
    /// ([`clear`](Self::clear)).
    pub fn put_back(&self, hook: Hook, now_ns: u64) {
        self.wide(hook.return_ns()).store(now_ns, Ordering::Relaxed);
        let state = self.wide(hook.state());
        state.store(state.load(Ordering::Relaxed) & !1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writers::{Slots, Writer};

    #[test]
    fn a_hook_that_is_away_has_no_writers_and_the_next_one_begins_anew() {
        let (daemon, file) = Writers::create(1 << 30).unwrap();
        let other = Writers::open(&file).unwrap();
        let writer = Writer { process_id: 7, start_ns: 1, command: [b'x'; 16] };
        let slot = Slots::default().slot(&other, &writer);
        let pages = [0, 3, 1023, 1024, (1 << 18) - 1];
        for page in pages {
            other.note(page, slot, false);
        }
        let known = || pages.iter().filter(|page| daemon.writer(**page).is_some()).count();
        assert_eq!((known(), daemon.hook(Hook::Pages)), (5, HookState::default()));
        // Calls are another hook.
        other.take_away(Hook::Calls, 70);
        assert_eq!(known(), 5);
        other.take_away(Hook::Pages, 90);
        let away = HookState { stops: 0, removals: 1, is_away: true, return_ns: 90 };
        assert_eq!((known(), daemon.hook(Hook::Pages)), (0, away));
        // What a stop that had begun notes is void too.
        other.note(5, slot, false);
        assert_eq!(daemon.writer(5), None);
        other.postpone(Hook::Pages, 95);
        other.clear().unwrap();
        other.put_back(Hook::Pages, 96);
        let back = HookState { is_away: false, return_ns: 96, ..away };
        assert_eq!((known(), daemon.writer(5), daemon.hook(Hook::Pages)), (0, None, back));
        // Processes of calls keep their slots, and pages get writers again.
        assert_eq!(daemon.process(slot), Some(writer));
        other.note(3, slot, false);
        assert_eq!(daemon.writer(3), Some(writer));
        other.take_away(Hook::Pages, 200);
        assert_eq!(daemon.hook(Hook::Pages).removals, 2);
        assert!(daemon.is_away(Hook::Pages) && daemon.is_away(Hook::Calls));
        assert_eq!([1, 2, 3].map(|_| other.count_stop(Hook::Calls)), [1, 2, 3]);
        other.count_stop(Hook::Pages);
        assert_eq!(daemon.stops(), 4);
        // Only the side of the interceptor has the file.
        assert!(daemon.clear().is_err());
    }
}
