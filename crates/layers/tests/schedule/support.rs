//! Disks on one device under simulated time, and clients of them.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fathom_backend::Null;
use fathom_block::{
    Buffers, Capabilities, Clock, Crossing, Disk, DiskOptions, GuestAddress, HeldBy, Kind, Layer,
    LayerPart, LayerQueue, OpenContext, Operation, Outcome, Request, Stack,
};
use fathom_insight::{Names, RequestFlags, Waiters};
use fathom_layers::{Schedule, ScheduleDevices, ScheduleOptions};
use fathom_reactor::Reactor;
use parking_lot::Mutex;

pub const MS: u64 = 1_000_000;
pub const SECOND: u64 = 1_000_000_000;
pub const CAPACITY: u64 = 1 << 30;

pub type Time = Rc<Cell<u64>>;

/// A request that has reached the device or been completed by it.
#[derive(Clone, Copy, Debug)]
pub struct Passed {
    pub time_ns: u64,
    pub token: u64,
    /// The bytes that it transfers.
    pub length: u64,
    pub is_completed: bool,
}

impl Passed {
    fn of(request: &Request, time_ns: u64, is_completed: bool) -> Self {
        let length = if request.operation.carries_data() { request.length } else { 0 };
        Self { time_ns, token: request.token, length, is_completed }
    }
}

/// A layer that models a device: some servers, each with one request at a time, in the order of
/// arrival. It records what reaches the device.
#[derive(Clone)]
pub struct Service {
    free_ns: Arc<Mutex<Vec<u64>>>,
    each_ns: u64,
    /// Requests of this disk never complete, or only its reads do.
    pub is_hung: Arc<AtomicBool>,
    pub reads_complete: bool,
    pub passed: Arc<Mutex<Vec<Passed>>>,
}

impl Service {
    pub fn new(servers: usize, service_ns: u64) -> Self {
        Self {
            free_ns: Arc::new(Mutex::new(vec![0; servers])),
            each_ns: service_ns,
            is_hung: Arc::default(),
            reads_complete: false,
            passed: Arc::default(),
        }
    }

    /// A disk on the same device that hangs by itself.
    pub fn hanging(&self) -> Self {
        Self { is_hung: Arc::new(AtomicBool::new(true)), ..self.clone() }
    }
}

impl Layer for Service {
    fn name(&self) -> &'static str {
        "service"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(self.clone()))
    }
}

impl LayerQueue for Service {
    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        let time_ns = next.now_ns();
        let passed = Passed::of(&request, time_ns, false);
        self.passed.lock().push(passed);
        let mut free_ns = self.free_ns.lock();
        let first = free_ns.iter_mut().min().unwrap();
        let length = if request.operation == Operation::Flush { 0 } else { self.each_ns };
        let done_ns = (*first).max(time_ns) + length;
        let is_read = request.operation == Operation::Read;
        if self.is_hung.load(Ordering::Relaxed) && !(is_read && self.reads_complete) {
            *next.word(&mut request) = time_ns + 3600 * SECOND;
        } else {
            *first = done_ns;
            *next.word(&mut request) = done_ns;
        }
        next.submit(request);
    }

    fn complete(&mut self, mut request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let done_ns = *next.word(&mut request);
        next.hold(request, Some(outcome), done_ns);
    }

    fn resume(&mut self, request: Box<Request>, outcome: Option<Outcome>, next: &mut Crossing<'_>) {
        let time_ns = next.now_ns();
        let passed = Passed::of(&request, time_ns, true);
        self.passed.lock().push(passed);
        next.complete(request, outcome.unwrap());
    }
}

/// The marks of a request.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    pub operation: Operation,
    pub flags: RequestFlags,
    pub kind: Kind,
    pub inode: u64,
    pub group: u32,
    pub length: u64,
}

/// A read of a file.
pub const READ: Mark = Mark {
    operation: Operation::Read,
    flags: RequestFlags(0),
    kind: Kind::Data,
    inode: 1,
    group: 0,
    length: 4096,
};
/// Background write-back.
pub const WRITE_BACK: Mark = Mark { operation: Operation::Write, inode: 2, ..READ };
/// A write that a process waits for.
pub const WRITE: Mark = Mark { flags: RequestFlags::SYNCHRONOUS, ..WRITE_BACK };
pub const FLUSH: Mark = Mark { operation: Operation::Flush, length: 0, ..READ };

