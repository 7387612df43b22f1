//! Runs the cache, by seed, over a faulty volume and a faulty disk. Whatever happens, no read gets
//! other data than the disk beneath has, also after crashes of both.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fathom_backend::Memory;
use fathom_block::{Backend, Disk, DiskOptions, Layer, Operation};
use fathom_cache::Policy;
use fathom_layers::Cache;
use fathom_layers::cache::format::{PAGE_LENGTH, Superblock};
use fathom_layers::cache::{CacheDisk, CacheMode, CacheTimes, CacheVolume, Dropped, VolumeOptions};
use fathom_persistence::{Identity, Superblock as _};
use fathom_sim::{
    Action, Harness, HarnessOptions, Images, SimBackend, SimOptions, SimRecord, Workload,
    WorkloadOptions, each_seed,
};

#[path = "support/around.rs"]
mod around;
#[path = "support/images.rs"]
mod images;
#[path = "support/kept.rs"]
mod kept;

use around::Around;
use images::check_mappings;
use kept::{IDENTITY, Mark, harness};

const CAPACITY: u64 = 256 << 10;
const VOLUME: u64 = 256 << 10;

fn volume_options(seed: u64) -> VolumeOptions {
    VolumeOptions {
        identity: Some(IDENTITY),
        block_size: 4096 << (seed % 3),
        disks: 2,
        bitmap_pages: 1,
        is_kept: true,
        policy: [Policy::None, Policy::Sky, Policy::Auto][seed as usize / 2 % 3],
        times: CacheTimes { write_ns: 20_000, quiet_ns: 50_000, store_ns: u64::MAX },
    }
}

fn disk() -> CacheDisk {
    kept::disk(CAPACITY, Identity::NONE)
}

/// The length of a volume with about `slots` slots.
fn volume_length(seed: u64) -> u64 {
    VOLUME / 2 + VOLUME / 8 * (seed % 5)
}

struct Rig {
    record: SimRecord,
    volume: Arc<SimBackend>,
    home: Arc<SimBackend>,
    cache: Cache,
    disk: Arc<Disk>,
    mark: Arc<Mark>,
    /// The number of effects at the last check.
    checked: Cell<usize>,
}

impl Rig {
    fn new(seed: u64, crash_rate: f64, images: Images) -> Self {
        let volume = SimOptions::new(images[0].len() as u64);
        Self::with(seed, crash_rate, images, volume, SimOptions::new(CAPACITY)).unwrap()
    }

    fn with(
        seed: u64,
        crash_rate: f64,
        images: Images,
        volume: SimOptions,
        home: SimOptions,
    ) -> Option<Self> {
        let record = SimRecord::new(seed, crash_rate);
        let mut images = images.into_iter();
        let volume = record.store(volume, seed, images.next()?);
        let home = record.store(home, seed + 1_000_000, images.next()?);
        let options = volume_options(seed);
        let store = Arc::<SimBackend>::clone(&volume) as Arc<dyn Backend>;
        let opened = Arc::new(CacheVolume::open(store, &options).ok()?);
        let mark = Arc::new(Mark(AtomicU64::new(7)));
        let mode = CacheMode::ALL[(seed / 4 % 3 % 2) as usize];
        let cache = Cache::new(&opened, &disk(), mode, Arc::<Mark>::clone(&mark)).ok()?;
        let layers = vec![Arc::new(cache.clone()) as _];
        let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&home) as _).unwrap();
        record.crashes();
        Some(Self { record, volume, home, cache, disk, mark, checked: Cell::new(0) })
    }

    /// Checks what each crash since the last call has left.
    fn check_crashes(&self) -> (usize, usize) {
        if self.checked.replace(self.record.length()) == self.record.length() {
            return (0, 0);
        }
        let mut crashes = self.record.crashes();
        crashes.push(self.record.crash());
        let blocks = crashes.iter().map(check_images).sum();
        (crashes.len(), blocks)
    }
}

/// Checks that the content of each mapping that an opening would use is the disk's. Returns their
/// number.
fn check_images(images: &Images) -> usize {
    check_mappings(&images[0], &images[1])
}

fn blank(seed: u64) -> Images {
    vec![vec![0; volume_length(seed) as usize], vec![0; CAPACITY as usize]]
}

fn workload(seed: u64) -> Workload {
    let mut options = WorkloadOptions::new(CAPACITY);
    options.alignment = if seed % 2 == 0 { 4096 } else { 512 };
    options.weights = [60, 20, 8, 3, 3, 1, 3];
    options.hot_rate = 0.8;
    Workload::new(options, seed)
}

