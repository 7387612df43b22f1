//! Two clients of one modelled device, in simulated time: steady reads of one against buffered
//! writes of the other, with and without the layer `schedule`. Prints a line of JSON for each case.
//!
//! ```text
//! cargo run --release -p fathom-layers --example shared_disk
//! ```
//!
//! With `--values`, also for other values of the options; with `--floods`, only the cases of a disk
//! beside large and many requests of another.
//!
//! The layer and the model of the device are those of the daemon. The writes have the marks of
//! background write-back.

#[path = "support/calls.rs"]
mod calls;

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use fathom_backend::Null;
use fathom_backend::model::{HddParameters, Model, SsdParameters};
use fathom_block::{Clock, Disk, DiskOptions, Kind, Layer, Operation, Stack};
use fathom_insight::{Name, Names};
use fathom_layers::{Schedule, ScheduleDevices, ScheduleOptions};
use fathom_options::Nanoseconds;
use fathom_reactor::Reactor;

const SECOND: u64 = 1_000_000_000;
const CAPACITY: u64 = 16 << 30;
/// The time before the measurement, and the time of the measurement, in nanoseconds.
const WARMUP_NS: u64 = 2 * SECOND;
const MEASURED_HDD_NS: u64 = 60 * SECOND;
const MEASURED_PAGES_NS: u64 = 240 * SECOND;
const MEASURED_SSD_NS: u64 = 2 * SECOND;
/// The length of a write, in bytes, and the most writes of a guest in flight.
const WRITE_LENGTH: u64 = 256 << 10;
const LARGE_LENGTH: u64 = 1280 << 10;
const WRITES_MAX: usize = 128;

/// The load of a client.
#[derive(Clone, Copy)]
enum Load {
    /// Random reads of 4 KiB of a file with these requests in flight, and a pause after each number
    /// of them.
    Reads { depth: usize, run: u64, pause_ns: u64, file: u64 },
    /// Each second, the write-back of a part of a file with this number of requests of this length,
    /// in bytes.
    WriteBack { count: u64, length: u64 },
    /// These requests in flight at random places.
    Flood { depth: usize, length: u64, operation: Operation },
    /// Each `interval_ns`, the write-back of this number of pages at random places of a file, in
    /// the order of the file. It begins when the one before has ended.
    Pages { count: u64, interval_ns: u64, file: u64 },
}

struct Client {
    stack: Stack,
    reactor: Reactor,
    load: Load,
    /// The control group of its requests.
    group: Name,
    random: fastrand::Rng,
    next_ns: BinaryHeap<Reverse<u64>>,
    sent_ns: HashMap<u64, u64>,
    tokens: u64,
    /// The offsets of the next writes, and their length.
    writes: VecDeque<u64>,
    write_length: u64,
    measured_ns: u64,
    /// The time with a request in flight, in nanoseconds.
    busy_ns: u64,
    /// The times of the requests completed in the measured time, in nanoseconds, and their bytes.
    times_ns: Vec<u64>,
    bytes: u64,
}

impl Client {
    fn new(disk: &Arc<Disk>, load: Load, time: &Rc<Cell<u64>>, measured_ns: u64) -> Self {
        let mut reactor = Reactor::new(8).expect("an io_uring");
        let clock = Clock::Simulated(Rc::clone(time));
        let stack = disk.open_queue(&mut reactor, clock).expect("a queue");
        let first = match load {
            Load::Reads { depth, .. } | Load::Flood { depth, .. } => depth,
            Load::WriteBack { .. } | Load::Pages { .. } => 1,
        };
        Self {
            stack,
            reactor,
            load,
            group: Name::default(),
            random: fastrand::Rng::with_seed(1),
            next_ns: std::iter::repeat_n(Reverse(SECOND), first).collect(),
            sent_ns: HashMap::new(),
            tokens: 0,
            writes: VecDeque::new(),
            write_length: WRITE_LENGTH,
            measured_ns,
            busy_ns: 0,
            times_ns: Vec::new(),
            bytes: 0,
        }
    }

    fn submit(&mut self, operation: Operation, offset: u64, length: u64, now_ns: u64) {
        let mut request = self.stack.request();
        (request.operation, request.offset, request.length) = (operation, offset, length);
        request.buffers.allocate(length as usize);
        // Without insight, a request counts as one that a process waits for.
        let is_known = !matches!(self.load, Load::Flood { .. });
        request.insight.facts.kind = if is_known { Kind::Data } else { Kind::Unknown };
        request.insight.facts.inode = u64::from(is_known);
        request.insight.facts.cgroup = self.group;
        request.token = self.tokens;
        self.sent_ns.insert(self.tokens, now_ns);
        self.tokens += 1;
        self.stack.submit(request, &mut self.reactor);
    }

