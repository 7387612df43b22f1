//! Several disks on one modelled device, in simulated time: loads by seed with peaks, and traces.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use fathom_backend::Null;
use fathom_backend::model::Model;
use fathom_block::{Clock, Disk, DiskOptions, Layer, Operation, Stack};
use fathom_devices::contention::Batch;
use fathom_reactor::Reactor;

use crate::replay::Arrival;

pub const SECOND: u64 = 1_000_000_000;
/// The most requests of a disk in flight; further ones wait in the guest.
const DEPTH_MAX: usize = 128;
/// The length of a stripe of an array, in bytes.
const STRIPE: u64 = 64 << 10;
/// The bytes of a disk that a load uses.
const LOAD_BYTES: u64 = 64 << 30;

/// The requests of a disk.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The mean rate, in requests a second, outside of peaks and in peaks.
    pub rates: [f64; 2],
    /// The share of reads.
    pub reads: f64,
    /// The length of a request, in bytes.
    pub length: u64,
    /// The share of the requests within the hot part, and its length in bytes.
    pub hot: f64,
    /// See `hot`.
    pub hot_bytes: u64,
    /// Whether requests come in bursts.
    pub is_bursty: bool,
}

/// A peak: the load grows, stays and falls.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_field_names, reason = "the names say the unit")]
pub struct Peak {
    pub start_ns: u64,
    pub ramp_ns: u64,
    pub stay_ns: u64,
    pub fall_ns: u64,
}

impl Peak {
    pub fn end_ns(&self) -> u64 {
        self.start_ns + self.ramp_ns + self.stay_ns + self.fall_ns
    }

    /// The part of the peak that is there at `now_ns`, from 0 to 1.
    fn part(&self, now_ns: u64) -> f64 {
        let age = now_ns.saturating_sub(self.start_ns) as f64;
        let left = self.end_ns().saturating_sub(now_ns) as f64;
        (age / self.ramp_ns as f64).min(left / self.fall_ns as f64).clamp(0.0, 1.0)
    }
}

/// Peaks by seed, after a time without.
pub fn peaks(seed: u64, count: usize, first_ns: u64) -> Vec<Peak> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut now_ns = first_ns;
    (0..count)
        .map(|_| {
            // The logarithms of the lengths of ramps are equally likely.
            let ramp_ns = (2e9 * 15_f64.powf(random.f64())) as u64;
            let peak = Peak {
                start_ns: now_ns,
                ramp_ns,
                stay_ns: random.u64(10 * SECOND..30 * SECOND),
                fall_ns: random.u64(2 * SECOND..10 * SECOND),
            };
            now_ns = peak.end_ns() + random.u64(30 * SECOND..90 * SECOND);
            peak
        })
        .collect()
}

/// The arrivals of a load, until `end_ns`.
pub struct Arrivals {
    load: Load,
    peaks: Vec<Peak>,
    random: fastrand::Rng,
    at_ns: u64,
    end_ns: u64,
    is_burst: bool,
    /// The end of the current burst or pause.
    until_ns: u64,
    /// Until when the load has quiet times: the last third of each minute.
    quiet_ns: u64,
}

impl Arrivals {
    pub fn new(load: Load, peaks: Vec<Peak>, seed: u64, end_ns: u64) -> Self {
        let random = fastrand::Rng::with_seed(seed);
        Self { load, peaks, random, at_ns: 0, end_ns, is_burst: false, until_ns: 0, quiet_ns: 0 }
    }

    /// The same with quiet times until `quiet_ns`: in the last third of each minute, the load is a
    /// twentieth.
    pub fn with_quiet(self, quiet_ns: u64) -> Self {
        Self { quiet_ns, ..self }
    }

    fn exponential(&mut self, mean_ns: f64) -> u64 {
        (-(1.0 - self.random.f64()).ln() * mean_ns) as u64
    }

    fn rate(&mut self) -> f64 {
        let part = self.peaks.iter().map(|peak| peak.part(self.at_ns)).fold(0.0, f64::max);
        let is_quiet = self.at_ns < self.quiet_ns && self.at_ns % (60 * SECOND) >= 40 * SECOND;
        let rate = self.load.rates[0] + (self.load.rates[1] - self.load.rates[0]) * part;
        let rate = if is_quiet { rate / 20.0 } else { rate };
        if !self.load.is_bursty {
            return rate;
        }
        while self.until_ns <= self.at_ns {
            self.is_burst = !self.is_burst;
            let mean_ns = if self.is_burst { 0.5e9 } else { 1.5e9 };
            self.until_ns += self.exponential(mean_ns).max(1);
        }
        rate * if self.is_burst { 2.5 } else { 0.5 }
    }
}

impl Iterator for Arrivals {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        let most = self.load.rates[0].max(self.load.rates[1]) * 2.5;
        loop {
            self.at_ns += self.exponential(1e9 / most).max(1);
            if self.at_ns >= self.end_ns {
                return None;
            }
            if self.random.f64() * most < self.rate() {
                break;
            }
        }
        let is_hot = self.random.f64() < self.load.hot;
        let hot = self.load.hot_bytes;
        let bytes = if is_hot { 0..hot } else { hot..LOAD_BYTES };
        let length = self.load.length;
        let offset = self.random.u64(bytes) / length * length;
        let is_write = self.random.f64() >= self.load.reads;
        Some(Arrival { at_ns: self.at_ns, is_write, offset, length })
    }
}

struct Queue {
    stack: Stack,
    reactor: Reactor,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    disk: usize,
    at_ns: u64,
    queue: u64,
}

