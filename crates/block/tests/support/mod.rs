//! A stack whose every call is recorded.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use fathom_block::{
    Backend, BackendContext, BackendOpenContext, BackendProblem, BackendQueue, Capabilities, Clock,
    Crossing, Disk, DiskOptions, ErrorKind, Geometry, Layer, LayerPart, LayerQueue, Observer,
    ObserverPosition, OpenContext, Operation, Outcome, Request, Stack,
};
use fathom_reactor::{Event, Reactor};
use parking_lot::Mutex;

pub const CAPACITY: u64 = 1 << 20;

/// Every call, in order.
#[derive(Clone, Default)]
pub struct Record(pub Arc<Mutex<Vec<String>>>);

impl Record {
    pub fn add(&self, line: String) {
        self.0.lock().push(line);
    }

    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock())
    }
}

/// What a probe does besides passing requests on.
#[derive(Clone, Copy, PartialEq)]
pub enum Behaviour {
    Pass,
    /// Holds requests on their way down for this time, in nanoseconds.
    HoldDown(u64),
    /// Holds outcomes on their way up for this time, in nanoseconds.
    HoldUp(u64),
    /// Reads the first block itself before each write.
    ReadFirst,
    /// Answers reads itself.
    AnswerReads,
    /// Passes requests on after making them one byte longer.
    Overreach,
    /// Only observes.
    Watch,
}

pub struct Probe {
    pub name: &'static str,
    pub behaviour: Behaviour,
    pub record: Record,
    pub capabilities: fn(Capabilities) -> Capabilities,
}

impl Layer for Probe {
    fn name(&self) -> &'static str {
        self.name
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        (self.capabilities)(below)
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let record = self.record.clone();
        if self.behaviour == Behaviour::Watch {
            return Ok(LayerPart::observer(Watcher { name: self.name, record }));
        }
        Ok(LayerPart::queue(ProbeQueue {
            name: self.name,
            behaviour: self.behaviour,
            record,
            parked: Vec::new(),
        }))
    }
}

pub struct ProbeQueue {
    pub name: &'static str,
    pub behaviour: Behaviour,
    pub record: Record,
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    pub parked: Vec<Box<Request>>,
}

impl ProbeQueue {
    pub fn note(&self, call: &str, request: &Request, outcome: Option<Outcome>) {
        let result = match outcome {
            None => String::new(),
            Some(Ok(())) => " ok".into(),
            Some(Err(error)) => format!(" {error}"),
        };
        self.record.add(format!("{} {call} {}{result}", self.name, describe(request)));
    }
}

pub fn describe(request: &Request) -> String {
    format!("{} {}+{}", request.operation, request.offset, request.length)
}

impl LayerQueue for ProbeQueue {
    fn expect(&mut self, requests: &[Box<Request>], _next: &mut Crossing<'_>) {
        for request in requests {
            self.note("expect", request, None);
        }
    }

    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        self.note("submit", &request, None);
        assert_eq!(*next.word(&mut request), 0, "a layer's word is its own");
        *next.word(&mut request) = u64::from(self.name.as_bytes()[0]);
        match self.behaviour {
            Behaviour::HoldDown(wait_ns) => {
                let deadline_ns = next.now_ns() + wait_ns;
                next.hold(request, None, deadline_ns);
            }
            Behaviour::ReadFirst if request.operation == Operation::Write => {
                let mut own = next.request();
                own.operation = Operation::Read;
                own.length = 512;
                own.buffers.allocate(512);
                next.submit(own);
                self.parked.push(request);
            }
            Behaviour::AnswerReads if request.operation == Operation::Read => {
                next.complete(request, Ok(()));
            }
            Behaviour::Overreach => {
                request.length += 1;
                next.submit(request);
            }
            _ => next.submit(request),
        }
    }

    fn complete(&mut self, mut request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        self.note("complete", &request, Some(outcome));
        assert_eq!(*next.word(&mut request), u64::from(self.name.as_bytes()[0]));
        if let Behaviour::HoldUp(wait_ns) = self.behaviour {
            let deadline_ns = next.now_ns() + wait_ns;
            next.hold(request, Some(outcome), deadline_ns);
        } else {
            next.complete(request, outcome);
        }
    }

    fn returned(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        self.note("returned", &request, Some(outcome));
        next.recycle(request);
        let parked = self.parked.remove(0);
        next.submit(parked);
    }

    fn resume(&mut self, request: Box<Request>, outcome: Option<Outcome>, next: &mut Crossing<'_>) {
        self.note("resume", &request, outcome);
        match outcome {
            None => next.submit(request),
            Some(outcome) => next.complete(request, outcome),
        }
    }
}

/// An observer that records what it sees.
pub struct Watcher {
    pub name: &'static str,
    pub record: Record,
}

