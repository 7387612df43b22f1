//! Replays arrivals of requests on a modelled disk, with and without background work.

use std::cell::Cell;
use std::collections::VecDeque;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;

use fathom_backend::Null;
use fathom_backend::model::Model;
use fathom_block::{Clock, Disk, DiskOptions, Layer, Operation, Stack};
use fathom_devices::{IdleTracker, Predictor};
use fathom_reactor::Reactor;

/// The capacity of the disk on which traces are replayed, in bytes. The first half is the guest's,
/// the second half is that of the background work.
pub const CAPACITY: u64 = 64 << 30;
const HALF: u64 = CAPACITY / 2;
/// The least time of idleness before a step, in nanoseconds.
const DWELL_NS: u64 = 1_000_000;
const BLOCK: u64 = 4096;
/// The most requests of the guest that are in flight; further ones wait in the guest.
const DEPTH_MAX: usize = 32;
/// The token of a step.
const STEP: u64 = u64::MAX;

/// A request of a guest.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    pub at_ns: u64,
    pub is_write: bool,
    pub offset: u64,
    pub length: u64,
}

impl Arrival {
    fn new(at_ns: u64, is_write: bool, offset: u64, length: u64) -> Self {
        let length = length.clamp(1, 1 << 20).next_multiple_of(BLOCK);
        let offset = offset % (HALF - length) / BLOCK * BLOCK;
        Self { at_ns, is_write, offset, length }
    }
}

/// The requests of a trace of `vscsiStats`; `None` if it is absent.
pub fn cloudphysics(path: &Path) -> Option<Vec<Arrival>> {
    let bytes = std::fs::read(path).ok()?;
    let mut arrivals: Vec<Arrival> = bytes
        .chunks_exact(32)
        .map(|record| {
            let number = |at: usize, length: usize| {
                let bytes = record[at..at + length].iter().rev();
                bytes.fold(0_u64, |value, byte| value << 8 | u64::from(*byte))
            };
            let (is_write, sector) = (number(12, 2) == 0x2a, number(16, 8));
            Arrival::new(number(24, 8) * 1000, is_write, sector * 512, number(4, 4))
        })
        .collect();
    arrivals.sort_by_key(|arrival| arrival.at_ns);
    Some(arrivals)
}

/// The requests of a trace of Tencent's block storage; `None` if it is absent. Its times are exact
/// to a second, so the requests of a second get times in the order of their lines. `volumes` of its
/// volumes share a device; the seconds of the groups follow each other.
pub fn tencent(path: &Path, volumes: usize) -> Option<Vec<Arrival>> {
    const SECOND_NS: u64 = 1_000_000_000;
    if !path.exists() {
        return None;
    }
    let output = Command::new("bzip2").arg("-dc").arg(path).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows: Vec<Vec<u64>> = text
        .lines()
        .map(|line| line.split(',').filter_map(|field| field.trim().parse().ok()).collect())
        .filter(|row: &Vec<u64>| row.len() == 5)
        .collect();
    let last = rows.iter().map(|row| row[0]).max()?;
    let rows: Vec<&Vec<u64>> = rows.iter().filter(|row| row[0] == last).collect();
    let mut names: Vec<u64> = rows.iter().map(|row| row[4]).collect();
    names.sort_unstable();
    names.dedup();
    let mut arrivals: Vec<Arrival> = rows
        .iter()
        .enumerate()
        .map(|(line, row)| {
            let volume = names.partition_point(|name| *name < row[4]);
            let group = (volume / volumes) as u64;
            let at_ns = group * SECOND_NS + line as u64 * SECOND_NS / rows.len() as u64;
            let offset =
                (volume % volumes) as u64 * (HALF / volumes as u64) + row[1] * 512 % (1 << 30);
            Arrival::new(at_ns, row[3] == 1, offset, row[2] * 512)
        })
        .collect();
    arrivals.sort_by_key(|arrival| arrival.at_ns);
    Some(arrivals)
}

/// Arrivals by seed: bursts of some requests, then a pause.
pub fn bursts(seed: u64, count: usize, in_burst: usize, pause_ms: u64) -> Vec<Arrival> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut at_ns = 0;
    (0..count)
        .map(|index| {
            let is_pause = index % in_burst == 0;
            // An exponential distribution.
            let mean_ns = if is_pause { pause_ms as f64 * 1e6 } else { 4e6 };
            at_ns += (-random.f64().max(1e-9).ln() * mean_ns) as u64;
            Arrival::new(at_ns, random.bool(), random.u64(..HALF), 4096 << random.u32(..5))
        })
        .collect()
}