    fn begin(&mut self, now_ns: u64) {
        match self.load {
            Load::Reads { file, .. } => {
                let offset = self.random.u64(0..file / 4096) * 4096;
                self.submit(Operation::Read, offset, 4096, now_ns);
            }
            Load::Flood { length, operation, .. } => {
                let offset = self.random.u64(0..CAPACITY / length) * length;
                self.submit(operation, offset, length, now_ns);
            }
            Load::WriteBack { count, length } => {
                // What is left of the last second is lost.
                let first = self.random.u64(0..CAPACITY / length - count);
                self.writes = (first..first + count).map(|it| it * length).collect();
                self.write_length = length;
                self.next_ns.push(Reverse(now_ns + SECOND));
            }
            Load::Pages { count, interval_ns, file } => {
                let places = (0..count).map(|_| self.random.u64(0..file / 4096) * 4096);
                let places: BTreeSet<u64> = places.collect();
                self.writes.extend(places);
                self.write_length = 4096;
                self.next_ns.push(Reverse(now_ns + interval_ns));
            }
        }
    }

    /// Submits further writes, as many as a guest has in flight.
    fn write(&mut self, now_ns: u64) {
        while self.stack.in_flight() < WRITES_MAX {
            let Some(offset) = self.writes.pop_front() else { return };
            self.submit(Operation::Write, offset, self.write_length, now_ns);
        }
    }

    fn round(&mut self, now_ns: u64) -> bool {
        self.stack.advance(&mut self.reactor);
        let mut is_busy = false;
        while self.next_ns.peek().is_some_and(|Reverse(time_ns)| *time_ns <= now_ns) {
            self.next_ns.pop();
            self.begin(now_ns);
            is_busy = true;
        }
        while let Some((request, outcome)) = self.stack.completed() {
            outcome.expect("a request without an error");
            let sent_ns = self.sent_ns.remove(&request.token).unwrap_or(now_ns);
            let from_ns = SECOND + WARMUP_NS;
            if (from_ns..from_ns + self.measured_ns).contains(&now_ns) {
                self.times_ns.push(now_ns - sent_ns);
                self.bytes += request.length;
            }
            self.stack.recycle(request);
            if let Load::Reads { run, pause_ns, .. } = self.load {
                let is_end = self.tokens % run == 0;
                self.next_ns.push(Reverse(now_ns + if is_end { pause_ns } else { 0 }));
            } else if matches!(self.load, Load::Flood { .. }) {
                self.next_ns.push(Reverse(now_ns));
            }
            is_busy = true;
        }
        self.write(now_ns);
        if is_busy {
            return true;
        }
        calls::take(&mut self.stack, &mut self.reactor)
    }
}

fn run(clients: &mut [Client], time: &Rc<Cell<u64>>, measured_ns: u64) {
    let end_ns = SECOND + WARMUP_NS + measured_ns;
    loop {
        let mut is_busy = false;
        for client in &mut *clients {
            is_busy |= client.round(time.get());
        }
        if is_busy {
            continue;
        }
        let stacks = clients.iter().filter_map(|client| client.stack.deadline_ns());
        let loads = clients.iter().filter_map(|client| client.next_ns.peek().map(|next| next.0));
        let next_ns = stacks.chain(loads).min().unwrap_or(u64::MAX).max(time.get() + 1);
        if next_ns > end_ns {
            return;
        }
        let measured = SECOND + WARMUP_NS..end_ns;
        for client in clients.iter_mut().filter(|client| client.stack.in_flight() > 0) {
            if measured.contains(&time.get()) {
                client.busy_ns += next_ns - time.get();
            }
        }
        time.set(next_ns);
    }
}

fn device(name: &str) -> Model {
    match name {
        "hdd" => Model::hdd(HddParameters::spanning(2 * CAPACITY), 1),
        _ => Model::ssd(SsdParameters::nvme(), 1),
    }
}

/// A client's load, the weight of its disk, and the place of the disk on the device.
type Place = (Load, u32, u64);

/// What a client has measured.
struct Figures {
    /// Requests a second.
    requests: f64,
    /// The mean time of a request, and the 99th percentile, in µs.
    mean_us: f64,
    late_us: f64,
    /// Bytes a second.
    bytes: f64,
    /// The share of the time with a request in flight.
    busy: f64,
}

