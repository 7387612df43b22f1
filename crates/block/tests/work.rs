//! Layers whose computations run on other threads: requests wait for the answers, a queue is
//! drained when all answers have arrived, and a simulated run needs no threads.

mod support;

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

use fathom_block::{
    Capabilities, Clock, Crossing, Disk, DiskOptions, ErrorKind, Layer, LayerPart, LayerQueue,
    OpenContext, Operation, Outcome, Request, Stack, Urgency, Work,
};
use fathom_reactor::Reactor;
use parking_lot::Mutex;

use support::{Record, Recorder};

/// The state of a layer that sums the bytes of each write before it passes the write on, and
/// computes a second time in the background afterwards. A write that begins with [`POISON`] makes
/// the computation panic.
#[derive(Default)]
struct Shared {
    sums: Arc<Mutex<HashMap<u64, u64>>>,
    background: Arc<AtomicU64>,
    threads: Arc<Mutex<Vec<ThreadId>>>,
}

const POISON: u8 = 0xfe;
const WAIT: Duration = Duration::from_millis(3);

fn sum(data: &[u8]) -> u64 {
    assert_ne!(data[0], POISON);
    data.iter().map(|byte| u64::from(*byte)).sum()
}

struct SumsQueue {
    layer: Arc<Shared>,
    now: Work<u64>,
    later: Work<u64>,
    waiting: HashMap<u64, Box<Request>>,
}

struct SumsLayer(Arc<Shared>);

impl Layer for SumsLayer {
    fn name(&self) -> &'static str {
        "sums"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let (now, later) = (context.work(Urgency::Request)?, context.work(Urgency::Background)?);
        let layer = Arc::clone(&self.0);
        Ok(LayerPart::queue(SumsQueue { layer, now, later, waiting: HashMap::new() }))
    }
}

impl LayerQueue for SumsQueue {
    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        if request.operation != Operation::Write {
            return next.submit(request);
        }
        let data = request.buffers.owned_mut().unwrap().to_vec();
        let (id, threads) = (request.id, Arc::clone(&self.layer.threads));
        let begun = self.now.begin(id, move || {
            threads.lock().push(std::thread::current().id());
            sum(&data)
        });
        if begun {
            self.waiting.insert(id, request);
        } else {
            next.complete(request, Err(ErrorKind::NoSpace));
        }
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }

    fn advance(&mut self, next: &mut Crossing<'_>) {
        while let Some((id, sum)) = self.now.answer() {
            let request = self.waiting.remove(&id).unwrap();
            let Some(sum) = sum else {
                next.complete(request, Err(ErrorKind::Io));
                continue;
            };
            self.layer.sums.lock().insert(request.offset, sum);
            next.submit(request);
            self.later.begin(id, move || {
                std::thread::sleep(WAIT);
                sum
            });
        }
        while let Some((_, sum)) = self.later.answer() {
            self.layer.background.fetch_add(sum.unwrap(), Ordering::Relaxed);
        }
    }
}

struct Queue {
    stack: Stack,
    reactor: Reactor,
    layer: Arc<Shared>,
}

impl Queue {
    fn open(clock: Clock) -> Self {
        let layer = Arc::new(Shared::default());
        let backend = Recorder {
            record: Record::default(),
            capabilities: Capabilities::ALL,
            alignment: 1,
            later: false,
        };
        let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(SumsLayer(Arc::clone(&layer)))];
        let disk = Disk::new(DiskOptions::default(), layers, Arc::new(backend)).unwrap();
        let mut reactor = Reactor::new(8).unwrap();
        let stack = disk.open_queue(&mut reactor, clock).unwrap();
        Self { stack, reactor, layer }
    }

    fn write(&mut self, offset: u64, first: u8) {
        let mut request = self.stack.request();
        request.operation = Operation::Write;
        (request.offset, request.length) = (offset, 4096);
        request.buffers.allocate(4096);
        request.buffers.owned_mut().unwrap().fill(3);
        request.buffers.owned_mut().unwrap()[0] = first;
        self.stack.submit(request, &mut self.reactor);
    }

    /// The outcomes of `count` requests, by offset.
    fn outcomes(&mut self, count: usize) -> HashMap<u64, Outcome> {
        let mut outcomes = HashMap::new();
        while outcomes.len() < count {
            self.stack.wait(&mut self.reactor, Some(Duration::from_secs(10))).unwrap();
            while let Some((request, outcome)) = self.stack.completed() {
                assert!(outcomes.insert(request.offset, outcome).is_none());
                self.stack.recycle(request);
            }
        }
        outcomes
    }
}

#[test]
fn requests_wait_for_computations_and_a_queue_for_all_of_them() {
    let mut queue = Queue::open(Clock::System);
    let here = std::thread::current().id();
    for round in 0..4 {
        for index in 0..50 {
            queue.write(index * 4096, if round == 1 && index == 7 { POISON } else { 3 });
        }
        assert!(!queue.stack.is_drained());
        let outcomes = queue.outcomes(50);
        for (offset, outcome) in outcomes {
            let failed = round == 1 && offset == 7 * 4096;
            assert_eq!(outcome.is_err(), failed, "{offset}");
        }
        assert!(queue.layer.sums.lock().values().all(|sum| *sum == 3 * 4096));
    }
    assert!(!queue.layer.threads.lock().contains(&here));
    // No request of a guest is in flight, but background work is.
    assert_eq!(queue.stack.in_flight(), 0);
    assert!(!queue.stack.is_drained());
    assert!(queue.stack.finish(&mut queue.reactor, Duration::from_secs(20)).unwrap());
    assert_eq!(queue.layer.background.load(Ordering::Relaxed), 199 * 3 * 4096);
}

#[test]
fn a_queue_that_is_dropped_waits_for_nothing() {
    let mut queue = Queue::open(Clock::System);
    for index in 0..200 {
        queue.write(index * 4096, 3);
    }
    let layer = Arc::clone(&queue.layer);
    drop(queue);
    assert_eq!(Arc::strong_count(&layer), 1);
    assert_eq!(layer.background.load(Ordering::Relaxed), 0);
}

#[test]
fn a_simulated_queue_computes_in_its_own_thread() {
    let time_ns = Rc::new(Cell::new(1000));
    let mut queue = Queue::open(Clock::Simulated(time_ns));
    let here = std::thread::current().id();
    for index in 0..10 {
        queue.write(index * 4096, 3);
    }
    assert_eq!(queue.outcomes(10).len(), 10);
    assert!(queue.stack.finish(&mut queue.reactor, Duration::from_secs(20)).unwrap());
    assert!(queue.layer.threads.lock().iter().all(|thread| *thread == here));
    assert_eq!(queue.layer.background.load(Ordering::Relaxed), 10 * 3 * 4096);
}
