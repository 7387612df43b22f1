//! Measures the cost of introspection on a synthetic guest: the time to find a kernel in memory of
//! 512 MiB and of 16 GiB, of which 2 GiB are in use, and the time per request.
//!
//!     cargo run --release -p fathom-layers --example introspection_cost
//!     … --example introspection_cost -- --no-search
//!     … --example introspection_cost -- --requests 1000 --case data --batch warm
//!
//! With `--requests` it measures no time: it resolves this number of requests of each case, or of
//! one case, under a profiler. `bench/introspection-instructions` counts their instructions in this
//! way.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_insight::{ClassTable, Insight, Names};
use fathom_introspect::synthetic::{Linux, Shape, Store, SyntheticRequest};
use fathom_introspect::{Guest, GuestState, Kernel, RequestView, Resolver};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const PAGE: u64 = 4096;

/// The number of symbols and of types of a distribution's kernel.
const SYMBOLS: usize = 160_000;
const TYPES: usize = 40_000;

/// A kernel of ordinary size, in a memory of which `touched` bytes have content.
fn large(regions: &[(u64, u64)], touched: u64, step: u64) -> (Store, Linux) {
    let (start, length) = *regions.last().expect("a region");
    let shape = Shape {
        // At the end of the memory, which is searched last.
        room: ((start + length - 64 * MIB) & !(2 * MIB - 1), 64 * MIB),
        symbols: SYMBOLS,
        types: TYPES,
        ..Shape::default()
    };
    let store = Store::new(regions).expect("memory");
    let linux = Linux::build(&store, &shape);
    let mut left = touched;
    for (start, length) in regions {
        let mut place = MIB;
        while place + MIB < *length && left > 0 && start + place < shape.room.0 {
            // Content that resembles no kernel structure.
            store.write_u64(start + place, 0x5555_5555_5555_5555 ^ place);
            place += step;
            left -= PAGE.min(left);
        }
    }
    (store, linux)
}

fn attach(what: &str, regions: &[(u64, u64)], touched: u64, step: u64) {
    let (store, linux) = large(regions, touched, step);
    let memory = store.memory();
    let header = linux.requests[0].view.header;
    let mut times: Vec<Duration> = (0..9)
        .map(|_| {
            let start = Instant::now();
            let kernel = Kernel::attach(&memory, Some(header)).expect("a kernel");
            assert_eq!(kernel.modules().len(), 2);
            start.elapsed()
        })
        .collect();
    times.sort();
    println!("{what}: {:?} (the longest {:?})", times[times.len() / 2], times[times.len() - 1]);
}

/// A queue of an attached guest.
fn queue(store: &Store, linux: &Linux) -> Resolver {
    let guest = Guest::new(&store.memory(), Arc::new(Names::default()), Box::new(|| {}));
    let mut resolver = guest.resolver();
    let request = &linux.requests[0];
    let pages = request.pieces.iter().copied();
    resolver.resolve(&request.view, pages, &ClassTable::default(), &mut Insight::default());
    guest.step();
    assert_eq!(guest.status().state, GuestState::Attached);
    resolver
}

/// The names of the measured requests in the synthetic guest.
const CASES: [&str; 20] = [
    "data",
    "one file",
    "merged",
    "mixed pages",
    "journal",
    "metadata",
    "iomap",
    "iomap, io_uring",
    "iomap, libaio",
    "iomap, overlay",
    "device, a waiter",
    "no reader",
    "a reader",
    "a waiter for write-back",
    "flush, a process",
    "flush, jbd2",
    "dm-crypt",
    "raid1 on dm-crypt",
    "btrfs data",
    "unknown function",
];

/// What the layer `classify` does with a request: finds its meaning when it comes, and the
/// processes that wait for it when it has been carried out.
#[inline]
fn resolve(
    resolver: &mut Resolver,
    request: &SyntheticRequest,
    now_ns: u64,
    table: &ClassTable,
    insight: &mut Insight,
) {
    let view = RequestView { now_ns, ..request.view };
    insight.clear();
    resolver.resolve(&view, request.pieces.iter().copied(), table, black_box(insight));
    resolver.find_waiters(&view, request.pieces.iter().copied(), black_box(insight));
}

