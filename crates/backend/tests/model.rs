//! The modelled disks have the calculated timing, and keep data like any other disk.

#![allow(unsafe_code)]

mod support;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use fathom_backend::model::{HddParameters, Model, SsdParameters};
use fathom_backend::{Memory, Null};
use fathom_block::{Backend, Clock, Layer, Operation};
use fathom_reactor::Reactor;
use fathom_sim::{
    Harness, HarnessOptions, SimBackend, SimOptions, Workload, WorkloadOptions, each_seed,
};

const TERABYTE: u64 = 1_000_000_000_000;

/// The result of a closed loop of requests on one queue.
#[derive(Debug)]
struct Found {
    /// Requests a second.
    rate: f64,
    /// Bytes a second.
    throughput: f64,
    latency_mean_us: f64,
    /// Every latency, in nanoseconds, in order of completion.
    latencies_ns: Vec<u64>,
}

/// The length of the model's queue in its status.
fn queued(model: &Model) -> u64 {
    let report = model.status();
    report.figures.iter().find(|figure| figure.name == "queued_requests").unwrap().value
}

/// How the next request is chosen.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    Random,
    Sequential,
}

/// Keeps `depth` requests of `length` bytes in flight until `count` have completed.
fn drive(
    model: &Model,
    capacity: u64,
    operation: impl Fn(u64) -> Operation,
    order: Order,
    length: u64,
    depth: usize,
    count: u64,
) -> Found {
    let disk = support::disk(vec![Arc::new(model.clone())], Arc::new(Null::new(capacity)));
    let mut reactor = Reactor::new(8).unwrap();
    let start_ns = 1_000_000_000;
    let time_ns = Rc::new(Cell::new(start_ns));
    let mut stack = disk.open_queue(&mut reactor, Clock::Simulated(Rc::clone(&time_ns))).unwrap();
    let mut random = fastrand::Rng::with_seed(42);
    let (mut submitted, mut latencies_ns) = (0, Vec::new());
    while (latencies_ns.len() as u64) < count {
        while stack.in_flight() < depth && submitted < count {
            let mut request = stack.request();
            request.operation = operation(submitted);
            if request.operation.has_range() {
                request.offset = match order {
                    Order::Random => random.u64(0..capacity / length) * length,
                    Order::Sequential => submitted * length,
                };
                request.length = length;
                request.buffers.allocate(length as usize);
            }
            request.token = time_ns.get();
            submitted += 1;
            stack.submit(request, &mut reactor);
        }
        assert!(queued(model) <= stack.in_flight() as u64);
        if !stack.has_completed() {
            assert_eq!(queued(model), stack.in_flight() as u64);
            time_ns.set(stack.deadline_ns().expect("a request is held"));
            stack.advance(&mut reactor);
        }
        while let Some((request, outcome)) = stack.completed() {
            assert_eq!(outcome, Ok(()));
            latencies_ns.push(time_ns.get() - request.token);
            stack.recycle(request);
        }
    }
    assert_eq!(queued(model), 0);
    let seconds = (time_ns.get() - start_ns) as f64 / 1e9;
    let total: u64 = latencies_ns.iter().sum();
    Found {
        rate: count as f64 / seconds,
        throughput: (count * length) as f64 / seconds,
        latency_mean_us: total as f64 / count as f64 / 1e3,
        latencies_ns,
    }
}

fn reads(_: u64) -> Operation {
    Operation::Read
}

fn writes(_: u64) -> Operation {
    Operation::Write
}

fn within(what: &str, found: f64, low: f64, high: f64) {
    println!("{what}: {found:.1}");
    assert!((low..=high).contains(&found), "{what}: {found:.1} is not in {low}..{high}");
}

