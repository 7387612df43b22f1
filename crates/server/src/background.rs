//! The background work of the disks' layers: one scheduler for each set of devices beneath disks.
//!
//! A set of devices gets a scheduler when the first disk on it has a layer with background work. From
//! then on, its disks report when requests of guests are in flight at the device (the layer
//! [`Activity`]); disks on other devices cost nothing. Requests of other programs are read from `/sys`
//! when a layer asks for a step.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use fathom_block::{
    BackgroundScheduler, BackgroundStep, Capabilities, Clock, Layer, LayerPart, Observer,
    OpenContext, Operation, Outcome, Permission, Place, Request, Waker,
};
use fathom_control::{BackgroundDevice, BackgroundList, WaitingWork};
use fathom_devices::predict::default_predictor;
use fathom_devices::{IdleOptions, Medium, MediumKind, Offer, Placement, Schedule, SysDevices};

use crate::lock;

/// The schedulers in use, by the devices beneath.
#[derive(Default)]
pub(crate) struct BackgroundWork {
    options: Mutex<IdleOptions>,
    devices: Mutex<BTreeMap<BTreeSet<Medium>, Weak<Scheduled>>>,
}

impl BackgroundWork {
    /// Sets when a device counts as idle, for the schedulers made from now on.
    pub(crate) fn set_options(&self, options: IdleOptions) {
        *lock(&self.options) = options;
    }

    /// Whether any device has background work.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.devices).values().all(|device| device.strong_count() == 0)
    }

    /// The scheduler of the devices of `placement`. It is made if `has_work`.
    pub(crate) fn of(&self, placement: &Placement, has_work: bool) -> Option<Arc<Scheduled>> {
        let mut devices = lock(&self.devices);
        devices.retain(|_, device| device.strong_count() > 0);
        if let Some(device) = devices.get(&placement.media).and_then(Weak::upgrade) {
            return Some(device);
        }
        if !has_work {
            return None;
        }
        let device = Arc::new(Scheduled::new(placement, *lock(&self.options)));
        devices.insert(placement.media.clone(), Arc::downgrade(&device));
        Some(device)
    }

    /// The work of all devices now.
    pub(crate) fn list(&self) -> BackgroundList {
        let devices: Vec<Arc<Scheduled>> =
            lock(&self.devices).values().filter_map(Weak::upgrade).collect();
        let time_ns = Clock::System.now_ns();
        BackgroundList {
            time_ns,
            unix_time_ns: crate::daemon::unix_time_ns(),
            devices: devices.iter().map(|device| device.status(time_ns)).collect(),
        }
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
}

impl Scheduled {
    fn new(placement: &Placement, options: IdleOptions) -> Self {
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
        }
    }

    /// The requests in flight of programs other than the observed disks.
    fn foreign(&self) -> u64 {
        let devices = self.media.iter().filter(|medium| medium.kind == MediumKind::Device);
        let of_host = devices.filter_map(|medium| self.sys.in_flight(&medium.name)).sum::<u64>();
        of_host.saturating_sub(self.in_flight.load(Ordering::Acquire))
    }

    /// `count` requests of guests begin.
    fn begin(&self, count: u64, now_ns: u64) {
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

    /// Reports the current number of requests. Of two threads that do so, the later one reports what
    /// both have changed.
    fn update(&self, now_ns: u64) {
        let mut schedule = lock(&self.schedule);
        let in_flight = self.in_flight.load(Ordering::Acquire);
        schedule.requests(in_flight, now_ns);
    }

    fn wake(&self, parts: &[u64]) {
        let known = lock(&self.parts);
        let wakers: Vec<Waker> =
            parts.iter().filter_map(|part| Some(known.get(part)?.waker.clone())).collect();
        drop(known);
        for waker in wakers {
            waker.wake();
        }
    }

    fn status(&self, now_ns: u64) -> BackgroundDevice {
        let schedule = lock(&self.schedule);
        let (work, tracker) = (schedule.work(), schedule.tracker());
        let (idle_ns, busy_ns) = tracker.times_ns(now_ns);
        let parts = lock(&self.parts);
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
            devices: self.media.iter().map(|medium| medium.name.clone()).collect(),
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
        lock(&self.parts).insert(number, Part { disk: disk.to_owned(), layer, waker });
        lock(&self.schedule).open(number);
        number
    }

    fn ask(&self, part: u64, step: BackgroundStep, now_ns: u64) -> Permission {
        let BackgroundStep { bytes, waiting_bytes, deadline_ns } = step;
        let foreign = self.foreign();
        let mut schedule = lock(&self.schedule);
        let offer = Offer { bytes, waiting_bytes, deadline_ns };
        if let Some(again_ns) = schedule.ask(part, offer, foreign, now_ns) {
            return Permission::Wait(again_ns);
        }
        self.is_stepping.store(true, Ordering::Release);
        Permission::Begin
    }

    fn end(&self, part: u64, now_ns: u64) {
        let mut schedule = lock(&self.schedule);
        let woken = schedule.end(part, now_ns);
        self.is_stepping.store(schedule.running().is_some(), Ordering::Release);
        drop(schedule);
        self.wake(&woken);
    }

    fn rest(&self, part: u64) {
        lock(&self.schedule).rest(part, Clock::System.now_ns());
    }

    fn close(&self, part: u64) {
        let mut schedule = lock(&self.schedule);
        let woken = schedule.close(part, Clock::System.now_ns());
        self.is_stepping.store(schedule.running().is_some(), Ordering::Release);
        drop(schedule);
        lock(&self.parts).remove(&part);
        self.wake(&woken);
    }
}

/// The layer that reports guests' requests at a device with background work.
#[derive(Clone)]
pub(crate) struct Activity {
    device: Arc<Scheduled>,
}

impl Activity {
    pub(crate) fn new(device: Arc<Scheduled>) -> Self {
        Self { device }
    }
}

impl Layer for Activity {
    fn name(&self) -> &'static str {
        "activity"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let device = Arc::clone(&self.device);
        Ok(LayerPart::observer(ActivityQueue { device, in_flight: 0 }))
    }
}

struct ActivityQueue {
    device: Arc<Scheduled>,
    /// The requests of this queue in flight.
    in_flight: u64,
}

/// Whether a request occupies the device, and a process may wait for it.
fn counts(request: &Request) -> bool {
    let is_io = !matches!(request.operation, Operation::GetId | Operation::Extents);
    is_io && !request.flags.background
}

impl Observer for ActivityQueue {
    fn down(&mut self, requests: &mut [Box<Request>], place: Place<'_>) {
        let count = requests.iter().filter(|request| counts(request)).count() as u64;
        if count > 0 {
            self.in_flight += count;
            self.device.begin(count, place.round_ns());
        }
    }

    fn up(&mut self, requests: &mut [(Box<Request>, Outcome)], place: Place<'_>) {
        let count = requests.iter().filter(|(request, _)| counts(request)).count() as u64;
        let count = count.min(self.in_flight);
        if count > 0 {
            self.in_flight -= count;
            self.device.end_requests(count, place.round_ns());
        }
    }
}

impl Drop for ActivityQueue {
    /// The requests of a queue that ends early are in flight no more.
    fn drop(&mut self) {
        if self.in_flight > 0 {
            self.device.end_requests(self.in_flight, Clock::System.now_ns());
        }
    }
}
