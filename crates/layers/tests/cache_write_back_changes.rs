//! Changes in the middle of the work of a disk with a cache in the mode `write-back`, by seed:
//! another size, stores that hang for a while, and requests that meet on one block. Both stores may
//! crash at any instant.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use fathom_block::{Backend, Disk, DiskOptions, ErrorKind, Flags, Layer, Operation};
use fathom_layers::Cache;
use fathom_layers::cache::{CacheDisk, CacheMode};
use fathom_persistence::Identity;
use fathom_sim::{
    Action, Harness, HarnessOptions, ModelDisk, SimBackend, SimOptions, Workload, WorkloadOptions,
    each_seed,
};

#[path = "support/images.rs"]
mod images;
#[path = "support/kept.rs"]
mod kept;
#[path = "support/write_back.rs"]
mod write_back;

use kept::{Mark, harness};
use write_back::{CAPACITY, Knowledge, Rig, blank, wait, workload};

/// The time limit of the write-back of a log.
const LIMIT: Duration = Duration::from_secs(20);
/// The most rounds of a request of a disk whose stores answer.
const ROUNDS_MAX: usize = 400;

/// A disk grows with changes in the log, which are beyond the earlier end, too. It cannot become
/// smaller.
#[test]
fn the_size_changes_with_changes_in_the_log() {
    let mut used = 0;
    each_seed(16, |seed| {
        let mut images = blank(seed);
        images[1].resize(2 * CAPACITY as usize, 0);
        let volume = SimOptions::new(images[0].len() as u64);
        let home = SimOptions::new(2 * CAPACITY);
        let rig = Rig::with(Knowledge::Full, seed, 0, 0.05, images, volume, home).unwrap();
        let mut harness = harness(&rig.disk, seed);
        let mut inspect = |model: &ModelDisk| _ = rig.watch.check_crashes(model);
        let mut size = CAPACITY;
        for step in 0..4_u64 {
            let options = WorkloadOptions {
                length_max: 8 << 10,
                hot_rate: 0.1,
                ..WorkloadOptions::new(size)
            };
            let mut workload = Workload::new(options, seed * 10 + step);
            for _ in 0..30 {
                harness.run(&mut workload, 1, &mut inspect);
            }
            used += rig.wal.status().used;
            for smaller in [size - 4096, CAPACITY / 2, 512] {
                assert_eq!(rig.disk.resize(smaller), Err(ErrorKind::Unsupported));
            }
            size = (size + [4096, 100 << 10][seed as usize % 2]).min(2 * CAPACITY);
            rig.disk.resize(size).unwrap();
            harness.model_mut().grow(size);
            assert_eq!(rig.disk.capacity(), size);
        }
        harness.drain(&mut inspect);
        wait(&mut harness, &rig, &mut inspect);
        harness.verify(size);
        rig.wal.drain(&rig.disk, LIMIT).unwrap();
        assert_eq!(harness.model().check_now(&rig.home.image()), Ok(()));
    });
    assert!(used > 0, "nothing was in the log");
}

/// A second disk of the cache of `rig`, in the mode write-through, with a store of its own.
fn neighbour(rig: &Rig, seed: u64) -> (Arc<Disk>, Cache, Arc<SimBackend>) {
    let found = CacheDisk { name: "other".into(), log: Identity::NONE, ..write_back::disk() };
    let mark = Arc::new(Mark(AtomicU64::new(7)));
    let cache = Cache::new(&rig.volume, &found, CacheMode::WriteThrough, mark).unwrap();
    let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), seed));
    let layers = vec![Arc::new(cache.clone()) as Arc<dyn Layer>];
    let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&home) as Arc<dyn Backend>);
    (disk.unwrap(), cache, home)
}

