//! Layers with state: additional stores, split requests, background work, and requests that wait
//! for another queue.

#[path = "support/changing.rs"]
mod changing;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fathom_backend::Memory;
use fathom_block::{
    Backend, Capabilities, Clock, Crossing, Disk, DiskOptions, ErrorKind, Geometry, Layer,
    LayerPart, LayerQueue, OpenContext, Operation, Outcome, Request, RestackError, StoreId, Waker,
};
use fathom_sim::{
    Harness, HarnessOptions, SimBackend, SimOptions, Workload, WorkloadOptions, each_seed,
};
use parking_lot::Mutex;

use changing::{LIMIT, Queue, restack};

const CAPACITY: u64 = 256 << 10;
/// The token of the background requests.
const CHECK: u64 = 1;
/// The interval between background reads of the copy, in nanoseconds.
const CHECK_NS: u64 = 5_000;

#[derive(Default)]
struct Changing {
    /// The beginnings and ends of the ranges that are being changed.
    ranges: Vec<(u64, u64)>,
    /// The queues that wait for a range to be free.
    waiting: Vec<Waker>,
}

/// The state that the queues of a mirror share. The lock is held only for a search of the list.
#[derive(Default)]
struct Shared {
    changing: Mutex<Changing>,
    checks: AtomicU64,
    parked: AtomicU64,
}

/// Keeps a copy of the disk in an additional store: changes go to both, and reads come from either,
/// in pieces. Changes of one block, from any queue, are sequential.
struct Mirror {
    copy: Arc<dyn Backend>,
    shared: Arc<Shared>,
    seed: u64,
}

impl Mirror {
    fn over(copy: Arc<dyn Backend>, seed: u64) -> (Arc<dyn Layer>, Arc<Shared>) {
        let shared = Arc::new(Shared::default());
        (Arc::new(Self { copy, shared: Arc::clone(&shared), seed }), shared)
    }
}

impl Layer for Mirror {
    fn name(&self) -> &'static str {
        "mirror"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(MirrorQueue {
            copy: context.open_store(&self.copy)?,
            waker: context.waker()?,
            shared: Arc::clone(&self.shared),
            random: fastrand::Rng::with_seed(self.seed + context.queue()),
            parked: VecDeque::new(),
            checking: false,
            closed: false,
        }))
    }
}

struct MirrorQueue {
    copy: StoreId,
    waker: Waker,
    shared: Arc<Shared>,
    random: fastrand::Rng,
    parked: VecDeque<Box<Request>>,
    checking: bool,
    closed: bool,
}

impl MirrorQueue {
    /// Changes both copies, or queues the request until another change of the same blocks is
    /// complete.
    fn change(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        let range = (request.offset, request.offset + request.length);
        let overlaps = |other: &(u64, u64)| other.0 < range.1 && range.0 < other.1;
        let mut changing = self.shared.changing.lock();
        if changing.ranges.iter().any(overlaps) {
            changing.waiting.push(self.waker.clone());
            drop(changing);
            self.shared.parked.fetch_add(1, Ordering::Relaxed);
            return self.parked.push_back(request);
        }
        changing.ranges.push(range);
        drop(changing);
        self.both(request, next);
    }

    fn both(&self, request: Box<Request>, next: &mut Crossing<'_>) {
        let length = request.length;
        let split = next.split(request);
        let piece = next.piece(split, 0, length);
        next.submit(piece);
        let piece = next.piece(split, 0, length);
        next.submit_to(self.copy, piece);
        next.join(split);
    }

    fn read(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        let sectors = request.length / 512;
        let split = next.split(request);
        let mut from = 0;
        while from < sectors {
            let count = self.random.u64(1..=sectors - from);
            let piece = next.piece(split, from * 512, count * 512);
            if self.random.bool() {
                next.submit(piece);
            } else {
                next.submit_to(self.copy, piece);
            }
            from += count;
        }
        next.join(split);
    }
}

