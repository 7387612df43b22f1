//! The pages of a guest's memory: which of them the host's kernel has swapped out.

pub(crate) mod sample;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use fathom_block::Clock;
use fathom_guest_memory::{GuestMemory, HostSwap, MemoryFile, Residency, ResidencyError};
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use sample::{Block, DiskCounts, Filter, PAGE, PageSample, blocks};

/// The most pages of a sample, but for the chance of the hash: 3 MiB of memory.
const SAMPLE_MAX: u64 = 1 << 14;
/// The pages of a sample that are looked up at a time, while queues wait.
const CHECKED: usize = 256;
/// Counts of the whole memory take this part of a processor at most.
const PART: u64 = 100;
/// The least age of a count that is made again, in nanoseconds.
const AGE_MIN_NS: u64 = 100_000_000;

/// The memory of a guest, which its disks share. Cheap until a layer `swap-watch` uses it.
pub struct GuestPages {
    memory: GuestMemory,
    /// Whether the kernel can count the memory's pages.
    countable: Result<(), ResidencyError>,
    /// One of 2^shift pages is in the sample.
    shift: u32,
    seed: u64,
    /// Whether the host has swap space.
    has_swap: AtomicBool,
    /// Whether pages may be swapped out: only then requests look.
    may_be_out: AtomicBool,
    measured: Mutex<Option<Measured>>,
    sample: Mutex<PageSample>,
    /// The pages in the sample.
    sampled: AtomicUsize,
    filter: Filter,
}

/// A count of a guest's memory.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// What was found, or why nothing was.
    pub found: Result<Residency, ResidencyError>,
    /// When, in nanoseconds of the system's clock.
    pub at_ns: u64,
    /// How long it took, in nanoseconds.
    pub took_ns: u64,
}

impl GuestPages {
    /// The pages of a guest's memory. The sample depends on `seed`.
    pub fn new(memory: GuestMemory, seed: u64) -> Self {
        let pages = memory.length() / PAGE;
        let shift = (0..63).find(|shift| pages >> shift <= SAMPLE_MAX).unwrap_or(63);
        Self {
            countable: memory.can_count(),
            memory,
            shift,
            seed,
            has_swap: AtomicBool::new(HostSwap::now().total > 0),
            may_be_out: AtomicBool::new(false),
            measured: Mutex::default(),
            sample: Mutex::default(),
            sampled: AtomicUsize::new(0),
            filter: Filter::default(),
        }
    }

    /// The size of the memory, in bytes.
    pub fn length(&self) -> u64 {
        self.memory.length()
    }

    /// The files that have the memory, each once.
    pub fn files(&self) -> Vec<MemoryFile> {
        let mut files: Vec<MemoryFile> = Vec::new();
        for region in self.memory.regions() {
            let (device, inode) = region.file_identity();
            let file = MemoryFile { device, inode };
            if !files.contains(&file) {
                files.push(file);
            }
        }
        files
    }

    /// The share of all pages that are in the sample if they have a block, from 0 to 1.
    pub fn share(&self) -> f64 {
        1.0 / (1_u64 << self.shift) as f64
    }

    /// The bytes for which a page of the sample stands.
    pub(crate) fn weight(&self) -> u64 {
        PAGE << self.shift
    }

    /// Counts the whole memory, or returns the last count if it is younger than a hundred times
    /// what it took. Waits for a count that is being made.
    pub fn measure(&self) -> Measured {
        self.measure_after(PART)
    }

    /// Counts the whole memory, or returns a count that was made just now.
    pub fn measure_now(&self) -> Measured {
        self.measure_after(1)
    }

    /// The last count; `None` before the first one, and while one is being made.
    pub fn last(&self) -> Option<Measured> {
        self.measured.try_lock().and_then(|measured| *measured)
    }

    /// Counts, unless the last count is younger than `times` what it took.
    fn measure_after(&self, times: u64) -> Measured {
        let mut measured = self.measured.lock();
        let at_ns = Clock::System.now_ns();
        if let Some(last) = *measured {
            let age_max = last.took_ns.saturating_mul(times).max(AGE_MIN_NS);
            if at_ns.saturating_sub(last.at_ns) < age_max {
                return last;
            }
        }
        let found = self.countable.and_then(|()| self.memory.residency(0, u64::MAX));
        let took_ns = Clock::System.now_ns().saturating_sub(at_ns);
        let new = Measured { found, at_ns, took_ns };
        *measured = Some(new);
        new
    }

    /// Finds out whether pages are swapped out, and what has become of the sample.
    pub fn check(&self) {
        let swap = HostSwap::now();
        self.has_swap.store(swap.total > 0, Ordering::Relaxed);
        let is_any_out = swap.used > 0 && self.measure().found.is_ok_and(|found| found.swapped > 0);
        self.may_be_out.store(is_any_out, Ordering::Relaxed);
        if is_any_out || self.sample.lock().has_out() {
            self.check_sample();
        }
    }

