//! The scheduler by seed, against conditions that hold for every step, and an independent count.

use super::*;
use crate::predict::{Fixed, Survival};

const MS: u64 = 1_000_000;

fn options() -> IdleOptions {
    IdleOptions { threshold: 1, dwell_ns: 2 * MS }
}

/// Requests of other programs.
fn requests(requests: u64) -> Others {
    Others { requests, ..Others::default() }
}

/// A device with requests, other programs, and parts that have work, all by seed.
struct Simulation {
    schedule: Schedule,
    random: fastrand::Rng,
    now_ns: u64,
    in_flight: u64,
    idle_since_ns: u64,
    foreign: u64,
    /// When each part asks next, and until when its work has to be done.
    parts: BTreeMap<u64, (u64, u64)>,
    /// The part with a step in flight, the end of the step, and its beginning.
    step: Option<(u64, u64, u64)>,
    used_ns: u64,
    begun: BTreeMap<u64, u64>,
}

impl Simulation {
    fn new(seed: u64, predictor: Box<dyn Predictor>, parts: u64) -> Self {
        let mut schedule = Schedule::new(options(), predictor, 0);
        for part in 0..parts {
            schedule.open(part);
        }
        Self {
            schedule,
            random: fastrand::Rng::with_seed(seed),
            now_ns: 0,
            in_flight: 0,
            idle_since_ns: 0,
            foreign: 0,
            parts: (0..parts).map(|part| (part, (0, 3000 * MS))).collect(),
            step: None,
            used_ns: 0,
            begun: BTreeMap::new(),
        }
    }

    fn advance(&mut self, to_ns: u64) {
        if let (Some((_, _, begun_ns)), 0) = (self.step, self.in_flight) {
            self.used_ns += to_ns - self.now_ns.max(begun_ns);
        }
        self.now_ns = to_ns;
    }

    fn requests(&mut self, in_flight: u64) {
        if in_flight == 0 && self.in_flight > 0 {
            self.idle_since_ns = self.now_ns;
        }
        self.in_flight = in_flight;
        self.schedule.requests(in_flight, self.now_ns);
    }

    /// Lets all parts ask that are due, and ends a step that is over.
    fn work(&mut self) {
        if let Some((part, end_ns, _)) = self.step.filter(|step| step.1 <= self.now_ns) {
            self.step = None;
            for woken in self.schedule.end(part, end_ns.max(self.now_ns)) {
                self.parts.get_mut(&woken).unwrap().0 = self.now_ns;
            }
            let (ask_ns, deadline_ns) = self.parts.get_mut(&part).unwrap();
            (*ask_ns, *deadline_ns) = (self.now_ns, self.now_ns + 3000 * MS);
        }
        for part in self.parts.keys().copied().collect::<Vec<_>>() {
            let (ask_ns, deadline_ns) = self.parts[&part];
            let has_step = self.step.is_some_and(|(running, ..)| running == part);
            if ask_ns > self.now_ns || has_step {
                continue;
            }
            let offer = Offer {
                bytes: 1 << 20,
                waiting_bytes: 1 << 20,
                waiting_steps: 1,
                deadline_ns,
                pause: 0,
            };
            let forced = self.schedule.work().forced;
            if let Some(again_ns) =
                self.schedule.ask(part, offer, requests(self.foreign), self.now_ns)
            {
                assert!(again_ns > self.now_ns, "a part asks again later");
                assert!(again_ns <= self.now_ns + WAIT_MAX_NS);
                self.parts.get_mut(&part).unwrap().0 = again_ns;
                continue;
            }
            assert!(self.step.is_none(), "one step at a time");
            assert!(self.now_ns <= deadline_ns, "the work begins before its deadline");
            if self.schedule.work().forced == forced {
                assert_eq!((self.in_flight, self.foreign), (0, 0));
                assert!(self.now_ns - self.idle_since_ns >= options().dwell_ns);
            }
            *self.begun.entry(part).or_default() += 1;
            let end_ns = self.now_ns + self.random.u64(5 * MS..15 * MS);
            self.step = Some((part, end_ns, self.now_ns));
        }
    }
}

