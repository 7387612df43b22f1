//! Files that are read ahead of the guest: what is read, when nothing is, and by seed that no read
//! gets old content, whatever else happens to the blocks.

#[path = "support/files.rs"]
mod files;

use std::collections::BTreeSet;
use std::sync::Arc;

use fathom_backend::Memory;
use fathom_block::{Disk, DiskOptions, Flags, Layer, Operation};
use fathom_cache::Policy;
use fathom_layers::Cache;
use fathom_layers::cache::{CacheDisk, CacheMode, CacheTimes, CacheVolume, NoMark, VolumeOptions};
use fathom_persistence::Identity;
use fathom_sim::{
    Action, Harness, HarnessOptions, SimBackend, SimOptions, Workload, WorkloadOptions, each_seed,
};

use files::{Files, Noted, PAGE};

/// The size of the disk, in bytes.
const CAPACITY: u64 = 8 << 20;
const PAGES: u64 = CAPACITY / PAGE;
/// The pages of a guest's read.
const STEP: u64 = 8;

struct Guest {
    cache: Cache,
    disk: Arc<Disk>,
    files: Files,
    noted: Noted,
}

impl Guest {
    /// A disk with these files and a cache of `size` bytes that reads ahead by at most `window`
    /// bytes.
    fn new(files: Files, size: u64, mode: CacheMode, window: u64, seed: u64) -> Self {
        let options = VolumeOptions {
            identity: Some(Identity([0; 16])),
            block_size: 4096 << (seed % 5),
            disks: 2,
            bitmap_pages: 1,
            is_kept: false,
            policy: [Policy::None, Policy::Sky, Policy::Auto][seed as usize % 3],
            times: CacheTimes::default(),
        };
        let store = Arc::new(Memory::open(size + (64 << 10)).unwrap());
        let volume = Arc::new(CacheVolume::open(store, &options).unwrap());
        let disk = CacheDisk::in_memory("disk", CAPACITY);
        let cache = Cache::new(&volume, &disk, mode, Arc::new(NoMark)).unwrap();
        cache.set_read_ahead(window);
        let noted = Noted::default();
        let layers: Vec<Arc<dyn Layer>> =
            vec![Arc::new(files.clone()), Arc::new(cache.clone()), Arc::new(noted.clone())];
        let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), seed));
        let disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
        Self { cache, disk, files, noted }
    }

    fn harness(&self, queues: usize, seed: u64) -> Harness {
        let options = HarnessOptions { queues, depth: 16, simulated: true };
        Harness::new(&self.disk, &options, seed)
    }

    /// Carries out an operation on pages of a file, as the file system does: a request for each
    /// piece.
    fn file(&self, harness: &mut Harness, operation: Operation, file: usize, from: u64) {
        for (offset, length) in self.files.ranges(file, from..from + STEP) {
            submit(harness, 0, operation, (offset, length), from);
            harness.drain(|_| {});
        }
    }

    fn size(&self, file: usize) -> u64 {
        self.files.places[file].len() as u64
    }

    /// The pages of the disk that were read beneath since the last call, each as often as it was
    /// read.
    fn read_pages(&self) -> Vec<u64> {
        let ranges = self.noted.take();
        ranges.iter().flat_map(|(offset, length)| offset / PAGE..(offset + length) / PAGE).collect()
    }
}

fn submit(
    harness: &mut Harness,
    queue: usize,
    operation: Operation,
    (offset, length): (u64, u64),
    content: u64,
) {
    let action = Action { operation, offset, length, flags: Flags::default(), content };
    harness.submit(queue, &action);
}

/// A file in fragments, which was written in its order, is read from home once, ahead of the guest,
/// and nothing that follows it on the disk.
#[test]
fn a_file_is_read_ahead_where_it_goes_on() {
    each_seed(8, |seed| {
        let files = Files::scattered(PAGES, 3, 16 + seed * 8, seed);
        let guest = Guest::new(files, 16 << 20, CacheMode::WriteAround, 512 << 10, seed);
        let mut harness = guest.harness(1, seed);
        for file in 0..3 {
            for page in (0..guest.size(file)).step_by(STEP as usize) {
                guest.file(&mut harness, Operation::Write, file, page);
            }
        }
        guest.read_pages();
        for file in 0..3 {
            let before = guest.cache.status();
            for page in (0..guest.size(file)).step_by(STEP as usize) {
                guest.file(&mut harness, Operation::Read, file, page);
            }
            harness.rest(|_| {});
            let mut read = guest.read_pages();
            read.sort_unstable();
            let mut expected = guest.files.places[file].clone();
            expected.sort_unstable();
            assert_eq!(read, expected, "each page of the file once, and no other");
            let status = guest.cache.status();
            let (reads, hits) =
                (status.reads.reads - before.reads.reads, status.reads.hits - before.reads.hits);
            assert!(hits * 10 > reads * 9, "{hits} of {reads} reads were hits");
        }
        let status = guest.cache.status();
        assert!(status.blocks.ahead > 0 && status.blocks.ahead_unused == 0, "{status:?}");
        assert_eq!(status.blocks.ahead_used, status.blocks.ahead);
    });
}

