//! Runs the cache over a write-ahead log on the same volume, by seed: the mode `write-back`. Both the volume and
//! the disk beneath are faulty. Whenever both crash, all acknowledged changes survive, and nothing old is read.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fathom_block::{Backend, Disk, DiskOptions, Operation};
use fathom_cache::Policy;
use fathom_layers::cache::format::{PAGE_LENGTH, Superblock};
use fathom_layers::cache::{CacheDisk, CacheMode, CacheTimes, CacheVolume, VolumeOptions};
use fathom_layers::wal::{LogVolume, WalOptions};
use fathom_layers::{Cache, Wal};
use fathom_sim::{
    Action, Harness, HarnessOptions, Images, ModelDisk, SimBackend, SimOptions, SimRecord,
    Workload, WorkloadOptions, each_seed,
};
use fathom_wal::RING_OFFSET;

#[path = "support/images.rs"]
mod images;
#[path = "support/kept.rs"]
mod kept;

use images::{check_mappings, with_log};
use kept::{IDENTITY, Mark, harness};

const CAPACITY: u64 = 192 << 10;
const LOG: [u8; 16] = *b"identity of log ";
/// The part of a log's place that is used, in bytes: a short ring wraps around and is full at times.
const LOG_LENGTH: u64 = RING_OFFSET + (56 << 10);

/// The format of the volume for a seed, with a place for a log.
fn format(seed: u64) -> Superblock {
    let length = (112 << 10) + (24 << 10) * (seed % 5);
    let format = Superblock::new(IDENTITY, length, 4096 << (seed % 3), 2, 1).unwrap();
    format.with_logs(1, 128 << 10).unwrap()
}

fn disk() -> CacheDisk {
    CacheDisk {
        name: "disk".into(),
        home: "image".into(),
        capacity: CAPACITY,
        expected: Some(7),
        stamp: None,
        generation: 7,
        log: LOG,
        region_shift: 15,
    }
}

/// The images of a volume that was just made, and of an empty disk.
fn blank(seed: u64) -> Images {
    let format = format(seed);
    let mut volume = vec![0; format.length() as usize];
    for copy in volume[..2 * PAGE_LENGTH].chunks_mut(PAGE_LENGTH) {
        copy.copy_from_slice(&format.encode());
    }
    vec![volume, vec![0; CAPACITY as usize]]
}

/// The bytes that a disk has after a start with `images`.
fn content(seed: u64, images: &Images) -> Vec<u8> {
    with_log(&images[0][format(seed).log_offset(0) as usize..], &images[1])
}

struct Rig {
    seed: u64,
    record: SimRecord,
    home: Arc<SimBackend>,
    cache: Cache,
    wal: Wal,
    disk: Arc<Disk>,
    mark: Arc<Mark>,
    /// The number of effects at the last check.
    checked: Cell<usize>,
    /// The images after crashes while the log and the cache were being opened.
    openings: Vec<Images>,
}

impl Rig {
    fn new(seed: u64, life: u64, crash_rate: f64, images: Images) -> Self {
        let volume = SimOptions::new(images[0].len() as u64);
        Self::with(seed, life, crash_rate, images, volume, SimOptions::new(CAPACITY)).unwrap()
    }