    fn check_sample(&self) {
        let frames = self.sample.lock().frames();
        for frames in frames.chunks(CHECKED) {
            let mut sample = self.sample.lock();
            for frame in frames {
                self.check_page(&mut sample, *frame);
            }
            self.note_length(&sample);
        }
    }

    /// A page that was out and is in memory again is read. Its owner has just used it. It is read
    /// through the mapping, so in the microsecond since the look the kernel could have swapped it
    /// out again.
    fn check_page(&self, sample: &mut PageSample, frame: u64) {
        let Some(is_out) = sample.is_out(frame) else { return };
        let Ok(found) = self.memory.residency(frame * PAGE, PAGE) else { return };
        if !is_out && found.swapped > 0 {
            sample.went_out(frame, self.weight());
        } else if is_out && found.resident > 0 {
            let mut page = [0; PAGE as usize];
            if self.memory.read(frame * PAGE, &mut page).is_some() {
                sample.came_in(frame, self.checksum(&page), self.weight(), &self.filter);
            }
        }
    }

    /// Requests come again after a pause: they look until the next check has an answer.
    pub(crate) fn wake(&self) {
        if self.countable.is_ok() {
            self.may_be_out.store(true, Ordering::Relaxed);
        }
    }

    /// Whether requests look for pages that are swapped out.
    pub(crate) fn may_be_out(&self) -> bool {
        self.may_be_out.load(Ordering::Relaxed)
    }

    /// The bytes of a range that are swapped out.
    pub(crate) fn swapped(&self, address: u64, length: u64) -> u64 {
        self.memory.residency(address, length).map_or(0, |found| found.swapped)
    }

    /// Whether pages get into the sample.
    pub(crate) fn is_sampling(&self) -> bool {
        self.countable.is_ok() && self.has_swap.load(Ordering::Relaxed)
    }

    /// Whether a page gets into the sample if it has a block.
    pub(crate) fn is_sampled(&self, frame: u64) -> bool {
        let mixed = (frame ^ self.seed).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed.checked_shr(64 - self.shift).unwrap_or(0) == 0
    }

    pub(crate) fn checksum(&self, page: &[u8]) -> u64 {
        xxh3_64_with_seed(page, self.seed)
    }

    /// Pages are about to be read into: what they had is lost. Those that are out count so before.
    pub(crate) fn overwrite(&self, frames: &[u64]) {
        self.change(frames, |sample, frame| {
            self.check_page(sample, frame);
            sample.forget_page(frame, &self.filter);
        });
    }

    /// Looks whether pages are out.
    pub(crate) fn look(&self, frames: &[u64]) {
        self.change(frames, |sample, frame| self.check_page(sample, frame));
    }

    fn change(&self, frames: &[u64], mut change: impl FnMut(&mut PageSample, u64)) {
        if frames.is_empty() || self.sampled.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut sample = self.sample.lock();
        for frame in frames {
            change(&mut sample, *frame);
        }
        self.note_length(&sample);
    }

    /// Pages have blocks of a disk.
    pub(crate) fn associate(&self, found: &mut Vec<(u64, Block)>) {
        if found.is_empty() {
            return;
        }
        let mut sample = self.sample.lock();
        for (frame, block) in found.drain(..) {
            sample.associate(frame, block, self.weight(), &self.filter);
        }
        self.note_length(&sample);
    }

    /// Blocks are about to get, or have got, other content.
    pub(crate) fn forget_blocks(&self, disk: &Arc<DiskCounts>, offset: u64, length: u64) {
        let is_many = length / PAGE > SAMPLE_MAX;
        let may_have = || blocks(offset, length).any(|block| self.filter.may_have(disk, block));
        if self.sampled.load(Ordering::Relaxed) > 0 && (is_many || may_have()) {
            let mut sample = self.sample.lock();
            sample.forget_blocks(disk, (offset, length), &self.filter);
            self.note_length(&sample);
        }
    }

    /// Blocks are read: those whose page is out are counted.
    pub(crate) fn reread(&self, disk: &Arc<DiskCounts>, offset: u64, length: u64) {
        if self.sampled.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut offsets = (0..length / PAGE)
            .map(|page| offset + page * PAGE)
            .filter(|offset| self.filter.may_have(disk, offset / PAGE))
            .peekable();
        if offsets.peek().is_some() {
            let sample = self.sample.lock();
            offsets.for_each(|offset| sample.reread(disk, offset, self.weight()));
        }
    }

    fn note_length(&self, sample: &PageSample) {
        self.sampled.store(sample.len(), Ordering::Relaxed);
    }
}