/// A completed request.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    pub token: u64,
    pub since_ns: u64,
    pub time_ns: u64,
    pub is_held: bool,
}

/// A client of one queue of a disk.
pub struct Client {
    pub stack: Stack,
    pub reactor: Reactor,
    pub mark: Mark,
    /// The requests that it keeps in flight, and the pause before each next one.
    pub depth: usize,
    pub pause_ns: u64,
    pub done: Vec<Done>,
    pub tokens: u64,
    random: fastrand::Rng,
    /// The times of the next requests.
    next_ns: BinaryHeap<Reverse<u64>>,
    sent_ns: VecDeque<(u64, u64)>,
    time: Time,
}

impl Client {
    pub fn new(disk: &Arc<Disk>, time: &Time, mark: Mark, depth: usize) -> Self {
        let mut reactor = Reactor::new(8).unwrap();
        let stack = disk.open_queue(&mut reactor, Clock::Simulated(Rc::clone(time))).unwrap();
        Self {
            stack,
            reactor,
            mark,
            depth,
            pause_ns: 0,
            done: Vec::new(),
            tokens: 0,
            random: fastrand::Rng::with_seed(depth as u64),
            next_ns: std::iter::repeat_n(Reverse(0), depth).collect(),
            sent_ns: VecDeque::new(),
            time: Rc::clone(time),
        }
    }

    /// Submits a request with a mark at a random place. Returns its token.
    pub fn submit(&mut self, mark: Mark) -> u64 {
        let places = CAPACITY / mark.length.max(4096);
        let offset = self.random.u64(0..places) * mark.length;
        self.submit_at(mark, offset)
    }

    pub fn submit_at(&mut self, mark: Mark, offset: u64) -> u64 {
        self.send(mark, offset, |buffers| buffers.allocate(mark.length as usize))
    }

    /// Submits a write of one page of a guest's memory at a random place. Returns its token.
    #[expect(unsafe_code, reason = "the memory of a guest")]
    pub fn submit_page(&mut self, mark: Mark, address: u64) -> u64 {
        let page = Box::leak(vec![0_u8; mark.length as usize].into_boxed_slice());
        let offset = self.random.u64(0..CAPACITY / mark.length) * mark.length;
        // SAFETY: the memory is never freed, and no reference to it is left.
        self.send(mark, offset, |buffers| unsafe {
            buffers.push(page.as_mut_ptr(), page.len(), Some(GuestAddress(address)));
        })
    }

    fn send(&mut self, mark: Mark, offset: u64, fill: impl FnOnce(&mut Buffers)) -> u64 {
        let mut request = self.stack.request();
        (request.operation, request.offset, request.length) = (mark.operation, offset, mark.length);
        if mark.operation.carries_data() {
            fill(&mut request.buffers);
        }
        request.insight.flags = mark.flags;
        let facts = &mut request.insight.facts;
        (facts.kind, facts.inode, facts.cgroup.0) = (mark.kind, mark.inode, mark.group);
        let token = self.tokens;
        request.token = token;
        self.tokens += 1;
        self.sent_ns.push_back((token, self.time.get()));
        self.stack.submit(request, &mut self.reactor);
        token
    }

    /// Makes a round. Returns whether anything has happened.
    fn round(&mut self) -> bool {
        let now_ns = self.time.get();
        let mut events = Vec::new();
        self.reactor.wait(Some(Duration::ZERO)).unwrap();
        self.reactor.collect(&mut events).unwrap();
        for event in &events {
            self.stack.event(event, &mut self.reactor);
        }
        self.stack.advance(&mut self.reactor);
        let mut is_busy = !events.is_empty();
        while self.next_ns.peek().is_some_and(|Reverse(time_ns)| *time_ns <= now_ns) {
            self.next_ns.pop();
            self.submit(self.mark);
            is_busy = true;
        }
        while let Some((request, outcome)) = self.stack.completed() {
            assert_eq!(outcome, Ok(()));
            let index = self.sent_ns.iter().position(|sent| sent.0 == request.token).unwrap();
            let (token, since_ns) = self.sent_ns.remove(index).unwrap();
            let is_held = request.course.held_by == HeldBy::Schedule;
            self.done.push(Done { token, since_ns, time_ns: now_ns, is_held });
            self.stack.recycle(request);
            if self.next_ns.len() + self.sent_ns.len() < self.depth {
                self.next_ns.push(Reverse(now_ns + self.pause_ns));
            }
            is_busy = true;
        }
        is_busy
    }