#[test]
fn hdd_random_reads_take_a_seek_and_half_a_revolution() {
    let found = |depth, count| {
        let model = Model::hdd(HddParameters::spanning(TERABYTE), 1);
        drive(&model, TERABYTE, reads, Order::Random, 4096, depth, count)
    };
    // 8.5 ms for the seek, 4.17 ms for half a revolution, 0.1 ms overhead: 12.8 ms.
    let alone = found(1, 2000);
    within("random reads, depth 1", alone.rate, 74.0, 83.0);
    // The choice of the nearest of many saves most of both.
    let queued = found(32, 2000);
    within("random reads, depth 32", queued.rate, alone.rate * 2.0, 350.0);
    let some = found(4, 3000);
    assert!(alone.rate * 1.1 < some.rate && some.rate < queued.rate, "{}", some.rate);
    println!("random reads, depth 4: {:.1}", some.rate);
    let longest_ns = queued.latencies_ns.iter().max().unwrap();
    assert!(*longest_ns < 2_000_000_000, "no request starves: {longest_ns}");
}

#[test]
fn hdd_random_writes_take_a_little_longer() {
    let model = Model::hdd(HddParameters::spanning(TERABYTE), 1);
    let found = drive(&model, TERABYTE, writes, Order::Random, 4096, 1, 2000);
    within("random writes, depth 1", found.rate, 70.0, 80.0);
}

#[test]
fn hdd_sequential_requests_run_at_the_rate_of_the_tracks() {
    // An eleventh of each track's time is the switch to the next track: 210 MB/s become 192.
    for (what, operation, depth) in [
        ("sequential reads, depth 1", reads as fn(u64) -> Operation, 1),
        ("sequential reads, depth 8", reads, 8),
        ("sequential writes, depth 8", writes, 8),
    ] {
        let model = Model::hdd(HddParameters::spanning(TERABYTE), 1);
        let found = drive(&model, TERABYTE, operation, Order::Sequential, 128 << 10, depth, 4000);
        within(what, found.throughput / 1e6, 150.0, 210.0);
    }
    // At depth 1 without a cache, a write arrives just too late and waits a revolution: 128 KiB in
    // 8.3 ms.
    let model = Model::hdd(HddParameters::spanning(TERABYTE), 1);
    let found = drive(&model, TERABYTE, writes, Order::Sequential, 128 << 10, 1, 500);
    within("sequential writes, depth 1", found.throughput / 1e6, 13.0, 17.0);
    let cached = HddParameters { write_cache: 16 << 20, ..HddParameters::spanning(TERABYTE) };
    let model = Model::hdd(cached, 1);
    let found = drive(&model, TERABYTE, writes, Order::Sequential, 128 << 10, 1, 4000);
    within("the same with a cache", found.throughput / 1e6, 130.0, 260.0);
}

#[test]
fn hdd_inner_tracks_are_slower() {
    let rate = |rate_outer| {
        let model = Model::hdd(HddParameters { rate_outer, ..HddParameters::spanning(4 << 30) }, 1);
        // The whole disk, from the outer to the inner edge.
        drive(&model, 4 << 30, reads, Order::Sequential, 1 << 20, 4, 4096).throughput / 1e6
    };
    let (zoned, flat) = (rate(210e6), rate(100e6));
    within("edge to edge", zoned, 120.0, 160.0);
    within("edge to edge, no zones", flat, 85.0, 100.0);
}

#[test]
fn hdd_flushes_wait_for_the_cache() {
    let cached = HddParameters { write_cache: 8 << 20, ..HddParameters::spanning(TERABYTE) };
    let model = Model::hdd(cached, 3);
    // Sixteen random writes, then a flush.
    let operation = |number| if number % 17 == 16 { Operation::Flush } else { Operation::Write };
    let found = drive(&model, TERABYTE, operation, Order::Random, 4096, 1, 170);
    for round in found.latencies_ns.chunks(17) {
        let slowest_write = round[..16].iter().max().unwrap();
        assert!(*slowest_write < 1_000_000, "a cached write took {slowest_write} ns");
        assert!((30_000_000..200_000_000).contains(&round[16]), "a flush took {} ns", round[16]);
    }
}

