//! Changes of layers: in all queues together; after a failure the old layers stay.

#[path = "support/changing.rs"]
mod changing;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fathom_block::{
    Backend, Capabilities, Crossing, Disk, DiskOptions, Layer, LayerPart, LayerQueue, OpenContext,
    Operation, Outcome, Request, RestackError,
};
use fathom_sim::{SimBackend, SimOptions};
use parking_lot::Mutex;

use changing::{LIMIT, Queue, restack};

const CAPACITY: u64 = 256 << 10;

fn store(options: SimOptions, seed: u64) -> Arc<SimBackend> {
    Arc::new(SimBackend::new(options, seed))
}

fn disk(layers: Vec<Arc<dyn Layer>>, home: Arc<dyn Backend>) -> Arc<Disk> {
    Disk::new(DiskOptions::default(), layers, home).unwrap()
}

/// Counts the openings and closings of its queues; opening and leaving fail on request.
#[derive(Default)]
struct Witness {
    opened: AtomicU64,
    closed: Arc<AtomicU64>,
    left: AtomicU64,
    opens_max: Option<u64>,
    leave_fails: AtomicBool,
    /// The number of the witness of each request in flight.
    serving: Arc<Mutex<Vec<usize>>>,
    number: usize,
}

struct WitnessQueue {
    number: usize,
    closed: Arc<AtomicU64>,
    serving: Arc<Mutex<Vec<usize>>>,
}

impl Layer for Witness {
    fn name(&self) -> &'static str {
        "witness"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn leave(&self, _: &Arc<Disk>, _: Duration) -> io::Result<()> {
        self.left.fetch_add(1, Ordering::Relaxed);
        if self.leave_fails.load(Ordering::Relaxed) {
            return Err(io::Error::other("it is needed"));
        }
        Ok(())
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        if self.opens_max.is_some_and(|limit| self.opened.load(Ordering::Relaxed) >= limit) {
            return Err(io::Error::other("no more"));
        }
        self.opened.fetch_add(1, Ordering::Relaxed);
        Ok(LayerPart::queue(WitnessQueue {
            number: self.number,
            closed: Arc::clone(&self.closed),
            serving: Arc::clone(&self.serving),
        }))
    }
}

impl LayerQueue for WitnessQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        let mut serving = self.serving.lock();
        assert!(serving.iter().all(|other| *other == self.number), "two sets serve together");
        serving.push(self.number);
        drop(serving);
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let mut serving = self.serving.lock();
        let at = serving.iter().position(|other| *other == self.number).unwrap();
        serving.swap_remove(at);
        drop(serving);
        next.complete(request, outcome);
    }

    fn close(&mut self, _: &mut Crossing<'_>) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }
}

/// Queues on threads of their own write and read as fast as they can while layers change.
#[test]
#[expect(clippy::too_many_lines, reason = "one scenario")]
fn all_queues_have_one_set_of_layers_whatever_fails() {
    const QUEUES: u64 = 4;
    let home: Arc<dyn Backend> =
        store(SimOptions { rounds_max: 3, ..SimOptions::new(CAPACITY) }, 1);
    let serving = Arc::new(Mutex::new(Vec::new()));
    let witness = |number, opens_max| {
        Arc::new(Witness { number, opens_max, serving: Arc::clone(&serving), ..Witness::default() })
    };
    let first = witness(0, None);
    let disk = disk(vec![Arc::clone(&first) as _], home);
    let stop = Arc::new(AtomicBool::new(false));
    let requests = Arc::new(AtomicU64::new(0));
    let threads: Vec<_> = (0..QUEUES)
        .map(|number| {
            let (disk, stop, requests) =
                (Arc::clone(&disk), Arc::clone(&stop), Arc::clone(&requests));
            thread::spawn(move || {
                let mut queue = Queue::open(&disk);
                let mut random = fastrand::Rng::with_seed(number);
                while !stop.load(Ordering::Relaxed) {
                    while !queue.stack.is_closing() && queue.stack.in_flight() < 4 {
                        let mut request = queue.stack.request();
                        request.operation = Operation::Write;
                        (request.offset, request.length) = (random.u64(0..512) * 512, 512);
                        request.buffers.allocate(512);
                        queue.stack.submit(request, &mut queue.reactor);
                    }
                    queue.stack.advance(&mut queue.reactor);
                    while let Some((request, outcome)) = queue.stack.completed() {
                        assert_eq!(outcome, Ok(()));
                        queue.stack.recycle(request);
                        requests.fetch_add(1, Ordering::Relaxed);
                    }
                }
                while queue.stack.in_flight() > 0 {
                    queue.stack.advance(&mut queue.reactor);
                    while let Some((request, _)) = queue.stack.completed() {
                        queue.stack.recycle(request);
                    }
                }
            })
        })
        .collect();
    let progress = || {
        let before = requests.load(Ordering::Relaxed);
        let begun = std::time::Instant::now();
        while requests.load(Ordering::Relaxed) < before + 100 {
            assert!(begun.elapsed() < LIMIT, "the queues make no progress");
            thread::yield_now();
        }
    };
    while first.opened.load(Ordering::Relaxed) < QUEUES {
        thread::yield_now();
    }
    let mut current = Arc::clone(&first);
    for number in 1..60 {
        progress();
        // Some sets cannot be opened in all queues, and some layers cannot leave.
        let opens_max = (number % 3 == 1).then_some(number as u64 % QUEUES);
        current.leave_fails.store(number % 3 == 2, Ordering::Relaxed);
        let next = witness(number, opens_max);
        let changed = disk.restack(vec![Arc::clone(&next) as _], LIMIT);
        match number % 3 {
            1 => assert!(matches!(changed, Err(RestackError::Open(_))), "{changed:?}"),
            2 => assert!(matches!(changed, Err(RestackError::Leave("witness", _))), "{changed:?}"),
            _ => {
                changed.unwrap();
                assert_eq!(
                    current.closed.load(Ordering::Relaxed),
                    QUEUES,
                    "all queues have closed"
                );
                assert!(current.left.load(Ordering::Relaxed) > 0);
                current = next;
            }
        }
        assert!(Arc::ptr_eq(&disk.layers()[0], &(Arc::clone(&current) as Arc<dyn Layer>)));
    }
    progress();
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(current.opened.load(Ordering::Relaxed), QUEUES, "layers that stay are not reopened");
}