/// A file of which it is not known where it goes on is read ahead to the end of its piece and a
/// little further, and where it was seen to go on the next time.
#[test]
fn where_a_file_goes_on_is_learned() {
    let files = Files::scattered(PAGES, 2, 64, 5);
    let guest = Guest::new(files, 16 << 20, CacheMode::WriteThrough, 256 << 10, 2);
    let mut harness = guest.harness(1, 1);
    let mut strange = Vec::new();
    for _ in 0..2 {
        for page in (0..guest.size(0)).step_by(STEP as usize) {
            guest.file(&mut harness, Operation::Read, 0, page);
        }
        harness.rest(|_| {});
        let pages: BTreeSet<u64> = guest.files.places[0].iter().copied().collect();
        let read = guest.read_pages();
        strange.push(read.iter().filter(|page| !pages.contains(page)).count());
        // Takes the file out of the cache.
        submit(&mut harness, 0, Operation::Discard, (0, CAPACITY), 0);
        harness.drain(|_| {});
    }
    assert!(strange[0] > 0 && strange[1] == 0, "{strange:?} pages of other files");
}

/// Nothing is read ahead if that is turned off, if the cache takes nothing in, or if another read
/// waits for home.
#[test]
fn reading_ahead_gives_way() {
    let pages: Vec<u64> = (0..PAGES / 2).collect();
    let files = Files::new(PAGES, vec![pages]);
    let run = |mode, window, others: bool| {
        let guest = Guest::new(files.clone(), 16 << 20, mode, window, 2);
        let mut harness = guest.harness(1, 1);
        for page in (0..64).step_by(STEP as usize) {
            if others {
                // A page behind the file, in the same round.
                let offset = CAPACITY / 2 + page * 65_536;
                submit(&mut harness, 0, Operation::Read, (offset, PAGE), 0);
            }
            guest.file(&mut harness, Operation::Read, 0, page);
        }
        harness.rest(|_| {});
        guest.cache.status().blocks.ahead
    };
    assert!(run(CacheMode::WriteThrough, 1 << 20, false) > 0);
    assert!(run(CacheMode::WriteAround, 1 << 20, false) > 0);
    assert_eq!(run(CacheMode::WriteThrough, 0, false), 0);
    assert_eq!(run(CacheMode::ReadOnly, 1 << 20, false), 0);
    assert_eq!(run(CacheMode::WriteThrough, 1 << 20, true), 0);
}

/// A file whose size the guest gets wrong, or that is beyond the disk, costs nothing but time: no
/// read of the guest fails.
#[test]
fn a_file_beyond_the_disk_is_no_error() {
    let last = PAGES - 64;
    let mut pages: Vec<u64> = (last..PAGES).collect();
    // The guest says that the file goes on, but not where.
    pages.extend(0..64);
    let guest =
        Guest::new(Files::new(PAGES, vec![pages]), 16 << 20, CacheMode::WriteThrough, 1 << 20, 2);
    let mut harness = guest.harness(1, 1);
    for page in (0..64).step_by(STEP as usize) {
        guest.file(&mut harness, Operation::Read, 0, page);
    }
    harness.rest(|_| {});
    assert_eq!(harness.statistics().failed, 0);
    assert!(guest.cache.status().blocks.ahead > 0);
}

/// Readers of files, writers, discards and random reads on several queues, over a cache that is
/// much smaller than the disk.
#[test]
fn no_read_ahead_brings_old_content() {
    let (mut ahead, mut used, mut unused) = (0, 0, 0);
    each_seed(24, |seed| {
        let files = Files::scattered(PAGES, 4, 8 << (seed % 4), seed);
        let mode = CacheMode::ALL[seed as usize / 2 % 2];
        let guest = Guest::new(files, (2 << 20) + (seed % 3 << 20), mode, 1 << 20, seed);
        let queues = 1 + seed as usize % 3;
        let mut harness = guest.harness(queues, seed);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut options = WorkloadOptions::new(CAPACITY);
        options.alignment = if seed % 2 == 0 { 4096 } else { 512 };
        options.hot_rate = 0.5;
        let mut workload = Workload::new(options, seed);
        let mut positions = [0_u64; 4];
        for round in 0..600 {
            let file = random.usize(0..4);
            let (queue, position) = (file % queues, positions[file]);
            for range in guest.files.ranges(file, position..position + STEP / 2) {
                // A change of what may be on its way.
                if random.u8(..) < 20 {
                    let operation = [Operation::Write, Operation::Discard, Operation::WriteZeroes]
                        [random.usize(0..3)];
                    let next = guest.files.ranges(file, position + STEP..position + 2 * STEP);
                    for range in next {
                        submit(&mut harness, random.usize(0..queues), operation, range, round);
                    }
                }
                submit(&mut harness, queue, Operation::Read, range, 0);
            }
            positions[file] =
                if position + STEP / 2 >= guest.size(file) { 0 } else { position + STEP / 2 };
            if random.u8(..) < 60 {
                harness.run(&mut workload, 2, |_| {});
            }
            for _ in 0..random.usize(0..6) {
                harness.step();
            }
            if round % 16 == 15 {
                harness.drain(|_| {});
            }
        }
        harness.verify(CAPACITY);
        harness.rest(|_| {});
        let status = guest.cache.status();
        assert_eq!((status.failed, status.mismatches), (None, 0));
        assert!(status.blocks.ahead >= status.blocks.ahead_used + status.blocks.ahead_unused);
        ahead += status.blocks.ahead;
        (used, unused) = (used + status.blocks.ahead_used, unused + status.blocks.ahead_unused);
    });
    assert!(ahead > 1000 && used > 500 && unused > 50, "{ahead} ahead, {used} used, {unused} not");
}
