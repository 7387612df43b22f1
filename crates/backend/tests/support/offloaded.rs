//! Disks with the layer `offload` on one modelled device, in simulated time. The device's
//! background work and the forecast of its contention are those of the daemon.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fathom_backend::model::{Model, Modelled};
use fathom_backend::{Memory, Null};
use fathom_block::{
    Backend, BackendOpenContext, BackendProblem, BackendQueue, BackgroundScheduler, BackgroundStep,
    Capabilities, Clock, Crossing, Disk, DiskOptions, ErrorKind, Geometry, Layer, LayerPart,
    LayerQueue, Observer, ObserverPosition, OpenContext, Operation, Outcome, Permission, Request,
    Stack, Waker,
};
use fathom_devices::contention::forecast::default_forecast;
use fathom_devices::contention::{Batch, Carriable, Contention, ContentionOptions};
use fathom_devices::predict::default_predictor;
use fathom_devices::{IdleOptions, Offer, Others, Schedule};
use fathom_layers::Offload;
use fathom_layers::offload::{CarryKind, OffloadOptions, OffloadState};
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_persistence::Identity;
use fathom_reactor::Reactor;
use parking_lot::Mutex;

use crate::consolidate::SECOND;
use crate::replay::Arrival;

/// The most requests of a disk in flight; further ones wait in the guest.
const DEPTH_MAX: usize = 128;
/// The length of a stripe of an array, in bytes.
const STRIPE: u64 = 64 << 10;
/// The interval of the daemon's looks at a device.
const STEP_NS: u64 = 100_000_000;
/// A disk is carried at least this long by a forecast, as by the daemon.
const CARRY_MIN_NS: u64 = 5 * SECOND;
/// The rounds of an instant, and by how much the time moves on then, in nanoseconds.
const ROUNDS_MAX: u32 = 64;
const MOVE_NS: u64 = 1000;
/// The bit of a request's word that says that it found the device idle.
const ALONE: u64 = 1;

/// One device of an array: it has every so-manieth stripe. It is as large as the array, so that the
/// way between two stripes is the same part of its own.
struct Spindle {
    model: Model,
    index: u64,
    count: u64,
}

struct SpindleQueue {
    inner: Box<dyn LayerQueue>,
    index: u64,
    count: u64,
}

impl SpindleQueue {
    fn has(&self, request: &Request) -> bool {
        request.offset / STRIPE % self.count == self.index
    }
}

impl Layer for Spindle {
    fn name(&self) -> &'static str {
        "spindle"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        self.model.capabilities(below)
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(match self.model.open_queue(context)? {
            LayerPart::Queue(inner) => {
                LayerPart::queue(SpindleQueue { inner, index: self.index, count: self.count })
            }
            observer @ LayerPart::Observer(_) => observer,
        })
    }
}

impl LayerQueue for SpindleQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        if self.has(&request) { self.inner.submit(request, next) } else { next.submit(request) }
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        if self.has(&request) {
            self.inner.complete(request, outcome, next);
        } else {
            next.complete(request, outcome);
        }
    }

    fn resume(&mut self, request: Box<Request>, outcome: Option<Outcome>, next: &mut Crossing<'_>) {
        self.inner.resume(request, outcome, next);
    }
}

/// A log volume that has the timing of a modelled device once its logs are open, because they are
/// opened in real time.
struct LogStore {
    memory: Arc<dyn Backend>,
    modelled: Arc<Modelled>,
    is_timed: AtomicBool,
}

impl Backend for LogStore {
    fn name(&self) -> &'static str {
        self.memory.name()
    }

    fn capacity(&self) -> u64 {
        self.memory.capacity()
    }

    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }

    fn open_queue(
        &self,
        context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        if self.is_timed.load(Ordering::Relaxed) {
            self.modelled.open_queue(context)
        } else {
            self.memory.open_queue(context)
        }
    }

    fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        self.memory.resize(capacity)
    }

    fn problems(&self) -> Vec<BackendProblem> {
        self.memory.problems()
    }

    fn losses(&self) -> u64 {
        self.memory.losses()
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        self.memory.recover()
    }
}