/// The result of a replay.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    /// The latency of each request, in the order of arrival.
    pub latencies_ns: Vec<u64>,
    /// The times at which requests were completed, in order. A disk may serve requests in another
    /// order if they come a little later, so delays are found by comparing the times of the first
    /// completion, of the second, and so on.
    pub completions_ns: Vec<u64>,
    /// The time without requests of the guest in flight, in nanoseconds.
    pub idle_ns: u64,
    /// The part of it during which a step was in flight.
    pub used_ns: u64,
    /// The durations of the steps, in nanoseconds.
    pub steps_ns: Vec<u64>,
    /// The longest of them.
    pub step_ns: u64,
    /// Requests that came during a step.
    pub met: usize,
}

/// When background work begins.
pub enum Rule<'p> {
    /// Never.
    Never,
    /// By a predictor.
    Predictor(&'p mut dyn Predictor),
    /// Whenever a step of the longest duration so far ends before the next request comes. No rule
    /// can use more of the idle time without meeting requests.
    Oracle,
}

/// The comparison of a replay with one without background work.
#[derive(Clone, Copy, Debug, Default)]
pub struct Comparison {
    /// The share of the idle time that the steps used.
    pub used: f64,
    /// The share of the requests that came during a step.
    pub met: f64,
    /// The share of the requests that were slowed by more than the longest step.
    pub slowed: f64,
    /// The share of the requests that were hastened by more than the longest step.
    pub hastened: f64,
    /// How much longer requests took on average, in nanoseconds.
    pub mean_ns: f64,
    /// The longest step, in nanoseconds.
    pub step_ns: u64,
}

impl Replay {
    /// The share of the requests that completed more than `step_ns` later than in `other`.
    pub fn slowed(&self, other: &Self, step_ns: u64) -> f64 {
        let pairs = self.completions_ns.iter().zip(&other.completions_ns);
        let slowed = pairs.filter(|(one, other)| **one > **other + step_ns);
        slowed.count() as f64 / self.completions_ns.len() as f64
    }

    /// Compares the replay with `without`, which had no background work.
    pub fn compare(&self, without: &Self) -> Comparison {
        let count = self.latencies_ns.len() as f64;
        let step_ns = self.step_ns;
        let pairs = self.completions_ns.iter().zip(&without.completions_ns);
        let hastened = pairs.filter(|(with, without)| **with + step_ns < **without);
        let sum = |latencies: &[u64]| latencies.iter().map(|ns| *ns as f64).sum::<f64>();
        Comparison {
            used: self.used_ns as f64 / without.idle_ns as f64,
            met: self.met as f64 / count,
            slowed: self.slowed(without, step_ns),
            hastened: hastened.count() as f64 / count,
            mean_ns: (sum(&self.latencies_ns) - sum(&without.latencies_ns)) / count,
            step_ns,
        }
    }
}

struct Run {
    stack: Stack,
    reactor: Reactor,
    time_ns: Rc<Cell<u64>>,
    tracker: IdleTracker,
    found: Replay,
    step_since_ns: Option<u64>,
    /// Whether the guest has had no request in flight since the step began.
    is_step_alone: bool,
    step_offset: u64,
    /// Requests that have come and are not in flight, and the number of those in flight.
    waiting: VecDeque<usize>,
    in_flight: usize,
}

impl Run {
    fn submit_waiting(&mut self, arrivals: &[Arrival]) {
        while self.in_flight < DEPTH_MAX {
            let Some(index) = self.waiting.pop_front() else { return };
            self.in_flight += 1;
            self.submit(&arrivals[index], index as u64);
        }
    }

    fn submit(&mut self, arrival: &Arrival, token: u64) {
        let mut request = self.stack.request();
        request.operation = if arrival.is_write { Operation::Write } else { Operation::Read };
        (request.offset, request.length) = (arrival.offset, arrival.length);
        request.flags.force_unit_access = token == STEP;
        request.flags.background = token == STEP;
        request.buffers.allocate(arrival.length as usize);
        request.token = token;
        self.stack.submit(request, &mut self.reactor);
    }

    fn end_use(&mut self, now_ns: u64) {
        if let (Some(since_ns), true) = (self.step_since_ns, self.is_step_alone) {
            self.found.used_ns += now_ns - since_ns;
            self.is_step_alone = false;
        }
    }

    fn collect(&mut self, arrivals: &[Arrival]) {
        let now_ns = self.time_ns.get();
        while let Some((request, outcome)) = self.stack.completed() {
            assert_eq!(outcome, Ok(()));
            if request.token == STEP {
                self.end_use(now_ns);
                let since_ns = self.step_since_ns.take().expect("a step is in flight");
                self.found.steps_ns.push(now_ns - since_ns);
                self.found.step_ns = self.found.step_ns.max(now_ns - since_ns);
            } else {
                let index = request.token as usize;
                self.found.latencies_ns[index] = now_ns - arrivals[index].at_ns;
                self.found.completions_ns.push(now_ns);
                self.tracker.end(1, now_ns);
                self.in_flight -= 1;
            }
            self.stack.recycle(request);
            self.submit_waiting(arrivals);
        }
    }
}

