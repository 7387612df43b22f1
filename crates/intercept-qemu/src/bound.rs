//! The bound on the stops at a hook: a hook at which the guest stops too often is taken away for a
//! while, and put back by itself.
//!
//! | state | until | then |
//! |---|---|---|
//! | in place | more than the most stops within a second | away |
//! | away | the pause is over, and no processor can be at the hook any more | in place |
//!
//! The pause doubles from removal to removal, and is the shortest one again when the hook was in
//! place for as long as the longest pause. The plugin decides it alone, so that it holds without a
//! daemon too.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_intercept::Hook;
use parking_lot::Mutex;

use crate::calls::Noting;
use crate::{Active, Plugin, now_ns};

const SECOND: u64 = 1_000_000_000;
/// The time over which stops are counted.
const WINDOW_NS: u64 = SECOND;
/// The shortest and the longest pause.
const PAUSE_MIN_NS: u64 = SECOND;
const PAUSE_MAX_NS: u64 = 300 * SECOND;
/// The clock is read once for so many stops.
const BATCH: u64 = 256;

/// The rule for one hook, by any clock.
#[derive(Debug, Default)]
struct Rule {
    /// When the count of stops began, and the stops since.
    begin_ns: u64,
    stops: u64,
    /// Since when the hook is in place.
    in_place_ns: u64,
    /// The last pause; 0 if there was none.
    pause_ns: u64,
    /// When the hook is to be put back; `None` while it is in place.
    return_ns: Option<u64>,
}

impl Rule {
    /// Counts stops that have just been. Returns whether there are too many.
    pub fn count(&mut self, stops: u64, stops_max: u64, now_ns: u64) -> bool {
        if now_ns.saturating_sub(self.begin_ns) >= WINDOW_NS {
            // These stops were before.
            (self.begin_ns, self.stops) = (now_ns, 0);
            return false;
        }
        self.stops = self.stops.saturating_add(stops);
        self.stops > stops_max
    }

    /// The hook is taken away. Returns when it is to be put back.
    pub fn take_away(&mut self, now_ns: u64) -> u64 {
        let was_quiet = now_ns.saturating_sub(self.in_place_ns) >= PAUSE_MAX_NS;
        let longer = if was_quiet { 0 } else { self.pause_ns.saturating_mul(2) };
        self.pause_ns = longer.clamp(PAUSE_MIN_NS, PAUSE_MAX_NS);
        *self.return_ns.insert(now_ns.saturating_add(self.pause_ns))
    }

    /// When the hook is to be put back; `None` while it is in place.
    pub fn return_ns(&self) -> Option<u64> {
        self.return_ns
    }

    /// The hook cannot be put back yet. Returns when it is to be tried again.
    pub fn postpone(&mut self, now_ns: u64) -> u64 {
        *self.return_ns.insert(now_ns.saturating_add(PAUSE_MIN_NS))
    }

    /// The hook is put back.
    pub fn put_back(&mut self, now_ns: u64) {
        (self.begin_ns, self.stops, self.in_place_ns) = (now_ns, 0, now_ns);
        self.return_ns = None;
    }
}

/// The bound of one hook.
#[derive(Default)]
pub(crate) struct Bound {
    /// The first translation of the guest's code that has the hook; [`AWAY`] while none has.
    from: AtomicU64,
    state: Mutex<BoundState>,
}

/// What changes with a removal.
#[derive(Default)]
struct BoundState {
    rule: Rule,
    /// The translation that is the first without the hook.
    gone: u64,
}

/// No translation.
const AWAY: u64 = u64::MAX;

impl Bound {
    /// Whether a translation has the hook.
    pub fn is_in(&self, translation: u64) -> bool {
        translation >= self.from.load(Ordering::Acquire)
    }

    /// Sets the first translation that has the hook.
    pub fn set_first(&self, translation: u64) {
        self.from.store(translation, Ordering::Release);
    }

    /// No translation has the hook, not even that in use.
    pub fn set_away(&self) {
        self.from.store(AWAY, Ordering::Release);
    }
}

impl Plugin {
    pub(crate) fn bound(&self, hook: Hook) -> &Bound {
        &self.bounds[match hook {
            Hook::Pages => 0,
            Hook::Calls => 1,
        }]
    }

    /// The guest stops at a hook. Returns what to do it for; `None` if the hook is taken away.
    pub(crate) fn stop(&self, hook: Hook) -> Option<Arc<Active>> {
        let active = self.active()?;
        let bound = self.bound(hook);
        if !bound.is_in(self.hooked.load(Ordering::Acquire)) {
            // QEMU has not translated this place again.
            self.follow();
            return None;
        }
        if active.writers.count_stop(hook) % BATCH == 0 {
            let (now_ns, stops_max) = (now_ns(), active.places.stops_max);
            let mut state = bound.state.lock();
            if state.rule.return_ns().is_none() && state.rule.count(BATCH, stops_max, now_ns) {
                self.take_away(hook, &mut state, now_ns);
                return None;
            }
        }
        Some(active)
    }

    /// Takes a hook away.
    fn take_away(&self, hook: Hook, state: &mut BoundState, now_ns: u64) {
        let return_ns = state.rule.take_away(now_ns);
        let active = self.active();
        if let Some(active) = &active {
            // First: the table must have no writers when the first page is missed.
            active.writers.take_away(hook, return_ns);
        }
        self.bound(hook).set_away();
        state.gone = active.map_or(0, |active| self.translate_again(&active));
        // It fails only if the thread is about to wake anyway.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        self.follow();
    }