/// What the disks on the device share: the scheduler of background work, and what their requests
/// did.
struct Device {
    now_ns: AtomicU64,
    in_flight: AtomicU64,
    schedule: Mutex<Schedule>,
    wakers: Mutex<BTreeMap<u64, Waker>>,
    opened: AtomicU64,
    batches: Vec<Mutex<Batch>>,
    /// The times without background work, in nanoseconds.
    held: Vec<Range<u64>>,
}

impl Device {
    fn new(disks: usize, held: &[Range<u64>]) -> Self {
        let schedule = Schedule::new(IdleOptions::default(), default_predictor(), 0);
        Self {
            now_ns: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            schedule: Mutex::new(schedule),
            wakers: Mutex::default(),
            opened: AtomicU64::new(0),
            batches: (0..disks).map(|_| Mutex::default()).collect(),
            held: held.to_vec(),
        }
    }

    fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }

    /// The number of guests' requests changes.
    fn requests(&self, change: impl Fn(u64) -> u64, now_ns: u64) {
        let in_flight = change(self.in_flight.load(Ordering::Relaxed));
        self.in_flight.store(in_flight, Ordering::Relaxed);
        self.schedule.lock().requests(in_flight, now_ns);
    }

    fn wake(&self, parts: &[u64]) {
        let wakers = self.wakers.lock();
        parts.iter().filter_map(|part| wakers.get(part)).for_each(Waker::wake);
    }
}

impl BackgroundScheduler for Device {
    fn open(&self, _: &str, _: &'static str, waker: Waker) -> u64 {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        self.wakers.lock().insert(number, waker);
        self.schedule.lock().open(number);
        number
    }

    fn ask(&self, part: u64, step: BackgroundStep, now_ns: u64) -> Permission {
        if let Some(held) = self.held.iter().find(|held| held.contains(&now_ns)) {
            return Permission::Wait(held.end);
        }
        let BackgroundStep { bytes, waiting_bytes, waiting_steps, deadline_ns, pause } = step;
        let offer = Offer { bytes, waiting_bytes, waiting_steps, deadline_ns, pause };
        let others = Others { requests: 0, has_step: false, is_first: false };
        match self.schedule.lock().ask(part, offer, others, now_ns) {
            Some(again_ns) => Permission::Wait(again_ns),
            None => Permission::Begin,
        }
    }

    fn end(&self, part: u64, now_ns: u64) {
        let woken = self.schedule.lock().end(part, now_ns);
        self.wake(&woken);
    }

    fn rest(&self, part: u64) {
        self.schedule.lock().rest(part, self.now_ns());
    }

    fn close(&self, part: u64) {
        let woken = self.schedule.lock().close(part, self.now_ns());
        self.wakers.lock().remove(&part);
        self.wake(&woken);
    }
}

/// Observes what a disk asks of the device.
struct Watch {
    device: Arc<Device>,
    disk: usize,
}

impl Layer for Watch {
    fn name(&self) -> &'static str {
        "watch"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::observer(WatchQueue { device: Arc::clone(&self.device), disk: self.disk }))
    }
}

struct WatchQueue {
    device: Arc<Device>,
    disk: usize,
}

impl Observer for WatchQueue {
    fn down(&mut self, requests: &mut [Box<Request>], place: ObserverPosition<'_>) {
        let now_ns = place.round_ns();
        let mut batch = self.device.batches[self.disk].lock();
        for request in requests.iter_mut().filter(|request| !request.flags.background) {
            let queue = self.device.in_flight.load(Ordering::Relaxed);
            if !request.flags.write_back {
                batch.arrive(request.operation == Operation::Read, queue);
            }
            *place.observe(request).word() = now_ns << 1 | if queue == 0 { ALONE } else { 0 };
            self.device.requests(|count| count + 1, now_ns);
        }
    }