    fn with(
        seed: u64,
        life: u64,
        crash_rate: f64,
        images: Images,
        volume: SimOptions,
        home: SimOptions,
    ) -> Option<Self> {
        let record = SimRecord::new(seed + life * 7919, crash_rate);
        let mut images = images.into_iter();
        let store = record.store(volume, seed + life, images.next()?);
        let home = record.store(home, seed + life + 1_000_000, images.next()?);
        let store = store as Arc<dyn Backend>;
        let logs = Arc::new(LogVolume::new(Arc::clone(&store)));
        let options = WalOptions {
            name: "disk".into(),
            home: "image".into(),
            home_capacity: CAPACITY,
            offset: format(seed).log_offset(0),
            size: LOG_LENGTH,
            block_size: 512,
            identity: LOG,
            age_ns: 20_000,
            expected: None,
        };
        let wal = Wal::open(&logs, &options).ok()?;
        let policy = [Policy::None, Policy::Sky, Policy::Auto][seed as usize / 2 % 3];
        let options = VolumeOptions {
            identity: None,
            block_size: 0,
            disks: 0,
            bitmap_pages: 0,
            is_kept: true,
            policy,
            times: CacheTimes { write_ns: 20_000, quiet_ns: 50_000 },
        };
        let opened = Arc::new(CacheVolume::open(store, &options).ok()?);
        let mark = Arc::new(Mark(AtomicU64::new(7)));
        let mode = CacheMode::WriteBack;
        let cache = Cache::new(&opened, &disk(), mode, Arc::<Mark>::clone(&mark)).ok()?;
        let layers = vec![Arc::new(cache.clone()) as _, Arc::new(wal.clone()) as _];
        let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&home) as _).unwrap();
        let openings = record.crashes();
        let checked = Cell::new(0);
        Some(Self { seed, record, home, cache, wal, disk, mark, checked, openings })
    }

    /// Checks what each crash since the last call has left. Returns the number of crashes and of the mappings.
    fn check_crashes(&self, model: &ModelDisk) -> (usize, usize) {
        if self.checked.replace(self.record.length()) == self.record.length() {
            return (0, 0);
        }
        let mut crashes = self.record.crashes();
        crashes.push(self.record.crash());
        let mut mappings = 0;
        for (number, images) in crashes.iter().enumerate() {
            let content = content(self.seed, images);
            if let Err(violation) = model.check_crash(&content) {
                panic!("crash {number} after {} effects: {violation}", self.record.length());
            }
            // After the cache was taken out of service, no start uses its mappings.
            if self.mark.0.load(Ordering::Relaxed) == 7 {
                mappings += check_mappings(&images[0], &content);
            }
        }
        (crashes.len(), mappings)
    }

    /// Checks that crashes during the opening have left the content of before.
    fn check_openings(&self, before: &[u8]) -> usize {
        for images in &self.openings {
            // There is no log yet while the first one is being made.
            let log = &images[0][format(self.seed).log_offset(0) as usize..];
            let is_made = fathom_wal::select(&log[..4096], &log[4096..8192]).is_ok();
            let content = if is_made { content(self.seed, images) } else { images[1].clone() };
            assert!(content == before, "a crash at an opening has changed the content");
            check_mappings(&images[0], &content);
        }
        self.openings.len()
    }
}

/// Lets time pass, so that the tables are loaded and written, and the log is written home.
fn wait(harness: &mut Harness, rig: &Rig, mut inspect: impl FnMut(&ModelDisk)) {
    harness.drain(&mut inspect);
    let mut idle = 0;
    while idle < 100 {
        let before = rig.record.length();
        harness.step();
        inspect(harness.model());
        idle = if rig.record.length() == before { idle + 1 } else { 0 };
    }
}

fn workload(seed: u64) -> Workload {
    let mut options = WorkloadOptions::new(CAPACITY);
    options.alignment = if seed % 2 == 0 { 4096 } else { 512 };
    options.length_max = 8 << 10;
    options.weights = [40, 40, 8, 4, 4, 1, 3];
    options.hot_rate = 0.8;
    Workload::new(options, seed)
}

#[test]
fn acknowledged_changes_survive_crashes_and_nothing_old_is_read() {
    let (mut cases, mut crashes, mut mappings, mut hits, mut rounds) = (0, 0, 0, 0, 0);
    each_seed(30, |seed| {
        cases += 1;
        let rig = Rig::new(seed, 0, 0.1, blank(seed));
        let mut harness = harness(&rig.disk, seed);
        let mut inspect = |model: &ModelDisk| {
            let (more, found) = rig.check_crashes(model);
            (crashes, mappings) = (crashes + more, mappings + found);
        };
        let mut workload = workload(seed);
        for _ in 0..3 {
            harness.run(&mut workload, 40, &mut inspect);
            wait(&mut harness, &rig, &mut inspect);
        }
        harness.verify(CAPACITY);
        harness.rest(|_| {});
        let status = rig.cache.status();
        assert_eq!((status.failed, status.mismatches), (None, 0));
        hits += status.hits;
        rounds += rig.wal.status().rounds;
        rig.wal.drain(&rig.disk, Duration::from_secs(20)).unwrap();
        assert_eq!(harness.model().check_now(&rig.home.image()), Ok(()));
        assert_eq!(rig.mark.0.load(Ordering::Relaxed), 7);
    });
    assert!(crashes > 50 * cases && mappings > crashes, "{crashes} crashes, {mappings} mappings");
    assert!(rounds > cases as u64 && hits > cases as u64, "{rounds} rounds, {hits} hits");
}

