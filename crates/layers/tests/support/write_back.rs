//! A cache in the mode `write-back` over a log on the same volume, with faulty stores.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::{Backend, Disk, DiskOptions};
use fathom_cache::Policy;
use fathom_layers::cache::format::{PAGE_LENGTH, Superblock};
use fathom_layers::cache::{CacheDisk, CacheMode, CacheTimes, CacheVolume, VolumeOptions};
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_layers::{Cache, Wal};
use fathom_persistence::{Identity, Superblock as _};
use fathom_sim::{
    Harness, Images, ModelDisk, SimBackend, SimOptions, SimRecord, Workload, WorkloadOptions,
};
use fathom_wal::RING_OFFSET;

use crate::images::{mappings, with_log};
use crate::kept::{self, IDENTITY, Mark};

pub const CAPACITY: u64 = 192 << 10;
const LOG: Identity = Identity(*b"identity of log ");
/// The part of a log's place that is used, in bytes: a short ring wraps around and is full at
/// times.
const LOG_LENGTH: u64 = RING_OFFSET + (56 << 10);

/// The format of the volume for a seed, with a place for a log.
pub fn format(seed: u64) -> Superblock {
    let length = (112 << 10) + (24 << 10) * (seed % 5);
    let format = Superblock::new(IDENTITY, length, 4096 << (seed % 3), 2, 1).unwrap();
    format.with_logs(1, 128 << 10).unwrap()
}

pub fn disk() -> CacheDisk {
    kept::disk(CAPACITY, LOG)
}

/// The images of a volume that was just made, and of an empty disk.
pub fn blank(seed: u64) -> Images {
    let format = format(seed);
    let mut volume = vec![0; format.length() as usize];
    for copy in volume[..2 * PAGE_LENGTH].chunks_mut(PAGE_LENGTH) {
        copy.copy_from_slice(&format.encode());
    }
    vec![volume, vec![0; CAPACITY as usize]]
}

/// The place for the log in `images`.
pub fn log_of(seed: u64, images: &Images) -> &[u8] {
    &images[0][format(seed).log_offset(0) as usize..]
}

/// The bytes that a disk has after a start with `images`.
pub fn content(seed: u64, images: &Images) -> Vec<u8> {
    with_log(log_of(seed, images), &images[1])
}

/// How the cache and the log of a rig know of each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Knowledge {
    /// As in the daemon.
    Full,
    /// The log does not know of the cache's notes, although the cache relies on that: a mistake.
    NoNotes,
    /// No change relies on the log.
    NoLog,
}

/// Checks what crashes leave.
pub struct Watch {
    seed: u64,
    pub record: SimRecord,
    pub mark: Arc<Mark>,
    /// The number of effects at the last check.
    checked: Cell<usize>,
    /// The images after crashes while the log and the cache were being opened.
    openings: Vec<Images>,
}

pub struct Rig {
    pub watch: Watch,
    pub store: Arc<SimBackend>,
    pub home: Arc<SimBackend>,
    pub volume: Arc<CacheVolume>,
    pub logs: Arc<LogVolume>,
    pub cache: Cache,
    pub wal: Wal,
    pub disk: Arc<Disk>,
}

/// The settings of the log.
pub fn log_options(seed: u64) -> WalOptions {
    WalOptions {
        name: "disk".into(),
        home: "image".into(),
        home_capacity: CAPACITY,
        home_alignment: 1,
        offset: format(seed).log_offset(0),
        size: LOG_LENGTH,
        block_size: 512,
        identity: LOG,
        age_ns: 20_000,
        completion: Completion::Written,
        expected: None,
        mark: None,
        times: None,
        home_store: fathom_layers::wal::HomeStore::default(),
        clock_start_ns: 0,
    }
}

impl Rig {
    pub fn new(seed: u64, life: u64, crash_rate: f64, images: Images) -> Self {
        Self::knowing(Knowledge::Full, seed, life, crash_rate, images)
    }

    pub fn knowing(
        knowledge: Knowledge,
        seed: u64,
        life: u64,
        crash_rate: f64,
        images: Images,
    ) -> Self {
        let volume = SimOptions::new(images[0].len() as u64);
        let home = SimOptions::new(CAPACITY);
        Self::with(knowledge, seed, life, crash_rate, images, volume, home).unwrap()
    }

