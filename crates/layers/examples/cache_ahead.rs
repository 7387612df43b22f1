//! What reading files ahead brings above a modelled hard disk, in simulated time: guests that read
//! files in order, in one piece or in fragments, alone and several at once, and guests that read at
//! random. Prints a line of JSON for each case and window.
//!
//! ```text
//! cargo run --release -p fathom-layers --example cache_ahead
//! ```
//!
//! The layer and the model of the disk are those of the daemon. The guests have the read-ahead of
//! Linux: two requests of at most 128 KiB in flight for a file, of which a process waits for the
//! older one.

#[path = "support/calls.rs"]
mod calls;

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use fathom_backend::model::{HddParameters, Model};
use fathom_backend::{Memory, Null};
use fathom_block::{Clock, Disk, DiskOptions, Kind, Layer, Operation, Stack};
use fathom_cache::Policy;
use fathom_insight::Facts;
use fathom_layers::Cache;
use fathom_layers::cache::{CacheDisk, CacheMode, CacheTimes, CacheVolume, NoMark, VolumeOptions};
use fathom_persistence::Identity;
use fathom_reactor::Reactor;

const SECOND: u64 = 1_000_000_000;
const CAPACITY: u64 = 64 << 30;
const CACHE: u64 = 256 << 20;
/// The measured time, in nanoseconds.
const MEASURED_NS: u64 = 10 * SECOND;
/// The length of a guest's read of a file in order, and at random, in bytes.
const SEQUENTIAL: u64 = 128 << 10;
const RANDOM: u64 = 4 << 10;
/// The size of a file that is read in order, in bytes.
const FILE: u64 = 1 << 30;
/// The most pieces of a file, and 1, so that it is odd.
const PIECES: u64 = 4097;
/// The time of a process between two reads, in nanoseconds.
const THINK_NS: u64 = 200_000;

/// What a process does.
#[derive(Clone, Copy)]
enum Load {
    /// Reads `files` files of `size` bytes in turn and in order, each up to `upto` bytes. They are
    /// in pieces of `fragment` bytes.
    Files { files: u64, fragment: u64, size: u64, upto: u64 },
    /// Reads a file at random.
    Random,
}

struct Process {
    load: Load,
    number: u64,
    random: fastrand::Rng,
    file: u64,
    offset: u64,
    in_flight: u32,
    /// When it makes its next read, in nanoseconds.
    next_ns: u64,
    bytes: u64,
    reads: u64,
}

/// The place of a byte of a file in fragments, which lie on the disk in an order of their own.
fn place(file: u64, offset: u64, fragment: u64) -> u64 {
    let fragments = CAPACITY / fragment;
    let number = file * PIECES + offset / fragment;
    // An odd factor: each fragment has its place.
    let scattered = number.wrapping_mul(0x9e37_79b1) % fragments;
    scattered * fragment + offset % fragment
}

impl Process {
    fn new(load: Load, number: u64) -> Self {
        Self {
            load,
            number,
            random: fastrand::Rng::with_seed(number),
            file: 0,
            offset: 0,
            in_flight: 0,
            next_ns: SECOND + number * 1_000_003,
            bytes: 0,
            reads: 0,
        }
    }

    /// The next read: its place, its length, the offset in the file, and the file's size.
    fn next(&mut self) -> (u64, u64, u64, u64) {
        match self.load {
            Load::Random => {
                let offset = self.random.u64(0..CAPACITY / RANDOM) * RANDOM;
                (offset, RANDOM, offset, CAPACITY)
            }
            Load::Files { files, fragment, size, upto } => {
                if self.offset >= upto.min(size) {
                    (self.file, self.offset) = ((self.file + 1) % files, 0);
                }
                let left = (size - self.offset).min(fragment - self.offset % fragment);
                let length = SEQUENTIAL.min(left);
                let place = place(self.inode(), self.offset, fragment);
                let read = (place, length, self.offset, size);
                self.offset += length;
                read
            }
        }
    }

    /// The number of its file.
    fn inode(&self) -> u64 {
        match self.load {
            Load::Random => 1,
            Load::Files { .. } => self.number * 7_000_003 + self.file + 2,
        }
    }