    /// Keeps more requests in flight from now on.
    pub fn deepen(&mut self, depth: usize) {
        let more = depth.saturating_sub(self.depth);
        self.next_ns.extend(std::iter::repeat_n(Reverse(self.time.get()), more));
        self.depth = depth;
    }

    /// Makes no further requests.
    pub fn stop(&mut self) {
        self.depth = 0;
        self.next_ns.clear();
    }

    pub fn done_within(&self, from_ns: u64, to_ns: u64) -> usize {
        self.done.iter().filter(|done| (from_ns..to_ns).contains(&done.time_ns)).count()
    }

    /// The mean time of the requests completed after `from_ns`, in nanoseconds.
    pub fn mean_ns(&self, from_ns: u64) -> u64 {
        let times: Vec<u64> = self
            .done
            .iter()
            .filter(|done| done.time_ns >= from_ns)
            .map(|done| done.time_ns - done.since_ns)
            .collect();
        times.iter().sum::<u64>() / times.len().max(1) as u64
    }
}

/// Makes rounds of all clients until `end_ns`.
pub fn run(clients: &mut [&mut Client], time: &Time, end_ns: u64) {
    loop {
        let mut is_busy = false;
        for client in clients.iter_mut() {
            is_busy |= client.round();
        }
        if is_busy {
            continue;
        }
        let stacks = clients.iter().filter_map(|client| client.stack.deadline_ns());
        let next = clients.iter().filter_map(|client| client.next_ns.peek().map(|time| time.0));
        let next_ns = stacks.chain(next).min().unwrap_or(u64::MAX).max(time.get() + 1);
        if next_ns > end_ns {
            time.set(end_ns);
            return;
        }
        time.set(next_ns);
    }
}

/// Disks that lie on one device.
pub struct Bench {
    pub time: Time,
    pub service: Service,
    pub devices: ScheduleDevices,
    pub names: Arc<Names>,
}

impl Bench {
    pub fn new(servers: usize, service_ns: u64) -> Self {
        Self {
            time: Rc::new(Cell::new(SECOND)),
            service: Service::new(servers, service_ns),
            devices: ScheduleDevices::default(),
            names: Arc::default(),
        }
    }

    pub fn layer(
        &self,
        options: &ScheduleOptions,
        waiters: Option<Arc<dyn Waiters>>,
    ) -> Arc<Schedule> {
        Arc::new(Schedule::new(options, "device", &self.devices, &self.names, waiters))
    }

    pub fn disk(&self, options: &ScheduleOptions) -> (Arc<Disk>, Arc<Schedule>) {
        let layer = self.layer(options, None);
        (disk_of(&layer, &self.service), layer)
    }

    pub fn client(&self, disk: &Arc<Disk>, mark: Mark, depth: usize) -> Client {
        Client::new(disk, &self.time, mark, depth)
    }

    /// A reader with some reads in flight, and a writer that makes no requests by itself, on disks
    /// of their own, with the layer of the writer's disk.
    pub fn reader_and_writer(
        &self,
        options: &ScheduleOptions,
        depth: usize,
    ) -> (Client, Client, Arc<Schedule>) {
        let (reads, _) = self.disk(options);
        let (writes, layer) = self.disk(options);
        (self.client(&reads, READ, depth), self.client(&writes, WRITE_BACK, 0), layer)
    }

    pub fn now(&self) -> u64 {
        self.time.get()
    }
}

pub fn figure(layer: &Schedule, name: &str) -> u64 {
    layer.status().figures.iter().find(|figure| figure.name == name).unwrap().value
}

/// A disk with a layer on a device.
pub fn disk_of(layer: &Arc<Schedule>, service: &Service) -> Arc<Disk> {
    let layers: Vec<Arc<dyn Layer>> =
        vec![Arc::<Schedule>::clone(layer), Arc::new(service.clone())];
    Disk::new(DiskOptions::default(), layers, Arc::new(Null::new(CAPACITY))).unwrap()
}