#[test]
fn steps_begin_only_when_the_device_is_idle_or_their_deadline_requires_it() {
    for seed in 0..60 {
        let predictor: Box<dyn Predictor> = match seed % 3 {
            0 => Box::new(Fixed::new(20 * MS)),
            _ => Box::new(Survival::new(0.1)),
        };
        let mut simulation = Simulation::new(seed, predictor, 1 + seed % 4);
        let is_always_busy = seed % 5 == 4;
        for _ in 0..20_000 {
            let to_ns = simulation.now_ns + simulation.random.u64(..MS);
            simulation.advance(to_ns);
            match simulation.random.u8(..200) {
                0 => {
                    let in_flight = simulation.random.u64(1..4);
                    simulation.requests(in_flight);
                }
                1..=20 if !is_always_busy => simulation.requests(0),
                21 => simulation.foreign = simulation.random.u64(..2),
                _ => {}
            }
            if is_always_busy && simulation.in_flight == 0 {
                simulation.requests(1);
            }
            simulation.work();
        }
        let now_ns = simulation.now_ns;
        let parts = simulation.parts.len();
        let work = simulation.schedule.work();
        assert_eq!(simulation.begun.len(), parts, "seed {seed}: no part starves: {work:?}");
        assert_eq!(simulation.begun.values().sum::<u64>(), work.steps);
        assert_eq!(work.bytes, work.steps << 20);
        // Equal parts get equal turns as far as no deadline requires another order.
        let (least, most) =
            (simulation.begun.values().min().unwrap(), simulation.begun.values().max().unwrap());
        assert!(most - least <= 2 + work.forced, "seed {seed}: {:?}", simulation.begun);
        if is_always_busy {
            assert_eq!((work.forced, work.used_ns), (work.steps, 0), "seed {seed}: {work:?}");
        } else {
            assert!(work.forced < work.steps, "seed {seed}: {work:?}");
        }
        simulation.schedule.rest(0, now_ns);
    }
}

#[test]
fn the_used_idle_time_is_that_of_steps_without_requests() {
    for seed in 0..60 {
        let mut simulation = Simulation::new(seed, Box::new(Fixed::new(0)), 1);
        for _ in 0..5000 {
            let to_ns = simulation.now_ns + simulation.random.u64(..2 * MS);
            simulation.advance(to_ns);
            match simulation.random.u8(..30) {
                0 => simulation.requests(1),
                // After a request that ends during a step, the rest of the step is not counted.
                1..=4 if simulation.step.is_none() => simulation.requests(0),
                _ => {}
            }
            simulation.work();
        }
        // The step in flight is not counted yet.
        while simulation.step.is_some() {
            simulation.requests(1);
            let to_ns = simulation.now_ns + MS;
            simulation.advance(to_ns);
            let (part, ..) = simulation.step.unwrap();
            simulation.schedule.end(part, to_ns);
            simulation.step = None;
        }
        let work = simulation.schedule.work();
        assert_eq!(work.used_ns, simulation.used_ns, "seed {seed}");
        let (idle_ns, _) = simulation.schedule.tracker().times_ns(simulation.now_ns);
        assert!(work.used_ns <= work.waited_idle_ns && work.waited_idle_ns <= idle_ns, "{work:?}");
        assert!(work.met_steps <= work.steps && work.met_ns <= work.met_steps * 17 * MS);
    }
}

#[test]
fn a_hung_step_and_a_closed_part_do_not_stop_the_others() {
    let mut schedule = Schedule::new(options(), Box::new(Fixed::new(0)), 0);
    let offer =
        Offer { bytes: 1, waiting_bytes: 1, waiting_steps: 1, deadline_ns: u64::MAX, pause: 0 };
    for part in 0..3 {
        schedule.open(part);
    }
    assert_eq!(schedule.ask(0, offer, Others::default(), 10 * MS), None);
    assert!(schedule.ask(1, offer, Others::default(), 11 * MS).is_some());
    assert_eq!(schedule.ask(1, offer, Others::default(), 11 * MS + STEP_TIME_MAX_NS), None);
    // Its end comes late.
    assert_eq!(schedule.end(0, 12 * MS + STEP_TIME_MAX_NS), []);
    assert_eq!(schedule.running(), Some(1));
    assert_eq!(schedule.close(1, 13 * MS + STEP_TIME_MAX_NS), [0]);
    schedule.close(0, 13 * MS + STEP_TIME_MAX_NS);
    assert_eq!(schedule.ask(2, offer, Others::default(), 20 * MS + STEP_TIME_MAX_NS), None);
    assert!(
        schedule.ask(7, offer, Others::default(), 20 * MS).is_some(),
        "an unknown part never begins"
    );
}