    fn depth(&self) -> u32 {
        match self.load {
            Load::Random => 1,
            Load::Files { .. } => 2,
        }
    }
}

struct Case {
    name: &'static str,
    loads: Vec<Load>,
    /// Whether the files were written in order before, so that it is known where they go on.
    is_known: bool,
}

fn cases() -> Vec<Case> {
    let files = |files, fragment, size, upto| Load::Files { files, fragment, size, upto };
    let whole = files(8, FILE, FILE, FILE);
    let pieces = |fragment| files(2, fragment, FILE / 4, FILE);
    let small = files(100_000, 1 << 20, 1 << 20, FILE);
    let begun = files(100_000, 16 << 20, 16 << 20, 384 << 10);
    let case = |name, loads: Vec<Load>| Case { name, loads, is_known: true };
    vec![
        case("1 file in one piece", vec![whole]),
        case("4 files in one piece", vec![whole; 4]),
        case("16 files in one piece", vec![whole; 16]),
        case("1 file in pieces of 256 KiB", vec![pieces(256 << 10)]),
        case("1 file in pieces of 1 MiB", vec![pieces(1 << 20)]),
        case("4 files in pieces of 256 KiB", vec![pieces(256 << 10); 4]),
        case("4 files in pieces of 1 MiB", vec![pieces(1 << 20); 4]),
        Case {
            name: "4 files in pieces of 1 MiB, unknown",
            loads: vec![pieces(1 << 20); 4],
            is_known: false,
        },
        case("4 readers of files of 1 MiB", vec![small; 4]),
        case("4 readers of beginnings of files", vec![begun; 4]),
        case("1 random reader", vec![Load::Random]),
        case("8 random readers", vec![Load::Random; 8]),
        case("1 file and 1 random reader", vec![whole, Load::Random]),
        case("4 files and 4 random readers", [vec![whole; 4], vec![Load::Random; 4]].concat()),
    ]
}

struct Bench {
    stack: Stack,
    reactor: Reactor,
    time: Rc<Cell<u64>>,
    cache: Cache,
    processes: Vec<Process>,
    /// The process of each read in flight.
    reads: HashMap<u64, usize>,
    tokens: u64,
}