    fn up(&mut self, requests: &mut [(Box<Request>, Outcome)], place: ObserverPosition<'_>) {
        let now_ns = place.round_ns();
        let mut batch = self.device.batches[self.disk].lock();
        for (request, _) in requests.iter().filter(|(request, _)| !request.flags.background) {
            let word = place.word(request);
            if !request.flags.write_back {
                batch.complete(now_ns.saturating_sub(word >> 1), u64::from(word & ALONE == 0));
            }
            self.device.requests(|count| count.saturating_sub(1), now_ns);
        }
    }
}

/// A disk, and the requests of its guest.
struct Carried {
    stack: Stack,
    reactor: Reactor,
    offload: Offload,
    waiting: VecDeque<Arrival>,
    in_flight: usize,
    /// When it was started, in nanoseconds, while it is carried.
    started_ns: Option<u64>,
    /// The requests that were carried until the last step.
    count: u64,
}

/// The sizes of a rig.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// The bytes of a disk.
    pub disk: u64,
    /// The bytes of its log, and of its copies.
    pub log: u64,
    /// See `log`.
    pub copies: u64,
}

/// What happens at a step of the control loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// The time, in nanoseconds.
    pub now_ns: u64,
    /// Whether the device has a peak.
    pub is_peak: bool,
    /// The disks that are carried, as bits.
    pub carried: u64,
    /// The disks whose logs have content that returns, as bits.
    pub returning: u64,
    /// The guests' requests at the device.
    pub queue: u64,
}

/// A request that has completed.
#[derive(Clone, Copy, Debug)]
pub struct Completed {
    /// Its disk.
    pub disk: usize,
    /// When it came, and how long it took, in nanoseconds.
    pub at_ns: u64,
    /// See `at_ns`.
    pub took_ns: u64,
}

/// Disks on one device.
pub struct Rig {
    time: Rc<Cell<u64>>,
    device: Arc<Device>,
    disks: Vec<Carried>,
    contention: Contention,
    carry: CarryKind,
    /// When the requests in flight came, by their tokens, in nanoseconds.
    arrived: Vec<u64>,
    free: Vec<usize>,
}

impl Rig {
    /// `disks` disks behind each other on `devices`, which are those of an array if there are
    /// several; each has its log on `log`, a device of the host. There is no background work in the
    /// times `held`, in nanoseconds.
    pub fn new(
        devices: &[Model],
        log: &Model,
        disks: usize,
        sizes: Sizes,
        carry: CarryKind,
        held: &[Range<u64>],
    ) -> Self {
        let (time, device) = (Rc::new(Cell::new(SECOND)), Arc::new(Device::new(disks, held)));
        let count = devices.len() as u64;
        let disk = |number: usize| {
            let length = sizes.log + sizes.copies;
            let memory: Arc<dyn Backend> = Arc::new(Memory::new(length));
            let model = log.at(number as u64 * length);
            let modelled = Arc::new(Modelled::new(Arc::clone(&memory), model));
            let is_timed = AtomicBool::new(false);
            let store = Arc::new(LogStore { memory, modelled, is_timed });
            let options = WalOptions {
                name: "disk".into(),
                home: "image".into(),
                home_capacity: sizes.disk,
                home_alignment: 1,
                offset: 0,
                size: sizes.log,
                block_size: 4096,
                identity: Identity(*b"identity of rigs"),
                age_ns: 3600 * SECOND,
                completion: Completion::Durable,
                expected: None,
                mark: None,
                times: None,
                home_store: fathom_layers::wal::HomeStore::default(),
                clock_start_ns: 0,
            };
            let settings =
                OffloadOptions { carry, copies: sizes.copies, ..OffloadOptions::default() };
            let volume = Arc::new(LogVolume::new(Arc::clone(&store) as Arc<dyn Backend>));
            let offload = Offload::open(&volume, &options, settings).expect("a log");
            store.is_timed.store(true, Ordering::Relaxed);
            let mut layers: Vec<Arc<dyn Layer>> = vec![
                Arc::new(offload.clone()),
                Arc::new(Watch { device: Arc::clone(&device), disk: number }),
            ];
            for (index, model) in (0..).zip(devices) {
                let model = model.at(number as u64 * sizes.disk);
                layers.push(Arc::new(Spindle { model, index, count }));
            }
            let home = Arc::new(Null::new(sizes.disk));
            let disk = Disk::new(DiskOptions::default(), layers, home).expect("a disk");
            disk.schedule_background(Arc::clone(&device) as _);
            let mut reactor = Reactor::new(64).expect("an io_uring");
            let clock = Clock::Simulated(Rc::clone(&time));
            let stack = disk.open_queue(&mut reactor, clock).expect("a queue");
            Carried {
                stack,
                reactor,
                offload,
                waiting: VecDeque::new(),
                in_flight: 0,
                started_ns: None,
                count: 0,
            }
        };
        let disks: Vec<Carried> = (0..disks).map(disk).collect();
        let mut contention = Contention::new(ContentionOptions::default(), default_forecast());
        for number in 0..disks.len() as u64 {
            contention.open(number);
        }
        Self { time, device, disks, contention, carry, arrived: Vec::new(), free: Vec::new() }
    }