impl LayerQueue for MirrorQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        if !self.checking && !self.closed {
            let deadline_ns = next.now_ns() + CHECK_NS;
            next.wake_at(deadline_ns);
        }
        match request.operation {
            Operation::Read => self.read(request, next),
            Operation::Write | Operation::WriteZeroes | Operation::Discard => {
                self.change(request, next);
            }
            Operation::Flush => self.both(request, next),
            Operation::GetId | Operation::Extents => next.submit(request),
        }
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }

    fn returned(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        if request.token == CHECK {
            assert_eq!((request.store(), outcome), (Some(self.copy), Ok(())));
            self.shared.checks.fetch_add(1, Ordering::Relaxed);
            self.checking = false;
        }
        next.recycle(request);
    }

    fn gathered(&mut self, parent: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        if parent.operation.modifies() {
            let range = (parent.offset, parent.offset + parent.length);
            let mut changing = self.shared.changing.lock();
            let at = changing.ranges.iter().position(|other| *other == range).unwrap();
            changing.ranges.swap_remove(at);
            changing.waiting.drain(..).for_each(|waker| waker.wake());
        }
        next.complete(parent, outcome);
    }

    fn advance(&mut self, next: &mut Crossing<'_>) {
        for _ in 0..self.parked.len() {
            let Some(request) = self.parked.pop_front() else { break };
            self.change(request, next);
        }
        if !self.checking && !self.closed {
            self.checking = true;
            let mut check = next.request();
            check.operation = Operation::Read;
            check.length = 512;
            check.token = CHECK;
            check.buffers.allocate(512);
            next.submit_to(self.copy, check);
        }
    }

    fn close(&mut self, _next: &mut Crossing<'_>) {
        self.closed = true;
    }
}

fn store(options: SimOptions, seed: u64) -> Arc<SimBackend> {
    Arc::new(SimBackend::new(options, seed))
}

fn disk(layers: Vec<Arc<dyn Layer>>, home: Arc<dyn Backend>) -> Arc<Disk> {
    Disk::new(DiskOptions::default(), layers, home).unwrap()
}

#[test]
fn a_mirror_holds_equal_copies_under_concurrent_changes_of_a_block() {
    let mut parked = 0;
    let mut checks = 0;
    each_seed(150, |seed| {
        let home = store(SimOptions::new(CAPACITY), seed);
        let copy = store(SimOptions::new(CAPACITY), seed + 1_000_000);
        let (mirror, shared) = Mirror::over(Arc::clone(&copy) as _, seed);
        let disk = disk(vec![mirror], Arc::clone(&home) as _);
        let options = HarnessOptions { queues: 3, ..HarnessOptions::default() };
        let mut harness = Harness::new(&disk, &options, seed);
        let mut workload = Workload::new(WorkloadOptions::new(CAPACITY), seed);
        harness.run(&mut workload, 300, |_| {});
        harness.verify(CAPACITY);
        assert!(home.image() == copy.image(), "the copies differ");
        parked += shared.parked.load(Ordering::Relaxed);
        checks += shared.checks.load(Ordering::Relaxed);
    });
    assert!(parked > 100 && checks > 100, "{parked} requests waited, {checks} checks");
}

#[test]
fn an_error_of_either_copy_is_an_error_of_the_request() {
    let mut failed = 0;
    each_seed(50, |seed| {
        let mut options = SimOptions::new(CAPACITY);
        options.write_error_rate = 0.05;
        options.flush_error_rate = 0.05;
        let home = store(SimOptions::new(CAPACITY), seed);
        let copy = store(options, seed);
        let (mirror, _) = Mirror::over(copy, seed);
        let disk = disk(vec![mirror], home);
        let mut harness = Harness::new(&disk, &HarnessOptions::default(), seed);
        harness.allow_errors();
        let mut workload = Workload::new(WorkloadOptions::new(CAPACITY), seed);
        // The contents after a change that failed on one copy are undefined, so only outcomes are
        // checked.
        for _ in 0..100 {
            let action = workload.next().unwrap();
            if action.operation != Operation::Read {
                harness.submit(0, &action);
            }
        }
        harness.drain(|_| {});
        failed += harness.statistics().failed;
    });
    assert!(failed > 50, "{failed} failures");
}