/// Disks on an array of modelled devices, or on one.
pub struct Consolidation {
    time: Rc<Cell<u64>>,
    /// The queues of each disk, one for each device.
    queues: Vec<Vec<Queue>>,
    waiting: Vec<VecDeque<Arrival>>,
    in_flight: Vec<usize>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    batches: Vec<Batch>,
}

impl Consolidation {
    /// `disks` disks of `capacity` bytes each, behind each other on the devices.
    pub fn new(devices: &[Model], disks: usize, capacity: u64) -> Self {
        let time = Rc::new(Cell::new(0));
        let part = capacity / devices.len() as u64;
        let queue = |device: &Model, disk: usize| {
            let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(device.at(disk as u64 * part))];
            let disk = Disk::new(DiskOptions::default(), layers, Arc::new(Null::new(part)));
            let mut reactor = Reactor::new(8).expect("an io_uring");
            let clock = Clock::Simulated(Rc::clone(&time));
            let stack = disk.expect("a disk").open_queue(&mut reactor, clock).expect("a queue");
            Queue { stack, reactor }
        };
        let queues: Vec<Vec<Queue>> =
            (0..disks).map(|disk| devices.iter().map(|it| queue(it, disk)).collect()).collect();
        Self {
            time,
            queues,
            waiting: vec![VecDeque::new(); disks],
            in_flight: vec![0; disks],
            slots: Vec::new(),
            free: Vec::new(),
            batches: vec![Batch::default(); disks],
        }
    }

    fn submit(&mut self, disk: usize, arrival: &Arrival) {
        let now_ns = self.time.get();
        let queue = self.in_flight.iter().sum::<usize>() as u64;
        let index = self.free.pop().unwrap_or(self.slots.len());
        self.slots.resize((index + 1).max(self.slots.len()), Slot::default());
        self.slots[index] = Slot { disk, at_ns: now_ns, queue };
        self.batches[disk].arrive(!arrival.is_write, queue);
        self.in_flight[disk] += 1;
        let devices = self.queues[disk].len() as u64;
        let (device, offset) = if devices == 1 {
            (0, arrival.offset)
        } else {
            let stripe = arrival.offset / STRIPE;
            (stripe % devices, stripe / devices * STRIPE + arrival.offset % STRIPE)
        };
        let Queue { stack, reactor } = &mut self.queues[disk][device as usize];
        let mut request = stack.request();
        request.operation = if arrival.is_write { Operation::Write } else { Operation::Read };
        (request.offset, request.length) = (offset, arrival.length);
        request.buffers.allocate(arrival.length as usize);
        request.token = index as u64;
        stack.submit(request, reactor);
    }

    /// Takes what has completed, and submits what has waited for it.
    fn collect(&mut self) {
        let now_ns = self.time.get();
        for disk in 0..self.queues.len() {
            for device in 0..self.queues[disk].len() {
                while let Some((request, outcome)) = self.queues[disk][device].stack.completed() {
                    assert_eq!(outcome, Ok(()));
                    let index = request.token as usize;
                    let slot = self.slots[index];
                    self.free.push(index);
                    self.batches[disk].complete(now_ns - slot.at_ns, slot.queue);
                    self.in_flight[slot.disk] -= 1;
                    self.queues[disk][device].stack.recycle(request);
                }
            }
            while self.in_flight[disk] < DEPTH_MAX {
                let Some(arrival) = self.waiting[disk].pop_front() else { break };
                self.submit(disk, &arrival);
            }
        }
    }

    /// Carries out `arrivals`, each with its disk, in order of time. After each `step_ns`, calls
    /// `step` with the time and what the disks' requests did.
    pub fn run(
        &mut self,
        arrivals: impl Iterator<Item = (usize, Arrival)>,
        step_ns: u64,
        mut step: impl FnMut(u64, &mut [Batch]),
    ) {
        let mut arrivals = arrivals.peekable();
        let mut step_at_ns = arrivals.peek().map_or(0, |next| next.1.at_ns);
        self.time.set(step_at_ns);
        loop {
            let now_ns = self.time.get();
            while let Some((disk, arrival)) = arrivals.next_if(|next| next.1.at_ns <= now_ns) {
                self.waiting[disk].push_back(arrival);
            }
            for Queue { stack, reactor } in self.queues.iter_mut().flatten() {
                if stack.deadline_ns().is_some_and(|deadline_ns| deadline_ns <= now_ns) {
                    stack.advance(reactor);
                }
            }
            self.collect();
            if step_at_ns <= now_ns {
                step(now_ns, &mut self.batches);
                self.batches.fill_with(Batch::default);
                step_at_ns += step_ns;
            }
            let arrival_ns = arrivals.peek().map_or(u64::MAX, |next| next.1.at_ns);
            let queues = self.queues.iter().flatten();
            let deadlines = queues.filter_map(|queue| queue.stack.deadline_ns());
            let deadline_ns = deadlines.min().unwrap_or(u64::MAX);
            if arrival_ns == u64::MAX && self.in_flight.iter().all(|count| *count == 0) {
                return;
            }
            let next_ns = arrival_ns.min(deadline_ns).min(step_at_ns);
            self.time.set(next_ns.max(now_ns));
        }
    }
}

/// Merges the arrivals of several disks in order of time.
pub fn merge<I: Iterator<Item = Arrival>>(disks: Vec<I>) -> impl Iterator<Item = (usize, Arrival)> {
    let mut disks: Vec<_> = disks.into_iter().map(Iterator::peekable).collect();
    std::iter::from_fn(move || {
        let at = |disk: &mut std::iter::Peekable<I>| disk.peek().map(|arrival| arrival.at_ns);
        let heads = disks.iter_mut().map(at).enumerate();
        let (_, disk) = heads.filter_map(|(disk, at)| Some((at?, disk))).min()?;
        disks[disk].next().map(|arrival| (disk, arrival))
    })
}