/// Several lives: each begins with what the crash before it left, of both stores. Some end at once, while the
/// log is recovered and the tables are loaded.
#[test]
fn a_disk_is_right_after_any_number_of_crashes() {
    let (mut kept, mut openings) = (0, 0);
    each_seed(20, |seed| {
        let mut images = blank(seed);
        let mut before = vec![0; CAPACITY as usize];
        let mut workload = workload(seed);
        for life in 0..8 {
            let rig = Rig::new(seed, life, 0.05, images.clone());
            openings += rig.check_openings(&before);
            let mut harness = harness(&rig.disk, seed * 100 + life);
            harness.model_mut().restart(&before);
            let mut inspect = |model: &ModelDisk| {
                rig.check_crashes(model);
            };
            if life % 3 == 2 {
                for _ in 0..seed % 20 {
                    harness.step();
                }
            } else {
                harness.run(&mut workload, 40, &mut inspect);
            }
            if life % 2 == 0 {
                wait(&mut harness, &rig, &mut inspect);
                kept += rig.cache.status().mapped;
                harness.run(&mut workload, 10, &mut inspect);
            }
            if life == 3 || life == 7 {
                harness.verify(CAPACITY);
            }
            // The crash occurs with requests in flight.
            images = rig.record.crash();
            before = content(seed, &images);
            assert_eq!(harness.model().check_crash(&before), Ok(()));
        }
    });
    assert!(kept > 100 && openings > 24, "{kept} blocks, {openings} crashes at openings");
}

/// Errors of the volume take the cache out of service, and let changes fail. Errors of the disk beneath fail
/// changes only when the log is full. What was acknowledged is read.
#[test]
fn acknowledged_changes_survive_errors_of_a_store() {
    let (mut cases, mut failed, mut out, mut stopped) = (0, 0, 0, 0);
    each_seed(45, |seed| {
        let images = blank(seed);
        let mut volume = SimOptions::new(images[0].len() as u64);
        let mut home = SimOptions::new(CAPACITY);
        match seed % 3 {
            0 => volume.write_error_rate = 0.01,
            1 => volume.flush_error_rate = 0.03,
            _ => {
                home.write_error_rate = 0.1;
                home.flush_error_rate = 0.1;
            }
        }
        let Some(rig) = Rig::with(seed, 0, 0.05, images, volume, home) else { return };
        cases += 1;
        let mut harness = harness(&rig.disk, seed);
        harness.allow_errors();
        let mut inspect = |model: &ModelDisk| {
            rig.check_crashes(model);
        };
        harness.run(&mut workload(seed), 100, &mut inspect);
        harness.drain(&mut inspect);
        harness.verify(CAPACITY);
        failed += harness.statistics().failed;
        out += u64::from(rig.cache.status().failed.is_some());
        stopped += u64::from(rig.wal.status().log_failed.is_some());
    });
    assert!(
        failed > cases && out * 4 > cases && stopped * 4 > cases,
        "{failed} failed, {out} caches and {stopped} logs of {cases} out of service"
    );
}

/// All changes that wait at the same time share a write and a flush of the volume for each queue and batch.
#[test]
fn changes_that_wait_share_a_flush() {
    const QUEUES: usize = 4;
    const EACH: usize = 8;
    // All writes take equally long.
    let images = blank(1);
    let volume = SimOptions { rounds_max: 1, ..SimOptions::new(images[0].len() as u64) };
    let home = SimOptions::new(CAPACITY);
    let rig = Rig::with(1, 0, 0.0, images, volume, home).unwrap();
    let options = HarnessOptions { queues: QUEUES, depth: EACH, simulated: true };
    let mut harness = Harness::new(&rig.disk, &options, 1);
    let flags = fathom_block::Flags::default();
    let write = |place: u64, content| {
        let (operation, offset) = (Operation::Write, place * 4096);
        Action { operation, offset, length: 512, flags, content }
    };
    // The regions get their bits, which the first change of each waits for.
    for place in 0..CAPACITY / 4096 {
        harness.submit(0, &write(place, 1));
        harness.drain(|_| {});
    }
    harness.rest(|_| {});
    rig.wal.drain(&rig.disk, Duration::from_secs(20)).unwrap();
    rig.wal.set_age(u64::MAX);
    for round in 0..1 {
        let before = rig.wal.status().volume_flushes;
        for queue in 0..QUEUES {
            // Less than the log has room for.
            for place in 0..EACH {
                harness.submit(queue, &write((queue * EACH + place) as u64, round + 2));
            }
        }
        harness.drain(|_| {});
        let flushes = rig.wal.status().volume_flushes - before;
        // Each queue writes its first change alone, and the others together.
        assert!((1..=6).contains(&flushes), "round {round}: {flushes} flushes for 32 changes");
    }
    harness.verify(CAPACITY);
}