#[test]
fn a_queue_changes_its_layers_only_after_their_background_requests() {
    let home: Arc<dyn Backend> = Arc::new(Memory::new(CAPACITY));
    let copy = store(SimOptions { rounds_max: 8, ..SimOptions::new(CAPACITY) }, 1);
    let mut shared = Vec::new();
    let mirror = |shared: &mut Vec<Arc<Shared>>| {
        let (mirror, state) = Mirror::over(Arc::clone(&copy) as _, 1);
        shared.push(state);
        mirror
    };
    let disk = disk(vec![mirror(&mut shared)], home);
    let mut queue = Queue::open(&disk);
    let mut waited = 0;
    for round in 0..100 {
        // A background read may complete in the round in which it begins.
        while queue.stack.in_flight_of_layers() == 0 {
            assert_eq!(queue.outcome_of(Operation::Write, 0, 512), Ok(()));
            queue.round(Duration::from_micros(10));
        }
        assert!(!queue.stack.is_drained());
        let next = mirror(&mut shared);
        let changed = restack(&disk, vec![next], LIMIT, || {
            // The background read is in flight until the change has begun.
            if queue.stack.is_closing() {
                waited += u64::from(!queue.stack.is_drained());
                queue.stack.advance(&mut queue.reactor);
            }
        });
        changed.unwrap();
        assert!(!queue.stack.is_closing(), "round {round}: the queue continues");
        // Removed layers do nothing more.
        let gone = shared.iter().rev().skip(1);
        let checks: Vec<u64> = gone.map(|state| state.checks.load(Ordering::Relaxed)).collect();
        queue.round(Duration::from_micros(10));
        let gone = shared.iter().rev().skip(1);
        assert!(gone.map(|state| state.checks.load(Ordering::Relaxed)).eq(checks));
    }
    assert!(waited >= 100, "{waited} rounds with checks of removed layers");
}

/// Counts its rounds, and offers a smaller disk with larger blocks.
#[derive(Default)]
struct Smaller {
    waker: Mutex<Option<Waker>>,
    rounds: Arc<AtomicU64>,
    broken: AtomicBool,
    block_size: u32,
}

const HIDDEN: u64 = 64 << 10;

impl Layer for Smaller {
    fn name(&self) -> &'static str {
        "smaller"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn geometry(&self, below: Geometry) -> Geometry {
        Geometry { alignment: self.block_size, block_size: self.block_size, ..below }
    }

    fn capacity(&self, below: u64) -> u64 {
        below - HIDDEN
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(io::Error::other("broken"));
        }
        *self.waker.lock() = Some(context.waker()?);
        let end = context.below().capacity;
        Ok(LayerPart::queue(SmallerQueue { rounds: Arc::clone(&self.rounds), end }))
    }
}

struct SmallerQueue {
    rounds: Arc<AtomicU64>,
    end: u64,
}

impl LayerQueue for SmallerQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        // The hidden range belongs to the layer: its own small write is not subject to the block
        // size above.
        let mut own = next.request();
        own.operation = Operation::Write;
        (own.offset, own.length) = (self.end - 512, 512);
        own.buffers.allocate(512);
        next.submit(own);
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }

    fn returned(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        assert_eq!(outcome, Ok(()));
        next.recycle(request);
    }

    fn advance(&mut self, _next: &mut Crossing<'_>) {
        self.rounds.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn each_layer_determines_the_size_above_it() {
    let home: Arc<dyn Backend> = Arc::new(Memory::new(CAPACITY));
    let layer = Arc::new(Smaller { block_size: 4096, ..Smaller::default() });
    let disk = disk(vec![Arc::clone(&layer) as _], home);
    assert_eq!((disk.capacity(), disk.geometry().block_size), (CAPACITY - HIDDEN, 4096));
    let mut queue = Queue::open(&disk);
    let top = disk.capacity();
    assert_eq!(queue.outcome_of(Operation::Write, top - 4096, 4096), Ok(()));
    assert_eq!(queue.outcome_of(Operation::Write, top, 4096), Err(ErrorKind::OutOfRange));
    assert_eq!(queue.outcome_of(Operation::Write, 0, 512), Err(ErrorKind::Misaligned));
    // The size of the store changes, and the size of the disk follows, in open queues too.
    disk.resize(2 * CAPACITY).unwrap();
    assert_eq!(disk.capacity(), 2 * CAPACITY - HIDDEN);
    assert_eq!(queue.outcome_of(Operation::Read, top, 4096), Ok(()));
    // The block size cannot change, because clients know it.
    let other = Arc::new(Smaller { block_size: 512, ..Smaller::default() });
    let refused = disk.restack(vec![other], LIMIT);
    assert!(matches!(refused, Err(RestackError::Geometry)), "{refused:?}");
    assert_eq!(queue.outcome_of(Operation::Read, 0, 4096), Ok(()));
    layer.broken.store(true, Ordering::Relaxed);
    let error = disk.open_queue(&mut queue.reactor, Clock::System).err().unwrap();
    assert_eq!(error.to_string(), "broken");
}

/// Sends invalid requests to its store.
struct Overreach {
    store: Arc<dyn Backend>,
    outcomes: Arc<Mutex<Vec<Outcome>>>,
}

impl Layer for Overreach {
    fn name(&self) -> &'static str {
        "overreach"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let store = context.open_store(&self.store)?;
        Ok(LayerPart::queue(OverreachQueue { store, outcomes: Arc::clone(&self.outcomes) }))
    }
}

