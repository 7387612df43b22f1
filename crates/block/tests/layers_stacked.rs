//! Three layers over a recorder: the order of every call, every refusal of the crossing, and the
//! use of boxes again.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use fathom_block::{
    Backend, BackendContext, BackendQueue, Capabilities, Clock, Crossing, Disk, DiskOptions,
    ErrorKind, Geometry, LAYERS_MAX, Layer, LayerQueue, Operation, Outcome, REQUEST_LENGTH_MAX,
    Request, SERIAL_LENGTH, Stack,
};
use fathom_reactor::{Event, Reactor};

const CAPACITY: u64 = 1 << 20;

/// Every call, in order.
#[derive(Clone, Default)]
struct Record(Arc<Mutex<Vec<String>>>);

impl Record {
    fn add(&self, line: String) {
        self.0.lock().unwrap().push(line);
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// What a probe does besides passing on.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Pass,
    /// Keeps requests for so long on their way down, in nanoseconds.
    HoldDown(u64),
    /// Keeps outcomes for so long on their way up, in nanoseconds.
    HoldUp(u64),
    /// Reads the first block itself before each write.
    ReadFirst,
    /// Answers reads itself.
    AnswerReads,
    /// Passes writes on although it makes them one byte longer.
    Overreach,
}

struct Probe {
    name: &'static str,
    manner: Manner,
    record: Record,
    capabilities: fn(Capabilities) -> Capabilities,
}

impl Layer for Probe {
    fn name(&self) -> &'static str {
        self.name
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        (self.capabilities)(below)
    }

    fn open_queue(&self, _queue: u64) -> Box<dyn LayerQueue> {
        let record = self.record.clone();
        Box::new(ProbeQueue { name: self.name, manner: self.manner, record, parked: Vec::new() })
    }
}

struct ProbeQueue {
    name: &'static str,
    manner: Manner,
    record: Record,
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    parked: Vec<Box<Request>>,
}

impl ProbeQueue {
    fn note(&self, call: &str, request: &Request, outcome: Option<Outcome>) {
        let result = match outcome {
            None => String::new(),
            Some(Ok(())) => " ok".into(),
            Some(Err(error)) => format!(" {error}"),
        };
        self.record.add(format!("{} {call} {}{result}", self.name, describe(request)));
    }
}

fn describe(request: &Request) -> String {
    format!("{} {}+{}", request.operation, request.offset, request.length)
}

