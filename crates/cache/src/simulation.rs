//! A cache without data: the replacement, an index and counts. It answers what a cache would have
//! done for a sequence of requests.

use std::collections::HashMap;

use crate::access::{BlockAccess, CLASSES};
use crate::cost::{MissCost, share};
use crate::replacement::{Policy, Replacement, ReplacementOptions, SLOTS_MAX};
use crate::seams::{Continued, Seams};

/// The blocks of a disk that a key can tell apart, as a power of two.
const BLOCK_BITS: u32 = 44;
/// The disks whose last requests are remembered.
const DISKS_MAX: usize = 1 << 16;
/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Reads the range.
    Read,
    /// Writes the range.
    Write,
    /// Discards the range, or fills it with zeroes.
    Discard,
}

/// A request of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulatedRequest {
    /// The instant, in nanoseconds.
    pub time_ns: u64,
    /// The number of the disk.
    pub disk: u32,
    /// What it does.
    pub action: Action,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub length: u64,
    /// The class of its data; see [`BlockAccess::class`].
    pub class: u8,
}

/// The slow disks beneath the simulated cache.
pub trait SlowDisk {
    /// Carries out a read or a write at an instant or after it. Returns the time that it takes, in
    /// nanoseconds.
    fn transfer(
        &mut self,
        time_ns: u64,
        disk: u32,
        is_write: bool,
        offset: u64,
        length: u64,
    ) -> u64;
}

/// What the cache does with writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteMode {
    /// Writes go to the slow disk and into the cache.
    #[default]
    Through,
    /// Writes go to the slow disk; blocks that they change leave the cache.
    Around,
}

/// The counts of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounts {
    /// The accesses to blocks, by reads and by writes.
    pub reads: u64,
    /// See `reads`.
    pub writes: u64,
    /// Those whose block was in the cache.
    pub read_hits: u64,
    /// See `read_hits`.
    pub write_hits: u64,
}

impl ClassCounts {
    /// All accesses.
    pub fn accesses(&self) -> u64 {
        self.reads + self.writes
    }

    /// All accesses whose block was in the cache.
    pub fn hits(&self) -> u64 {
        self.read_hits + self.write_hits
    }

    fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.read_hits += other.read_hits;
        self.write_hits += other.write_hits;
    }
}

/// The counts of a simulation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimulationCounts {
    /// The requests.
    pub requests: u64,
    /// The accesses to blocks and their hits, by class.
    pub classes: [ClassCounts; CLASSES],
    /// The blocks that were put into the cache.
    pub insertions: u64,
    /// The blocks that left for others.
    pub evictions: u64,
    /// The blocks that were not admitted.
    pub refusals: u64,
    /// The reads of the slow disk, and their time in nanoseconds.
    pub disk_reads: u64,
    /// See `disk_reads`.
    pub disk_read_ns: u64,
    /// The writes of the slow disk, and their time in nanoseconds.
    pub disk_writes: u64,
    /// See `disk_writes`.
    pub disk_write_ns: u64,
}

impl SimulationCounts {
    /// The counts of all classes together.
    pub fn total(&self) -> ClassCounts {
        let mut total = ClassCounts::default();
        self.classes.iter().for_each(|class| total.add(class));
        total
    }
}

/// A simulated cache of blocks, above slow disks of its own.
#[derive(Debug)]
pub struct Simulation<D> {
    replacement: Replacement,
    index: HashMap<u64, u32>,
    /// The key of the block in each slot that was ever used, and the slots that are free again.
    keys: Vec<u64>,
    free: Vec<u32>,
    slots_max: u32,
    block: u64,
    mode: WriteMode,
    policy: Policy,
    disk: D,
    cost: MissCost,
    /// The end of the last request to each disk.
    ends: HashMap<u32, u64>,
    seams: Seams,
    counts: SimulationCounts,
    /// The blocks of a request that are not in the cache; empty between requests.
    missing: Vec<u64>,
}

impl<D: SlowDisk> Simulation<D> {
    /// Makes a cache of `slots_max` blocks of `block` bytes.
    pub fn new(
        options: &ReplacementOptions,
        slots_max: u32,
        block: u64,
        mode: WriteMode,
        disk: D,
    ) -> Self {
        let slots_max = slots_max.clamp(1, SLOTS_MAX);
        Self {
            replacement: Replacement::new(options, slots_max),
            index: HashMap::new(),
            keys: Vec::new(),
            free: Vec::new(),
            slots_max,
            block: block.max(1),
            mode,
            policy: options.policy,
            disk,
            cost: MissCost::new(),
            ends: HashMap::new(),
            seams: Seams::default(),
            counts: SimulationCounts::default(),
            missing: Vec::new(),
        }
    }

    /// The counts so far.
    pub fn counts(&self) -> &SimulationCounts {
        &self.counts
    }

    /// Sets the counts to zero. What the cache has, and what was learned, stays.
    pub fn forget_counts(&mut self) {
        self.counts = SimulationCounts::default();
    }

