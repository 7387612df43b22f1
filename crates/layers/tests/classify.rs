//! The meaning of requests reaches the layers below and the accounts.

mod support;

use std::io;
use std::sync::Arc;

use fathom_block::{
    Capabilities, Crossing, Facts, GuestAddress, Insight, Kind, Layer, LayerPart, LayerQueue,
    OpenContext, Operation, Outcome, Request,
};
use fathom_guest_memory::GuestMemory;
use fathom_insight::{ClassTable, Confidence, InsightSource, Names, RequestFlags};
use fathom_introspect::Guest;
use fathom_layers::classify::{Direction, UsageOptions, UsageSnapshot};
use fathom_layers::tap::Labels;
use fathom_layers::{Classify, Delay, DelayTime, GuestSlot, Log, Tap};
use parking_lot::Mutex;

use support::Bench;

/// A layer that sets the meaning of each request, in place of a guest.
struct Oracle(Mutex<Insight>);

impl Oracle {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::default()))
    }

    /// Sets the meaning of the next requests.
    fn set_meaning(&self, parts: &[(u64, Facts)]) {
        let mut insight = Insight::default();
        for (length, facts) in parts {
            insight.push(*length, *facts);
        }
        insight.finish(&ClassTable::default());
        insight.flags.insert(RequestFlags::SYNCHRONOUS);
        *self.0.lock() = insight;
    }
}

/// The layer itself; the test keeps the other handle.
struct OracleLayer(Arc<Oracle>);

impl Layer for OracleLayer {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(Self(Arc::clone(&self.0))))
    }
}

impl LayerQueue for OracleLayer {
    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        request.insight = self.0.0.lock().clone();
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }
}

struct Case {
    oracle: Arc<Oracle>,
    classify: Classify,
    names: Arc<Names>,
    slot: Arc<GuestSlot>,
    lines: Arc<Mutex<Vec<String>>>,
    tap: Tap,
    bench: Bench,
}

/// An oracle, above all layers that use insights, above a delay of 2 ms for reads.
fn case() -> Case {
    let (oracle, names, slot) = (Oracle::new(), Arc::new(Names::default()), Arc::default());
    let classify = Classify::new(
        Arc::clone(&slot),
        ClassTable::default(),
        Arc::clone(&names),
        UsageOptions::default(),
    );
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let sink = Box::new(move |line: &str| sink.lock().push(line.to_owned()));
    let log = Log::new("disk0", 0, sink).with_names(Arc::clone(&names));
    let tap = Tap::new(1, Labels::default());
    let delay = Delay::new(0);
    delay.set(Operation::Read, DelayTime::fixed(2_000_000));
    let layers: Vec<Arc<dyn Layer>> = vec![
        Arc::new(OracleLayer(Arc::clone(&oracle))),
        Arc::new(classify.clone()),
        Arc::new(tap.clone()),
        Arc::new(log),
        Arc::new(delay),
    ];
    let bench = Bench::new(layers);
    Case { oracle, classify, names, slot, lines, tap, bench }
}

impl Case {
    fn file(&self, inode: u64, path: &str) -> Facts {
        Facts {
            kind: Kind::Data,
            source: InsightSource::Bio,
            inode,
            file_size: 30,
            path: self.names.number(path),
            file_system: self.names.number("ext4"),
            device: self.names.number("vda"),
            cgroup: self.names.number("/web"),
            process: self.names.number("fio"),
            process_id: 12,
            ..Facts::default()
        }
    }
}

/// Requests and bytes of a direction in the row of `inode`.
fn row(usage: &UsageSnapshot, inode: u64, direction: Direction) -> (u64, u64) {
    let row = usage.rows.iter().find(|row| row.subject.inode == inode).expect("a row");
    let account = &row.accounts[direction as usize];
    (account.requests, account.bytes)
}