impl LayerQueue for ProbeQueue {
    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        self.note("submit", &request, None);
        assert_eq!(*next.word(&mut request), 0, "a layer's word is its own");
        *next.word(&mut request) = u64::from(self.name.as_bytes()[0]);
        match self.manner {
            Manner::HoldDown(wait_ns) => {
                let deadline_ns = next.now_ns() + wait_ns;
                next.hold(request, None, deadline_ns);
            }
            Manner::ReadFirst if request.operation == Operation::Write => {
                let mut own = next.request();
                own.operation = Operation::Read;
                own.length = 512;
                own.buffers.allocate(512);
                next.submit(own);
                self.parked.push(request);
            }
            Manner::AnswerReads if request.operation == Operation::Read => {
                next.complete(request, Ok(()));
            }
            Manner::Overreach => {
                request.length += 1;
                next.submit(request);
            }
            _ => next.submit(request),
        }
    }

    fn complete(&mut self, mut request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        self.note("complete", &request, Some(outcome));
        assert_eq!(*next.word(&mut request), u64::from(self.name.as_bytes()[0]));
        if let Manner::HoldUp(wait_ns) = self.manner {
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

/// A back end that notes what reaches it and answers at once, or in the next round.
struct Recorder {
    record: Record,
    capabilities: Capabilities,
    alignment: u32,
    later: bool,
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

    fn open_queue(&self, _reactor: &mut Reactor) -> io::Result<Box<dyn BackendQueue>> {
        let record = self.record.clone();
        Ok(Box::new(RecorderQueue { record, later: self.later, waiting: Vec::new() }))
    }

    fn resize(&self, _capacity: u64) -> Result<(), ErrorKind> {
        Err(ErrorKind::Unsupported)
    }
}

struct RecorderQueue {
    record: Record,
    later: bool,
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    waiting: Vec<Box<Request>>,
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

/// A stack under test, with its time.
struct Bench {
    stack: Stack,
    reactor: Reactor,
    record: Record,
    time_ns: Rc<Cell<u64>>,
}

struct Plan {
    manners: [Manner; 3],
    capabilities: Capabilities,
    below_layer: fn(Capabilities) -> Capabilities,
    alignment: u32,
    later: bool,
    read_only: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            manners: [Manner::Pass; 3],
            capabilities: Capabilities::ALL,
            below_layer: |below| below,
            alignment: 1,
            later: false,
            read_only: false,
        }
    }
}

impl Plan {
    fn open(self) -> Bench {
        let record = Record::default();
        let layers = ["A", "B", "C"].into_iter().zip(self.manners).map(|(name, manner)| {
            let capabilities = if name == "B" { self.below_layer } else { |below| below };
            Arc::new(Probe { name, manner, record: record.clone(), capabilities }) as Arc<dyn Layer>
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
    fn submit(&mut self, operation: Operation, offset: u64, length: u64) {
        let mut request = self.stack.request();
        request.operation = operation;
        request.offset = offset;
        request.length = length;
        if operation.carries_data() {
            request.buffers.allocate(length as usize);
        }
        self.stack.submit(request, &mut self.reactor);
    }

    fn advance(&mut self) {
        self.stack.advance(&mut self.reactor);
    }

    fn outcome(&mut self) -> Option<Outcome> {
        let (request, outcome) = self.stack.completed()?;
        self.stack.recycle(request);
        Some(outcome)
    }

    /// Submits a request that must be refused, with no call of anyone below `last`.
    fn refused(&mut self, expected: ErrorKind, change: impl FnOnce(&mut Request)) {
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

#[test]
fn a_request_goes_down_and_up_through_every_layer() {
    let mut bench = Plan::default().open();
    bench.submit(Operation::Read, 0, 512);
    assert_eq!(
        bench.record.take(),
        [
            "A submit read 0+512",
            "B submit read 0+512",
            "C submit read 0+512",
            "- submit read 0+512",
            "C complete read 0+512 ok",
            "B complete read 0+512 ok",
            "A complete read 0+512 ok",
        ]
    );
    assert_eq!(bench.outcome(), Some(Ok(())));
    assert_eq!((bench.stack.in_flight(), bench.outcome()), (0, None));
}

#[test]
fn every_operation_passes_every_layer() {
    for operation in Operation::ALL {
        let mut bench = Plan::default().open();
        let (offset, length) = if operation.has_range() { (1024, 512) } else { (0, 0) };
        bench.submit(operation, offset, length);
        let calls = bench.record.take();
        let what = format!("{operation} {offset}+{length}");
        let mut expected: Vec<String> =
            ["A", "B", "C", "-"].map(|name| format!("{name} submit {what}")).into();
        expected.extend(["C", "B", "A"].map(|name| format!("{name} complete {what} ok")));
        if operation == Operation::GetId {
            // The serial belongs to the disk: no back end is asked.
            expected.retain(|call| !call.starts_with('-'));
        }
        assert_eq!(calls, expected);
        assert_eq!(bench.outcome(), Some(Ok(())));
    }
}

#[test]
fn two_requests_come_back_in_the_order_of_the_back_end() {
    let mut bench = Plan { later: true, ..Plan::default() }.open();
    bench.submit(Operation::Write, 0, 512);
    bench.submit(Operation::Flush, 0, 0);
    assert_eq!(bench.stack.in_flight(), 2);
    assert_eq!(bench.record.take().len(), 8);
    bench.advance();
    // What comes back together goes up level by level.
    assert_eq!(
        bench.record.take(),
        [
            "C complete write 0+512 ok",
            "C complete flush 0+0 ok",
            "B complete write 0+512 ok",
            "B complete flush 0+0 ok",
            "A complete write 0+512 ok",
            "A complete flush 0+0 ok",
        ]
    );
    assert_eq!((bench.outcome(), bench.outcome()), (Some(Ok(())), Some(Ok(()))));
}

#[test]
fn held_requests_resume_by_deadline_and_then_by_age() {
    let manners = [Manner::Pass, Manner::HoldDown(500), Manner::HoldUp(200)];
    let mut bench = Plan { manners, ..Plan::default() }.open();
    bench.submit(Operation::Read, 0, 512);
    bench.submit(Operation::Read, 512, 512);
    assert_eq!(bench.stack.deadline_ns(), Some(1500));
    bench.time_ns.set(1499);
    bench.record.take();
    bench.advance();
    assert!(bench.record.take().is_empty(), "too early");
    bench.time_ns.set(1500);
    bench.advance();
    assert_eq!(
        bench.record.take(),
        [
            "B resume read 0+512",
            "C submit read 0+512",
            "- submit read 0+512",
            "C complete read 0+512 ok",
            "B resume read 512+512",
            "C submit read 512+512",
            "- submit read 512+512",
            "C complete read 512+512 ok",
        ]
    );
    assert_eq!((bench.stack.deadline_ns(), bench.outcome()), (Some(1700), None));
    bench.time_ns.set(9000);
    bench.advance();
    assert_eq!(
        bench.record.take(),
        [
            "C resume read 0+512 ok",
            "B complete read 0+512 ok",
            "A complete read 0+512 ok",
            "C resume read 512+512 ok",
            "B complete read 512+512 ok",
            "A complete read 512+512 ok",
        ]
    );
    assert_eq!((bench.stack.deadline_ns(), bench.stack.in_flight()), (None, 2));
    assert_eq!((bench.outcome(), bench.outcome()), (Some(Ok(())), Some(Ok(()))));
}

#[test]
fn a_layers_own_request_returns_to_it_and_goes_no_further() {
    let manners = [Manner::Pass, Manner::ReadFirst, Manner::Pass];
    let mut bench = Plan { manners, ..Plan::default() }.open();
    bench.submit(Operation::Write, 4096, 512);
    assert_eq!(
        bench.record.take(),
        [
            "A submit write 4096+512",
            "B submit write 4096+512",
            "C submit read 0+512",
            "- submit read 0+512",
            "C complete read 0+512 ok",
            "B returned read 0+512 ok",
            "C submit write 4096+512",
            "- submit write 4096+512",
            "C complete write 4096+512 ok",
            "B complete write 4096+512 ok",
            "A complete write 4096+512 ok",
        ]
    );
    assert_eq!((bench.outcome(), bench.stack.in_flight()), (Some(Ok(())), 0));
}

#[test]
fn what_a_layer_answers_nobody_below_sees() {
    let manners = [Manner::Pass, Manner::AnswerReads, Manner::Pass];
    let mut bench = Plan { manners, ..Plan::default() }.open();
    bench.submit(Operation::Read, 0, 512);
    assert_eq!(
        bench.record.take(),
        ["A submit read 0+512", "B submit read 0+512", "A complete read 0+512 ok"]
    );
    assert_eq!(bench.outcome(), Some(Ok(())));
}

#[test]
fn a_layer_is_checked_like_a_front_end() {
    let manners = [Manner::Pass, Manner::Overreach, Manner::Pass];
    let mut bench = Plan { manners, ..Plan::default() }.open();
    bench.submit(Operation::Read, CAPACITY - 512, 512);
    assert_eq!(
        bench.record.take(),
        [
            "A submit read 1048064+512",
            "B submit read 1048064+512",
            // The crossing below B refuses; C never sees it.
            "B complete read 1048064+513 out of range",
            "A complete read 1048064+513 out of range",
        ]
    );
    assert_eq!(bench.outcome(), Some(Err(ErrorKind::OutOfRange)));
}

#[test]
fn the_crossing_refuses_what_contradicts_itself() {
    let mut bench = Plan { alignment: 512, ..Plan::default() }.open();
    let range = |operation, offset, length: u64| {
        move |request: &mut Request| {
            request.operation = operation;
            request.offset = offset;
            request.length = length;
            if operation.carries_data() {
                request.buffers.allocate(length.min(1 << 26) as usize);
            }
        }
    };
    for operation in Operation::ALL {
        if !operation.has_range() {
            bench.refused(ErrorKind::Malformed, range(operation, 512, 0));
            bench.refused(ErrorKind::Malformed, range(operation, 0, 512));
            continue;
        }
        bench.refused(ErrorKind::OutOfRange, range(operation, CAPACITY, 512));
        bench.refused(ErrorKind::OutOfRange, range(operation, CAPACITY - 512, 1024));
        bench.refused(ErrorKind::OutOfRange, range(operation, u64::MAX - 511, 1024));
        bench.refused(ErrorKind::Malformed, range(operation, 0, 0));
        bench.refused(ErrorKind::Misaligned, range(operation, 1, 512));
        bench.refused(ErrorKind::Misaligned, range(operation, 512, 513));
        if operation.carries_data() {
            bench.refused(ErrorKind::Malformed, |request| {
                range(operation, 0, 1024)(request);
                request.buffers.truncate(512);
            });
            bench.refused(ErrorKind::Malformed, |request| {
                range(operation, 0, 1024)(request);
                request.buffers.clear();
            });
        }
    }
    // At the very end it is within the disk.
    bench.submit(Operation::Read, CAPACITY - 512, 512);
    assert_eq!(bench.outcome(), Some(Ok(())));
}

#[test]
fn the_crossing_refuses_what_is_too_long() {
    struct Large(Recorder);
    impl Backend for Large {
        fn name(&self) -> &'static str {
            "large"
        }
        fn capacity(&self) -> u64 {
            REQUEST_LENGTH_MAX * 4
        }
        fn geometry(&self) -> Geometry {
            self.0.geometry()
        }
        fn capabilities(&self) -> Capabilities {
            self.0.capabilities()
        }
        fn open_queue(&self, reactor: &mut Reactor) -> io::Result<Box<dyn BackendQueue>> {
            self.0.open_queue(reactor)
        }
        fn resize(&self, _capacity: u64) -> Result<(), ErrorKind> {
            Err(ErrorKind::Unsupported)
        }
    }
    let record = Record::default();
    let capabilities = Capabilities::ALL;
    let recorder = Recorder { record: record.clone(), capabilities, alignment: 1, later: false };
    let disk = Disk::new(DiskOptions::default(), Vec::new(), Arc::new(Large(recorder))).unwrap();
    let mut reactor = Reactor::new(8).unwrap();
    let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
    for (operation, expected) in [
        (Operation::Read, Err(ErrorKind::TooLong)),
        (Operation::Write, Err(ErrorKind::TooLong)),
        // Without data there is no limit but the disk.
        (Operation::Discard, Ok(())),
        (Operation::WriteZeroes, Ok(())),
        (Operation::Extents, Ok(())),
    ] {
        let mut request = stack.request();
        request.operation = operation;
        request.length = REQUEST_LENGTH_MAX + 1;
        if operation.carries_data() {
            request.buffers.allocate(request.length as usize);
        }
        stack.submit(request, &mut reactor);
        let (request, outcome) = stack.completed().unwrap();
        assert_eq!(outcome, expected, "{operation}");
        assert_eq!(record.take().len(), usize::from(expected.is_ok()));
        stack.recycle(request);
    }
}

#[test]
fn the_crossing_refuses_what_the_disk_does_not_offer() {
    let nothing = Capabilities {
        flush: false,
        force_unit_access: false,
        discard: false,
        write_zeroes: false,
        ..Capabilities::ALL
    };
    let mut bench = Plan { capabilities: nothing, ..Plan::default() }.open();
    let ask = |operation: Operation, force_unit_access: bool| {
        move |request: &mut Request| {
            request.operation = operation;
            request.flags.force_unit_access = force_unit_access;
            request.length = if operation.has_range() { 512 } else { 0 };
            if operation.carries_data() {
                request.buffers.allocate(512);
            }
        }
    };
    bench.refused(ErrorKind::Unsupported, ask(Operation::Flush, false));
    bench.refused(ErrorKind::Unsupported, ask(Operation::Discard, false));
    bench.refused(ErrorKind::Unsupported, ask(Operation::WriteZeroes, false));
    bench.refused(ErrorKind::Unsupported, ask(Operation::Write, true));
    let mut bench = Plan { read_only: true, ..Plan::default() }.open();
    for operation in [Operation::Write, Operation::Discard, Operation::WriteZeroes] {
        bench.refused(ErrorKind::ReadOnly, ask(operation, false));
    }
    assert!(!bench.stack.capabilities().write);
    bench.submit(Operation::Read, 0, 512);
    assert_eq!(bench.outcome(), Some(Ok(())));
}

#[test]
fn a_capability_holds_from_the_layer_that_gives_it_upward() {
    // B takes discard away: A and the front end see none, C and the back end would.
    let below_layer = |below| Capabilities { discard: false, ..below };
    let mut bench = Plan { below_layer, ..Plan::default() }.open();
    assert!(!bench.stack.capabilities().discard);
    bench.submit(Operation::Discard, 0, 512);
    assert_eq!(bench.outcome(), Some(Err(ErrorKind::Unsupported)));
    assert!(bench.record.take().is_empty());
}

#[test]
fn extents_are_answered_where_nothing_is_known() {
    let capabilities = Capabilities { extents: false, ..Capabilities::ALL };
    let mut bench = Plan { capabilities, ..Plan::default() }.open();
    bench.submit(Operation::Extents, 512, 1024);
    assert!(!bench.record.take().iter().any(|call| call.starts_with('-')));
    let (request, outcome) = bench.stack.completed().unwrap();
    assert_eq!(outcome, Ok(()));
    assert_eq!((request.extents[0].offset, request.extents[0].length), (512, 1024));
}

#[test]
fn the_serial_is_the_disks() {
    let mut bench = Plan::default().open();
    let mut request = bench.stack.request();
    request.operation = Operation::GetId;
    request.buffers.allocate(SERIAL_LENGTH);
    bench.stack.submit(request, &mut bench.reactor);
    let (request, outcome) = bench.stack.completed().unwrap();
    assert_eq!(outcome, Ok(()));
    assert_eq!(request.buffers.owned().unwrap(), b"a serial\0\0\0\0\0\0\0\0\0\0\0\0");
}

#[test]
fn boxes_are_used_again_with_new_numbers() {
    let manners = [Manner::Pass, Manner::ReadFirst, Manner::Pass];
    let mut bench = Plan { manners, ..Plan::default() }.open();
    let mut numbers = Vec::new();
    let mut places = Vec::new();
    for _ in 0..10 {
        let mut request = bench.stack.request();
        assert!(request.buffers.length() == 0 && request.extents.is_empty());
        assert_eq!((request.token, request.offset, request.length), (0, 0, 0));
        numbers.push(request.id);
        places.push(std::ptr::from_ref(&*request));
        request.operation = Operation::Write;
        request.length = 512;
        request.token = 7;
        request.buffers.allocate(512);
        bench.stack.submit(request, &mut bench.reactor);
        assert_eq!(bench.outcome(), Some(Ok(())));
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 10, "numbers are unique");
    places.sort_unstable();
    places.dedup();
    assert!(places.len() <= 2, "one box for the front end, one for the layer");
}

#[test]
fn a_disk_has_so_many_layers_and_no_more() {
    let record = Record::default();
    let open = |count| {
        let layers = (0..count)
            .map(|_| {
                let capabilities = |below| below;
                let record = record.clone();
                Arc::new(Probe { name: "P", manner: Manner::Pass, record, capabilities })
                    as Arc<dyn Layer>
            })
            .collect();
        let capabilities = Capabilities::ALL;
        let record = record.clone();
        let backend = Arc::new(Recorder { record, capabilities, alignment: 1, later: false });
        Disk::new(DiskOptions::default(), layers, backend)
    };
    assert!(open(LAYERS_MAX).is_ok());
    assert_eq!(open(LAYERS_MAX + 1).err(), Some(ErrorKind::TooLong));
}
