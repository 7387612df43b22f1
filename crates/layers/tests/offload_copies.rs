//! Runs the layer `offload` with copies of blocks that are read often, by seed, over faulty stores.
//! A read never finds an old copy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fathom_block::{
    BackgroundScheduler, BackgroundStep, Disk, DiskOptions, Operation, Permission, Waker,
};
use fathom_layers::offload::{CarryKind, OffloadOptions, OffloadState};
use fathom_layers::tap::{EventType, Labels};
use fathom_layers::{Offload, Tap};
use fathom_sim::{
    Harness, HarnessOptions, Images, ModelDisk, SimOptions, Workload, WorkloadOptions, each_seed,
};

#[path = "support/images.rs"]
mod images;
#[path = "support/offload.rs"]
mod offload;

use offload::{CAPACITY, LOG_LENGTH, Rig, action, read, write};

const BLOCK: u64 = 4096;
const SLOTS: u64 = 6;
/// The log and the copies.
const VOLUME_LENGTH: u64 = LOG_LENGTH + SLOTS * BLOCK;

fn settings() -> OffloadOptions {
    OffloadOptions {
        copies: SLOTS * BLOCK,
        block_shift: 12,
        window_ns: 4_000_000,
        ..offload::settings()
    }
}

fn blank() -> Images {
    vec![vec![0; VOLUME_LENGTH as usize], vec![0; CAPACITY as usize]]
}

fn rig(seed: u64, log: SimOptions) -> Option<Rig> {
    Rig::with(seed, 0.02, blank(), log, SimOptions::new(CAPACITY), settings())
}

fn workload(seed: u64) -> Workload {
    let mut options = WorkloadOptions::new(CAPACITY);
    options.length_max = 4 << 10;
    options.alignment = if seed % 2 == 0 { 4096 } else { 512 };
    options.weights = [80, 12, 3, 2, 2, 1, 1];
    options.hot_rate = 0.8;
    Workload::new(options, seed)
}

/// Lets the layer make copies of the blocks that are read most.
fn warm(harness: &mut Harness) {
    warm_by(harness, BLOCK);
}

/// The same by reads of `length` bytes. Shorter ones than a block do not fill copies.
fn warm_by(harness: &mut Harness, length: u64) {
    // Some windows pass before all copies are made.
    for _ in 0..20 {
        for number in 0..SLOTS {
            harness.submit(0, &read(number * BLOCK, length));
        }
        harness.drain(|_| {});
    }
    for _ in 0..200 {
        harness.step();
    }
}

#[test]
fn a_read_never_finds_an_old_copy() {
    let (mut cases, mut hits, mut made) = (0, 0, 0);
    each_seed(150, |seed| {
        cases += 1;
        let mut rig = rig(seed, SimOptions::new(VOLUME_LENGTH)).unwrap();
        let mut harness = rig.harness(seed);
        let mut workload = workload(seed);
        for _ in 0..4 {
            rig.offload.stop();
            warm(&mut harness);
            for _ in 0..10 {
                rig.switch().unwrap();
                harness.run(&mut workload, 1 + seed as usize % 12, |model: &ModelDisk| {
                    rig.check_crashes(model);
                });
            }
            rig.pin(&mut harness);
            rig.offload.start().unwrap();
            harness.verify(CAPACITY);
            for number in 0..CAPACITY / BLOCK {
                harness.submit(0, &read(number * BLOCK, BLOCK));
                harness.submit(0, &read(number * BLOCK + 512, 1024));
            }
            harness.drain(|_| {});
        }
        let status = rig.offload.status();
        assert_eq!(status.copies_failed, 0);
        hits += status.hits;
        made += status.copies_made;
    });
    assert!(hits > 10 * cases && made > 5 * cases, "{hits} hits, {made} copies made");
}

