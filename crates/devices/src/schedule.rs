//! The scheduling of background work on one device.
//!
//! Parts of layers offer work in steps. A step begins while the device is idle, for all programs,
//! and is predicted to stay idle for as long as the step takes. There is one step at a time, so
//! that a request that comes meanwhile waits for at most one step. If the device is not idle for
//! long enough, steps begin in time for the deadline of the work: those of a gentle part, which
//! pauses, are spread over the time that is left. Parts take turns.

mod cost;

use std::collections::BTreeMap;

use self::cost::StepCost;
use crate::idle::{IdleOptions, IdleTracker};
use crate::predict::Predictor;

/// The longest wait before a part asks again, in nanoseconds. Requests of other programs are seen
/// only when a part asks.
const WAIT_MAX_NS: u64 = 100_000_000;
/// The shortest wait.
const WAIT_MIN_NS: u64 = 500_000;
/// The wait of a part whose turn it is not, while the device is busy, in nanoseconds.
const WAIT_BUSY_NS: u64 = 10_000_000;
/// How long a part that has asked counts as waiting for its turn.
const TURN_NS: u64 = 2 * WAIT_MAX_NS;
/// The time after which a step that has not ended no longer delays other parts: its store hangs.
const STEP_TIME_MAX_NS: u64 = 10_000_000_000;
/// Work begins when this many times its expected duration is left before its deadline.
const MARGIN: u64 = 2;
/// The same for the work of a gentle part.
const GENTLE_MARGIN: u64 = 12;
/// The share of the time left over which the steps of gentle work are spread then.
const SPREAD: f64 = 0.75;
/// The duration of a step before any was measured.
const STEP_NS: u64 = 10_000_000;

/// The longest pause of a part, in nanoseconds.
const PAUSE_MAX_NS: u64 = 1_000_000_000;
/// The idle time after which a device is not used, in nanoseconds.
const QUIET_NS: u64 = 1_000_000_000;

/// An offer of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// The bytes of the step.
    pub bytes: u64,
    /// The bytes of all work that waits.
    pub waiting_bytes: u64,
    /// About how many steps all of this work takes.
    pub waiting_steps: u64,
    /// When all of it has to be done, in nanoseconds.
    pub deadline_ns: u64,
    /// For how long the part pauses after its last step while the device is used, in durations of
    /// that step. The part is gentle if this is not 0.
    pub pause: u32,
}

/// What else uses a device, apart from the guests' requests and the steps that its scheduler knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Others {
    /// The requests of other programs in flight.
    pub requests: u64,
    /// Whether a step of another scheduler is in flight at the device.
    pub has_step: bool,
    /// Whether another scheduler of the device has waited for such a step, and begins first.
    pub is_first: bool,
}

/// The counts of a device's background work. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCounts {
    /// Steps that have begun.
    pub steps: u64,
    /// Steps among these that began because of their deadline.
    pub forced: u64,
    /// The bytes of all steps.
    pub bytes: u64,
    /// Idle time during which a step was in flight, in nanoseconds.
    pub used_ns: u64,
    /// Idle time during which work waited or a step was in flight, in nanoseconds.
    pub waited_idle_ns: u64,
    /// Steps during which a request came.
    pub met_steps: u64,
    /// How long these steps still took, in nanoseconds: at most this long a request was delayed.
    pub met_ns: u64,
}

/// A part with work.
#[derive(Clone, Debug, Default)]
struct Part {
    offer: Option<Offer>,
    asked_ns: u64,
    /// Since when it has had work, in nanoseconds.
    since_ns: u64,
    /// The number of the part's latest step.
    turn: u64,
    /// When its last step ended, and how long that took, in nanoseconds.
    ended_ns: u64,
    took_ns: u64,
}

impl Part {
    /// Until when it pauses, in nanoseconds.
    fn pause_end_ns(&self) -> u64 {
        let pause = self.offer.map_or(0, |offer| u64::from(offer.pause));
        self.ended_ns.saturating_add(self.took_ns.saturating_mul(pause).min(PAUSE_MAX_NS))
    }
}

#[derive(Clone, Copy, Debug)]
struct Running {
    part: u64,
    since_ns: u64,
    /// When the first request came meanwhile.
    met_ns: Option<u64>,
    is_idle: bool,
}

/// The scheduler of one device. Its clock is that of the callers.
pub struct Schedule {
    options: IdleOptions,
    tracker: IdleTracker,
    predictor: Box<dyn Predictor>,
    parts: BTreeMap<u64, Part>,
    running: Option<Running>,
    /// The time at which requests of other programs were last seen.
    foreign_ns: Option<u64>,
    /// The expected duration of a step.
    step_ns: u64,
    cost: StepCost,
    turns: u64,
    /// Since when work has waited while the device was idle.
    idle_since_ns: Option<u64>,
    work: WorkCounts,
}