#[test]
fn lines_and_events_have_the_meaning_of_a_request() {
    let mut case = case();
    let metadata = Facts { kind: Kind::Metadata, source: InsightSource::Page, ..Facts::default() };
    case.oracle.set_meaning(&[(4096, case.file(12, "/a")), (4096, metadata)]);
    let mut reader = case.tap.attach().unwrap();
    assert_eq!(case.bench.run(Operation::Write, 4096, 8192, 1), Ok(()));
    case.oracle.set_meaning(&[]);
    assert_eq!(case.bench.run(Operation::Flush, 0, 0, 0), Ok(()));
    let lines = case.lines.lock();
    let expected = [
        r#"disk0 #0 write 4096+8192 | 4096 data source=bio inode=12 size=30 fs="ext4" device="vda" path="/a" cgroup="/web" process="fio" pid=12 | 4096 metadata source=page"#,
        "disk0 #0 write 4096+8192 done 0 ns",
        "disk0 #1 flush",
        r#"disk0 #1 flush done 0 ns | 0 data source=bio inode=12 size=30 fs="ext4" device="vda" path="/a" cgroup="/web""#,
    ];
    assert_eq!(*lines, expected);
    let mut events = Vec::new();
    reader.drain(&mut events);
    let event = &events[0];
    assert_eq!((event.kind, event.inode, event.file_size, event.parts), (1, 12, 30, 2));
    assert_eq!(event.path, case.names.number("/a").0);
    assert_eq!((event.process_id, event.source), (12, InsightSource::Bio as u8));
    assert_eq!(event.flags >> 8, u16::from(RequestFlags::SYNCHRONOUS.0));
    assert_eq!(event.class, 1 + 4, "a small file is of class 4");
    assert_eq!((events[2].kind, events[2].path), (0, 0));
    // What the flush ends is known when it has been carried out.
    assert_eq!((events[3].kind, events[3].path, events[3].process_id), (1, event.path, 0));
    assert_eq!(events[3].confidence, Confidence::Likely as u8);
}

#[test]
fn the_log_drops_no_line_without_a_limit() {
    let mut case = case();
    for _ in 0..5_000 {
        assert_eq!(case.bench.run(Operation::Write, 0, 512, 1), Ok(()));
    }
    assert_eq!(case.lines.lock().len(), 10_000);
}

#[test]
fn requests_are_counted_in_their_rows_and_groups() {
    let mut case = case();
    let (a, b) = (case.file(1, "/a"), case.file(2, "/b"));
    case.oracle.set_meaning(&[(512, a), (1024, b)]);
    for _ in 0..40 {
        assert_eq!(case.bench.run(Operation::Write, 0, 1536, 1), Ok(()));
    }
    case.oracle.set_meaning(&[(4096, b)]);
    assert_eq!(case.bench.run(Operation::Read, 0, 4096, 0), Ok(()));
    case.oracle.set_meaning(&[]);
    assert_eq!(case.bench.run(Operation::Read, 0, 512, 0), Ok(()));
    for _ in 0..2 {
        assert_eq!(case.bench.run(Operation::Flush, 0, 0, 0), Ok(()));
    }

    let usage = case.classify.usage();
    assert_eq!(row(&usage, 1, Direction::Write), (40, 40 * 512));
    assert_eq!(row(&usage, 2, Direction::Write), (40, 40 * 1024));
    assert_eq!(row(&usage, 2, Direction::Read), (1, 4096));
    let read = &usage.totals.all()[Direction::Read as usize];
    assert_eq!((read.requests, read.bytes, read.latency_max_ns), (2, 4608, 2_000_000));
    assert_eq!(usage.totals.unknown[Direction::Read as usize].bytes, 512);
    // The first flush is given to the file of which it ends the most, and the second ends nothing.
    let flushed: Vec<_> = usage
        .rows
        .iter()
        .map(|row| (row.subject.inode, row.accounts[Direction::Flush as usize].requests))
        .filter(|(_, flushes)| *flushes > 0)
        .collect();
    assert_eq!(flushed, [(2, 1)]);
    assert_eq!(usage.totals.unknown[Direction::Flush as usize].requests, 1);
    assert_eq!(usage.totals.known[Direction::Flush as usize].requests, 1);
    let b = usage.rows.iter().find(|row| row.subject.inode == 2).unwrap();
    assert_eq!(b.subject.path.as_deref(), Some("/b"));
    assert_eq!(b.subject.cgroup.as_deref(), Some("/web"));

    let (_, groups) = case.classify.groups();
    let accounts = &groups[0].accounts[Kind::Data as usize];
    assert_eq!(&*groups[0].cgroup, "/web");
    assert_eq!(accounts[Direction::Write as usize].bytes, 40 * 1536);

    // Queues open and close; the accounts stay.
    let Case { classify, bench, .. } = case;
    drop(bench);
    assert_eq!(row(&classify.usage(), 1, Direction::Write), (40, 40 * 512));
}