impl Rule<'_> {
    /// How long a step waits on a device that has been idle for `idle_ns`, in nanoseconds.
    fn wait_ns(&self, idle_ns: u64, expected_ns: u64, longest_ns: u64, left_ns: u64) -> u64 {
        match self {
            Self::Never => u64::MAX,
            Self::Predictor(predictor) => predictor.wait_ns(idle_ns, expected_ns),
            Self::Oracle if longest_ns.max(expected_ns) < left_ns => 0,
            Self::Oracle => left_ns,
        }
    }
}

/// Replays `arrivals` on `model`. There is always background work to do, in steps of `step` bytes,
/// which begin by `rule`.
pub fn replay(arrivals: &[Arrival], model: Model, step: u64, mut rule: Rule<'_>) -> Replay {
    let has_work = !matches!(rule, Rule::Never);
    let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(model)];
    let disk = Disk::new(DiskOptions::default(), layers, Arc::new(Null::new(CAPACITY))).unwrap();
    let mut reactor = Reactor::new(8).unwrap();
    let start_ns = arrivals[0].at_ns;
    let time_ns = Rc::new(Cell::new(start_ns));
    let stack = disk.open_queue(&mut reactor, Clock::Simulated(Rc::clone(&time_ns))).unwrap();
    let mut run = Run {
        stack,
        reactor,
        time_ns,
        tracker: IdleTracker::new(1, start_ns),
        found: Replay { latencies_ns: vec![0; arrivals.len()], ..Replay::default() },
        step_since_ns: None,
        is_step_alone: false,
        step_offset: 0,
        waiting: VecDeque::new(),
        in_flight: 0,
    };
    let mut next = 0;
    let mut ask_ns = start_ns;
    let mut expected_ns = 10_000_000;
    loop {
        let now_ns = run.time_ns.get();
        let may_ask = has_work && run.step_since_ns.is_none();
        if may_ask && ask_ns <= now_ns && next < arrivals.len() {
            if let Some(idle_ns) = run.tracker.idle_for_ns(now_ns) {
                let left_ns = arrivals[next].at_ns - now_ns;
                let wait_ns = rule.wait_ns(idle_ns, expected_ns, run.found.step_ns, left_ns);
                let wait_ns = wait_ns.max(DWELL_NS.saturating_sub(idle_ns));
                if wait_ns == 0 {
                    (run.step_since_ns, run.is_step_alone) = (Some(now_ns), true);
                    let offset = HALF + run.step_offset % (HALF - step) / BLOCK * BLOCK;
                    run.step_offset += step;
                    let arrival = Arrival { at_ns: now_ns, is_write: true, offset, length: step };
                    run.submit(&arrival, STEP);
                    run.collect(arrivals);
                } else {
                    ask_ns = now_ns + wait_ns;
                }
            } else {
                ask_ns = u64::MAX;
            }
        }
        let arrival_ns = arrivals.get(next).map_or(u64::MAX, |arrival| arrival.at_ns);
        let deadline_ns = run.stack.deadline_ns().unwrap_or(u64::MAX);
        let decision_ns =
            if has_work && run.step_since_ns.is_none() { ask_ns.max(now_ns) } else { u64::MAX };
        let decision_ns = if next < arrivals.len() { decision_ns } else { u64::MAX };
        let event_ns = arrival_ns.min(deadline_ns).min(decision_ns);
        if event_ns == u64::MAX {
            break;
        }
        run.time_ns.set(event_ns.max(now_ns));
        let now_ns = run.time_ns.get();
        if deadline_ns <= now_ns {
            run.stack.advance(&mut run.reactor);
            let steps = run.found.steps_ns.len();
            run.collect(arrivals);
            if let Some(duration_ns) = run.found.steps_ns.get(steps) {
                expected_ns = (expected_ns * 7 + duration_ns) / 8;
            }
            ask_ns = now_ns;
        }
        while arrivals.get(next).is_some_and(|arrival| arrival.at_ns <= now_ns) {
            run.found.met += usize::from(run.step_since_ns.is_some());
            run.end_use(now_ns);
            if let Some(length_ns) = run.tracker.begin(1, now_ns) {
                if let Rule::Predictor(predictor) = &mut rule {
                    predictor.ended(length_ns);
                }
            }
            run.waiting.push_back(next);
            run.submit_waiting(arrivals);
            run.collect(arrivals);
            next += 1;
        }
    }
    run.found.idle_ns = run.tracker.times_ns(run.time_ns.get()).0;
    run.found
}