impl Schedule {
    /// The scheduler of a device that is idle at `now_ns`.
    pub fn new(options: IdleOptions, predictor: Box<dyn Predictor>, now_ns: u64) -> Self {
        Self {
            options,
            tracker: IdleTracker::new(options.threshold, now_ns),
            predictor,
            parts: BTreeMap::new(),
            running: None,
            foreign_ns: None,
            step_ns: STEP_NS,
            cost: StepCost::default(),
            turns: 0,
            idle_since_ns: None,
            work: WorkCounts::default(),
        }
    }

    /// The requests of guests in flight have changed to `in_flight`.
    pub fn requests(&mut self, in_flight: u64, now_ns: u64) {
        let before = self.tracker.in_flight();
        if in_flight < before {
            if self.tracker.end(before - in_flight, now_ns) && self.has_work() {
                self.idle_since_ns = Some(now_ns);
            }
            return;
        }
        if let Some(length_ns) = self.tracker.begin(in_flight - before, now_ns) {
            self.predictor.ended(length_ns);
            self.end_idle(now_ns);
        }
        if let Some(running) = self.running.as_mut().filter(|_| in_flight > before) {
            running.met_ns.get_or_insert(now_ns);
        }
    }

    /// Whether a part has work, or a step is in flight.
    fn has_work(&self) -> bool {
        self.running.is_some() || self.parts.values().any(|part| part.offer.is_some())
    }

    /// The idle time ends, or the step in it.
    fn end_idle(&mut self, now_ns: u64) {
        if let Some(since_ns) = self.idle_since_ns.take() {
            self.work.waited_idle_ns += now_ns.saturating_sub(since_ns);
        }
        if let Some(running) = &mut self.running {
            if std::mem::take(&mut running.is_idle) {
                self.work.used_ns += now_ns.saturating_sub(running.since_ns);
            }
        }
    }

    /// Adds a part.
    pub fn open(&mut self, part: u64) {
        self.parts.insert(part, Part::default());
    }

    /// Removes a part. Returns the parts to wake.
    pub fn close(&mut self, part: u64, now_ns: u64) -> Vec<u64> {
        self.parts.remove(&part);
        if self.running.is_some_and(|running| running.part == part) {
            return self.end(part, now_ns);
        }
        Vec::new()
    }

    /// The part has no work.
    pub fn rest(&mut self, part: u64, now_ns: u64) {
        if let Some(part) = self.parts.get_mut(&part) {
            part.offer = None;
        }
        if !self.has_work() {
            self.end_idle(now_ns);
        }
    }

    /// Asks whether a step may begin. Returns `None` if it begins, or else the time at which the
    /// part asks again.
    pub fn ask(&mut self, part: u64, offer: Offer, others: Others, now_ns: u64) -> Option<u64> {
        let Some(asking) = self.parts.get_mut(&part) else { return Some(now_ns + WAIT_MAX_NS) };
        if asking.offer.is_none() {
            asking.since_ns = now_ns;
        }
        (asking.offer, asking.asked_ns) = (Some(offer), now_ns);
        let (turn, pause_end_ns) = (asking.turn, asking.pause_end_ns());
        let latest_ns = asking.since_ns.max(asking.ended_ns);
        // The requests of a step look like those of other programs.
        let has_step = self.running.is_some() || others.has_step;
        let foreign = if has_step { 0 } else { others.requests };
        if foreign >= self.options.threshold {
            self.foreign_ns = Some(now_ns);
            self.end_idle(now_ns);
        } else if self.tracker.is_idle() {
            self.idle_since_ns.get_or_insert(now_ns);
        }
        if let Some(running) = self.running {
            let age_ns = now_ns.saturating_sub(running.since_ns);
            if running.part != part && age_ns < STEP_TIME_MAX_NS {
                let left_ns = self.step_ns.saturating_sub(age_ns);
                return Some(now_ns + left_ns.clamp(WAIT_MIN_NS, WAIT_MAX_NS));
            }
        }
        let forced_ns = self.forced_ns(&offer, latest_ns);
        let is_other_first = self.parts.iter().any(|(number, other)| {
            let waits = other.offer.is_some() && now_ns.saturating_sub(other.asked_ns) < TURN_NS;
            *number != part && waits && other.turn < turn && other.pause_end_ns() <= now_ns
        });
        let is_forced = forced_ns <= now_ns;
        if !is_forced && others.has_step {
            return Some(now_ns + self.step_ns.clamp(WAIT_MIN_NS, WAIT_MAX_NS));
        }
        if !is_forced && (is_other_first || others.is_first) {
            // The end of a step wakes all parts. While the device is busy, no turn passes soon.
            let is_idle = self.tracker.is_idle() && foreign < self.options.threshold;
            return Some(now_ns + if is_idle { WAIT_MIN_NS } else { WAIT_BUSY_NS });
        }
        let idle_ns = self.idle_for_ns(foreign, now_ns);
        let is_used = idle_ns.is_none_or(|idle_ns| idle_ns < QUIET_NS);
        if is_used && !is_forced && now_ns < pause_end_ns {
            return Some(pause_end_ns.min(forced_ns));
        }
        let wait_ns = match idle_ns {
            Some(idle_ns) => self
                .predictor
                .wait_ns(idle_ns, self.expected_ns(offer.bytes))
                .max(self.options.dwell_ns.saturating_sub(idle_ns)),
            // The end of the busy period is not announced.
            None => self.options.dwell_ns.clamp(WAIT_MIN_NS * 4, WAIT_MAX_NS),
        };
        if wait_ns > 0 && !is_forced {
            let again_ns = now_ns + wait_ns.clamp(WAIT_MIN_NS, WAIT_MAX_NS);
            return Some(again_ns.min(forced_ns.max(now_ns + 1)));
        }
        self.turns += 1;
        let turn = self.turns;
        if let Some(asking) = self.parts.get_mut(&part) {
            asking.turn = turn;
        }
        let is_idle = idle_ns.is_some();
        self.running = Some(Running { part, since_ns: now_ns, met_ns: None, is_idle });
        self.work.steps += 1;
        self.work.bytes += offer.bytes;
        self.work.forced += u64::from(wait_ns > 0 || others.has_step);
        None
    }