/// Announces the next batch. A profiler finds this function and the next by their names.
#[inline(never)]
fn announce(release: &str, name: &str, what: &str) {
    println!("{release}\t{name}\t{what}");
}

/// Resolves a request `count` times, at intervals of `step_ns`.
#[inline(never)]
fn counted(
    resolver: &mut Resolver,
    request: &SyntheticRequest,
    now_ns: &mut u64,
    count: u32,
    step_ns: u64,
) {
    let table = ClassTable::default();
    let mut insight = Insight::default();
    for _ in 0..count {
        *now_ns += step_ns;
        resolve(resolver, request, *now_ns, &table, &mut insight);
    }
}

/// Resolves `count` requests of each case, or of one case, in batches: requests of a cached file,
/// then requests whose cached data has expired. Prints the names of the batches in order.
fn batches(shape: &Shape, count: u32, case: Option<&str>, batch: Option<&str>) {
    let store = Store::new(&shape.memory()).expect("memory");
    let linux = Linux::build(&store, shape);
    let mut resolver = queue(&store, &linux);
    let mut now_ns = 0;
    for name in CASES.into_iter().filter(|name| case.is_none_or(|case| case == *name)) {
        let request = linux.request(name);
        let all = [("warm-up", 10_000), ("warm", 10_000), ("first", 2_000_000_000)];
        for (what, step_ns) in all {
            if batch.is_some_and(|batch| batch != what) {
                continue;
            }
            announce(&shape.release, name, what);
            counted(&mut resolver, request, &mut now_ns, count, step_ns);
        }
    }
}

fn requests(shape: &Shape) {
    let store = Store::new(&shape.memory()).expect("memory");
    let linux = Linux::build(&store, shape);
    let mut resolver = queue(&store, &linux);
    let table = ClassTable::default();
    let mut insight = Insight::default();
    println!("{}: nanoseconds a request, median and 99th percentile:", shape.release);
    let mut now_ns = 0;
    for name in CASES {
        let request = linux.request(name);
        let mut time = |count: u32, step_ns: u64| {
            let mut times: Vec<u64> = (0..20_000)
                .map(|_| {
                    let start = Instant::now();
                    for _ in 0..count {
                        now_ns += step_ns;
                        resolve(&mut resolver, request, now_ns, &table, &mut insight);
                    }
                    start.elapsed().as_nanos() as u64 / u64::from(count)
                })
                .collect();
            times.sort_unstable();
            (times[times.len() / 2], times[times.len() * 99 / 100])
        };
        // A single measurement includes the time to read the clock.
        let (batch, _) = time(32, 10_000);
        let (median, late) = time(1, 10_000);
        let (fresh, _) = time(1, 2_000_000_000);
        println!("  {name:18} {batch:5} in a row, {median:5} {late:5} singly, {fresh:5} first met");
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| {
        let place = arguments.iter().position(|argument| argument == name)?;
        arguments.get(place + 1)
    };
    let shapes = [Shape::default(), Shape::recent()];
    if let Some(count) = option("--requests") {
        let count = count.parse().expect("--requests takes a number");
        let case = option("--case").map(String::as_str);
        let batch = option("--batch").map(String::as_str);
        for shape in &shapes {
            batches(shape, count, case, batch);
        }
        return;
    }
    if !arguments.iter().any(|argument| argument == "--no-search") {
        search();
    }
    for shape in &shapes {
        requests(shape);
    }
}

fn search() {
    attach("512 MiB, all touched", &[(0, 512 * MIB)], 440 * MIB, PAGE);
    let large = [(0, 2 * GIB), (4 * GIB, 14 * GIB)];
    attach("16 GiB, 2 GiB touched in a row", &large, 2 * GIB, PAGE);
    attach("16 GiB, 2 GiB touched, every 7th page", &large, 2 * GIB, 7 * PAGE);
}