/// Lets time pass, so that the tables are loaded and written.
fn wait(harness: &mut Harness, rig: &Rig) {
    harness.drain(|_| {});
    let mut idle = 0;
    while idle < 100 {
        let before = rig.record.length();
        harness.step();
        rig.check_crashes();
        idle = if rig.record.length() == before { idle + 1 } else { 0 };
    }
}

#[test]
fn no_crash_leaves_old_content_in_the_cache() {
    let (mut cases, mut crashes, mut blocks, mut hits, mut evictions, mut overwritten) =
        (0, 0, 0, 0, 0, 0);
    each_seed(12, |seed| {
        cases += 1;
        let rig = Rig::new(seed, 0.1, blank(seed));
        let mut harness = harness(&rig.disk, seed);
        wait(&mut harness, &rig);
        let mut inspect = |_: &_| {
            let (more, found) = rig.check_crashes();
            crashes += more;
            blocks += found;
        };
        let mut workload = workload(seed);
        for _ in 0..3 {
            harness.run(&mut workload, 100, &mut inspect);
            wait(&mut harness, &rig);
        }
        harness.drain(&mut inspect);
        harness.verify(CAPACITY);
        let status = rig.cache.status();
        hits += status.reads.hits;
        evictions += status.blocks.evictions;
        overwritten += status.blocks.overwritten;
        assert_eq!((status.failed, status.mismatches), (None, 0));
    });
    assert!(crashes > 20 * cases && blocks > crashes && hits > 10 * cases as u64);
    assert!(evictions > cases as u64 && overwritten > cases as u64);
}

/// Several lives: each begins with what the crash before it left in both stores.
#[test]
fn a_disk_is_right_after_each_crash() {
    let mut kept = 0;
    each_seed(6, |seed| {
        let mut images = blank(seed);
        let mut workload = workload(seed);
        for life in 0..6 {
            let rig = Rig::new(seed, 0.05, images.clone());
            let mut harness = harness(&rig.disk, seed * 100 + life);
            harness.model_mut().restart(&images[1]);
            let mut inspect = |_: &_| {
                rig.check_crashes();
            };
            wait(&mut harness, &rig);
            kept += rig.cache.status().mapped;
            harness.run(&mut workload, 60, &mut inspect);
            if life % 2 == 0 {
                wait(&mut harness, &rig);
                harness.run(&mut workload, 20, &mut inspect);
            }
            if life == 3 {
                harness.verify(CAPACITY);
            }
            images = rig.record.crash();
            assert_eq!(harness.model().check_crash(&images[1]), Ok(()));
        }
    });
    assert!(kept > 100, "{kept} blocks survived crashes");
}

/// A disk leaves a volume that stays open, changes without the cache, and comes back. No crash from
/// then on finds the blocks of before.
#[test]
fn a_disk_that_changed_without_the_cache_begins_empty() {
    let (mut cases, mut crashes, mut blocks) = (0, 0, 0);
    each_seed(4, |seed| {
        cases += 1;
        let rig = Rig::new(seed, 0.2, blank(seed));
        let mut harness = harness(&rig.disk, seed);
        let mut requests = workload(seed);
        harness.run(&mut requests, 150, |_| {});
        wait(&mut harness, &rig);
        // The last requests may leave nothing in a small cache.
        for _ in 0..100 {
            if rig.cache.status().mapped > 0 {
                break;
            }
            harness.run(&mut requests, 10, |_| {});
            wait(&mut harness, &rig);
        }
        harness.rest(|_| {});
        drop(harness);
        assert!(rig.cache.status().mapped > 0);
        let Rig { record, volume, home, cache, disk, mark, checked } = rig;
        let opened = Arc::clone(cache.volume());
        drop((cache, disk));
        let alone = Disk::new(DiskOptions::default(), Vec::new(), Arc::clone(&home) as _).unwrap();
        let options = HarnessOptions { simulated: true, ..HarnessOptions::default() };
        let mut without = Harness::new(&alone, &options, seed);
        without.model_mut().restart(&home.image());
        without.run(&mut workload(seed + 1), 150, |_| {});
        without.rest(|_| {});
        drop((without, alone));

        let later = CacheDisk { expected: None, generation: 8, ..self::disk() };
        let mode = CacheMode::WriteThrough;
        let cache = Cache::new(&opened, &later, mode, Arc::<Mark>::clone(&mark)).unwrap();
        assert_eq!((cache.dropped(), cache.status().mapped), (Some(Dropped::Mark), 0));
        let layers = vec![Arc::new(cache.clone()) as _];
        let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&home) as _).unwrap();
        record.crashes();
        checked.set(record.length());
        let rig = Rig { record, volume, home, cache, disk, mark, checked };
        let mut harness = self::harness(&rig.disk, seed);
        harness.model_mut().restart(&rig.home.image());
        let mut inspect = |_: &_| {
            let (more, found) = rig.check_crashes();
            (crashes, blocks) = (crashes + more, blocks + found);
        };
        harness.run(&mut workload(seed + 2), 30, &mut inspect);
        wait(&mut harness, &rig);
        harness.run(&mut workload(seed + 3), 60, &mut inspect);
        wait(&mut harness, &rig);
        harness.verify(CAPACITY);
    });
    assert!(crashes > 10 * cases, "{crashes} crashes");
    // A crash of a single case may find an empty cache.
    assert!(blocks > 0 || cases < 4, "{blocks} blocks");
}

