//! Three layers over a recorder: the order of every call, and the reuse of boxes.

mod support;

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use fathom_block::{
    Capabilities, Clock, Crossing, Disk, DiskOptions, ErrorKind, LAYERS_MAX, Layer, LayerPart,
    LayerQueue, OpenContext, Operation, Outcome, Request, SERIAL_LENGTH,
};
use fathom_reactor::Reactor;

use support::{Behaviour, Bench, CAPACITY, Plan, Probe, Record, Recorder};

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
            // The serial belongs to the disk: the back end is not called.
            expected.retain(|call| !call.starts_with('-'));
        }
        assert_eq!(calls, expected);
        assert_eq!(bench.outcome(), Some(Ok(())));
    }
}

#[test]
fn two_requests_complete_in_the_order_of_the_back_end() {
    let mut bench = Plan { later: true, ..Plan::default() }.open();
    bench.submit(Operation::Write, 0, 512);
    bench.submit(Operation::Flush, 0, 0);
    assert_eq!(bench.stack.in_flight(), 2);
    assert_eq!(bench.record.take().len(), 8);
    bench.advance();
    // The first goes all the way up before the second.
    assert_eq!(
        bench.record.take(),
        [
            "C complete write 0+512 ok",
            "B complete write 0+512 ok",
            "A complete write 0+512 ok",
            "C complete flush 0+0 ok",
            "B complete flush 0+0 ok",
            "A complete flush 0+0 ok",
        ]
    );
    assert_eq!((bench.outcome(), bench.outcome()), (Some(Ok(())), Some(Ok(()))));
}