    /// The step of a part has ended. Returns the parts to wake.
    pub fn end(&mut self, part: u64, now_ns: u64) -> Vec<u64> {
        let Some(running) = self.running.filter(|running| running.part == part) else {
            return Vec::new();
        };
        let duration_ns = now_ns.saturating_sub(running.since_ns);
        let mut offer = Offer::default();
        if let Some(part) = self.parts.get_mut(&part) {
            offer = part.offer.unwrap_or_default();
            (part.ended_ns, part.took_ns) = (now_ns, duration_ns);
        }
        self.step_ns = (self.step_ns * 7 + duration_ns) / 8;
        if offer.bytes > 0 {
            self.cost.add(offer.bytes, duration_ns);
        }
        if running.is_idle {
            self.work.used_ns += duration_ns;
        }
        if let Some(met_ns) = running.met_ns {
            self.work.met_steps += 1;
            self.work.met_ns += now_ns.saturating_sub(met_ns);
        }
        self.running = None;
        let waits = |other: &(&u64, &Part)| *other.0 != part && other.1.offer.is_some();
        self.parts.iter().filter(waits).map(|(number, _)| *number).collect()
    }

    /// How long the device has been idle for all programs; `None` while it is busy.
    fn idle_for_ns(&self, foreign: u64, now_ns: u64) -> Option<u64> {
        let idle_ns = self.tracker.idle_for_ns(now_ns)?;
        if foreign >= self.options.threshold {
            return None;
        }
        let since_foreign = self.foreign_ns.map_or(u64::MAX, |seen| now_ns.saturating_sub(seen));
        Some(idle_ns.min(since_foreign))
    }

    fn expected_ns(&self, bytes: u64) -> u64 {
        self.step_ns.max(self.cost.of(1, bytes))
    }

    /// When a step has to begin so that its part's work meets its deadline. `latest_ns` is when the
    /// part's latest step ended, or its work came.
    fn forced_ns(&self, offer: &Offer, latest_ns: u64) -> u64 {
        // The work of other parts may have to be done at the same time.
        let offers = self.parts.values().filter_map(|part| part.offer.as_ref());
        let of_offer = |offer: &Offer| {
            let all_ns = self.cost.of(offer.waiting_steps, offer.waiting_bytes);
            all_ns.saturating_add(self.step_ns)
        };
        let needed_ns = offers.map(of_offer).fold(0, u64::saturating_add);
        let before_ns =
            |times: u64| offer.deadline_ns.saturating_sub(needed_ns.saturating_mul(times));
        if offer.pause == 0 {
            return before_ns(MARGIN);
        }
        let left_ns = offer.deadline_ns.saturating_sub(latest_ns) as f64 * SPREAD;
        let step_ns = self.expected_ns(offer.bytes);
        let interval_ns = (left_ns * step_ns as f64 / needed_ns.max(1) as f64) as u64;
        let spread_ns = latest_ns.saturating_add(interval_ns.saturating_sub(step_ns));
        spread_ns.max(before_ns(GENTLE_MARGIN))
    }

    /// The idle and busy periods of the guests' requests.
    pub fn tracker(&self) -> &IdleTracker {
        &self.tracker
    }

    /// The counts of the work.
    pub fn work(&self) -> WorkCounts {
        self.work
    }

    /// The expected duration of a step, in nanoseconds.
    pub fn step_ns(&self) -> u64 {
        self.step_ns
    }

    /// The part whose step is in flight.
    pub fn running(&self) -> Option<u64> {
        self.running.map(|running| running.part)
    }

    /// The offer of a part that waits.
    pub fn offer(&self, part: u64) -> Option<Offer> {
        self.parts.get(&part)?.offer
    }

    /// The name of the predictor.
    pub fn predictor(&self) -> String {
        self.predictor.name()
    }
}

#[cfg(test)]
mod tests;