#[test]
fn a_request_that_does_not_complete_keeps_the_layers() {
    let home = store(SimOptions { rounds_max: 2, ..SimOptions::new(CAPACITY) }, 1);
    let witness = Arc::new(Witness::default());
    let disk = disk(vec![Arc::clone(&witness) as _], home);
    let mut queue = Queue::open(&disk);
    let mut request = queue.stack.request();
    request.operation = Operation::Flush;
    queue.stack.submit(request, &mut queue.reactor);
    // No thread runs rounds of this queue.
    let changed = disk.restack(Vec::new(), Duration::from_millis(50));
    assert!(matches!(changed, Err(RestackError::Hangs)), "{changed:?}");
    // The queue has not yet noticed that it may continue.
    let again = disk.restack(Vec::new(), Duration::from_millis(50));
    assert!(matches!(again, Err(RestackError::Busy)), "{again:?}");
    while queue.stack.in_flight() > 0 {
        queue.stack.advance(&mut queue.reactor);
        if let Some((request, outcome)) = queue.stack.completed() {
            assert_eq!(outcome, Ok(()));
            queue.stack.recycle(request);
        }
    }
    assert!(queue.stack.is_closing());
    queue.stack.advance(&mut queue.reactor);
    assert!(!queue.stack.is_closing());
    assert_eq!(queue.outcome_of(Operation::Write, 0, 512), Ok(()));
    assert_eq!(witness.opened.load(Ordering::Relaxed), 1);
    restack(&disk, Vec::new(), LIMIT, || queue.stack.advance(&mut queue.reactor)).unwrap();
    assert_eq!(queue.outcome_of(Operation::Write, 0, 512), Ok(()));
    // No change waits for a queue that has been closed.
    drop(queue);
    disk.restack(vec![witness], Duration::from_millis(50)).unwrap();
}

/// Completes all requests by itself, and has a request of its own beneath.
#[derive(Default)]
struct Worker {
    opened: AtomicU64,
}

struct WorkerQueue {
    has_begun: bool,
}

impl Layer for Worker {
    fn name(&self) -> &'static str {
        "worker"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        self.opened.fetch_add(1, Ordering::Relaxed);
        Ok(LayerPart::queue(WorkerQueue { has_begun: false }))
    }
}

impl LayerQueue for WorkerQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        if !std::mem::replace(&mut self.has_begun, true) {
            let mut own = next.request();
            own.operation = Operation::Flush;
            next.submit(own);
        }
        next.complete(request, Ok(()));
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }

    fn returned(&mut self, request: Box<Request>, _: Outcome, next: &mut Crossing<'_>) {
        next.recycle(request);
    }
}

#[test]
fn a_failed_change_does_not_wait_for_work_that_hangs_beneath_the_layers() {
    let home = store(SimOptions { rounds_max: 2, ..SimOptions::new(CAPACITY) }, 1);
    let worker = Arc::new(Worker::default());
    let disk = disk(vec![Arc::clone(&worker) as _], Arc::clone(&home) as _);
    let mut queue = Queue::open(&disk);
    home.hang(true);
    assert_eq!(queue.outcome_of(Operation::Write, 0, 512), Ok(()));
    for _ in 0..2 {
        let limit = Duration::from_millis(50);
        let changed = restack(&disk, Vec::new(), limit, || queue.stack.advance(&mut queue.reactor));
        assert!(matches!(changed, Err(RestackError::Hangs)), "{changed:?}");
        queue.stack.advance(&mut queue.reactor);
        assert!(!queue.stack.is_closing());
        assert_eq!(queue.outcome_of(Operation::Write, 0, 512), Ok(()));
    }
    assert_eq!(worker.opened.load(Ordering::Relaxed), 1);
    home.hang(false);
    restack(&disk, Vec::new(), LIMIT, || queue.stack.advance(&mut queue.reactor)).unwrap();
    assert_eq!(queue.outcome_of(Operation::Write, 0, 512), Ok(()));
}
