//! The tap counts all requests, emits events, and never delays a disk.

mod support;

use std::sync::Arc;

use fathom_backend::Null;
use fathom_block::{Clock, Disk, DiskOptions, ErrorKind, Layer, Operation};
use fathom_layers::tap::{Event, Labels, size_class};
use fathom_layers::{Delay, DelayTime, Fault, FaultRule, Tap};
use fathom_reactor::Reactor;

use support::Bench;

fn labels() -> Labels {
    Labels {
        vm_name: "muscatvm51".into(),
        virtual_disk: "/dev/sda1".into(),
        physical_disk: "/dev/sda3".into(),
    }
}

/// A tap over a delay of 1 ms for reads and an error for flushes.
fn bench(tap: &Tap) -> Bench {
    let delay = Delay::new(0);
    delay.set(Operation::Read, DelayTime::fixed(1_000_000));
    let rule =
        |operation, error| FaultRule { operations: vec![operation], error, ..FaultRule::default() };
    let rules = vec![
        rule(Operation::Flush, ErrorKind::Io),
        rule(Operation::Discard, ErrorKind::Unsupported),
    ];
    let layers: Vec<Arc<dyn Layer>> =
        vec![Arc::new(tap.clone()), Arc::new(delay), Arc::new(Fault::new(rules, 0))];
    Bench::new(layers)
}

#[test]
fn a_request_and_its_response_have_one_event_each() {
    let tap = Tap::new(7, labels());
    let mut bench = bench(&tap);
    assert_eq!(bench.run(Operation::Read, 0, 512, 0), Ok(()));
    let mut reader = tap.attach().unwrap();
    assert!(tap.attach().is_none(), "a ring has one reader");
    assert_eq!(bench.run(Operation::Read, 4096, 1024, 0), Ok(()));
    assert_eq!(bench.run(Operation::Write, 512, 512, 1), Ok(()));
    assert!(bench.run(Operation::Flush, 0, 0, 0).is_err());
    assert!(bench.run(Operation::Discard, 0, 512, 0).is_err());
    let mut events = Vec::new();
    reader.drain(&mut events);
    let letters: Vec<(char, char, u64, u64)> = events
        .iter()
        .map(|event| (event.record_type.into(), event.io_op.into(), event.sector, event.size))
        .collect();
    assert_eq!(
        letters,
        [
            ('Q', 'r', 8, 2),
            ('R', 'r', 8, 2),
            ('Q', 'w', 1, 1),
            ('R', 'w', 1, 1),
            ('Q', 'f', 0, 0),
            ('E', 'f', 0, 0),
            ('Q', 'd', 0, 1),
            ('N', 'd', 0, 1),
        ]
    );
    assert_eq!(events[1].blktap_ts - events[0].blktap_ts, 1_000_000);
    assert!(events.chunks(2).all(|pair| pair[0].req_id == pair[1].req_id));
    assert!(events.iter().all(|event| event.disk == 7));
    assert_eq!((events[5].error, events[7].error), (1, 1 + ErrorKind::Unsupported as u8));
    assert_eq!(reader.labels().vm_name, "muscatvm51");

    // Without a reader there are no events, and a new reader gets no old ones.
    drop(reader);
    assert_eq!(bench.run(Operation::Read, 0, 512, 0), Ok(()));
    let mut reader = tap.attach().unwrap();
    events.clear();
    reader.drain(&mut events);
    assert!(events.is_empty());
}

#[test]
fn a_full_ring_drops_events_and_counts_them() {
    let tap = Tap::with_ring(1, labels(), 8);
    let mut bench = bench(&tap);
    let mut reader = tap.attach().unwrap();
    for _ in 0..10 {
        assert_eq!(bench.run(Operation::Write, 0, 512, 1), Ok(()));
    }
    let mut events = Vec::new();
    reader.drain(&mut events);
    assert_eq!((events.len(), reader.dropped()), (8, 12));
    assert_eq!(tap.snapshot(0).count(), 10, "counters count all requests");
    drop(reader);
    assert_eq!(tap.attach().unwrap().dropped(), 0, "drops are counted for each reader");
}