thread_local! {
    /// What happens when a queue of a [`watched`] store is opened next.
    static AT_OPENING: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
}

/// A store for which something happens when a queue is opened.
fn watched(store: &Arc<SimBackend>) -> Around {
    Around::new(store, store.capabilities(), |_, inner| {
        if let Some(action) = AT_OPENING.take() {
            action();
        }
        inner
    })
}

/// A cache on a volume with the blocks of a disk that was settled. `blocks` counts them.
fn settled_and_opened_again(seed: u64, blocks: &mut u64) -> Arc<CacheVolume> {
    let rig = Rig::new(seed, 0.0, blank(seed));
    let mut harness = harness(&rig.disk, seed);
    harness.run(&mut workload(seed), 150, |_| {});
    harness.rest(|_| {});
    rig.cache.save_state(&rig.disk, Duration::from_secs(20)).unwrap();
    *blocks += rig.cache.status().mapped;
    let image = rig.record.crash().swap_remove(0);
    drop((harness, rig));
    let length = image.len() as u64;
    let volume = Arc::new(SimBackend::with_image(SimOptions::new(length), seed, image));
    Arc::new(CacheVolume::open(Arc::new(watched(&volume)), &volume_options(seed)).unwrap())
}

/// A blank disk with the cache `volume`.
fn disk_on(volume: &Arc<CacheVolume>, found: &CacheDisk, seed: u64) -> (Cache, Arc<Disk>) {
    let mark = Arc::new(Mark(AtomicU64::new(7)));
    let cache = Cache::new(volume, found, CacheMode::WriteThrough, mark).unwrap();
    let layers = vec![Arc::new(cache.clone()) as _];
    let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), seed));
    (cache, Disk::new(DiskOptions::default(), layers, home).unwrap())
}

/// A disk whose blocks are out of date comes back while a queue of another disk loads the tables.
#[test]
fn a_disk_begins_empty_while_another_one_loads_the_tables() {
    let mut blocks = 0;
    each_seed(4, |seed| {
        let opened = settled_and_opened_again(seed, &mut blocks);
        let disk = |found: &CacheDisk| disk_on(&opened, found, seed);
        let (_other, other) = disk(&CacheDisk { name: "other".into(), ..self::disk() });
        let mut loader = Harness::new(&other, &HarnessOptions::default(), seed);
        let volume = Arc::clone(&opened);
        AT_OPENING.set(Some(Box::new(move || {
            let rounds = (0..100_000).take_while(|_| !volume.is_loaded());
            rounds.for_each(|_| _ = loader.step());
        })));
        let (cache, disk) = disk(&CacheDisk { expected: None, generation: 8, ..self::disk() });
        assert!(opened.is_loaded());
        assert_eq!((cache.dropped(), cache.status().mapped), (Some(Dropped::Mark), 0));
        // Its store has only zeroes now.
        Harness::new(&disk, &HarnessOptions::default(), seed).verify(CAPACITY);
    });
    assert!(blocks > 0, "nothing was in the tables");
}

/// A disk leaves the cache while a queue of another disk loads the tables: its blocks keep no
/// slots.
#[test]
fn a_disk_that_leaves_while_the_tables_are_loaded_keeps_no_slots() {
    let mut blocks = 0;
    each_seed(4, |seed| {
        let opened = settled_and_opened_again(seed, &mut blocks);
        let disk = |found: &CacheDisk| disk_on(&opened, found, seed);
        let (leaving, leaving_disk) = disk(&self::disk());
        assert_eq!(leaving.dropped(), None);
        let (_other, other) = disk(&CacheDisk { name: "other".into(), ..self::disk() });
        let mut loader = Harness::new(&other, &HarnessOptions::default(), seed);
        assert!(!opened.is_loaded());
        let volume = Arc::clone(&opened);
        AT_OPENING.set(Some(Box::new(move || {
            let rounds = (0..100_000).take_while(|_| !volume.is_loaded());
            rounds.for_each(|_| _ = loader.step());
        })));
        Layer::leave(&leaving, &leaving_disk, Duration::from_secs(20)).unwrap();
        assert!(opened.is_loaded());
        assert_eq!(leaving.status().mapped, 0);
    });
    assert!(blocks > 0, "nothing was in the tables");
}

