//! The background work of the disks' layers: one scheduler for each set of devices beneath disks.
//!
//! A set of devices gets a scheduler when the first disk on it has a layer with background work.
//! From then on, its disks report when requests of guests are in flight at the device (the layer
//! [`Activity`]), and so do disks that share only some of the devices, by schedulers of their own.
//! Disks on other devices cost nothing. Schedulers of sets that overlap know each other: each sees
//! the requests of all disks on its devices, and their steps exclude each other. Requests of other
//! programs are read from `/sys` when a layer asks for a step.
//!
//! Only while a disk of a device is to be relieved in its peaks, the layer also measures each
//! request for the model of the device's contention (`probe`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use fathom_block::{BackgroundScheduler, BackgroundStep, Clock, Permission, Waker};
use fathom_control::{BackgroundDevice, BackgroundList, DeviceIdle, WaitingWork};
use fathom_devices::predict::default_predictor;
use fathom_devices::{
    IdleOptions, Medium, MediumKind, Offer, Others, Placement, Schedule, SysDevices,
};
use parking_lot::Mutex;

mod activity;
mod equip;
pub(crate) mod feature;
pub(crate) mod metrics;
mod probe;

pub(crate) use activity::Activity;
pub(crate) use probe::Probes;

/// How long a scheduler that waited for the step of another one may be ahead of it, in nanoseconds.
const TURN_NS: u64 = 200_000_000;

/// The schedulers in use, by the devices beneath.
#[derive(Default)]
pub(crate) struct BackgroundWork {
    options: Mutex<IdleOptions>,
    devices: Mutex<BTreeMap<BTreeSet<Medium>, Weak<Scheduled>>>,
    order: Arc<Order>,
    /// How often a set of devices got its first work.
    beginnings: AtomicU64,
    begins: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// The order of the steps of schedulers whose devices overlap.
#[derive(Default)]
struct Order {
    /// Locked while such a scheduler decides whether a step begins.
    deciding: Mutex<()>,
    turns: AtomicU64,
}

impl BackgroundWork {
    /// Sets when a device counts as idle, for the schedulers made from now on.
    pub(crate) fn set_options(&self, options: IdleOptions) {
        *self.options.lock() = options;
    }

    /// Calls `begins` whenever a set of devices gets its first work, so that disks that are already
    /// served are observed.
    pub(crate) fn on_begin(&self, begins: impl Fn() + Send + Sync + 'static) {
        let _ = self.begins.set(Box::new(begins));
    }

    /// How often a set of devices got its first work so far.
    pub(crate) fn beginnings(&self) -> u64 {
        self.beginnings.load(Ordering::Acquire)
    }

    /// Whether any device has background work.
    pub(crate) fn is_empty(&self) -> bool {
        !self.alive().iter().any(|device| device.has_work())
    }