/// Runs some loads, each on a disk of its own, with the layer `schedule` if it has options.
fn measure(name: &str, loads: &[Place], options: Option<&ScheduleOptions>) -> Vec<Figures> {
    let (time, devices, model) =
        (Rc::new(Cell::new(SECOND)), ScheduleDevices::default(), device(name));
    let measured_ns = match name {
        "hdd" if loads.iter().any(|load| matches!(load.0, Load::Pages { .. })) => MEASURED_PAGES_NS,
        "hdd" => MEASURED_HDD_NS,
        _ => MEASURED_SSD_NS,
    };
    let mut clients: Vec<Client> = loads
        .iter()
        .map(|(load, weight, place)| {
            let mut layers: Vec<Arc<dyn Layer>> = Vec::new();
            if let Some(options) = options {
                let options = ScheduleOptions { weight: *weight, ..options.clone() };
                let names = Arc::default();
                layers.push(Arc::new(Schedule::new(&options, name, &devices, &names, None)));
            }
            layers.push(Arc::new(model.at(place * CAPACITY)));
            let backend = Arc::new(Null::new(CAPACITY));
            let disk = Disk::new(DiskOptions::default(), layers, backend).expect("a disk");
            Client::new(&disk, *load, &time, measured_ns)
        })
        .collect();
    figures(&mut clients, &time, measured_ns)
}

/// Runs two loads of the same disk, in control groups with these weights.
fn measure_groups(name: &str, load: Load, weights: [u32; 2]) -> Vec<Figures> {
    let (time, devices, names) =
        (Rc::new(Cell::new(SECOND)), ScheduleDevices::default(), Arc::<Names>::default());
    let groups = ["/docker/first", "/docker/second"];
    let options = ScheduleOptions {
        weights: groups.map(str::to_owned).into_iter().zip(weights).collect(),
        ..ScheduleOptions::default()
    };
    let schedule = Schedule::new(&options, name, &devices, &names, None);
    let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(schedule), Arc::new(device(name))];
    let backend = Arc::new(Null::new(CAPACITY));
    let disk = Disk::new(DiskOptions::default(), layers, backend).expect("a disk");
    let measured_ns = if name == "hdd" { MEASURED_HDD_NS } else { MEASURED_SSD_NS };
    let mut clients = groups.map(|group| {
        let mut client = Client::new(&disk, load, &time, measured_ns);
        client.group = names.number(group);
        client
    });
    figures(&mut clients, &time, measured_ns)
}

/// Runs the clients, and returns their figures.
fn figures(clients: &mut [Client], time: &Rc<Cell<u64>>, measured_ns: u64) -> Vec<Figures> {
    run(clients, time, measured_ns);
    let seconds = measured_ns as f64 / 1e9;
    let result = |client: &mut Client| {
        client.times_ns.sort_unstable();
        let times = &client.times_ns;
        let count = times.len().max(1);
        let mean_ns = times.iter().sum::<u64>() as f64 / count as f64;
        let late_ns = times.get(count * 99 / 100).copied().unwrap_or_default() as f64;
        Figures {
            requests: times.len() as f64 / seconds,
            mean_us: mean_ns / 1e3,
            late_us: late_ns / 1e3,
            bytes: client.bytes as f64 / seconds,
            busy: client.busy_ns as f64 / measured_ns as f64,
        }
    };
    clients.iter_mut().map(result).collect()
}

fn print(device: &str, case: &str, client: &str, figures: &Figures) {
    let Figures { requests, mean_us, late_us, bytes, busy } = figures;
    println!(
        "{{\"device\":\"{device}\",\"case\":\"{case}\",\"client\":\"{client}\",\"requests\":{requests:.3},\
         \"mean_us\":{mean_us:.3},\"p99_us\":{late_us:.3},\"bytes\":{bytes:.0},\"busy\":{busy:.5}}}"
    );
}

/// Prints a case of two clients.
fn both(
    device: &str,
    case: &str,
    clients: [&str; 2],
    loads: [Place; 2],
    options: Option<&ScheduleOptions>,
) {
    let figures = measure(device, &loads, options);
    for (client, figures) in clients.into_iter().zip(&figures) {
        print(device, case, client, figures);
    }
}

/// Other values of the options than the defaults, with their names.
fn values() -> Vec<(String, ScheduleOptions)> {
    let defaults = ScheduleOptions::default;
    let mut values = Vec::new();
    for time_ms in [125, 250, 500, 1000, 2000, 4000] {
        let hold_max = Nanoseconds(time_ms * SECOND / 1000);
        values.push((format!("hold_max {time_ms} ms"), ScheduleOptions { hold_max, ..defaults() }));
    }
    for held_requests in [8, 16, 32, 64, 128] {
        let name = format!("held_requests {held_requests}");
        values.push((name, ScheduleOptions { held_requests, ..defaults() }));
    }
    for depth in [4, 8, 16, 32, 64, 128] {
        values.push((format!("depth {depth}"), ScheduleOptions { depth, ..defaults() }));
    }
    values
}

