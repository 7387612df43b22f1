//! Measures nanoseconds per request for several stacks, which run alternately in many short passes.
//! The result is each stack's fastest pass, which a busy host affects least.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_backend::{Memory, Null};
use fathom_block::{
    Backend, BackendContext, BackendOpenContext, BackendProblem, BackendQueue, Capabilities, Clock,
    Disk, DiskOptions, ErrorKind, Geometry, Layer, Operation, Request, Stack,
};
use fathom_layers::tap::TapReader;
use fathom_reactor::{Event, Reactor};

pub const CAPACITY: u64 = 64 << 20;
const DEPTH: usize = 32;
const ROUNDS: usize = 2_000;
/// A request has two events, and the ring has space for 8192.
const ROUNDS_PER_DRAIN: usize = 100;
const PASSES: usize = 100;

/// A back end that completes each request in the next round, as a file does.
pub struct Later;

impl Backend for Later {
    fn name(&self) -> &'static str {
        "later"
    }

    fn capacity(&self) -> u64 {
        CAPACITY
    }

    fn geometry(&self) -> Geometry {
        Geometry::default()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::ALL
    }

    fn open_queue(
        &self,
        _context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        Ok(Box::new(LaterQueue(Vec::new())))
    }

    fn resize(&self, _capacity: u64) -> Result<(), ErrorKind> {
        Err(ErrorKind::Unsupported)
    }

    fn problems(&self) -> Vec<BackendProblem> {
        Vec::new()
    }

    fn losses(&self) -> u64 {
        0
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        Ok(())
    }
}

#[expect(clippy::vec_box, reason = "a request travels in its box")]
struct LaterQueue(Vec<Box<Request>>);

impl BackendQueue for LaterQueue {
    fn submit(&mut self, request: Box<Request>, _context: &mut BackendContext<'_>) {
        self.0.push(request);
    }

    fn event(&mut self, _event: &Event, _context: &mut BackendContext<'_>) {}

    fn advance(&mut self, context: &mut BackendContext<'_>) {
        for request in self.0.drain(..) {
            context.complete(request, Ok(()));
        }
    }
}

/// One variant: a stack, and the reader that keeps its ring empty if events are collected.
pub struct Variant {
    name: &'static str,
    stack: Stack,
    reader: Option<TapReader>,
    nanoseconds: Vec<f64>,
}

impl Variant {
    pub fn new(
        name: &'static str,
        layers: Vec<Arc<dyn Layer>>,
        backend: &Arc<dyn Backend>,
        reader: Option<TapReader>,
        reactor: &mut Reactor,
    ) -> Self {
        let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(backend));
        let disk = disk.expect("few layers");
        let stack = disk.open_queue(reactor, Clock::System).expect("a queue");
        Self { name, stack, reader, nanoseconds: Vec::new() }
    }
}

/// The back ends over which the cost of a layer is measured.
pub fn backends() -> [Arc<dyn Backend>; 3] {
    [Arc::new(Null::new(CAPACITY)), Arc::new(Memory::new(CAPACITY)), Arc::new(Later)]
}

/// Runs the variants alternately, all over `backend`, and prints the cost of each.
pub fn compare(backend: &dyn Backend, variants: &mut [Variant], reactor: &mut Reactor) {
    for _ in 0..PASSES {
        for variant in &mut *variants {
            run(variant, reactor);
        }
    }
    let base = least(&variants[0].nanoseconds);
    for variant in variants {
        let nanoseconds = least(&variant.nanoseconds);
        println!(
            "{:8} {:32} {nanoseconds:7.1} ns/request {:+7.1}",
            backend.name(),
            variant.name,
            nanoseconds - base
        );
    }
}

fn run(variant: &mut Variant, reactor: &mut Reactor) {
    let mut events = Vec::new();
    let mut spent = Duration::ZERO;
    for group in 0..ROUNDS / ROUNDS_PER_DRAIN {
        let start = Instant::now();
        for round in 0..ROUNDS_PER_DRAIN {
            let first = (group * ROUNDS_PER_DRAIN + round) * DEPTH;
            for slot in 0..DEPTH {
                let mut request = variant.stack.request();
                request.operation = Operation::Read;
                request.offset = ((first + slot) as u64 * 7919 * 4096) % CAPACITY;
                request.length = 4096;
                request.buffers.allocate(4096);
                variant.stack.submit(request, reactor);
            }
            variant.stack.advance(reactor);
            while let Some((request, _)) = variant.stack.completed() {
                variant.stack.recycle(request);
            }
        }
        spent += start.elapsed();
        // In a daemon, the reader has a separate thread, so its time is not counted here.
        if let Some(reader) = &mut variant.reader {
            events.clear();
            reader.drain(&mut events);
            assert_eq!(reader.dropped(), 0, "the ring has room for a group");
        }
    }
    let count = ROUNDS / ROUNDS_PER_DRAIN * ROUNDS_PER_DRAIN * DEPTH;
    variant.nanoseconds.push(spent.as_nanos() as f64 / count as f64);
}

/// The result of the fastest pass.
fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}