impl Observer for Watcher {
    fn down(&mut self, requests: &mut [Box<Request>], place: ObserverPosition<'_>) {
        for request in requests {
            assert_eq!(place.word(request), 0, "an observer's word is its own");
            *place.observe(request).word() = u64::from(self.name.as_bytes()[0]);
            self.record.add(format!("{} down {}", self.name, describe(request)));
        }
    }

    fn up(&mut self, requests: &mut [(Box<Request>, Outcome)], place: ObserverPosition<'_>) {
        for (request, outcome) in requests {
            assert_eq!(place.word(request), u64::from(self.name.as_bytes()[0]));
            let result = outcome.map_or_else(|error| error.to_string(), |()| "ok".into());
            self.record.add(format!("{} up {} {result}", self.name, describe(request)));
        }
    }
}

/// A back end that records requests and completes them immediately or in the next round.
pub struct Recorder {
    pub record: Record,
    pub capabilities: Capabilities,
    pub alignment: u32,
    pub later: bool,
}

impl Backend for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }

    fn capacity(&self) -> u64 {
        CAPACITY
    }

    fn geometry(&self) -> Geometry {
        Geometry { alignment: self.alignment, ..Geometry::default() }
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn open_queue(
        &self,
        _context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        let record = self.record.clone();
        Ok(Box::new(RecorderQueue { record, later: self.later, waiting: Vec::new() }))
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

pub struct RecorderQueue {
    pub record: Record,
    pub later: bool,
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    pub waiting: Vec<Box<Request>>,
}

impl BackendQueue for RecorderQueue {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        self.record.add(format!("- submit {}", describe(&request)));
        if self.later {
            self.waiting.push(request);
        } else {
            context.complete(request, Ok(()));
        }
    }

    fn event(&mut self, _event: &Event, _context: &mut BackendContext<'_>) {}

    fn advance(&mut self, context: &mut BackendContext<'_>) {
        for request in self.waiting.drain(..) {
            context.complete(request, Ok(()));
        }
    }
}

/// A stack under test, with its clock.
pub struct Bench {
    pub stack: Stack,
    pub reactor: Reactor,
    pub record: Record,
    pub time_ns: Rc<Cell<u64>>,
}

pub struct Plan {
    pub behaviours: [Behaviour; 3],
    pub capabilities: Capabilities,
    pub below_layer: fn(Capabilities) -> Capabilities,
    pub alignment: u32,
    pub later: bool,
    pub read_only: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            behaviours: [Behaviour::Pass; 3],
            capabilities: Capabilities::ALL,
            below_layer: |below| below,
            alignment: 1,
            later: false,
            read_only: false,
        }
    }
}

impl Plan {
    pub fn open(self) -> Bench {
        let record = Record::default();
        let layers = ["A", "B", "C"].into_iter().zip(self.behaviours).map(|(name, behaviour)| {
            let capabilities = if name == "B" { self.below_layer } else { |below| below };
            Arc::new(Probe { name, behaviour, record: record.clone(), capabilities })
                as Arc<dyn Layer>
        });
        let layers = layers.collect();
        let backend = Arc::new(Recorder {
            record: record.clone(),
            capabilities: self.capabilities,
            alignment: self.alignment,
            later: self.later,
        });
        let serial = "a serial".into();
        let options = DiskOptions { serial, read_only: self.read_only, ..DiskOptions::default() };
        let disk = Disk::new(options, layers, backend).unwrap();
        let mut reactor = Reactor::new(8).unwrap();
        let time_ns = Rc::new(Cell::new(1000));
        let stack = disk.open_queue(&mut reactor, Clock::Simulated(Rc::clone(&time_ns))).unwrap();
        Bench { stack, reactor, record, time_ns }
    }
}

impl Bench {
    pub fn submit(&mut self, operation: Operation, offset: u64, length: u64) {
        let mut request = self.stack.request();
        request.operation = operation;
        request.offset = offset;
        request.length = length;
        if operation.carries_data() {
            request.buffers.allocate(length as usize);
        }
        self.stack.submit(request, &mut self.reactor);
    }

    pub fn advance(&mut self) {
        self.stack.advance(&mut self.reactor);
    }

    pub fn outcome(&mut self) -> Option<Outcome> {
        let (request, outcome) = self.stack.completed()?;
        self.stack.recycle(request);
        Some(outcome)
    }

    /// Submits a request that must be refused before any level is called.
    pub fn refused(&mut self, expected: ErrorKind, change: impl FnOnce(&mut Request)) {
        let mut request = self.stack.request();
        change(&mut request);
        let what = format!("{request:?}");
        let before =
            self.stack.disk().counters().refused.load(std::sync::atomic::Ordering::Relaxed);
        self.stack.submit(request, &mut self.reactor);
        assert_eq!(self.outcome(), Some(Err(expected)), "{what}");
        assert_eq!(self.record.take(), Vec::<String>::new(), "{what}");
        let after = self.stack.disk().counters().refused.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(after, before + 1);
    }
}