/// The load of `bench/shared-disk --guests`: the write-back of pages at random places of a file,
/// beside reads that leave the device a third of its time in short and in long pauses.
fn pages() {
    let writes = Load::Pages { count: 1920, interval_ns: 15 * SECOND, file: 512 << 20 };
    let writes = (writes, 100, 1);
    print("hdd", "alone", "pages", &measure("hdd", &[writes], None)[0]);
    for run in [50, 800] {
        let pause_ns = run * 3_750_000;
        let load = Load::Reads { depth: 1, run, pause_ns, file: CAPACITY / 25 };
        let (load, reads) = ((load, 100, 0), format!("runs of {run}"));
        print("hdd", "alone", &reads, &measure("hdd", &[load], None)[0]);
        let clients = [reads.as_str(), &format!("pages beside {reads}")];
        both("hdd", "neither", clients, [load, writes], None);
        both("hdd", "schedule", clients, [load, writes], Some(&ScheduleOptions::default()));
    }
}

/// The write-back of a guest whose kernel merges adjoining pages to the longest requests that a
/// disk with 254 segments and transparent huge pages gets.
fn large(reads: Place) {
    let writes = (Load::WriteBack { count: 13, length: LARGE_LENGTH }, 100, 1);
    print("hdd", "alone", "large writes", &measure("hdd", &[writes], None)[0]);
    print("hdd", "alone", "pausing, large", &measure("hdd", &[reads], None)[0]);
    let clients = ["pausing, large", "large writes beside pausing, large"];
    both("hdd", "neither", clients, [reads, writes], None);
    both("hdd", "schedule", clients, [reads, writes], Some(&ScheduleOptions::default()));
}

/// A reader of the greatest weight beside large and many requests of a disk of the least one, and
/// the shares of two disks with large requests.
fn floods(name: &str) {
    let reads = (Load::Reads { depth: 1, run: 1, pause_ns: 2_000_000, file: CAPACITY }, 1000, 0);
    print(name, "alone", "heavy reads", &measure(name, &[reads], None)[0]);
    let defaults = ScheduleOptions::default();
    for (flood, depth, length, operation) in [
        ("60 writes of 32 MiB", 60, 32 << 20, Operation::Write),
        ("20 reads of 8 MiB", 20, 8 << 20, Operation::Read),
        ("64 reads of 4 KiB", 64, 4096, Operation::Read),
    ] {
        let load = (Load::Flood { depth, length, operation }, 1, 1);
        for (case, options) in [("flood", None), ("flood, schedule", Some(&defaults))] {
            let clients = [&format!("heavy reads beside {flood}"), flood];
            both(name, case, clients.map(|it| it as &str), [reads, load], options);
        }
    }
    for depth in [4, 32] {
        let load = Load::Flood { depth, length: 1 << 20, operation: Operation::Read };
        let clients = ["first", "second"].map(|it| format!("{it} of {depth} reads of 1 MiB"));
        let clients = clients.each_ref().map(String::as_str);
        both(name, "1:10", clients, [(load, 100, 0), (load, 1000, 1)], Some(&defaults));
    }
}

fn main() {
    if std::env::args().any(|it| it == "--floods") {
        return ["ssd", "hdd"].into_iter().for_each(floods);
    }
    let defaults = ScheduleOptions::default();
    let values = if std::env::args().any(|it| it == "--values") { values() } else { Vec::new() };
    for (name, depth, count) in [("hdd", 1, 64), ("ssd", 1, 400)] {
        let writes = (Load::WriteBack { count, length: WRITE_LENGTH }, 100, 1);
        print(name, "alone", "writes", &measure(name, &[writes], None)[0]);
        let steady = (Load::Reads { depth, run: 1, pause_ns: 0, file: CAPACITY }, 100, 0);
        let mean_us = measure(name, &[steady], None)[0].mean_us;
        // Reads that leave the device a third of its time: after each read, or after each fifty.
        let pausing = |run: u64| {
            let pause_ns = (mean_us * 500.0) as u64 * run;
            (Load::Reads { depth, run, pause_ns, file: CAPACITY }, 100, 0)
        };
        let cases = [("pausing", pausing(50)), ("shortly pausing", pausing(1)), ("steady", steady)];
        for (reads, load) in cases {
            print(name, "alone", reads, &measure(name, &[load], None)[0]);
            let clients = [reads, &format!("writes beside {reads}")];
            both(name, "neither", clients, [load, writes], None);
            both(name, "schedule", clients, [load, writes], Some(&defaults));
            for (case, options) in &values {
                both(name, case, clients, [load, writes], Some(options));
            }
        }
        floods(name);
        if name == "hdd" {
            large(pausing(50));
            pages();
        }
        for (case, weights) in [("equal", [100, 100]), ("1:3", [100, 300])] {
            let reads = Load::Reads { depth: 64, run: 1, pause_ns: 0, file: CAPACITY };
            let loads = [(reads, weights[0], 0), (reads, weights[1], 1)];
            both(name, case, ["first", "second"], loads, Some(&defaults));
            let found = measure_groups(name, reads, weights);
            for (client, figures) in ["first container", "second container"].iter().zip(&found) {
                print(name, case, client, figures);
            }
        }
    }
}