#[test]
fn steps_of_another_scheduler_of_the_device_exclude_a_step_until_its_deadline() {
    let mut schedule = Schedule::new(options(), Box::new(Fixed::new(0)), 0);
    schedule.open(0);
    let offer =
        Offer { bytes: 1, waiting_bytes: 1, waiting_steps: 1, deadline_ns: 1000 * MS, pause: 0 };
    let step = Others { has_step: true, requests: 3, is_first: false };
    assert!(schedule.ask(0, offer, step, 50 * MS).is_some());
    let first = Others { is_first: true, ..Others::default() };
    assert!(schedule.ask(0, offer, first, 60 * MS).is_some());
    // The requests of the other step are no requests of other programs: the device counts as idle.
    assert_eq!(schedule.ask(0, offer, Others::default(), 61 * MS), None);
    assert_eq!(schedule.end(0, 70 * MS), []);
    assert_eq!(schedule.work().used_ns, 9 * MS);
    assert_eq!(schedule.ask(0, offer, step, 999 * MS), None, "the deadline is near");
    assert_eq!(schedule.work().forced, 1);
}

/// A part pauses after each step while the device is used, and not in a quiet time or when its
/// deadline is near.
#[test]
fn a_part_with_pauses_leaves_a_used_device_most_of_its_time() {
    let mut schedule = Schedule::new(options(), Box::new(Fixed::new(0)), 0);
    schedule.open(0);
    schedule.open(1);
    let offer =
        Offer { bytes: 1, waiting_bytes: 1, waiting_steps: 1, deadline_ns: 5000 * MS, pause: 14 };
    let others = Others::default();
    let request = |schedule: &mut Schedule, at_ms: u64| {
        schedule.requests(1, at_ms * MS);
        schedule.requests(0, at_ms * MS);
    };
    request(&mut schedule, 100);
    assert_eq!(schedule.ask(0, offer, others, 110 * MS), None);
    schedule.end(0, 120 * MS);
    assert_eq!(schedule.ask(0, offer, others, 121 * MS), Some(260 * MS));
    // It is no other part's turn meanwhile.
    let other = Offer { pause: 0, ..offer };
    assert_eq!(schedule.ask(1, other, others, 122 * MS), None);
    schedule.end(1, 123 * MS);
    request(&mut schedule, 124);
    assert_eq!(schedule.ask(1, other, others, 135 * MS), None);
    schedule.end(1, 136 * MS);
    assert_eq!(schedule.ask(0, offer, others, 260 * MS), None);
    schedule.end(0, 270 * MS);
    // Nothing comes for a second: it works without pauses.
    assert!(schedule.ask(0, offer, others, 300 * MS).is_some());
    for at_ms in [1130, 1140] {
        assert_eq!(schedule.ask(0, offer, others, at_ms * MS), None);
        schedule.end(0, (at_ms + 5) * MS);
    }
    request(&mut schedule, 1150);
    assert!(schedule.ask(0, offer, others, 1160 * MS).is_some());
    let urgent = Offer { deadline_ns: 1161 * MS, ..offer };
    assert_eq!(schedule.ask(0, urgent, others, 1161 * MS), None);
}

/// A device that is never idle: the work of a gentle part is done by its deadline, evenly and not
/// at its end, whatever the lengths of its steps are.
#[test]
fn gentle_work_that_gets_no_idle_time_is_spread_over_the_time_left() {
    for (steps, bytes) in [(1000, 4096), (1000, 1 << 20), (6000, 4096), (10, 4096)] {
        let mut schedule = Schedule::new(options(), Box::new(Fixed::new(20 * MS)), 0);
        schedule.open(0);
        schedule.requests(1, 0);
        let (deadline_ns, step_ns) = (100_000 * MS, 8 * MS + bytes * 5);
        // Earlier steps were of another length.
        for at in 0..4 {
            let offer = Offer { bytes: 64 << 10, waiting_steps: 1, ..Offer::default() };
            assert_eq!(schedule.ask(0, offer, Others::default(), at * 10 * MS), None);
            schedule.end(0, at * 10 * MS + 8 * MS + (64 << 10) * 5);
        }
        let (mut now_ns, mut left, mut in_tenths) = (40 * MS, steps, [0; 10]);
        while left > 0 {
            let offer = Offer {
                bytes,
                waiting_bytes: left * bytes,
                waiting_steps: left,
                deadline_ns,
                pause: 14,
            };
            if let Some(again_ns) = schedule.ask(0, offer, Others::default(), now_ns) {
                now_ns = again_ns;
                continue;
            }
            in_tenths[(now_ns * 10 / deadline_ns).min(9) as usize] += 1;
            now_ns += step_ns;
            schedule.end(0, now_ns);
            left -= 1;
        }
        assert!(now_ns <= deadline_ns, "{steps} of {bytes}: {now_ns}");
        // Little work waits for an idle time for as long as it can.
        let is_spread = in_tenths.iter().all(|count| *count <= steps / 4);
        assert!(is_spread || steps == 10, "{steps} of {bytes}: {in_tenths:?}");
    }
}