/// A copy whose bytes are wrong, or cannot be read, is not used, and the read goes home.
#[test]
fn wrong_and_unreadable_copies_are_not_used() {
    let mut failed = 0;
    each_seed(100, |seed| {
        let mut log = SimOptions::new(VOLUME_LENGTH);
        if seed % 2 == 0 {
            log.read_error_rate = 0.2;
        }
        // The opening may fail.
        let Some(rig) = rig(seed, log) else { return };
        let mut harness = rig.harness(seed);
        for number in 0..SLOTS {
            harness.submit(0, &write(number * BLOCK, number + 1));
        }
        harness.drain(|_| {});
        warm(&mut harness);
        let status = rig.offload.status();
        assert_eq!((status.copies, status.copies_max), (SLOTS, SLOTS));
        let store = Arc::clone(&rig.log);
        let disk = Disk::new(DiskOptions::default(), Vec::new(), store).unwrap();
        let mut spoiler = Harness::new(&disk, &HarnessOptions::default(), seed);
        spoiler.submit(0, &action(Operation::Write, LOG_LENGTH + 512, 512, 99));
        spoiler.submit(0, &action(Operation::Write, LOG_LENGTH + 3 * BLOCK, 2 * BLOCK, 99));
        spoiler.drain(|_| {});
        rig.offload.start().unwrap();
        for _ in 0..3 {
            for number in 0..SLOTS {
                harness.submit(0, &read(number * BLOCK, BLOCK));
            }
            harness.drain(|_| {});
        }
        let status = rig.offload.status();
        assert!(status.copies_failed >= 3, "{status:?}");
        failed += status.copies_failed;
    });
    assert!(failed > 200, "{failed} copies failed");
}

#[test]
fn a_change_removes_the_copies_of_its_blocks() {
    let rig = rig(1, SimOptions::new(VOLUME_LENGTH)).unwrap();
    let mut harness = rig.harness(1);
    warm(&mut harness);
    assert_eq!(rig.offload.status().copies, SLOTS);
    // A change removes the copy of its block.
    harness.submit(0, &action(Operation::WriteZeroes, 512, 512, 0));
    harness.drain(|_| {});
    assert_eq!(rig.offload.status().copies, SLOTS - 1);
    // One that touches many blocks removes them all.
    harness.submit(0, &action(Operation::Discard, 0, CAPACITY, 0));
    harness.drain(|_| {});
    assert_eq!(rig.offload.status().copies, 0);
    harness.verify(CAPACITY);
}

/// With `reads`, only reads are carried, and the tap above sees which layer answered them.
#[test]
fn reads_are_carried_alone() {
    let settings = OffloadOptions { carry: CarryKind::Reads, ..settings() };
    let (log, home) = (SimOptions::new(VOLUME_LENGTH), SimOptions::new(CAPACITY));
    let rig = Rig::with(1, 0.0, blank(), log, home, settings).unwrap();
    let tap = Tap::new(1, Labels::default());
    let layers = vec![Arc::new(tap.clone()) as _, Arc::new(rig.offload.clone()) as _];
    let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&rig.home) as _).unwrap();
    let options = HarnessOptions { queues: 1, depth: 8, simulated: true };
    let mut harness = Harness::new(&disk, &options, 1);
    warm(&mut harness);
    let mut reader = tap.attach().unwrap();
    let reads = rig.home.counts().reads;
    rig.offload.start().unwrap();
    for action in [read(0, BLOCK), write(0, 1), read(0, BLOCK), read(BLOCK, 512)] {
        harness.submit(0, &action);
        harness.drain(|_| {});
    }
    let mut events = Vec::new();
    reader.drain(&mut events);
    let answered = events.iter().filter(|event| event.record_type == EventType::Response as u8);
    let answered: Vec<_> = answered.map(|event| (event.layer, event.cache_hit)).collect();
    assert_eq!(answered, [(2, 2), (0, 0), (0, 0), (2, 2)]);
    assert_eq!(rig.home.counts().reads, reads + 1);
    let status = rig.offload.status();
    assert_eq!((status.state, status.carried, status.hits), (OffloadState::Carrying, 0, 2));
}

/// A scheduler that allows nothing at first.
#[derive(Default)]
struct Gatekeeper {
    is_open: AtomicBool,
    begun: AtomicU64,
    ended: AtomicU64,
}

