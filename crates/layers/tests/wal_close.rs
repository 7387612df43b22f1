//! Queues that close while others go on.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fathom_block::{
    Backend, BackendContext, BackendQueue, Clock, Disk, DiskOptions, Operation, Request, Stack,
};
use fathom_layers::Wal;
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_persistence::Identity;
use fathom_reactor::{Event, Reactor};
use fathom_sim::{SimBackend, SimOptions};
use fathom_wal::RING_OFFSET;

#[path = "support/around.rs"]
mod around;

use around::Around;

const CAPACITY: u64 = 64 << 10;
const LOG_CAPACITY: u64 = RING_OFFSET + (64 << 10);

/// A queue of a log volume that keeps writes while they are to be kept.
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

/// A queue of the disk, with its thread's ring.
struct Queue {
    reactor: Reactor,
    stack: Stack,
    events: Vec<Event>,
}

impl Queue {
    fn new(disk: &Arc<Disk>) -> Self {
        let mut reactor = Reactor::new(8).unwrap();
        let clock = Clock::Simulated(Rc::new(Cell::new(1)));
        let stack = disk.open_queue(&mut reactor, clock).unwrap();
        Self { reactor, stack, events: Vec::new() }
    }

    fn write(&mut self, offset: u64) {
        let mut request = self.stack.request();
        request.operation = Operation::Write;
        (request.offset, request.length) = (offset, 4096);
        request.buffers.allocate(4096);
        self.stack.submit(request, &mut self.reactor);
    }

    /// Makes some rounds. Returns the number of completed requests.
    fn step(&mut self) -> usize {
        let mut completed = 0;
        for _ in 0..20 {
            self.reactor.submit().unwrap();
            self.reactor.collect(&mut self.events).unwrap();
            for event in self.events.drain(..) {
                self.stack.event(&event, &mut self.reactor);
            }
            self.stack.advance(&mut self.reactor);
            while let Some((request, outcome)) = self.stack.completed() {
                assert_eq!(outcome, Ok(()));
                self.stack.recycle(request);
                completed += 1;
            }
        }
        completed
    }
}

/// A queue writes an empty record in the place of one that another queue did not write, and closes
/// before that is written. It makes no flush any more. A change of a third queue waits for both
/// records.
#[test]
fn a_closed_queue_leaves_the_flush_of_its_last_record_to_another() {
    let keeps = Arc::new(AtomicBool::new(false));
    let log = Arc::new(SimBackend::new(SimOptions::new(LOG_CAPACITY), 1));
    let for_queues = Arc::clone(&keeps);
    let volume = Around::new(&log, log.capabilities(), move |_, inner| {
        Box::new(Keeping { inner, keeps: Arc::clone(&for_queues), kept: Vec::new() })
    });
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
        times: None,
        home_store: fathom_layers::wal::HomeStore::default(),
        clock_start_ns: 0,
    };
    let wal = Wal::open(&Arc::new(LogVolume::new(Arc::new(volume))), &options).unwrap();
    let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), 2));
    let disk = Disk::new(DiskOptions::default(), vec![Arc::new(wal)], home).unwrap();
    let mut queues = [Queue::new(&disk), Queue::new(&disk)];
    for queue in &mut queues {
        queue.step();
    }

    keeps.store(true, Ordering::Relaxed);
    let mut ending = Queue::new(&disk);
    ending.write(0);
    ending.step();
    drop(ending);
    let [closing, serving] = &mut queues;
    closing.step();
    assert_eq!(closing.stack.in_flight_of_layers(), 1, "the empty record");
    keeps.store(false, Ordering::Relaxed);
    serving.write(8192);
    assert_eq!(serving.step(), 0);
    assert_eq!(serving.stack.in_flight_of_layers(), 0, "it waits for the first record");
    closing.stack.close(&mut closing.reactor);
    closing.step();
    assert!(closing.stack.is_drained());
    assert_eq!(serving.step(), 1, "nobody makes the records durable");
}