#[test]
fn the_slowest_requests_are_kept_with_their_courses() {
    let mut case = case();
    case.oracle.set_meaning(&[(4096, case.file(9, "/slow"))]);
    for _ in 0..100 {
        assert_eq!(case.bench.run(Operation::Write, 0, 4096, 1), Ok(()));
    }
    let start_ns = case.bench.time_ns.get();
    case.bench.submit(Operation::Read, 8192, 4096, 0);
    case.bench.submit(Operation::Read, 0, 4096, 0);
    assert_eq!((case.bench.outcome(), case.bench.outcome()), (Ok(()), Ok(())));
    let slow = case.classify.slow(case.bench.time_ns.get(), 2);
    assert_eq!(slow.len(), 2);
    let first = slow.iter().find(|slow| slow.offset == 8192).unwrap();
    assert_eq!((first.operation, first.length), (Operation::Read, 4096));
    assert_eq!((first.start_ns, first.latency_ns), (start_ns, 2_000_000));
    assert_eq!(first.course.sent_ns - start_ns, 2_000_000, "the whole latency is the delay's");
    assert_eq!(first.course.ahead, 0);
    assert!(slow.iter().any(|slow| slow.course.ahead == 1));
    assert_eq!(case.names.text(first.insight.facts.path).as_deref(), Some("/slow"));
    assert!(first.insight.flags.contains(RequestFlags::SYNCHRONOUS));
}

/// A guest with blank memory.
fn blank_guest(names: &Arc<Names>) -> Arc<Guest> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(32 << 10).unwrap();
    let mut memory = GuestMemory::default();
    memory.add(0, 32 << 10, file, 0, &Arc::default()).unwrap();
    Guest::new(&memory, Arc::clone(names), Box::new(|| {}))
}

#[test]
fn a_change_of_guest_is_followed_and_the_old_guest_dropped() {
    let (slot, names) = (Arc::new(GuestSlot::new()), Arc::new(Names::default()));
    let table = ClassTable::default();
    let options = UsageOptions::default();
    let classify = Classify::new(Arc::clone(&slot), table, Arc::clone(&names), options);
    let mut bench = Bench::new(vec![Arc::new(classify.clone())]);
    let guest = blank_guest(&names);
    let mut ask = |header: Option<GuestAddress>| {
        let mut request = bench.stack.request();
        (request.operation, request.length, request.header) = (Operation::Read, 512, header);
        request.insight.io_priority = 5;
        request.buffers.allocate(512);
        bench.stack.submit(request, &mut bench.reactor);
        let (request, outcome) = bench.stack.completed().unwrap();
        let insight = request.insight.clone();
        bench.stack.recycle(request);
        assert_eq!(outcome, Ok(()));
        assert_eq!((insight.facts.kind, insight.io_priority), (Kind::Unknown, 5));
    };
    slot.set(Some(Arc::clone(&guest)));
    let held = Arc::strong_count(&guest);
    ask(None);
    assert_eq!(Arc::strong_count(&guest), held, "requests of other clients are not resolved");
    for address in [4096, 0, u64::MAX, 32768] {
        ask(Some(GuestAddress(address)));
    }
    assert!(Arc::strong_count(&guest) > held);
    slot.set(None);
    ask(Some(GuestAddress(4096)));
    assert_eq!(Arc::strong_count(&guest), 1);
    assert_eq!(classify.failures(), 0);
    assert_eq!(classify.usage().totals.unknown[Direction::Read as usize].requests, 6);
}

#[test]
fn an_empty_slot_leaves_requests_without_insight() {
    let mut case = case();
    assert!(case.slot.guest().is_none());
    assert_eq!(case.bench.run(Operation::Read, 0, 512, 0), Ok(()));
    assert!(case.classify.usage().rows.is_empty());
}