    /// Carries out a request. Its blocks are accessed one after the other, in ascending order. The
    /// slow disk reads those that are not in the cache with one request, from the first to the
    /// last.
    pub fn request(&mut self, request: &SimulatedRequest) {
        if request.length == 0 {
            return;
        }
        self.counts.requests += 1;
        let end = request.offset.saturating_add(request.length);
        let is_sequential = self.ends.get(&request.disk) == Some(&request.offset);
        if self.ends.len() < DISKS_MAX || self.ends.contains_key(&request.disk) {
            self.ends.insert(request.disk, end);
        }
        let blocks = request.offset / self.block..=(end - 1) / self.block;
        let Self { seams, block, .. } = self;
        let continued = seams.request(request.disk, request.offset, request.length, *block);
        match request.action {
            Action::Read => self.read(request, blocks, is_sequential, continued),
            Action::Write => self.write(request, blocks, is_sequential, continued),
            Action::Discard => blocks.for_each(|block| self.take_out(key(request.disk, block))),
        }
    }

    fn read(
        &mut self,
        request: &SimulatedRequest,
        blocks: std::ops::RangeInclusive<u64>,
        is_sequential: bool,
        continued: Continued,
    ) {
        let class = usize::from(request.class).min(CLASSES - 1);
        let count = blocks.end() - blocks.start() + 1;
        let miss_ns = self.cost.block_ns(is_sequential, count);
        let mut access =
            BlockAccess { class: request.class, is_sequential, miss_ns, ..BlockAccess::default() };
        let ends = (*blocks.start(), *blocks.end());
        let mut missing = std::mem::take(&mut self.missing);
        for block in blocks {
            let key = key(request.disk, block);
            self.counts.classes[class].reads += 1;
            if let Some(slot) = self.index.get(&key) {
                self.counts.classes[class].read_hits += 1;
                access.is_continued = continued.is_of(block, ends);
                self.replacement.hit(*slot, key, &access);
            } else {
                missing.push(block);
            }
        }
        if let (Some(first), Some(last)) = (missing.first(), missing.last()) {
            let count = last - first + 1;
            let (offset, length) = (first * self.block, count * self.block);
            let time_ns = self.disk.transfer(request.time_ns, request.disk, false, offset, length);
            self.cost.observe(is_sequential, count, time_ns);
            self.counts.disk_reads += 1;
            self.counts.disk_read_ns += time_ns;
            access.is_continued = false;
            access.miss_ns = share(time_ns, missing.len() as u64);
            for block in &missing {
                self.put_in(key(request.disk, *block), &access);
            }
        }
        missing.clear();
        self.missing = missing;
    }

    fn write(
        &mut self,
        request: &SimulatedRequest,
        blocks: std::ops::RangeInclusive<u64>,
        is_sequential: bool,
        continued: Continued,
    ) {
        let class = usize::from(request.class).min(CLASSES - 1);
        let (disk, offset, length) = (request.disk, request.offset, request.length);
        let time_ns = self.disk.transfer(request.time_ns, disk, true, offset, length);
        self.counts.disk_writes += 1;
        self.counts.disk_write_ns += time_ns;
        let mut access = BlockAccess {
            class: request.class,
            is_write: true,
            is_sequential,
            ..BlockAccess::default()
        };
        let ends = (*blocks.start(), *blocks.end());
        let is_short = length <= self.policy.write_inserted_max(request.class);
        let mode = if is_short { self.mode } else { WriteMode::Around };
        for block in blocks {
            let key = key(disk, block);
            self.counts.classes[class].writes += 1;
            let slot = self.index.get(&key).copied();
            self.counts.classes[class].write_hits += u64::from(slot.is_some());
            access.is_continued = slot.is_some() && continued.is_of(block, ends);
            match (slot, mode) {
                (Some(slot), WriteMode::Through) => self.replacement.hit(slot, key, &access),
                (None, WriteMode::Through) => self.put_in(key, &access),
                (Some(_), WriteMode::Around) => self.take_out(key),
                (None, WriteMode::Around) => {}
            }
        }
    }

    fn put_in(&mut self, key: u64, access: &BlockAccess) {
        if !self.replacement.admits(key, access) {
            self.counts.refusals += 1;
            return;
        }
        let slot = if let Some(slot) = self.free.pop() {
            slot
        } else if self.keys.len() < self.slots_max as usize {
            self.keys.push(key);
            self.keys.len() as u32 - 1
        } else {
            let keys = &self.keys;
            let slot = self.replacement.victim(Some(key), |slot| keys[slot as usize]);
            let Some(slot) = slot else { return };
            self.counts.evictions += 1;
            self.index.remove(&self.keys[slot as usize]);
            slot
        };
        self.keys[slot as usize] = key;
        self.index.insert(key, slot);
        self.counts.insertions += 1;
        self.replacement.insert(slot, key, access);
    }

    fn take_out(&mut self, key: u64) {
        if let Some(slot) = self.index.remove(&key) {
            self.replacement.remove(slot, key);
            self.free.push(slot);
        }
    }
}

/// The key of a block of a disk. Blocks beyond 2^44 of a disk are confused with others, which costs
/// nothing but accuracy.
pub fn key(disk: u32, block: u64) -> u64 {
    u64::from(disk) << BLOCK_BITS ^ block
}
