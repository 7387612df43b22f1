//! A pool over its life, in simulated time on modelled devices: what the device is given for each
//! block written when the pool is 80 % full, and how a rotational pool compares with a raw image.
//! Prints lines of JSON, of which `bench/store` makes a table. Arguments: a text that the case has
//! to contain, and the bytes of the pools in GiB.

#[path = "support/sparse.rs"]
mod sparse;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use fathom_backend::model::{HddParameters, Model, Modelled, SsdParameters};
use fathom_block::{Backend, Clock, Disk, DiskOptions, Operation, Stack};
use fathom_persistence::Identity;
use fathom_reactor::{Event, Reactor};
use fathom_store::{BLOCK, MakeOptions, Pool, PoolOptions, SEGMENT_BLOCKS, make};

use sparse::Sparse;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
const SECOND: u64 = 1_000_000_000;
/// The requests in flight of the loads: of 4 KiB, and of 1 MiB.
const DEPTH: usize = 32;
const DEPTH_LONG: usize = 8;
/// The simulated time of each load on a hard disk, and the longest rest after it.
const LOAD_NS: u64 = 10 * SECOND;
const REST_NS: u64 = 100_000 * SECOND;
/// The share of the blocks that are overwritten before a volume is read in order, and the bytes
/// that are read.
const OVERWRITTEN: u64 = 4;
const READ: u64 = 128 * MIB;
/// Of these, those that are read before the blocks are put together: that takes long.
const READ_SCATTERED: u64 = 16 * MIB;
/// The processor's time for a request. Requests that complete meanwhile are answered together, so
/// that the next ones get into the same batch.
const CPU_NS: u64 = 4000;

/// Drives a disk in simulated time.
struct Drive {
    reactor: Reactor,
    stack: Stack,
    events: Vec<Event>,
    time_ns: Rc<Cell<u64>>,
    /// The content of the next block.
    next: u64,
}

impl Drive {
    fn open(backend: Arc<dyn Backend>) -> Self {
        // The pool was made and opened in the host's time, which the model knows.
        let time_ns = Rc::new(Cell::new(Clock::System.now_ns()));
        let disk = Disk::new(DiskOptions::default(), Vec::new(), backend).expect("a disk");
        let mut reactor = Reactor::new(64).expect("an io_uring");
        let clock = Clock::Simulated(Rc::clone(&time_ns));
        let stack = disk.open_queue(&mut reactor, clock).expect("a queue");
        Self { reactor, stack, events: Vec::new(), time_ns, next: 1 << 32 }
    }

    fn submit(&mut self, operation: Operation, offset: u64, length: u64) {
        let mut request = self.stack.request();
        (request.operation, request.offset, request.length) = (operation, offset, length);
        request.buffers.allocate(length as usize);
        if operation == Operation::Write {
            let bytes = request.buffers.owned_mut().expect("memory was allocated above");
            for block in bytes.chunks_exact_mut(BLOCK as usize) {
                self.next += 1;
                let word = self.next.to_le_bytes();
                block.chunks_exact_mut(8).for_each(|target| target.copy_from_slice(&word));
            }
        }
        self.stack.submit(request, &mut self.reactor);
    }

    /// Makes a round, and lets time pass if nothing completes. Returns what has completed.
    fn round(&mut self, end_ns: u64) -> u64 {
        self.reactor.submit().expect("the ring takes entries");
        self.reactor.collect(&mut self.events).expect("the ring gives events");
        for event in self.events.drain(..) {
            self.stack.event(&event, &mut self.reactor);
        }
        self.stack.advance(&mut self.reactor);
        let mut done = 0;
        while let Some((request, outcome)) = self.stack.completed() {
            outcome.expect("a device that does not fail");
            self.stack.recycle(request);
            done += 1;
        }
        self.time_ns.set(self.time_ns.get() + done * CPU_NS);
        if done == 0 {
            let deadline_ns = self.stack.deadline_ns().unwrap_or(u64::MAX).min(end_ns);
            self.time_ns.set(self.time_ns.get().max(deadline_ns));
        }
        done
    }