    pub fn with(
        knowledge: Knowledge,
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
        // The store may have room to grow.
        home.resize(CAPACITY).unwrap();
        let volume = Arc::clone(&store);
        let store = store as Arc<dyn Backend>;
        let logs = Arc::new(LogVolume::new(Arc::clone(&store)));
        let wal = Wal::open(&logs, &log_options(seed)).ok()?;
        let policy = [Policy::None, Policy::Sky, Policy::Auto][seed as usize / 2 % 3];
        let options = VolumeOptions {
            identity: None,
            block_size: 0,
            disks: 0,
            bitmap_pages: 0,
            is_kept: true,
            policy,
            // The log writes changes back before the tables are written, or after that.
            times: [
                CacheTimes { write_ns: 20_000, quiet_ns: 50_000, store_ns: u64::MAX },
                CacheTimes { write_ns: 1_000_000_000, quiet_ns: 3_000_000_000, store_ns: u64::MAX },
            ][seed as usize / 3 % 2],
        };
        let opened = Arc::new(CacheVolume::open(store, &options).ok()?);
        let mark = Arc::new(Mark(AtomicU64::new(7)));
        let mode = CacheMode::WriteBack;
        let found = CacheDisk { changes: wal.ranges(), ..disk() };
        let cache = Cache::new(&opened, &found, mode, Arc::<Mark>::clone(&mark)).ok()?;
        if knowledge == Knowledge::Full {
            wal.set_notes(cache.notes());
        }
        cache.rely_on_log(knowledge != Knowledge::NoLog);
        let layers = vec![Arc::new(cache.clone()) as _, Arc::new(wal.clone()) as _];
        let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&home) as _).unwrap();
        let openings = record.crashes();
        let watch = Watch { seed, record, mark, checked: Cell::new(0), openings };
        Some(Self { watch, store: volume, home, volume: opened, logs, cache, wal, disk })
    }
}

impl Watch {
    /// Checks what each crash since the last call has left. Returns the number of crashes and of
    /// the mappings.
    pub fn check_crashes(&self, model: &ModelDisk) -> (usize, usize) {
        self.violations(model).unwrap()
    }

    /// As [`check_crashes`](Self::check_crashes). Returns what is wrong with the cache, if
    /// something is.
    pub fn violations(&self, model: &ModelDisk) -> Result<(usize, usize), String> {
        if self.checked.replace(self.record.length()) == self.record.length() {
            return Ok((0, 0));
        }
        let mut crashes = self.record.crashes();
        crashes.push(self.record.crash());
        let mut found = 0;
        for (number, images) in crashes.iter().enumerate() {
            let content = content(self.seed, images);
            if let Err(violation) = model.check_crash(&content) {
                panic!("crash {number} after {} effects: {violation}", self.record.length());
            }
            // After the cache was taken out of service, no start uses its mappings.
            if self.mark.0.load(Ordering::Relaxed) == 7 {
                found += mappings(&images[0], Some(log_of(self.seed, images)), &content)?;
            }
        }
        Ok((crashes.len(), found))
    }

    /// Checks that crashes during the opening have left the content of before.
    pub fn check_openings(&self, before: &[u8]) -> usize {
        for images in &self.openings {
            let content = content(self.seed, images);
            assert!(content == before, "a crash at an opening has changed the content");
            mappings(&images[0], Some(log_of(self.seed, images)), &content).unwrap();
        }
        self.openings.len()
    }
}

/// Lets time pass, so that the tables are loaded and written, and the log is written home.
pub fn wait(harness: &mut Harness, rig: &Rig, mut inspect: impl FnMut(&ModelDisk)) {
    harness.drain(&mut inspect);
    let mut idle = 0;
    while idle < 100 {
        let before = rig.watch.record.length();
        harness.step();
        inspect(harness.model());
        idle = if rig.watch.record.length() == before { idle + 1 } else { 0 };
    }
}

pub fn workload(seed: u64) -> Workload {
    let mut options = WorkloadOptions::new(CAPACITY);
    options.alignment = if seed % 2 == 0 { 4096 } else { 512 };
    options.length_max = 8 << 10;
    options.weights = [40, 40, 8, 4, 4, 1, 3];
    options.hot_rate = 0.8;
    Workload::new(options, seed)
}