    fn alive(&self) -> Vec<Arc<Scheduled>> {
        self.devices.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// The scheduler of the devices of `placement`. It is made if `has_work`, or if another
    /// scheduler with work has some of the devices.
    pub(crate) fn of(&self, placement: &Placement, has_work: bool) -> Option<Arc<Scheduled>> {
        let mut devices = self.devices.lock();
        devices.retain(|_, device| device.strong_count() > 0);
        let overlapping: Vec<Arc<Scheduled>> = devices
            .values()
            .filter_map(Weak::upgrade)
            .filter(|device| !device.media.is_disjoint(&placement.media))
            .collect();
        if !has_work && !overlapping.iter().any(|device| device.has_work()) {
            return None;
        }
        let known = overlapping.iter().find(|device| device.media == placement.media).cloned();
        let device = known.unwrap_or_else(|| {
            let device =
                Arc::new(Scheduled::new(placement, *self.options.lock(), Arc::clone(&self.order)));
            for other in &overlapping {
                other.add_neighbour(&device);
                device.add_neighbour(other);
            }
            devices.insert(placement.media.clone(), Arc::downgrade(&device));
            device
        });
        drop(devices);
        if has_work && !device.has_work.swap(true, Ordering::AcqRel) {
            self.beginnings.fetch_add(1, Ordering::AcqRel);
            self.announce();
        }
        Some(device)
    }

    /// Lets disks be observed that share devices with work and are not observed yet.
    pub(crate) fn announce(&self) {
        if let Some(begins) = self.begins.get() {
            begins();
        }
    }

    /// The work of all devices now.
    pub(crate) fn list(&self) -> BackgroundList {
        let time_ns = Clock::System.now_ns();
        let devices = self.alive().into_iter().filter(|device| device.has_work());
        BackgroundList {
            time_ns,
            unix_time_ns: crate::daemon::unix_time_ns(),
            devices: devices.map(|device| device.status(time_ns)).collect(),
        }
    }

    /// The idle time of a device; `None` if it is not observed.
    pub(crate) fn idle_time(&self, medium: &Medium) -> Option<DeviceIdle> {
        let observed = self.alive().into_iter().filter(|device| device.media.contains(medium));
        // The smallest set says most about the device.
        Some(observed.min_by_key(|device| device.media.len())?.idle_time(Clock::System.now_ns()))
    }
}

/// A part of a layer with background work.
struct Part {
    disk: String,
    layer: &'static str,
    waker: Waker,
}

/// A set of devices with background work.
pub(crate) struct Scheduled {
    media: BTreeSet<Medium>,
    sys: SysDevices,
    threshold: u64,
    /// Guests' requests in flight.
    in_flight: AtomicU64,
    /// Whether a step is in flight, and the requests that came during steps.
    is_stepping: AtomicBool,
    met: AtomicU64,
    /// Locked only when the device becomes idle or busy, and by parts with work.
    schedule: Mutex<Schedule>,
    parts: Mutex<BTreeMap<u64, Part>>,
    opened: AtomicU64,
    /// Whether a disk on exactly these devices has had a layer with work.
    has_work: AtomicBool,
    order: Arc<Order>,
    /// The schedulers with some of these devices, and a number that changes with them.
    neighbours: Mutex<Vec<Weak<Scheduled>>>,
    generation: AtomicU64,
    /// The turn of the latest step.
    turn: AtomicU64,
    /// When a part waited for a neighbour's step, in nanoseconds; 0 if the latest answer was
    /// another.
    excluded_ns: AtomicU64,
    /// What the disks ask of the devices.
    probes: Probes,
}

impl Scheduled {
    fn new(placement: &Placement, options: IdleOptions, order: Arc<Order>) -> Self {
        let schedule = Schedule::new(options, default_predictor(), Clock::System.now_ns());
        Self {
            media: placement.media.clone(),
            sys: SysDevices::default(),
            threshold: options.threshold.max(1),
            in_flight: AtomicU64::new(0),
            is_stepping: AtomicBool::new(false),
            met: AtomicU64::new(0),
            schedule: Mutex::new(schedule),
            parts: Mutex::default(),
            opened: AtomicU64::new(0),
            has_work: AtomicBool::new(false),
            order,
            neighbours: Mutex::default(),
            generation: AtomicU64::new(0),
            turn: AtomicU64::new(0),
            excluded_ns: AtomicU64::new(0),
            probes: Probes::default(),
        }
    }

    /// What the disks ask of the devices.
    pub(crate) fn probes(&self) -> &Probes {
        &self.probes
    }

    /// The guests' requests in flight.
    fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    fn has_work(&self) -> bool {
        self.has_work.load(Ordering::Acquire)
    }