    /// Carries out requests of `length` bytes, at the offsets that `next` gives until it ends, or
    /// `limit_ns` is over. Returns the rate, in requests a second.
    fn load(
        &mut self,
        (operation, length, depth): (Operation, u64, usize),
        limit_ns: u64,
        mut next: impl FnMut() -> Option<u64>,
    ) -> f64 {
        let start_ns = self.time_ns.get();
        let end_ns = start_ns.saturating_add(limit_ns);
        let (mut done, mut is_over) = (0, false);
        while !is_over || self.stack.in_flight() > 0 {
            while !is_over && self.stack.in_flight() < depth {
                match next().filter(|_| self.time_ns.get() < end_ns) {
                    Some(offset) => self.submit(operation, offset, length),
                    None => is_over = true,
                }
            }
            done += self.round(u64::MAX);
        }
        done as f64 * SECOND as f64 / (self.time_ns.get() - start_ns).max(1) as f64
    }

    /// Writes or reads a range in order. Returns the rate, in MiB a second.
    fn in_order(&mut self, operation: Operation, bytes: u64) -> f64 {
        let mut offsets = (0..bytes / MIB).map(|index| index * MIB);
        self.load((operation, MIB, DEPTH_LONG), u64::MAX, || offsets.next())
    }

    /// Lets time pass without requests, until `is_done` or `limit_ns` is over. Returns the seconds.
    fn rest(&mut self, limit_ns: u64, mut is_done: impl FnMut() -> bool) -> f64 {
        let start_ns = self.time_ns.get();
        let mut before_ns = start_ns;
        // With nothing left to wait for, a round lets all the time pass.
        while before_ns - start_ns < limit_ns && !is_done() {
            before_ns = self.time_ns.get();
            self.round(start_ns + limit_ns);
        }
        (before_ns - start_ns) as f64 / SECOND as f64
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pattern {
    Uniform,
    /// 90 % of the writes go to 10 % of the blocks.
    Skewed,
}

impl Pattern {
    fn block(self, random: &mut fastrand::Rng, blocks: u64) -> u64 {
        let hot = blocks / 10;
        match self {
            // The hot ones lie all over the volume, 40 KiB apart.
            Self::Skewed if random.u8(..10) < 9 => random.u64(..hot) * 10,
            Self::Uniform | Self::Skewed => random.u64(..blocks),
        }
    }
}

/// A device with a pool.
struct Rig {
    device: Arc<Sparse>,
    pool: Pool,
    drive: Drive,
    /// The bytes of the volume.
    volume: u64,
}

fn rig(bytes: u64, share: f64, model: Model, options: PoolOptions) -> Rig {
    let device = Arc::new(Sparse::new(bytes));
    let identity = Identity(*b"a pool's benches");
    let segment_blocks = SEGMENT_BLOCKS;
    let made = MakeOptions { capacity_max: bytes, segment_blocks, identity, key: [7; 32] };
    let plain: Arc<dyn Backend> = Arc::clone(&device) as _;
    let layout = make(&plain, &made, |_| {}).expect("room for a pool");
    let beneath = Arc::new(Modelled::new(plain, model));
    let pool = Pool::open(beneath, options).expect("a pool");
    let volume = (layout.data_bytes() as f64 * share) as u64 / MIB * MIB;
    pool.create_volume("volume", volume).expect("room");
    let mut drive = Drive::open(pool.volume("volume").expect("a volume"));
    drive.in_order(Operation::Write, volume);
    Rig { device, pool, drive, volume }
}

impl Rig {
    /// Overwrites blocks at random. Returns the rate, in blocks a second.
    fn overwrite(&mut self, pattern: Pattern, count: u64, limit_ns: u64, seed: u64) -> f64 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (blocks, mut left) = (self.volume / BLOCK, count);
        self.drive.load((Operation::Write, BLOCK, DEPTH), limit_ns, || {
            left = left.checked_sub(1)?;
            Some(pattern.block(&mut random, blocks) * BLOCK)
        })
    }
}

fn ssd() -> Model {
    Model::ssd(SsdParameters::nvme(), 1)
}

fn hdd(bytes: u64) -> Model {
    Model::hdd(HddParameters::spanning(bytes), 1)
}

/// The blocks and requests that the device is given for each block that is overwritten.
fn amplification(name: &str, bytes: u64, share: f64, pattern: Pattern) {
    let mut rig = rig(bytes, share, ssd(), PoolOptions::default());
    let blocks = rig.volume / BLOCK;
    // Until the free places are where this load leaves them.
    rig.overwrite(pattern, 2 * blocks, u64::MAX, 1);
    let (before, pages) = (rig.device.written(), rig.pool.status().counts.map_pages);
    let rate = rig.overwrite(pattern, blocks, u64::MAX, 2);
    // The checkpoint of what was written belongs to it.
    let wanted = rig.pool.status().counts.checkpoints + 1;
    let pool = rig.pool.clone();
    rig.drive.rest(40 * SECOND, || pool.status().counts.checkpoints >= wanted);
    let after = rig.device.written();
    let each = |count: u64| count as f64 / blocks as f64;
    println!(
        "{{\"case\":\"{name}\",\"gib\":{},\"blocks\":{:.4},\"requests\":{:.4},\"map_pages\":{:.4},\
         \"rate\":{rate:.0}}}",
        bytes / GIB,
        each(after.blocks - before.blocks),
        each(after.requests - before.requests),
        each(rig.pool.status().counts.map_pages - pages),
    );
}

/// Random writes on a hard disk, and a read in order of what they leave, against a raw image.
fn rotational(name: &str, bytes: u64, share: f64) {
    let mut rig = rig(bytes, share, hdd(bytes), PoolOptions::default());
    let blocks = rig.volume / BLOCK;
    let raw = Arc::new(Modelled::new(Arc::new(Sparse::new(bytes)), hdd(bytes)));
    let mut drive = Drive::open(raw);
    let mut random = fastrand::Rng::with_seed(3);
    let raw_writes = drive
        .load((Operation::Write, BLOCK, DEPTH), LOAD_NS, || Some(random.u64(..blocks) * BLOCK));
    let raw_read = drive.in_order(Operation::Read, READ);
    let fresh_read = rig.drive.in_order(Operation::Read, READ);
    rig.overwrite(Pattern::Uniform, blocks / OVERWRITTEN, u64::MAX, 1);
    let writes = rig.overwrite(Pattern::Uniform, u64::MAX, LOAD_NS, 2);
    let before_read = rig.drive.in_order(Operation::Read, READ_SCATTERED);
    let pool = rig.pool.clone();
    rig.drive.rest(SECOND, || pool.has_work());
    let rest_s = rig.drive.rest(REST_NS, || !pool.has_work());
    let relocated = pool.status().counts.relocated_blocks;
    let read = rig.drive.in_order(Operation::Read, READ);
    let settled = rig.overwrite(Pattern::Uniform, u64::MAX, LOAD_NS, 4);
    println!(
        "{{\"case\":\"{name}\",\"gib\":{},\"raw_writes\":{raw_writes:.1},\"writes\":{writes:.1},\
         \"settled_writes\":{settled:.1},\"raw_read\":{raw_read:.1},\"fresh_read\":{fresh_read:.1},\
         \"overwritten_read\":{before_read:.1},\"read\":{read:.1},\"rest_s\":{rest_s:.0},\"relocated\":{relocated}}}",
        bytes / GIB,
    );
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let wanted = arguments.next().unwrap_or_default();
    let gib = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(8);
    let bytes = gib * GIB;
    let rows: [(&str, f64, Pattern); 3] = [
        ("ssd, uniform, 40 %", 0.4, Pattern::Uniform),
        ("ssd, uniform, 80 %", 0.8, Pattern::Uniform),
        ("ssd, 90/10, 80 %", 0.8, Pattern::Skewed),
    ];
    for (name, share, pattern) in rows.into_iter().filter(|(name, ..)| name.contains(&wanted)) {
        amplification(name, bytes, share, pattern);
    }
    for (name, share) in [("hdd, 40 %", 0.4), ("hdd, 80 %", 0.8)] {
        if name.contains(&wanted) {
            rotational(name, bytes, share);
        }
    }
}