    fn submit(&mut self, disk: usize, arrival: &Arrival) {
        let index = self.free.pop().unwrap_or(self.arrived.len());
        self.arrived.resize((index + 1).max(self.arrived.len()), 0);
        self.arrived[index] = arrival.at_ns;
        let Carried { stack, reactor, in_flight, .. } = &mut self.disks[disk];
        *in_flight += 1;
        let mut request = stack.request();
        request.operation = if arrival.is_write { Operation::Write } else { Operation::Read };
        (request.offset, request.length) = (arrival.offset, arrival.length);
        request.buffers.allocate(arrival.length as usize);
        request.token = index as u64;
        stack.submit(request, reactor);
    }

    /// Takes what has completed, and submits what has waited for it. Returns whether there was
    /// anything.
    fn collect(&mut self, done: &mut impl FnMut(Completed)) -> bool {
        let now_ns = self.time.get();
        let mut is_busy = false;
        for disk in 0..self.disks.len() {
            while let Some((request, outcome)) = self.disks[disk].stack.completed() {
                assert_eq!(outcome, Ok(()));
                let index = request.token as usize;
                let at_ns = self.arrived[index];
                self.free.push(index);
                done(Completed { disk, at_ns, took_ns: now_ns - at_ns });
                self.disks[disk].in_flight -= 1;
                self.disks[disk].stack.recycle(request);
                is_busy = true;
            }
            while self.disks[disk].in_flight < DEPTH_MAX {
                let Some(arrival) = self.disks[disk].waiting.pop_front() else { break };
                self.submit(disk, &arrival);
                is_busy = true;
            }
        }
        is_busy
    }