#[test]
fn counters_count_requests_by_outcome() {
    let tap = Tap::new(1, labels());
    let mut bench = bench(&tap);
    let start = tap.snapshot(bench.time_ns.get());
    for _ in 0..4 {
        assert_eq!(bench.run(Operation::Read, 0, 4096, 0), Ok(()));
    }
    assert_eq!(bench.run(Operation::Write, 0, 64 << 10, 0), Ok(()));
    assert!(bench.run(Operation::Flush, 0, 0, 0).is_err());
    let middle = tap.snapshot(bench.time_ns.get());
    let found = middle.since(&start);
    let reads = found.operation(Operation::Read);
    assert_eq!((reads.count(), reads.bytes(), reads.failed()), (4, 4 * 4096, 0));
    assert_eq!(reads.sizes[size_class(4096)].count, 4);
    let latency_ns = reads.latency_ns();
    assert_eq!(latency_ns.count(), 4);
    assert!(latency_ns.percentile(50.0).abs_diff(1_000_000) < 1_000_000 / 31);
    assert_eq!(reads.sizes[size_class(4096)].latency_sum_ns, 4_000_000, "exactly");
    assert_eq!(found.operation(Operation::Write).bytes(), 64 << 10);
    assert_eq!(found.operation(Operation::Flush).failed_with(ErrorKind::Io), 1);
    assert_eq!((found.interval_ns, found.busy_ns), (4_000_000, 4_000_000));
    assert!((found.depth_mean() - 1.0).abs() < 0.01, "one at a time: {}", found.depth_mean());
    assert!((found.requests_per_second() - 1250.0).abs() < 1.0);

    // Ten at the same time; one more is in flight at the end.
    for _ in 0..10 {
        bench.submit(Operation::Read, 0, 512, 0);
    }
    for _ in 0..10 {
        assert_eq!(bench.outcome(), Ok(()));
    }
    bench.submit(Operation::Read, 0, 512, 0);
    let end = tap.snapshot(bench.time_ns.get());
    let found = end.since(&middle);
    assert_eq!((found.count(), found.in_flight), (10, 1));
    assert!((found.depth_mean() - 10.0).abs() < 0.01, "{}", found.depth_mean());
    assert_eq!(found.operation(Operation::Read).sizes[3].count, 0, "only new requests");
    assert!(found.operation(Operation::Read).sizes[3].latency_ns.buckets.is_empty());
    assert_eq!(bench.outcome(), Ok(()));
}

#[test]
fn a_queue_that_closes_keeps_its_counts_and_its_events() {
    let tap = Tap::new(1, labels());
    let mut first = bench(&tap);
    let mut reader = tap.attach().unwrap();
    assert_eq!(first.run(Operation::Read, 0, 512, 0), Ok(()));
    assert!(first.run(Operation::Flush, 0, 0, 0).is_err());
    assert_eq!(tap.snapshot(0).queues, 1);
    drop(first);
    let snapshot = tap.snapshot(0);
    assert_eq!((snapshot.queues, snapshot.count(), snapshot.failed()), (0, 1, 1));
    assert_eq!(snapshot.operation(Operation::Read).latency_ns().count(), 1);
    let mut events = Vec::new();
    reader.drain(&mut events);
    assert_eq!(events.len(), 4);
    let mut second = bench(&tap);
    assert_eq!(second.run(Operation::Read, 0, 512, 0), Ok(()));
    assert_eq!(tap.snapshot(0).count(), 2);
}

#[test]
fn events_have_their_queue_and_counts_are_of_all_queues() {
    const THREADS: u64 = 2;
    const REQUESTS: u64 = 20_000;
    let tap = Tap::with_ring(1, labels(), 1024);
    let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(tap.clone())];
    let disk = Disk::new(DiskOptions::default(), layers, Arc::new(Null::new(1 << 20))).unwrap();
    let mut reader = tap.attach().unwrap();
    let mut events: Vec<Event> = Vec::new();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let disk = Arc::clone(&disk);
                scope.spawn(move || {
                    let mut reactor = Reactor::new(8).unwrap();
                    let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
                    for number in 0..REQUESTS {
                        let mut request = stack.request();
                        request.operation = Operation::Read;
                        request.offset = number % 1024 * 512;
                        request.length = 512;
                        request.buffers.allocate(512);
                        stack.submit(request, &mut reactor);
                        let (request, outcome) = stack.completed().unwrap();
                        assert_eq!(outcome, Ok(()));
                        stack.recycle(request);
                    }
                })
            })
            .collect();
        while !threads.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            reader.drain(&mut events);
        }
    });
    reader.drain(&mut events);
    assert_eq!(events.len() as u64 + reader.dropped(), THREADS * REQUESTS * 2);
    for queue in 0..THREADS {
        let of_queue = events.iter().filter(|event| u64::from(event.queue) == queue);
        let times = of_queue.map(|event| event.blktap_ts);
        assert!(times.is_sorted(), "a queue's events are in order");
    }
    assert_eq!(tap.snapshot(Clock::System.now_ns()).count(), THREADS * REQUESTS);
}