struct OverreachQueue {
    store: StoreId,
    outcomes: Arc<Mutex<Vec<Outcome>>>,
}

impl LayerQueue for OverreachQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        for (operation, offset, length, memory) in [
            (Operation::Read, CAPACITY, 512, 512),
            (Operation::Read, u64::MAX - 511, 512, 512),
            (Operation::Write, 0, 512, 511),
            (Operation::Write, 1, 512, 512),
            (Operation::Discard, 0, 0, 0),
            (Operation::Flush, 512, 0, 0),
            (Operation::GetId, 0, 0, 20),
            (Operation::Read, 0, 512, 512),
        ] {
            let mut own = next.request();
            (own.operation, own.offset, own.length) = (operation, offset, length);
            own.buffers.allocate(memory);
            next.submit_to(self.store, own);
        }
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }

    fn returned(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        self.outcomes.lock().push(outcome);
        next.recycle(request);
    }
}

#[test]
fn invalid_requests_to_a_store_are_refused() {
    let home: Arc<dyn Backend> = Arc::new(Memory::new(CAPACITY));
    let options = SimOptions { rounds_max: 0, ..SimOptions::new(CAPACITY) };
    let outcomes = Arc::new(Mutex::new(Vec::new()));
    let layer = Overreach { store: store(options, 1), outcomes: Arc::clone(&outcomes) };
    let disk = disk(vec![Arc::new(layer)], home);
    let mut queue = Queue::open(&disk);
    assert_eq!(queue.outcome_of(Operation::Read, 0, 512), Ok(()));
    let expected = [
        Err(ErrorKind::OutOfRange),
        Err(ErrorKind::OutOfRange),
        Err(ErrorKind::Malformed),
        Err(ErrorKind::Misaligned),
        Err(ErrorKind::Malformed),
        Err(ErrorKind::Malformed),
        Err(ErrorKind::Unsupported),
        Ok(()),
    ];
    while !queue.stack.is_drained() {
        queue.round(Duration::from_millis(1));
    }
    assert_eq!(*outcomes.lock(), expected);
    assert_eq!(disk.counters().refused.load(Ordering::Relaxed), 7);
}

#[test]
fn a_waker_wakes_a_sleeping_thread_and_only_that_layer() {
    let home: Arc<dyn Backend> = Arc::new(Memory::new(CAPACITY));
    let upper = Arc::new(Smaller { block_size: 512, ..Smaller::default() });
    let lower = Arc::new(Smaller { block_size: 512, ..Smaller::default() });
    let disk = disk(vec![Arc::clone(&upper) as _, Arc::clone(&lower) as _], home);
    let mut queue = Queue::open(&disk);
    let rounds = || (upper.rounds.load(Ordering::Relaxed), lower.rounds.load(Ordering::Relaxed));
    for time in 1..=20 {
        let waker = lower.waker.lock().clone().unwrap();
        let thread = thread::spawn(move || {
            thread::sleep(Duration::from_millis(2));
            // Several wake-ups count as one, or as two if the thread wakes up between them.
            (0..3).for_each(|_| waker.wake());
        });
        while rounds().1 < time {
            queue.round(Duration::from_secs(10));
        }
        thread.join().unwrap();
        queue.round(Duration::ZERO);
        lower.rounds.store(time, Ordering::Relaxed);
    }
    assert_eq!(rounds().0, 0);
    // A wake-up of a closed queue has no effect.
    let waker = lower.waker.lock().clone().unwrap();
    drop(queue);
    waker.wake();
}