    /// Says in the table of a new kernel which hooks are away.
    pub(crate) fn keep_away(&self) {
        for hook in Hook::ALL {
            let state = self.bound(hook).state.lock();
            if let Some((return_ns, active)) = state.rule.return_ns().zip(self.active()) {
                active.writers.take_away(hook, return_ns);
            }
        }
    }

    /// When the next hook is to be put back, if one is away.
    pub(crate) fn return_ns(&self) -> Option<u64> {
        self.bounds.iter().filter_map(|bound| bound.state.lock().rule.return_ns()).min()
    }

    /// Puts the hooks back whose time has come.
    pub(crate) fn put_back(&self) {
        for hook in Hook::ALL {
            let (bound, now_ns) = (self.bound(hook), now_ns());
            let mut state = bound.state.lock();
            if state.rule.return_ns().is_none_or(|return_ns| now_ns < return_ns) {
                continue;
            }
            let active = self.active();
            // QEMU takes a hook away while no processor runs: then none can note anything that it
            // has seen before.
            let is_gone = self.hooked.load(Ordering::Acquire) >= state.gone;
            if active.as_ref().is_some_and(|active| !is_gone || active.forget(hook).is_err()) {
                let return_ns = state.rule.postpone(now_ns);
                active.inspect(|active| active.writers.postpone(hook, return_ns));
                continue;
            }
            state.rule.put_back(now_ns);
            let mut last = self.translations.lock();
            *last += 1;
            bound.set_first(*last);
            if let Some(active) = &active {
                active.writers.put_back(hook, now_ns);
                active.translation.store(*last, Ordering::Release);
            }
            self.wanted.store(*last, Ordering::Release);
        }
    }
}

impl Active {
    /// Forgets what was noted at a hook that is away.
    fn forget(&self, hook: Hook) -> io::Result<()> {
        match hook {
            Hook::Pages => self.writers.clear()?,
            // The end of one call must not be taken for that of another.
            Hook::Calls => self.noting.iter().for_each(Noting::forget),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 100_000;
    const HOUR: u64 = 3600 * SECOND;

    /// A guest that stops `rate` times a second whenever the hook is in place, for `seconds`.
    /// Returns the stops, and the lengths of the pauses in seconds.
    fn run(rule: &mut Rule, start_ns: u64, seconds: u64, rate: u64) -> (u64, Vec<u64>) {
        let (mut now, mut stops, mut pauses) = (start_ns, 0, Vec::new());
        let end = start_ns + seconds * SECOND;
        while now < end {
            now += BATCH * SECOND / rate;
            stops += BATCH;
            if rule.count(BATCH, MAX, now) {
                let back = rule.take_away(now);
                assert_eq!(rule.return_ns(), Some(back));
                pauses.push((back - now) / SECOND);
                now = back;
                rule.put_back(now);
                assert_eq!(rule.return_ns(), None);
            }
        }
        (stops, pauses)
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut rule = Rule::default();
        let (stops, pauses) = run(&mut rule, HOUR, 3600, 1_000_000);
        assert_eq!(pauses[..10], [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        assert!(pauses[10..].iter().all(|pause| *pause == 300) && pauses.len() == 20, "{pauses:?}");
        // A second's worth of stops each time.
        assert!(stops <= 21 * (MAX + 2 * BATCH), "{stops}");
    }

    #[test]
    fn fewer_stops_take_nothing_away() {
        let mut rule = Rule::default();
        assert_eq!(run(&mut rule, HOUR, 100, MAX - MAX / 50).1, [0; 0]);
        assert_eq!(run(&mut rule, 2 * HOUR, 100, 10).1, [0; 0]);
        // Bursts with a second between them.
        for burst in 0..100 {
            let begin = 3 * HOUR + burst * 2 * SECOND;
            for batch in 0..MAX / BATCH {
                assert!(!rule.count(BATCH, MAX, begin + batch * 1000));
            }
        }
    }

    #[test]
    fn a_hook_that_was_long_in_place_has_a_short_pause_again() {
        let mut rule = Rule::default();
        assert_eq!(run(&mut rule, HOUR, 10, 1_000_000).1, [1, 2, 4, 8]);
        assert_eq!(run(&mut rule, HOUR + 20 * SECOND, 300, 1000).1, [0; 0]);
        assert_eq!(run(&mut rule, HOUR + 330 * SECOND, 1, 1_000_000).1, [1]);
        // Not after a short time.
        assert_eq!(run(&mut rule, HOUR + 340 * SECOND, 1, 1_000_000).1, [2]);
        assert_eq!(run(&mut rule, HOUR + 345 * SECOND, 100, 1000).1, [0; 0]);
        assert_eq!(run(&mut rule, HOUR + 445 * SECOND, 1, 1_000_000).1, [4]);
    }

    #[test]
    fn a_clock_that_jumps_or_a_bound_without_sense_is_no_end() {
        let mut rule = Rule::default();
        assert!(!rule.count(BATCH, 0, HOUR));
        assert!(rule.count(BATCH, 0, HOUR + 1));
        assert_eq!(rule.take_away(u64::MAX), u64::MAX);
        rule.put_back(u64::MAX);
        assert!(rule.count(BATCH, 0, 5));
        rule.take_away(5);
        assert_eq!(rule.postpone(10), 10 + PAUSE_MIN_NS);
    }

    #[test]
    fn a_translation_has_the_hook_from_its_number_on() {
        let bound = Bound::default();
        assert!(bound.is_in(0) && bound.is_in(7));
        bound.set_away();
        assert!(!bound.is_in(7) && !bound.is_in(u64::MAX - 1));
        bound.set_first(8);
        assert!(!bound.is_in(7) && bound.is_in(8));
    }
}
