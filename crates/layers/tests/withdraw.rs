//! Requests that layers hold when their front end has gone: they are given back, and never reach
//! the disk.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fathom_backend::Memory;
use fathom_block::{
    Backend, BackendContext, BackendQueue, Clock, Disk, DiskOptions, ErrorKind, Layer, Operation,
    Request, Stack,
};
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_layers::{
    Delay, DelayTime, Fault, FaultRule, Limit, LimitGroups, LimitOptions, WaitForRoom, Wal,
};
use fathom_persistence::Identity;
use fathom_reactor::{Event, Reactor};
use fathom_sim::{SimBackend, SimOptions};
use fathom_wal::RING_OFFSET;

#[path = "support/around.rs"]
mod around;

use around::Around;

const CAPACITY: u64 = 1 << 20;
const LENGTH: u64 = 4096;

/// A queue of a disk with its thread's ring.
struct Queue {
    reactor: Reactor,
    stack: Stack,
    time: Rc<Cell<u64>>,
}

impl Queue {
    fn new(layers: Vec<Arc<dyn Layer>>, backend: Arc<dyn Backend>) -> Self {
        let disk = Disk::new(DiskOptions::default(), layers, backend).unwrap();
        let (mut reactor, time) = (Reactor::new(8).unwrap(), Rc::new(Cell::new(1_000_000_000)));
        let stack = disk.open_queue(&mut reactor, Clock::Simulated(Rc::clone(&time))).unwrap();
        Self { reactor, stack, time }
    }

    fn send(&mut self, operation: Operation, block: u64) {
        let mut request = self.stack.request();
        (request.operation, request.offset, request.length) = (operation, block * LENGTH, LENGTH);
        request.token = block;
        request.buffers.allocate(LENGTH as usize);
        if let Some(memory) = request.buffers.owned_mut().filter(|_| operation == Operation::Write)
        {
            memory.fill(1);
        }
        self.stack.submit(request, &mut self.reactor);
    }

    /// Makes some rounds. Returns the tokens of the requests that succeeded and of those that were
    /// withdrawn, and the last content that was read.
    fn step(&mut self) -> (Vec<u64>, Vec<u64>, Option<u8>) {
        let (mut good, mut withdrawn, mut content) = (Vec::new(), Vec::new(), None);
        let mut events = Vec::new();
        for _ in 0..20 {
            self.reactor.submit().unwrap();
            self.reactor.collect(&mut events).unwrap();
            for event in events.drain(..) {
                self.stack.event(&event, &mut self.reactor);
            }
            self.stack.advance(&mut self.reactor);
            while let Some((mut request, outcome)) = self.stack.completed() {
                match outcome {
                    Ok(()) => good.push(request.token),
                    Err(ErrorKind::Withdrawn) => withdrawn.push(request.token),
                    Err(error) => panic!("{error}"),
                }
                if request.operation == Operation::Read {
                    content = request.buffers.owned_mut().map(|memory| memory[0]);
                }
                self.stack.recycle(request);
            }
        }
        (good, withdrawn, content)
    }

    /// Withdraws, and expects `count` writes of those sent to be given back, the last of them
    /// unwritten even after a long time.
    fn check(&mut self, count: usize, last: u64) {
        assert!(self.step().1.is_empty(), "none is given back by itself");
        assert!(self.stack.in_flight() >= count);
        self.stack.withdraw(&mut self.reactor);
        let (_, withdrawn, _) = self.step();
        assert_eq!(withdrawn.len(), count, "{withdrawn:?}");
        assert_eq!(self.stack.in_flight(), 0);
        self.time.set(self.time.get() + 3600 * 1_000_000_000);
        self.send(Operation::Read, last);
        self.time.set(self.time.get() + 1_000_000_000);
        let (good, _, content) = self.step();
        assert_eq!((good, content), (vec![last], Some(0)), "it has landed");
    }
}

fn figure(layer: &dyn Layer, name: &str) -> u64 {
    layer.status().figures.iter().find(|figure| figure.name == name).unwrap().value
}

#[test]
fn a_limit_gives_back_what_waits_and_charges_nothing_for_it() {
    let options = LimitOptions { total_iops_sec: 10, ..LimitOptions::default() };
    let limit = Arc::new(Limit::new(&options, &Arc::default(), &LimitGroups::default()));
    let layers: Vec<Arc<dyn Layer>> = vec![Arc::<Limit>::clone(&limit)];
    let mut queue = Queue::new(layers, Arc::new(Memory::new(CAPACITY)));
    (0..20).for_each(|block| queue.send(Operation::Write, block));
    let passed = queue.step().0.len();
    assert!((1..=3).contains(&passed), "{passed}");
    assert_eq!(figure(&*limit, "waiting"), 20 - passed as u64);
    queue.stack.withdraw(&mut queue.reactor);
    assert_eq!((queue.step().1.len(), figure(&*limit, "waiting")), (20 - passed, 0));
    // The next one waits for a tenth of a second, not for those withdrawn.
    queue.send(Operation::Write, 40);
    queue.time.set(queue.time.get() + 200_000_000);
    assert_eq!(queue.step().0, [40]);
    (0..20).for_each(|block| queue.send(Operation::Write, 100 + block));
    let passed = queue.step().0.len();
    queue.check(20 - passed, 119);
}