#[test]
fn ssd_reads_scale_with_the_number_of_dies() {
    let found = |depth, count| {
        let model = Model::ssd(SsdParameters::nvme(), 1);
        drive(&model, TERABYTE, reads, Order::Random, 4096, depth, count)
    };
    // 10 µs overhead, 55 µs sensing, 3.4 µs channel, 1.2 µs link.
    let alone = found(1, 2000);
    within("random reads, depth 1, µs", alone.latency_mean_us, 66.0, 74.0);
    // Thirty-two dies, of which a few have two requests and a few none.
    let many = found(32, 20_000);
    within("random reads, depth 32, times depth 1", many.rate / alone.rate, 15.0, 28.0);
    // At most the rate of all dies together: 32 / 55 µs.
    let deep = found(512, 40_000);
    within("random reads, depth 512", deep.rate, 400_000.0, 582_000.0);
}

#[test]
fn ssd_sequential_reads_fill_the_link() {
    for (parameters, low, high) in
        [(SsdParameters::nvme(), 2800.0, 3500.0), (SsdParameters::sata(), 480.0, 550.0)]
    {
        let model = Model::ssd(parameters, 1);
        let found = drive(&model, TERABYTE, reads, Order::Sequential, 128 << 10, 32, 8_000);
        within("sequential reads, MB/s", found.throughput / 1e6, low, high);
    }
}

#[test]
fn ssd_writes_complete_immediately_until_the_buffer_is_full() {
    let model = Model::ssd(SsdParameters::nvme(), 1);
    let short = drive(&model, TERABYTE, writes, Order::Random, 4096, 1, 1000);
    within("writes into the buffer, µs", short.latency_mean_us, 10.0, 15.0);
    let model = Model::ssd(SsdParameters::nvme(), 1);
    let long = drive(&model, TERABYTE, writes, Order::Sequential, 128 << 10, 32, 30_000);
    // 32 dies × 64 KiB in 700 µs, an erase for 1024 programs, 1.5 bytes programmed for each
    // written.
    within("sustained writes, MB/s", long.throughput / 1e6, 1800.0, 2100.0);
}

#[test]
fn ssd_reads_wait_for_programs() {
    let latency = |write_share: u64| {
        let model = Model::ssd(SsdParameters::nvme(), 1);
        let operation = move |number| {
            if number % 4 < write_share { Operation::Write } else { Operation::Read }
        };
        drive(&model, TERABYTE, operation, Order::Random, 64 << 10, 8, 4000).latencies_ns
    };
    let last = |mut latencies: Vec<u64>| {
        latencies.sort_unstable();
        latencies[latencies.len() * 99 / 100]
    };
    let (quiet, busy) = (last(latency(0)), last(latency(2)));
    assert!(quiet < 400_000, "99 % of quiet reads within {quiet} ns");
    assert!(busy > 700_000, "a read waits for a program: {busy} ns");
}

#[test]
fn the_same_seed_results_in_the_same_timing() {
    for make in
        [(|seed| Model::hdd(HddParameters::spanning(1 << 40), seed)) as fn(u64) -> Model, |seed| {
            Model::ssd(SsdParameters::sata(), seed)
        }]
    {
        let run = |seed| {
            let mixed = |number: u64| match number % 5 {
                0 => Operation::Write,
                4 if number % 50 == 49 => Operation::Flush,
                _ => Operation::Read,
            };
            drive(&make(seed), 1 << 40, mixed, Order::Random, 8192, 8, 500).latencies_ns
        };
        assert_eq!(run(5), run(5));
        assert_ne!(run(5), run(6));
    }
}

/// The seeded suite and the crash points, over the models.
#[test]
fn data_is_kept() {
    const CAPACITY: u64 = 256 << 10;
    each_seed(3, |seed| {
        let cached = HddParameters { write_cache: 64 << 10, ..HddParameters::spanning(CAPACITY) };
        for model in [
            Model::hdd(HddParameters::spanning(CAPACITY), seed),
            Model::hdd(cached, seed),
            Model::ssd(SsdParameters::nvme(), seed),
            Model::ssd(SsdParameters::sata(), seed),
        ] {
            let store = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), seed));
            let backends: [Arc<dyn Backend>; 2] =
                [Arc::new(Memory::new(CAPACITY)), Arc::clone(&store) as Arc<dyn Backend>];
            for backend in backends {
                let crashes = backend.name() == "sim";
                let mut layers = support::layers("tap", seed);
                layers.push(Arc::new(model.clone()) as Arc<dyn Layer>);
                let disk = support::disk(layers, backend);
                let mut harness = Harness::new(&disk, &HarnessOptions::default(), seed);
                let mut workload = Workload::new(WorkloadOptions::new(CAPACITY), seed);
                let mut round = 0;
                harness.run(&mut workload, 200, |known| {
                    round += 1;
                    if crashes && round % 8 == 0 {
                        if let Err(violation) = known.check_crash(&store.crash(round)) {
                            panic!("crash in round {round}: {violation}");
                        }
                    }
                });
                harness.verify(CAPACITY);
            }
        }
    });
}