/// After an orderly end, the next start finds all that was cached.
#[test]
fn an_orderly_end_keeps_the_cache() {
    each_seed(12, |seed| {
        let rig = Rig::new(seed, 0.0, blank(seed));
        let mut harness = harness(&rig.disk, seed);
        harness.run(&mut workload(seed), 100, |_| {});
        harness.drain(|_| {});
        harness.rest(|_| {});
        rig.cache.save_state(&rig.disk, Duration::from_secs(20)).unwrap();
        let before = rig.cache.status();
        assert_eq!(before.regions, 0);
        let images = rig.record.crash();
        drop(harness);
        let again = Rig::new(seed, 0.0, images.clone());
        let mut harness = Harness::new(&again.disk, &HarnessOptions::default(), seed);
        harness.model_mut().restart(&images[1]);
        wait(&mut harness, &again);
        let after = again.cache.status();
        assert!(after.is_loaded);
        assert_eq!((after.mapped, after.regions), (before.mapped, 0));
        harness.verify(CAPACITY);
        assert_eq!(again.mark.0.load(Ordering::Relaxed), 7);
    });
}

/// A cache in memory needs no tables. Queues of one disk never get other data than the disk has.
#[test]
fn a_cache_in_memory_follows_the_disk() {
    let (mut cases, mut hits, mut evictions) = (0, 0, 0);
    each_seed(60, |seed| {
        cases += 1;
        let length = volume_length(seed);
        let volume = Arc::new(SimBackend::new(SimOptions::new(length), seed)) as Arc<dyn Backend>;
        let options = VolumeOptions { is_kept: false, ..volume_options(seed) };
        let opened = Arc::new(CacheVolume::open(volume, &options).unwrap());
        let home = Arc::new(SimBackend::new(SimOptions::new(CAPACITY), seed + 1));
        let mark = Arc::new(Mark(AtomicU64::new(0)));
        let mode = CacheMode::ALL[seed as usize % 2];
        let cache = Cache::new(&opened, &disk(), mode, mark).unwrap();
        let layers = vec![Arc::new(cache.clone()) as _];
        let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&home) as _).unwrap();
        let (queues, depth) = (1 + seed as usize % 4, 1 + (seed as usize * 5) % 16);
        let options = HarnessOptions { queues, depth, simulated: true };
        let mut harness = Harness::new(&disk, &options, seed);
        harness.run(&mut workload(seed), 500, |_| {});
        harness.drain(|_| {});
        harness.verify(CAPACITY);
        assert_eq!(harness.model().check_now(&home.image()), Ok(()));
        harness.rest(|_| {});
        let status = cache.status();
        (hits, evictions) = (hits + status.reads.hits, evictions + status.blocks.evictions);
        // A layer that leaves and comes back finds nothing: the disk has changed without it.
        let (slots, mapped) = (status.slots, status.mapped);
        assert!(slots > 0 && mapped > 0, "{status:?}");
        drop((harness, disk, cache));
        let mark = Arc::new(Mark(AtomicU64::new(0)));
        let again = Cache::new(&opened, &self::disk(), mode, mark).unwrap();
        assert_eq!(again.status().mapped, 0);
        assert!(
            Cache::new(&opened, &self::disk(), mode, Arc::new(Mark(AtomicU64::new(0)))).is_err(),
            "the disk is served once"
        );
    });
    assert!(hits > 10 * cases && evictions > 10 * cases, "{hits} hits, {evictions} evictions");
}