#[test]
fn a_delay_gives_back_what_it_delays() {
    let delay = Delay::new(1);
    delay.set(Operation::Write, DelayTime::fixed(1_000_000_000));
    let mut queue = Queue::new(vec![Arc::new(delay)], Arc::new(Memory::new(CAPACITY)));
    (0..3).for_each(|block| queue.send(Operation::Write, block));
    queue.check(3, 2);
}

#[test]
fn writes_that_wait_for_space_are_given_back() {
    let full = FaultRule {
        operations: vec![Operation::Write],
        error: ErrorKind::NoSpace,
        ..FaultRule::default()
    };
    let (room, fault) = (WaitForRoom::new(), Arc::new(Fault::new(vec![full], 1)));
    let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(room.clone()), Arc::<Fault>::clone(&fault)];
    let mut queue = Queue::new(layers, Arc::new(Memory::new(CAPACITY)));
    (0..3).for_each(|block| queue.send(Operation::Write, block));
    assert_eq!(room.waiting(), 3);
    queue.check(3, 2);
    assert_eq!(room.waiting(), 0);
    // A layer's own work goes on.
    let mut request = queue.stack.request();
    (request.operation, request.length) = (Operation::Write, LENGTH);
    request.flags.background = true;
    request.buffers.allocate(LENGTH as usize);
    queue.stack.submit(request, &mut queue.reactor);
    queue.stack.withdraw(&mut queue.reactor);
    assert_eq!((queue.step().1.len(), room.waiting()), (0, 1));
    fault.set_enabled(false);
    queue.time.set(queue.time.get() + 2_000_000_000);
    assert_eq!((queue.step().0.len(), room.waiting()), (1, 0));
}

/// A queue of a disk that keeps writes while they are to be kept.
struct Keeping {
    inner: Box<dyn BackendQueue>,
    keeps: Arc<AtomicBool>,
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    kept: Vec<Box<Request>>,
}

impl BackendQueue for Keeping {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        if request.operation == Operation::Write && self.keeps.load(Ordering::Relaxed) {
            return self.kept.push(request);
        }
        self.inner.submit(request, context);
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        self.inner.event(event, context);
    }

    fn advance(&mut self, context: &mut BackendContext<'_>) {
        if !self.keeps.load(Ordering::Relaxed) {
            for request in self.kept.drain(..) {
                self.inner.submit(request, context);
            }
        }
        self.inner.advance(context);
    }
}

/// The home of a log hangs, so that the log fills.
#[test]
fn changes_that_wait_for_space_in_a_log_are_given_back() {
    let log_capacity = RING_OFFSET + (40 << 10);
    let log = Arc::new(LogVolume::new(Arc::new(SimBackend::new(SimOptions::new(log_capacity), 1))));
    let options = WalOptions {
        name: "disk".into(),
        home: "image".into(),
        home_capacity: CAPACITY,
        home_alignment: 512,
        offset: 0,
        size: 0,
        block_size: 512,
        identity: Identity(*b"identity of test"),
        age_ns: u64::MAX,
        completion: Completion::Durable,
        expected: None,
        mark: None,
        clock_start_ns: 0,
        times: None,
        home_store: fathom_layers::wal::HomeStore::default(),
    };
    let wal = Wal::open(&log, &options).unwrap();
    let store = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), 2));
    let keeps = Arc::new(AtomicBool::new(true));
    let for_queue = Arc::clone(&keeps);
    let home = Around::new(&store, store.capabilities(), move |_, inner| {
        Box::new(Keeping { inner, keeps: Arc::clone(&for_queue), kept: Vec::new() })
    });
    let mut queue = Queue::new(vec![Arc::new(wal)], Arc::new(home));
    (0..16).for_each(|block| queue.send(Operation::Write, block));
    let logged = queue.step().0;
    assert!((1..16).contains(&logged.len()), "{logged:?}");
    queue.stack.withdraw(&mut queue.reactor);
    let withdrawn = queue.step().1;
    assert_eq!(logged.len() + withdrawn.len(), 16, "{withdrawn:?}");
    assert_eq!(queue.stack.in_flight(), 0);
    keeps.store(false, Ordering::Relaxed);
    queue.step();
    queue.send(Operation::Read, 15);
    assert_eq!(queue.step().2, Some(0), "it has landed");
    queue.send(Operation::Read, logged[0]);
    assert_eq!(queue.step().2, Some(1), "an acknowledged change is lost");
    queue.send(Operation::Write, 15);
    assert_eq!(queue.step().0, [15], "the log goes on");
}