/// The same on the host's clock: two queues share the arm, and every request waits for it.
#[test]
fn time_passes_on_the_hosts_clock_too() {
    let model = Model::hdd(HddParameters::spanning(1 << 20), 1);
    let disk = support::disk(vec![Arc::new(model)], Arc::new(Memory::new(1 << 20)));
    let options = HarnessOptions { simulated: false, depth: 4, queues: 2 };
    let mut harness = Harness::new(&disk, &options, 1);
    let mut workload = WorkloadOptions::new(1 << 20);
    workload.weights = [1, 1, 0, 0, 0, 0, 0];
    let start = std::time::Instant::now();
    harness.run(&mut Workload::new(workload, 1), 40, |_| {});
    harness.drain(|_| {});
    // The requests are served one by one, and each takes more than half a millisecond in any order
    // (the order depends on the times of arrival). Without the model they would take microseconds.
    // There is no upper limit, because a busy host may take longer.
    assert!(start.elapsed().as_millis() > 20, "{:?}", start.elapsed());
}

/// Reads 64 KiB sequentially on each model with one request in flight, for a simulated second.
/// Returns the bytes per second of each.
fn sequential_together(models: &[Model], capacity: u64) -> Vec<f64> {
    const LENGTH: u64 = 64 << 10;
    let time_ns = Rc::new(Cell::new(1_000_000_000));
    let mut queues: Vec<_> = models
        .iter()
        .map(|model| {
            let disk = support::disk(vec![Arc::new(model.clone())], Arc::new(Null::new(capacity)));
            let mut reactor = Reactor::new(8).unwrap();
            let clock = Clock::Simulated(Rc::clone(&time_ns));
            (disk.open_queue(&mut reactor, clock).unwrap(), reactor, 0)
        })
        .collect();
    while time_ns.get() < 2_000_000_000 {
        for (stack, reactor, done) in &mut queues {
            stack.advance(reactor);
            while let Some((request, outcome)) = stack.completed() {
                assert_eq!(outcome, Ok(()));
                stack.recycle(request);
                *done += LENGTH;
            }
            if stack.in_flight() == 0 {
                let mut request = stack.request();
                (request.operation, request.offset) = (Operation::Read, *done);
                request.length = LENGTH;
                request.buffers.allocate(LENGTH as usize);
                stack.submit(request, reactor);
            }
        }
        let deadlines = queues.iter().filter_map(|(stack, ..)| stack.deadline_ns());
        time_ns.set(deadlines.min().expect("requests are held").max(time_ns.get()));
    }
    queues.iter().map(|(_, _, done)| *done as f64).collect()
}

#[test]
fn disks_on_one_device_wait_for_each_other() {
    let capacity = 1 << 30;
    let device = || Model::hdd(HddParameters::default(), 1);
    let alone = sequential_together(&[device()], capacity)[0];
    within("one disk alone, MB/s", alone / 1e6, 150.0, 215.0);
    let apart = sequential_together(&[device(), device()], capacity);
    assert!(apart.iter().all(|rate| (rate - alone).abs() < alone * 0.01), "{apart:?}");
    // Each read of the one disk moves the arm away from the other disk.
    let shared = device();
    let together = sequential_together(&[shared.at(0), shared.at(500_000_000_000)], capacity);
    let sum: f64 = together.iter().sum();
    within("two disks on one device, MB/s", sum / 1e6, 2.0, alone / 1e6 * 0.2);
    assert!((together[0] - together[1]).abs() < sum * 0.1, "{together:?}");
}