/// While the store of a disk hangs, the disk takes changes until its log is full, and another disk
/// of the cache is served as ever. What waited completes when the store continues.
#[test]
fn a_store_that_hangs_holds_back_only_its_disk() {
    let (mut logged, mut cases) = (0, 0);
    each_seed(12, |seed| {
        cases += 1;
        let images = blank(seed);
        let volume = SimOptions::new(images[0].len() as u64);
        let home = SimOptions::new(CAPACITY);
        let rig = Rig::with(Knowledge::Full, seed, 0, 0.05, images, volume, home).unwrap();
        let (other, cache, _home) = neighbour(&rig, seed);
        let mut mine = harness(&rig.disk, seed);
        let mut theirs =
            Harness::new(&other, &HarnessOptions { queues: 2, depth: 1, simulated: true }, seed);
        let mut mine_work = workload(seed);
        let mut their_work = workload(seed + 1);
        let mut inspect = |model: &ModelDisk| _ = rig.watch.check_crashes(model);
        mine.run(&mut mine_work, 30, &mut inspect);
        mine.drain(&mut inspect);
        rig.home.hang(true);
        // Writes only: reads of what is only at home wait for it.
        let flags = Flags::default();
        for (number, place) in (0..40_u64).zip((0..CAPACITY / 4096).cycle()) {
            let (operation, offset) = (Operation::Write, place * 4096);
            let content = 1_000_000 + number;
            mine.submit(0, &Action { operation, offset, length: 4096, flags, content });
        }
        let before = mine.statistics().succeeded;
        for _ in 0..60 {
            theirs.run(&mut their_work, 1, |_| {});
            let mut rounds = 0;
            while theirs.step() > 0 {
                mine.step();
                rounds += 1;
                assert!(rounds < ROUNDS_MAX, "another disk waits");
            }
            mine.step();
        }
        theirs.verify(CAPACITY);
        logged += mine.statistics().succeeded - before;
        assert!(mine.step() > 0 && rig.wal.status().used > 0, "the log took all changes");
        assert_eq!((cache.status().failed, rig.cache.status().failed), (None, None));
        rig.home.hang(false);
        mine.drain(&mut inspect);
        wait(&mut mine, &rig, &mut inspect);
        mine.verify(CAPACITY);
        rig.wal.drain(&rig.disk, LIMIT).unwrap();
        assert_eq!(mine.model().check_now(&rig.home.image()), Ok(()));
    });
    // The log has room for some of them.
    assert!(logged >= 3 * cases, "{logged} changes of {cases} disks completed");
}

/// While the store of the cache hangs, no change completes, because it would not be durable. All
/// complete when it continues, also if it crashes instead at any instant.
#[test]
fn a_cache_that_hangs_acknowledges_nothing() {
    each_seed(12, |seed| {
        let rig = Rig::new(seed, 0, 0.05, blank(seed));
        let mut harness = harness(&rig.disk, seed);
        let mut work = workload(seed);
        let mut inspect = |model: &ModelDisk| _ = rig.watch.check_crashes(model);
        for _ in 0..3 {
            harness.run(&mut work, 20, &mut inspect);
            harness.drain(&mut inspect);
            rig.store.hang(true);
            let before = harness.statistics().succeeded;
            let flags = Flags::default();
            for place in 0..8 {
                let (operation, offset) = (Operation::Write, place * (20 << 10));
                harness
                    .submit(0, &Action { operation, offset, length: 512, flags, content: place });
            }
            for _ in 0..300 {
                harness.step();
                inspect(harness.model());
            }
            assert_eq!(harness.statistics().succeeded, before, "a change is not durable");
            rig.store.hang(false);
            harness.drain(&mut inspect);
        }
        harness.verify(CAPACITY);
        assert_eq!(rig.cache.status().failed, None);
    });
}

/// Several queues change and read the same few blocks, with all kinds of changes.
#[test]
fn queues_that_meet_on_one_block_agree() {
    let mut counts = (0, 0, 0);
    each_seed(24, |seed| {
        let rig = Rig::new(seed, 0, 0.1, blank(seed));
        let options = HarnessOptions {
            queues: 2 + seed as usize % 3,
            depth: 1 + seed as usize % 8,
            simulated: true,
        };
        let mut harness = Harness::new(&rig.disk, &options, seed);
        let options = WorkloadOptions {
            alignment: [4096, 512][seed as usize % 2],
            length_max: 8 << 10,
            // One block, a part of one, or the two beside each other.
            weights: [30, 30, 5, 15, 15, 2, 0],
            ..WorkloadOptions::new([4096, 8192, 16 << 10][seed as usize % 3])
        };
        let mut workload = Workload::new(options, seed);
        let mut inspect = |model: &ModelDisk| _ = rig.watch.check_crashes(model);
        for _ in 0..3 {
            harness.run(&mut workload, 60, &mut inspect);
            wait(&mut harness, &rig, &mut inspect);
        }
        harness.verify(CAPACITY);
        let status = rig.cache.status();
        counts = (
            counts.0 + status.reads.hits,
            counts.1 + status.blocks.overwritten,
            counts.2 + status.blocks.discarded,
        );
        rig.wal.drain(&rig.disk, LIMIT).unwrap();
        assert_eq!(harness.model().check_now(&rig.home.image()), Ok(()));
    });
    assert!(counts.0 > 0 && counts.1 + counts.2 > 0, "{counts:?}");
}
