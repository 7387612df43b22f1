//! A disk with the layer `offload`, over two faulty stores that crash together.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::sync::Arc;

use fathom_block::{Backend, Disk, DiskOptions, ErrorKind, Flags, Operation};
use fathom_layers::Offload;
use fathom_layers::offload::OffloadOptions;
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_persistence::Identity;
use fathom_sim::{
    Action, Harness, HarnessOptions, Images, ModelDisk, SimBackend, SimOptions, SimRecord,
    Workload, WorkloadOptions,
};
use fathom_wal::RING_OFFSET;

use crate::images::with_log;

pub const CAPACITY: u64 = 64 << 10;
pub const LOG_LENGTH: u64 = RING_OFFSET + (40 << 10);

pub fn options() -> WalOptions {
    WalOptions {
        name: "disk".into(),
        home: "image".into(),
        home_capacity: CAPACITY,
        home_alignment: 1,
        offset: 0,
        size: LOG_LENGTH,
        block_size: 512,
        identity: Identity(*b"identity of test"),
        age_ns: 20_000,
        completion: Completion::Durable,
        expected: None,
        mark: None,
        times: None,
        home_store: fathom_layers::wal::HomeStore::default(),
        clock_start_ns: 0,
    }
}

/// The disk has 16 regions.
pub fn settings() -> OffloadOptions {
    OffloadOptions { region_shift: 12, ..OffloadOptions::default() }
}

pub struct Rig {
    pub record: SimRecord,
    pub log: Arc<SimBackend>,
    pub home: Arc<SimBackend>,
    pub offload: Offload,
    pub disk: Arc<Disk>,
    volume: Arc<LogVolume>,
    random: fastrand::Rng,
}

pub fn blank() -> Images {
    vec![vec![0; LOG_LENGTH as usize], vec![0; CAPACITY as usize]]
}

/// The content of the disk after a start with `images`.
pub fn recovered(images: &Images) -> Vec<u8> {
    with_log(&images[0], &images[1])
}

impl Rig {
    pub fn new(seed: u64, crash_rate: f64, images: Images) -> Self {
        let frees_zeroes = seed % 2 == 1;
        let log = SimOptions { frees_zeroes, ..SimOptions::new(LOG_LENGTH) };
        let home = SimOptions::new(CAPACITY);
        Self::with(seed, crash_rate, images, log, home, settings()).unwrap()
    }

    /// With an empty log in a store with these options.
    pub fn on(seed: u64, crash_rate: f64, log: SimOptions) -> Self {
        Self::with(seed, crash_rate, blank(), log, SimOptions::new(CAPACITY), settings()).unwrap()
    }

    /// `None` if the log cannot be opened because its store fails.
    pub fn with(
        seed: u64,
        crash_rate: f64,
        images: Images,
        log: SimOptions,
        home: SimOptions,
        settings: OffloadOptions,
    ) -> Option<Self> {
        let record = SimRecord::new(seed, crash_rate);
        let mut images = images.into_iter();
        let log = record.store(log, seed, images.next().unwrap());
        let home = record.store(home, seed + 1_000_000, images.next().unwrap());
        let volume = Arc::new(LogVolume::new(Arc::clone(&log) as Arc<dyn Backend>));
        let offload = Offload::open(&volume, &options(), settings).ok()?;
        let layers = vec![Arc::new(offload.clone()) as _];
        let disk = Disk::new(DiskOptions::default(), layers, Arc::clone(&home) as _).unwrap();
        let random = fastrand::Rng::with_seed(seed);
        Some(Self { record, log, home, offload, disk, volume, random })
    }

    pub fn volume(&self) -> Arc<LogVolume> {
        Arc::clone(&self.volume)
    }

    pub fn harness(&self, seed: u64) -> Harness {
        let (queues, depth) = (1 + seed as usize % 4, 1 + (seed as usize * 5) % 16);
        Harness::new(&self.disk, &HarnessOptions { queues, depth, simulated: true }, seed)
    }

    /// Starts or stops, or neither.
    pub fn switch(&mut self) -> Result<(), ErrorKind> {
        match self.random.u8(..4) {
            0 if self.random.bool() => self.offload.start()?,
            0 => drop(self.offload.begin()?),
            1 => self.offload.stop(),
            _ => {}
        }
        Ok(())
    }

    /// Checks the content after each crash since the last call, and after one now.
    pub fn check_crashes(&self, model: &ModelDisk) -> usize {
        let mut crashes = self.record.crashes();
        crashes.push(self.record.crash());
        for (number, images) in crashes.iter().enumerate() {
            if let Err(violation) = model.check_crash(&recovered(images)) {
                panic!("crash {number} after {} effects: {violation}", self.record.length());
            }
        }
        crashes.len()
    }

    /// The content of the disk, if no change is in flight.
    pub fn content(&self) -> Vec<u8> {
        recovered(&vec![self.log.image(), self.home.image()])
    }

    /// Waits until nothing is in flight, and flushes the disk. From then on the model has one
    /// content for each sector: what the disk has must never change without a further request, nor
    /// in a crash.
    pub fn pin(&self, harness: &mut Harness) {
        let mut inspect = |model: &ModelDisk| {
            self.check_crashes(model);
        };
        harness.drain(&mut inspect);
        harness.submit(0, &flush());
        harness.drain(&mut inspect);
        let content = self.content();
        assert_eq!(harness.model().check_now(&content), Ok(()));
        self.record.crashes();
        assert!(recovered(&self.record.crash()) == content, "a flush makes the content durable");
        harness.model_mut().restart(&content);
    }

    /// Lets write-back continue for `rounds` rounds. Checks all the time that the content is the
    /// same.
    pub fn rest(&self, harness: &mut Harness, rounds: usize) {
        for _ in 0..rounds {
            harness.step();
            self.check_crashes(harness.model());
            assert_eq!(harness.model().check_now(&self.content()), Ok(()));
        }
    }
}

pub fn flush() -> Action {
    action(Operation::Flush, 0, 0, 0)
}

pub fn write(offset: u64, content: u64) -> Action {
    action(Operation::Write, offset, 4096, content)
}

pub fn read(offset: u64, length: u64) -> Action {
    action(Operation::Read, offset, length, 0)
}

pub fn action(operation: Operation, offset: u64, length: u64, content: u64) -> Action {
    Action { operation, offset, length, flags: Flags::default(), content }
}

pub fn workload(seed: u64) -> Workload {
    let mut options = WorkloadOptions::new(CAPACITY);
    options.length_max = [4 << 10, 8 << 10][seed as usize / 4 % 2];
    options.weights = [10, 50, 8, 5, 5, 1, 3];
    options.hot_rate = [0.4, 0.9][seed as usize / 8 % 2];
    Workload::new(options, seed)
}