#[test]
fn held_requests_resume_by_deadline_and_then_by_age() {
    let behaviours = [Behaviour::Pass, Behaviour::HoldDown(500), Behaviour::HoldUp(200)];
    let mut bench = Plan { behaviours, ..Plan::default() }.open();
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
    let behaviours = [Behaviour::Pass, Behaviour::ReadFirst, Behaviour::Pass];
    let mut bench = Plan { behaviours, ..Plan::default() }.open();
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
fn levels_below_do_not_see_a_request_that_a_layer_answers() {
    let behaviours = [Behaviour::Pass, Behaviour::AnswerReads, Behaviour::Pass];
    let mut bench = Plan { behaviours, ..Plan::default() }.open();
    bench.submit(Operation::Read, 0, 512);
    assert_eq!(
        bench.record.take(),
        ["A submit read 0+512", "B submit read 0+512", "A complete read 0+512 ok"]
    );
    assert_eq!(bench.outcome(), Some(Ok(())));
}

#[test]
fn a_layer_is_checked_like_a_front_end() {
    let behaviours = [Behaviour::Pass, Behaviour::Overreach, Behaviour::Pass];
    let mut bench = Plan { behaviours, ..Plan::default() }.open();
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
fn extents_are_answered_without_the_back_ends_capability() {
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
fn boxes_are_reused_with_new_numbers() {
    let behaviours = [Behaviour::Pass, Behaviour::ReadFirst, Behaviour::Pass];
    let mut bench = Plan { behaviours, ..Plan::default() }.open();
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
fn a_disk_has_a_limited_number_of_layers() {
    let record = Record::default();
    let open = |count| {
        let layers = (0..count)
            .map(|_| {
                let capabilities = |below| below;
                let record = record.clone();
                Arc::new(Probe { name: "P", behaviour: Behaviour::Pass, record, capabilities })
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

#[test]
fn observers_see_each_request_once_each_way_wherever_they_are() {
    let watch = Behaviour::Watch;
    let (all, read) = ("read 0+512", Operation::Read);
    let cases = [
        (
            [watch, Behaviour::Pass, watch],
            ["A down", "B submit", "C down", "- submit"],
            ["C up", "B complete", "A up"],
        ),
        (
            [Behaviour::Pass, watch, watch],
            ["A submit", "B down", "C down", "- submit"],
            ["C up", "B up", "A complete"],
        ),
        (
            [watch, watch, Behaviour::Pass],
            ["A down", "B down", "C submit", "- submit"],
            ["C complete", "B up", "A up"],
        ),
        (
            [watch, watch, watch],
            ["A down", "B down", "C down", "- submit"],
            ["C up", "B up", "A up"],
        ),
    ];
    for (behaviours, down, up) in cases {
        let mut bench = Plan { behaviours, ..Plan::default() }.open();
        bench.submit(read, 0, 512);
        let mut expected: Vec<String> = down.map(|call| format!("{call} {all}")).into();
        expected.extend(up.map(|call| format!("{call} {all} ok")));
        assert_eq!(bench.record.take(), expected);
        assert_eq!(bench.outcome(), Some(Ok(())));
    }
}

/// Begins reads of 512 bytes at these offsets, and settles them together.
fn read_together(bench: &mut Bench, offsets: &[u64]) {
    for offset in offsets {
        let mut request = bench.stack.request();
        (request.operation, request.offset, request.length) = (Operation::Read, *offset, 512);
        request.buffers.allocate(512);
        bench.stack.begin(request, &bench.reactor);
    }
    assert!(bench.record.take().is_empty(), "they wait for each other");
    bench.stack.run_round(&mut bench.reactor).unwrap();
}

/// The calls `down` and then `up`, each for the reads at 0 and 512 before the next one.
fn calls_together(down: &[&str], up: &[&str]) -> Vec<String> {
    let each =
        |call: &str, end: &str| [0, 512].map(|offset| format!("{call} read {offset}+512{end}"));
    let down = down.iter().flat_map(|call| each(call, ""));
    down.chain(up.iter().flat_map(|call| each(call, " ok"))).collect()
}

#[test]
fn observers_see_requests_that_came_together_before_the_back_end_does() {
    let mut bench = Plan { behaviours: [Behaviour::Watch; 3], ..Plan::default() }.open();
    read_together(&mut bench, &[0, 512]);
    let down = ["A down", "B down", "C down", "- submit"];
    assert_eq!(bench.record.take(), calls_together(&down, &["C up", "B up", "A up"]));
    assert_eq!((bench.outcome(), bench.outcome()), (Some(Ok(())), Some(Ok(()))));
}

#[test]
fn observers_above_all_layers_see_requests_together_that_came_together() {
    let behaviours = [Behaviour::Watch, Behaviour::Watch, Behaviour::AnswerReads];
    let mut bench = Plan { behaviours, alignment: 512, ..Plan::default() }.open();
    // The first crossing refuses the one in the middle: nobody sees it.
    read_together(&mut bench, &[0, 100, 512]);
    let down = ["A down", "B down", "C expect", "C submit"];
    assert_eq!(bench.record.take(), calls_together(&down, &["B up", "A up"]));
    let outcomes = [0; 3].map(|_| bench.outcome());
    assert_eq!(outcomes, [Some(Err(ErrorKind::Misaligned)), Some(Ok(())), Some(Ok(()))]);
    // What comes alone is answered at once, and not announced.
    bench.submit(Operation::Read, 1024, 512);
    assert_eq!(bench.outcome(), Some(Ok(())));
    assert!(bench.record.take().iter().all(|call| !call.contains("expect")));
}

/// Every layer that takes requests knows of a batch before one of them gets its first request.
#[test]
fn layers_expect_requests_that_came_together() {
    let behaviours = [Behaviour::Watch, Behaviour::Pass, Behaviour::AnswerReads];
    let mut bench = Plan { behaviours, ..Plan::default() }.open();
    read_together(&mut bench, &[0, 512]);
    let calls = bench.record.take();
    let expected = calls_together(&["A down", "B expect", "C expect"], &[]);
    assert_eq!(calls[..6], expected);
    assert_eq!(calls[6..8], ["B submit read 0+512", "C submit read 0+512"]);
}

#[test]
fn observers_below_see_a_layers_own_requests() {
    let behaviours = [Behaviour::Watch, Behaviour::ReadFirst, Behaviour::Watch];
    let mut bench = Plan { behaviours, ..Plan::default() }.open();
    bench.submit(Operation::Write, 1024, 512);
    assert_eq!(
        bench.record.take(),
        [
            "A down write 1024+512",
            "B submit write 1024+512",
            "C down read 0+512",
            "- submit read 0+512",
            "C up read 0+512 ok",
            "B returned read 0+512 ok",
            "C down write 1024+512",
            "- submit write 1024+512",
            "C up write 1024+512 ok",
            "B complete write 1024+512 ok",
            "A up write 1024+512 ok",
        ]
    );
}

#[test]
fn an_observer_sees_the_refusal_of_a_request_of_a_layer_below_it() {
    let behaviours = [Behaviour::Watch, Behaviour::Overreach, Behaviour::Watch];
    let mut bench = Plan { behaviours, alignment: 512, ..Plan::default() }.open();
    bench.submit(Operation::Discard, 0, 512);
    let misaligned = ErrorKind::Misaligned;
    assert_eq!(
        bench.record.take(),
        [
            "A down discard 0+512".to_owned(),
            "B submit discard 0+512".to_owned(),
            format!("B complete discard 0+513 {misaligned}"),
            format!("A up discard 0+513 {misaligned}"),
        ]
    );
    assert_eq!(bench.outcome(), Some(Err(misaligned)));
}

/// A layer that records the time of the round at each call.
struct Watch(Record);

impl Layer for Watch {
    fn name(&self) -> &'static str {
        "watch"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(Self(self.0.clone())))
    }
}

impl LayerQueue for Watch {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        self.0.add(format!("down {}", next.round_ns()));
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        self.0.add(format!("up {}", next.round_ns()));
        next.complete(request, outcome);
    }
}

#[test]
fn a_round_has_one_time_until_the_thread_hands_over_or_waits() {
    let record = Record::default();
    let (capabilities, alignment, later) = (Capabilities::ALL, 1, true);
    let recorder = Recorder { record: Record::default(), capabilities, alignment, later };
    let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(Watch(record.clone()))];
    let disk = Disk::new(DiskOptions::default(), layers, Arc::new(recorder)).unwrap();
    let mut reactor = Reactor::new(8).unwrap();
    let time_ns = Rc::new(Cell::new(10));
    let mut stack = disk.open_queue(&mut reactor, Clock::Simulated(Rc::clone(&time_ns))).unwrap();
    for time in [10, 11, 12, 13] {
        time_ns.set(time);
        let request = stack.request();
        stack.submit(request, &mut reactor);
        if time == 11 {
            reactor.submit().unwrap();
        }
    }
    assert_eq!(record.take(), ["down 10", "down 10", "down 12", "down 12"]);
    time_ns.set(20);
    stack.advance(&mut reactor);
    assert_eq!(record.take(), ["up 20"; 4]);
    time_ns.set(30);
    let request = stack.request();
    stack.submit(request, &mut reactor);
    assert_eq!(record.take(), ["down 30"]);
}