    fn add_neighbour(&self, other: &Arc<Self>) {
        let mut neighbours = self.neighbours.lock();
        neighbours.retain(|neighbour| neighbour.strong_count() > 0);
        neighbours.push(Arc::downgrade(other));
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    fn neighbours(&self) -> Vec<Arc<Self>> {
        self.neighbours.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether a part has waited for the step of a neighbour that had a later turn.
    fn is_before(&self, neighbour: &Self, now_ns: u64) -> bool {
        let excluded_ns = self.excluded_ns.load(Ordering::Acquire);
        excluded_ns > 0
            && now_ns.saturating_sub(excluded_ns) < TURN_NS
            && self.turn.load(Ordering::Acquire) < neighbour.turn.load(Ordering::Acquire)
    }

    /// The requests in flight of programs other than the observed disks.
    fn foreign(&self) -> u64 {
        let devices = self.media.iter().filter(|medium| medium.kind == MediumKind::Device);
        let of_host = devices.filter_map(|medium| self.sys.in_flight(&medium.name)).sum::<u64>();
        of_host.saturating_sub(self.in_flight.load(Ordering::Acquire))
    }

    /// `count` requests of guests begin.
    fn begin(&self, count: u64, now_ns: u64) {
        if count == 0 {
            return;
        }
        let before = self.in_flight.fetch_add(count, Ordering::AcqRel);
        let is_stepping = self.is_stepping.load(Ordering::Acquire);
        if is_stepping {
            self.met.fetch_add(count, Ordering::Relaxed);
        }
        let becomes_busy = before < self.threshold && before + count >= self.threshold;
        if becomes_busy || is_stepping {
            self.update(now_ns);
        }
    }

    /// `count` requests of guests have ended.
    fn end_requests(&self, count: u64, now_ns: u64) {
        let before = self.in_flight.fetch_sub(count, Ordering::AcqRel);
        if before >= self.threshold && before.saturating_sub(count) < self.threshold {
            self.update(now_ns);
        }
    }

    /// Reports the current number of requests. Of two threads that do so, the later one reports
    /// what both have changed.
    fn update(&self, now_ns: u64) {
        let mut schedule = self.schedule.lock();
        let in_flight = self.in_flight.load(Ordering::Acquire);
        schedule.requests(in_flight, now_ns);
    }

    fn wake(&self, parts: &[u64]) {
        let known = self.parts.lock();
        let wakers: Vec<Waker> =
            parts.iter().filter_map(|part| Some(known.get(part)?.waker.clone())).collect();
        drop(known);
        for waker in wakers {
            waker.wake();
        }
    }

    /// Wakes parts that wait for the end of a step, here and at neighbours.
    fn wake_all(&self, parts: &[u64]) {
        self.wake(parts);
        for neighbour in self.neighbours() {
            if neighbour.excluded_ns.load(Ordering::Acquire) > 0 {
                let parts: Vec<u64> = neighbour.parts.lock().keys().copied().collect();
                neighbour.wake(&parts);
            }
        }
    }

    /// The names of the devices.
    pub(crate) fn names(&self) -> Vec<String> {
        self.media.iter().map(|medium| medium.name.clone()).collect()
    }

    fn idle_time(&self, now_ns: u64) -> DeviceIdle {
        let schedule = self.schedule.lock();
        let tracker = schedule.tracker();
        let (idle_ns, busy_ns) = tracker.times_ns(now_ns);
        let (is_idle, periods) = (tracker.is_idle(), tracker.periods().clone());
        DeviceIdle { devices: self.names(), is_idle, idle_ns, busy_ns, periods }
    }

    fn status(&self, now_ns: u64) -> BackgroundDevice {
        let schedule = self.schedule.lock();
        let (work, tracker) = (schedule.work(), schedule.tracker());
        let (idle_ns, busy_ns) = tracker.times_ns(now_ns);
        let parts = self.parts.lock();
        let waiting = parts.iter().filter_map(|(number, part)| {
            let offer = schedule.offer(*number)?;
            Some(WaitingWork {
                disk: part.disk.clone(),
                layer: part.layer.to_owned(),
                bytes: offer.waiting_bytes,
                deadline_in_ns: offer.deadline_ns.saturating_sub(now_ns),
                is_running: schedule.running() == Some(*number),
            })
        });
        BackgroundDevice {
            devices: self.names(),
            is_idle: tracker.is_idle(),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            idle_ns,
            busy_ns,
            idle_periods: tracker.periods().clone(),
            predictor: schedule.predictor(),
            waiting: waiting.collect(),
            steps: work.steps,
            forced_steps: work.forced,
            bytes: work.bytes,
            step_ns: schedule.step_ns(),
            offered_ns: work.waited_idle_ns,
            used_ns: work.used_ns,
            met_requests: self.met.load(Ordering::Relaxed),
            met_steps: work.met_steps,
            met_ns: work.met_ns,
        }
    }
}

impl BackgroundScheduler for Scheduled {
    fn open(&self, disk: &str, layer: &'static str, waker: Waker) -> u64 {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        self.parts.lock().insert(number, Part { disk: disk.to_owned(), layer, waker });
        self.schedule.lock().open(number);
        number
    }

    fn ask(&self, part: u64, step: BackgroundStep, now_ns: u64) -> Permission {
        let BackgroundStep { bytes, waiting_bytes, waiting_steps, deadline_ns, pause } = step;
        let offer = Offer { bytes, waiting_bytes, waiting_steps, deadline_ns, pause };
        let requests = self.foreign();
        let neighbours = self.neighbours();
        let _deciding = (!neighbours.is_empty()).then(|| self.order.deciding.lock());
        let is_stepping = |other: &Arc<Self>| other.is_stepping.load(Ordering::Acquire);
        let has_step = neighbours.iter().any(is_stepping);
        let is_first = neighbours.iter().any(|other| other.is_before(self, now_ns));
        let mut schedule = self.schedule.lock();
        let others = Others { requests, has_step, is_first };
        let again_ns = schedule.ask(part, offer, others, now_ns);
        let is_excluded = again_ns.is_some() && has_step;
        self.excluded_ns.store(if is_excluded { now_ns } else { 0 }, Ordering::Release);
        if let Some(again_ns) = again_ns {
            return Permission::Wait(again_ns);
        }
        self.turn.store(self.order.turns.fetch_add(1, Ordering::AcqRel) + 1, Ordering::Release);
        self.is_stepping.store(true, Ordering::Release);
        Permission::Begin
    }

    fn end(&self, part: u64, now_ns: u64) {
        let mut schedule = self.schedule.lock();
        let woken = schedule.end(part, now_ns);
        self.is_stepping.store(schedule.running().is_some(), Ordering::Release);
        drop(schedule);
        self.wake_all(&woken);
    }

    fn rest(&self, part: u64) {
        self.schedule.lock().rest(part, Clock::System.now_ns());
    }

    fn close(&self, part: u64) {
        let mut schedule = self.schedule.lock();
        let woken = schedule.close(part, Clock::System.now_ns());
        self.is_stepping.store(schedule.running().is_some(), Ordering::Release);
        drop(schedule);
        self.parts.lock().remove(&part);
        self.wake_all(&woken);
    }
}

#[cfg(test)]
mod tests;