impl Bench {
    fn new(case: &Case, window: u64) -> Self {
        let options = VolumeOptions {
            identity: Some(Identity([0; 16])),
            block_size: 16 << 10,
            disks: 2,
            bitmap_pages: 1,
            is_kept: false,
            policy: Policy::Auto,
            times: CacheTimes::default(),
        };
        let store = Arc::new(Memory::new(CACHE));
        let volume = Arc::new(CacheVolume::open(store, &options).expect("a cache"));
        let disk = CacheDisk::in_memory("disk", CAPACITY);
        let mode = CacheMode::WriteAround;
        let cache = Cache::new(&volume, &disk, mode, Arc::new(NoMark)).expect("a disk");
        cache.set_read_ahead(window);
        let model = Model::hdd(HddParameters::spanning(CAPACITY), 1);
        let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(cache.clone()), Arc::new(model)];
        let home = Arc::new(Null::new(CAPACITY));
        let disk = Disk::new(DiskOptions::default(), layers, home).expect("a disk");
        let mut reactor = Reactor::new(8).expect("an io_uring");
        let time = Rc::new(Cell::new(1));
        let clock = Clock::Simulated(Rc::clone(&time));
        let stack = disk.open_queue(&mut reactor, clock).expect("a queue");
        let processes = (0..).zip(&case.loads).map(|(number, load)| Process::new(*load, number));
        let processes = processes.collect();
        let mut bench =
            Self { stack, reactor, time, cache, processes, reads: HashMap::new(), tokens: 0 };
        if case.is_known {
            bench.write_files();
        }
        bench
    }

    fn submit(&mut self, operation: Operation, read: (u64, u64, u64, u64), file: u64) {
        let (offset, length, file_offset, file_size) = read;
        let mut request = self.stack.request();
        (request.operation, request.offset, request.length) = (operation, offset, length);
        request.buffers.allocate(length as usize);
        let facts = Facts { kind: Kind::Data, inode: file, file_size, ..Facts::default() };
        (request.insight.facts, request.insight.file_offset) = (facts, Some(file_offset));
        request.token = self.tokens;
        self.stack.submit(request, &mut self.reactor);
    }

    /// Writes the ends and the beginnings of the pieces of all files in order.
    fn write_files(&mut self) {
        let mut fragments = self.processes.iter().filter_map(|process| match process.load {
            Load::Files { fragment, size, .. } if fragment < size => Some((fragment, size)),
            _ => None,
        });
        let Some((fragment, size)) = fragments.next_back() else { return };
        for process in 0..self.processes.len() {
            for file in 0..2 {
                self.processes[process].file = file;
                let inode = self.processes[process].inode();
                for joint in (fragment..size).step_by(fragment as usize) {
                    for offset in [joint - RANDOM, joint] {
                        let at = place(inode, offset, fragment);
                        self.submit(Operation::Write, (at, RANDOM, offset, size), inode);
                        self.drain();
                    }
                }
            }
            self.processes[process].file = 0;
        }
    }

    fn drain(&mut self) {
        while self.stack.in_flight() > 0 {
            self.stack.advance(&mut self.reactor);
            while let Some((request, outcome)) = self.stack.completed() {
                outcome.expect("a write");
                self.stack.recycle(request);
            }
            if let Some(deadline_ns) = self.stack.deadline_ns() {
                self.time.set(deadline_ns.max(self.time.get()));
            }
        }
    }

    fn round(&mut self) -> bool {
        let now_ns = self.time.get();
        self.stack.advance(&mut self.reactor);
        let mut is_busy = false;
        while let Some((request, outcome)) = self.stack.completed() {
            outcome.expect("a read");
            let process = &mut self.processes[self.reads[&request.token]];
            self.reads.remove(&request.token);
            process.in_flight -= 1;
            process.bytes += request.length;
            process.reads += 1;
            process.next_ns = now_ns + THINK_NS;
            self.stack.recycle(request);
            is_busy = true;
        }
        for number in 0..self.processes.len() {
            let process = &mut self.processes[number];
            if process.in_flight < process.depth() && process.next_ns <= now_ns {
                process.in_flight += 1;
                let (read, file) = (process.next(), process.inode());
                self.tokens += 1;
                self.reads.insert(self.tokens, number);
                self.submit(Operation::Read, read, file);
                is_busy = true;
            }
        }
        is_busy || calls::take(&mut self.stack, &mut self.reactor)
    }

    /// Runs the processes for the measured time.
    fn run(&mut self) {
        let end_ns = self.time.get().max(SECOND) + MEASURED_NS;
        let begin_ns = self.time.get().max(SECOND);
        self.time.set(begin_ns);
        for process in &mut self.processes {
            process.next_ns = begin_ns + process.number * 1_000_003;
        }
        loop {
            if self.round() {
                continue;
            }
            let due = self.processes.iter().filter(|process| process.in_flight < process.depth());
            let next_ns = due.map(|process| process.next_ns).chain(self.stack.deadline_ns()).min();
            let next_ns = next_ns.unwrap_or(u64::MAX).max(self.time.get() + 1);
            if next_ns > end_ns {
                return;
            }
            self.time.set(next_ns);
        }
    }
}

fn main() {
    let windows = [0, 512 << 10, 1 << 20, 2 << 20];
    for case in cases() {
        for window in windows {
            let mut bench = Bench::new(&case, window);
            bench.run();
            let seconds = MEASURED_NS as f64 / 1e9;
            let sum = |is_random: bool, value: fn(&Process) -> u64| {
                let processes = bench.processes.iter();
                let of = processes.filter(|p| matches!(p.load, Load::Random) == is_random);
                of.map(value).sum::<u64>() as f64 / seconds
            };
            let status = bench.cache.status();
            println!(
                "{{\"case\":\"{}\",\"window\":{window},\"file_mb_s\":{:.2},\"random_reads_s\":{:.2},\
                 \"ahead\":{},\"used\":{},\"unused\":{}}}",
                case.name,
                sum(false, |process| process.bytes) / 1e6,
                sum(true, |process| process.reads),
                status.blocks.ahead,
                status.blocks.ahead_used,
                status.blocks.ahead_unused
            );
        }
    }
}