/// Blocks beyond the end of a disk that shrinks do not come back when it grows.
#[test]
fn a_disk_that_shrinks_and_grows_has_zeroes() {
    let volume = Arc::new(SimBackend::new(SimOptions::new(VOLUME), 1)) as Arc<dyn Backend>;
    let options = VolumeOptions { is_kept: false, ..volume_options(0) };
    let opened = Arc::new(CacheVolume::open(volume, &options).unwrap());
    let mark = Arc::new(Mark(AtomicU64::new(0)));
    let cache = Cache::new(&opened, &disk(), CacheMode::WriteThrough, mark).unwrap();
    let home = Arc::new(Memory::open(CAPACITY).unwrap());
    let layers = vec![Arc::new(cache.clone()) as _];
    let disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
    let mut harness = Harness::new(&disk, &HarnessOptions::default(), 1);
    let flags = fathom_block::Flags::default();
    let write =
        |offset| Action { operation: Operation::Write, offset, length: 4096, flags, content: 5 };
    for offset in [0, CAPACITY / 2, CAPACITY - 4096] {
        harness.submit(0, &write(offset));
    }
    harness.rest(|_| {});
    assert_eq!(cache.status().mapped, 3);
    disk.resize(CAPACITY / 2).unwrap();
    assert_eq!(cache.status().mapped, 1);
    disk.resize(CAPACITY).unwrap();
    let zeroes = |offset| Action { operation: Operation::WriteZeroes, ..write(offset) };
    // What the model expects of a disk that has shrunk.
    let mut model = vec![0; CAPACITY as usize];
    fathom_sim::pattern(&mut model[..4096], 5);
    harness.model_mut().restart(&model);
    harness.verify(CAPACITY);
    harness.submit(0, &zeroes(0));
    harness.drain(|_| {});
    harness.verify(CAPACITY);
    assert!(cache.status().reads.hit_bytes > 0);
}

/// What a volume returns is compared with checksums, also if a read wants a part of a granule.
#[test]
fn a_volume_with_other_content_gives_none_of_it() {
    let (mut blocks, mut failed) = (0, 0);
    each_seed(6, |seed| {
        let rig = Rig::new(seed, 0.0, blank(seed));
        let mut harness = harness(&rig.disk, seed);
        harness.run(&mut workload(seed), 150, |_| {});
        harness.rest(|_| {});
        rig.cache.save_state(&rig.disk, Duration::from_secs(20)).unwrap();
        let mut images = rig.record.crash();
        drop((harness, rig));
        let format = Superblock::select(&images[0][..2 * PAGE_LENGTH]).unwrap();
        for byte in &mut images[0][format.slot_offset(0) as usize..] {
            *byte ^= 0x55;
        }
        let rig = Rig::new(seed, 0.0, images.clone());
        let mut harness = Harness::new(&rig.disk, &HarnessOptions::default(), seed);
        harness.model_mut().restart(&images[1]);
        let rounds = (0..100_000).take_while(|_| !rig.cache.volume().is_loaded());
        rounds.for_each(|_| _ = harness.step());
        blocks += rig.cache.status().mapped;
        let mut read = |from: u64, length: u64| {
            let flags = fathom_block::Flags::default();
            for offset in (from..CAPACITY).step_by(4096) {
                let operation = Operation::Read;
                harness.submit(0, &Action { operation, offset, length, flags, content: 0 });
                harness.drain(|_| {});
            }
        };
        read(512, 512);
        assert_eq!((rig.cache.status().reads.hit_bytes, rig.cache.status().failed), (0, None));
        read(0, 4096);
        harness.rest(|_| {});
        let status = rig.cache.status();
        failed += u64::from(status.mismatches > 0 && status.failed.is_some());
    });
    assert!(blocks > 0 && failed > 0, "{blocks} blocks, {failed} volumes");
}

/// Errors of the volume cost no data and no request; errors of the disk are its own.
#[test]
fn a_volume_with_errors_is_taken_out_of_service() {
    let (mut cases, mut failed) = (0, 0);
    each_seed(40, |seed| {
        let mut volume = SimOptions::new(volume_length(seed));
        match seed % 3 {
            0 => volume.write_error_rate = 0.02,
            1 => volume.read_error_rate = 0.05,
            _ => volume.flush_error_rate = 0.1,
        }
        let home = SimOptions::new(CAPACITY);
        let Some(rig) = Rig::with(seed, 0.05, blank(seed), volume, home) else { return };
        cases += 1;
        let mut harness = harness(&rig.disk, seed);
        harness.run(&mut workload(seed), 200, |_| {});
        harness.drain(|_| {});
        harness.verify(CAPACITY);
        let status = rig.cache.status();
        failed += u64::from(status.failed.is_some());
        assert_eq!(harness.model().check_now(&rig.home.image()), Ok(()));
        if status.failed.is_some() {
            // The next change was preceded by a change of the mark.
            let action = workload(seed + 1).find(|action| action.operation == Operation::Write);
            harness.submit(0, &action.unwrap());
            harness.drain(|_| {});
            assert!(rig.mark.0.load(Ordering::Relaxed) > 7);
        }
        drop(rig.volume);
    });
    assert!(failed * 2 > cases, "{failed} of {cases}");
}