    /// What the thread of the daemon does every 100 ms: it starts the disk that relieves the device
    /// most, and stops what it has started after the peak.
    fn control(&mut self) -> Moment {
        let now_ns = self.time.get();
        let mut moment = Moment {
            now_ns,
            queue: self.device.in_flight.load(Ordering::Relaxed),
            ..Moment::default()
        };
        for (number, disk) in (0..).zip(&mut self.disks) {
            let mut batch = std::mem::take(&mut *self.device.batches[number as usize].lock());
            let status = disk.offload.status();
            let carried = status.carried + status.hits;
            batch.carried = carried - disk.count;
            disk.count = carried;
            self.contention.record(number, &batch);
            moment.returning |= u64::from(status.state == OffloadState::Returning) << number;
        }
        self.contention.step(now_ns);
        moment.is_peak = self.contention.is_peak();
        if self.carry == CarryKind::Off {
            return moment;
        }
        if moment.is_peak {
            let disks = &self.disks;
            let choice = self.contention.choose(|number| {
                let disk = &disks[number as usize];
                if disk.started_ns.is_some() {
                    return Carriable::default();
                }
                let share = |is: bool, share: f64| if is { share } else { 0.0 };
                Carriable {
                    reads: share(self.carry.has_reads(), disk.offload.warmth()),
                    writes: share(self.carry.has_writes(), 1.0),
                }
            });
            if let Some(choice) = choice {
                let disk = &mut self.disks[choice.disk as usize];
                disk.offload.start().expect("a sound log");
                disk.started_ns = Some(now_ns);
            }
        } else {
            for disk in &mut self.disks {
                if disk.started_ns.is_some_and(|since_ns| now_ns - since_ns >= CARRY_MIN_NS) {
                    disk.offload.stop();
                    disk.started_ns = None;
                }
            }
        }
        for (number, disk) in self.disks.iter().enumerate() {
            moment.carried |= u64::from(disk.started_ns.is_some()) << number;
        }
        moment
    }

    /// Handles what is due in each queue, and the calls of others. Returns whether there was
    /// anything.
    fn advance(&mut self) -> bool {
        let (now_ns, mut is_busy, mut events) = (self.time.get(), false, Vec::new());
        for Carried { stack, reactor, .. } in &mut self.disks {
            if stack.deadline_ns().is_some_and(|deadline_ns| deadline_ns <= now_ns) {
                stack.advance(reactor);
                is_busy = true;
            }
            // The ring has calls only. Without one there is no system call.
            reactor.submit().expect("an io_uring");
            if reactor.is_ready() {
                events.clear();
                reactor.collect(&mut events).expect("an io_uring");
                for event in &events {
                    stack.event(event, reactor);
                }
                stack.advance(reactor);
                is_busy |= !events.is_empty();
            }
        }
        is_busy
    }

    /// Carries out `arrivals`, each with its disk, in order of time, until all have completed.
    pub fn run(
        &mut self,
        arrivals: impl Iterator<Item = (usize, Arrival)>,
        mut done: impl FnMut(Completed),
        mut step: impl FnMut(Moment),
    ) {
        let mut arrivals = arrivals.peekable();
        let mut step_at_ns = self.time.get();
        let mut rounds = 0;
        loop {
            let now_ns = self.time.get();
            rounds += 1;
            if rounds > ROUNDS_MAX {
                // A real clock would have moved on.
                rounds = 0;
                self.time.set(now_ns + MOVE_NS);
                continue;
            }
            self.device.now_ns.store(now_ns, Ordering::Relaxed);
            while let Some((disk, arrival)) = arrivals.next_if(|next| next.1.at_ns <= now_ns) {
                self.disks[disk].waiting.push_back(arrival);
            }
            // The answers of an instant may cause others in the same one.
            let is_busy = self.collect(&mut done);
            if self.advance() || is_busy {
                continue;
            }
            if step_at_ns <= now_ns {
                let moment = self.control();
                step(moment);
                step_at_ns += STEP_NS;
                continue;
            }
            let arrival_ns = arrivals.peek().map_or(u64::MAX, |next| next.1.at_ns);
            if arrival_ns == u64::MAX && self.disks.iter().all(|disk| disk.in_flight == 0) {
                return;
            }
            let due = self.disks.iter().filter_map(|disk| disk.stack.deadline_ns()).min();
            let due_ns = due.unwrap_or(u64::MAX);
            self.time.set(arrival_ns.min(due_ns).min(step_at_ns).max(now_ns + 1));
            rounds = 0;
            for Carried { stack, reactor, .. } in &mut self.disks {
                stack.advance(reactor);
            }
        }
    }
}