impl BackgroundScheduler for Gatekeeper {
    fn open(&self, _: &str, layer: &'static str, _: Waker) -> u64 {
        assert_eq!(layer, "offload");
        1
    }

    fn ask(&self, _: u64, _: BackgroundStep, now_ns: u64) -> Permission {
        if self.is_open.load(Ordering::Relaxed) {
            self.begun.fetch_add(1, Ordering::Relaxed);
            return Permission::Begin;
        }
        Permission::Wait(now_ns + 10_000)
    }

    fn end(&self, _: u64, _: u64) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    fn rest(&self, _: u64) {}

    fn close(&self, _: u64) {}
}

/// What is read and written at home becomes copies, in all states and without further reads of
/// home.
#[test]
fn copies_are_made_of_what_passes() {
    let rig = rig(1, SimOptions::new(VOLUME_LENGTH)).unwrap();
    // It allows nothing.
    rig.disk.schedule_background(Arc::new(Gatekeeper::default()) as _);
    let mut harness = rig.harness(1);
    warm(&mut harness);
    assert_eq!((rig.offload.status().copies, rig.home.counts().reads), (SLOTS, 20 * SLOTS));
    // A change at rest renews the copy, after it has gone home.
    harness.submit(0, &write(0, 1));
    harness.drain(|_| {});
    for _ in 0..200 {
        harness.step();
    }
    let status = rig.offload.status();
    assert_eq!((status.copies, status.copies_made, status.hits), (SLOTS, SLOTS + 1, 0));
    rig.offload.start().unwrap();
    harness.submit(0, &read(0, BLOCK));
    harness.drain(|_| {});
    assert_eq!((rig.offload.status().hits, rig.home.counts().reads), (1, 20 * SLOTS));
    // One in the log takes its copy away, and what is read from the log does not become one.
    harness.submit(0, &write(0, 2));
    harness.drain(|_| {});
    harness.submit(0, &read(0, BLOCK));
    harness.drain(|_| {});
    let status = rig.offload.status();
    assert_eq!((status.copies, status.copies_made, status.hits), (SLOTS - 1, SLOTS + 1, 1));
    harness.verify(CAPACITY);
}

/// Other copies are made only when the scheduler of background work allows it, and only while the
/// layer rests.
#[test]
fn copies_are_made_in_idle_time() {
    let rig = rig(1, SimOptions::new(VOLUME_LENGTH)).unwrap();
    let scheduler = Arc::new(Gatekeeper::default());
    rig.disk.schedule_background(Arc::clone(&scheduler) as _);
    let mut harness = rig.harness(1);
    warm_by(&mut harness, 512);
    assert_eq!(rig.offload.status().copies_made, 0);
    scheduler.is_open.store(true, Ordering::Relaxed);
    rig.offload.start().unwrap();
    warm_by(&mut harness, 512);
    assert_eq!(rig.offload.status().copies_made, 0);
    rig.offload.stop();
    warm_by(&mut harness, 512);
    let made = rig.offload.status().copies_made;
    let counts = [&scheduler.begun, &scheduler.ended].map(|count| count.load(Ordering::Relaxed));
    assert_eq!((made, counts), (SLOTS, [SLOTS; 2]));
}

/// A place for copies that does not fit, or that has the log of another disk, is refused.
#[test]
fn a_place_for_copies_must_be_free() {
    let rig = rig(1, SimOptions::new(VOLUME_LENGTH)).unwrap();
    let volume = rig.volume();
    let refusal = |change: fn(&mut fathom_layers::wal::WalOptions)| {
        let mut options = offload::options();
        options.name = "another".into();
        change(&mut options);
        Offload::open(&volume, &options, settings())
            .err()
            .map(|error| format!("{:#}", error.failure("another")))
    };
    assert!(refusal(|options| options.size = 0).unwrap().contains("the log a `size`"));
    assert!(refusal(|options| options.size = 64 << 10).unwrap().contains("smaller `copies`"));
}
