//! Recovers the logs of the layers `wal` and `offload`, by seed, after their volume has failed and
//! works again, while their disk is used. Both stores crash together at any time. What was
//! acknowledged is never lost, and nothing old reappears.

use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Backend, Disk, DiskOptions, Layer};
use fathom_layers::offload::{OffloadOptions, OffloadState};
use fathom_layers::wal::{Completion, LogVolume, WalError, WalOptions};
use fathom_layers::{Offload, Wal};
use fathom_sim::{
    Harness, HarnessOptions, ModelDisk, SimBackend, SimOptions, SimRecord, each_seed,
};

#[path = "support/images.rs"]
mod images;
#[path = "support/offload.rs"]
mod offload;

use offload::{CAPACITY, LOG_LENGTH, blank, options, recovered, settings, workload, write};

struct Rig {
    record: SimRecord,
    log: Arc<SimBackend>,
    home: Arc<SimBackend>,
    volume: Arc<LogVolume>,
    wal: Wal,
    /// If the log is that of a layer `offload`.
    offload: Option<Offload>,
    disk: Arc<Disk>,
    random: fastrand::Rng,
}

impl Rig {
    /// `None` if the store of the log fails while it is opened.
    fn new(seed: u64, crash_rate: f64, log: SimOptions) -> Option<Self> {
        let record = SimRecord::new(seed, crash_rate);
        let [log_image, home_image] = <[Vec<u8>; 2]>::try_from(blank()).unwrap();
        let log = record.store(log, seed, log_image);
        let home = record.store(SimOptions::new(CAPACITY), seed + 1_000_000, home_image);
        let volume = Arc::new(LogVolume::new(Arc::clone(&log) as Arc<dyn Backend>));
        let (wal, offload) = if seed % 2 == 0 {
            // Every change touches a region of the log, or only some do.
            let region_shift = [12, 20][seed as usize / 2 % 2];
            let settings = OffloadOptions { region_shift, ..settings() };
            let offload = Offload::open(&volume, &options(), settings).ok()?;
            offload.start().unwrap();
            (offload.wal().clone(), Some(offload))
        } else {
            (Wal::open(&volume, &options()).ok()?, None)
        };
        let layer: Arc<dyn Layer> = match &offload {
            Some(offload) => Arc::new(offload.clone()),
            None => Arc::new(wal.clone()),
        };
        let store = Arc::clone(&home) as Arc<dyn Backend>;
        let disk = Disk::new(DiskOptions::default(), vec![layer], store).unwrap();
        record.crashes();
        let random = fastrand::Rng::with_seed(seed);
        Some(Self { record, log, home, volume, wal, offload, disk, random })
    }

    fn harness(&self, seed: u64) -> Harness {
        let (queues, depth) = (1 + seed as usize % 4, 1 + (seed as usize * 5) % 16);
        let options = HarnessOptions { queues, depth, simulated: true };
        let mut harness = Harness::new(&self.disk, &options, seed);
        harness.allow_errors();
        harness
    }

    fn has_failed(&self) -> bool {
        self.wal.status().log_failed.is_some()
    }

    fn switch(&mut self) {
        let Some(offload) = &self.offload else { return };
        match self.random.u8(..6) {
            // An error is expected while the log takes no changes.
            0 => drop(offload.begin()),
            1 => drop(offload.start()),
            2 => offload.stop(),
            _ => {}
        }
    }

    fn check_crashes(&self, model: &ModelDisk) {
        let mut crashes = self.record.crashes();
        crashes.push(self.record.crash());
        for images in &crashes {
            if let Err(violation) = model.check_crash(&recovered(images)) {
                panic!("after {} effects: {violation}", self.record.length());
            }
        }
    }

    /// Recovers the log while the disk is used, once its requests in flight have completed.
    fn recover(&self, harness: &mut Harness) -> Result<(), WalError> {
        for _ in 0..1000 {
            match self.volume.recover(Duration::ZERO) {
                Ok(_) => return Ok(()),
                Err(WalError::InUse("requests are in flight")) => {
                    harness.step_with(|model| self.check_crashes(model));
                }
                Err(error) => return Err(error),
            }
        }
        panic!("the log does not get quiet");
    }

    /// Ends well: all content is home, and the log takes changes.
    fn end(&self, harness: &mut Harness) {
        harness.drain(|model: &ModelDisk| self.check_crashes(model));
        // A request may have met the last death without having completed before.
        self.recover(harness).unwrap();
        if let Some(offload) = &self.offload {
            offload.stop();
        }
        harness.rest(|_| {});
        for _ in 0..20_000 {
            if self.wal.status().used == 0 {
                break;
            }
            harness.step();
        }
        let status = self.wal.status();
        assert_eq!((status.log_failed, status.emptied_after, status.used), (None, None, 0));
        if let Some(offload) = &self.offload {
            assert_eq!(offload.status().state, OffloadState::Resting);
            assert_eq!(offload.start(), Ok(()));
        }
        assert_eq!(harness.model().check_now(&self.home.image()), Ok(()));
        harness.verify(CAPACITY);
    }
}

/// The volume dies and lives again, several times: for a moment or for long, with requests in
/// flight. Flushes of it may lose what had been written.
#[test]
fn a_log_is_recovered_when_its_volume_works_again() {
    let (mut cases, mut deaths, mut recoveries, mut succeeded, mut losses) = (0, 0, 0, 0, 0);
    each_seed(300, |seed| {
        let loses_writes = seed % 3 == 0;
        let flush_error_rate = if loses_writes { 0.02 } else { 0.0 };
        let log = SimOptions { loses_writes, flush_error_rate, ..SimOptions::new(LOG_LENGTH) };
        let Some(mut rig) = Rig::new(seed, 0.05, log) else { return };
        cases += 1;
        let mut harness = rig.harness(seed);
        let mut workload = workload(seed);
        for _ in 0..12 {
            rig.switch();
            harness.run(&mut workload, 20, |model: &ModelDisk| rig.check_crashes(model));
            if rig.random.bool() {
                rig.log.die();
                deaths += 1;
                let changes = rig.random.usize(0..10);
                harness.run(&mut workload, changes, |model: &ModelDisk| rig.check_crashes(model));
                if rig.has_failed() {
                    let refused = rig.recover(&mut harness);
                    assert!(matches!(refused, Err(WalError::Volume(_))), "{refused:?}");
                }
                rig.log.revive();
                harness.run(&mut workload, changes, |model: &ModelDisk| rig.check_crashes(model));
            }
            for _ in 0..20 {
                if !rig.has_failed() {
                    break;
                }
                // A flush of the recovery may fail, too.
                let _ = rig.recover(&mut harness);
            }
            assert!(!rig.has_failed());
            let before = harness.statistics();
            for _ in 0..rig.random.usize(0..200) {
                harness.step_with(|model| rig.check_crashes(model));
            }
            harness.run(&mut workload, 10, |model: &ModelDisk| rig.check_crashes(model));
            succeeded += harness.statistics().succeeded - before.succeeded;
        }
        recoveries += rig.volume.recoveries();
        losses += rig.log.losses() / 2;
        if !loses_writes {
            rig.end(&mut harness);
        }
    });
    assert!(
        deaths > 4 * cases
            && recoveries > 3 * cases
            && succeeded > 10 * cases
            && losses > cases / 3,
        "{cases} cases, {deaths} deaths, {recoveries} recoveries, {succeeded} succeeded, {losses} losses"
    );
}

/// A log that has failed rejects changes of what it has, and none beside that. It carries nothing
/// before it is started again, and then it does.
#[test]
fn a_failed_log_rejects_only_what_it_has() {
    // All of the disk is one region.
    let rig = Rig::new(2, 0.0, SimOptions::new(LOG_LENGTH)).unwrap();
    let offload = rig.offload.clone().unwrap();
    let mut harness = rig.harness(2);
    let mut change = |offset: u64, content: u64| {
        let before = harness.statistics().failed;
        harness.submit(0, &write(offset, content));
        harness.drain(|_| {});
        harness.statistics().failed == before
    };
    assert!(change(0, 1) && change(32 << 10, 2));
    assert_eq!((offload.status().state, offload.status().carried), (OffloadState::Carrying, 2));
    rig.log.die();
    assert!(!change(0, 3), "the log fails with it");
    assert_eq!(offload.status().state, OffloadState::Returning);
    // Behind and before what it has.
    assert!(change(36 << 10, 4) && change(28 << 10, 5) && !change(32 << 10, 6) && !change(0, 7));
    assert_eq!(offload.status().bypassed, 2);
    rig.log.revive();
    rig.recover(&mut harness).unwrap();
    assert_eq!(offload.status().state, OffloadState::Returning, "its changes go home");
    rig.end(&mut harness);
    assert_eq!(offload.status().state, OffloadState::Carrying, "it was started again");
}

/// A store that is elsewhere carries out writes after it has given them up. If the log continued
/// behind the last record that was found, as an opening does, new records would be lost. If a tail
/// counted once it is in one superblock, old content would reappear. If a log were recovered while
/// superblocks were given up in both places, both could be replaced by older ones.
#[test]
fn a_write_that_takes_effect_after_it_has_failed_harms_nothing() {
    let (mut cases, mut recoveries, mut waits) = (0, 0, 0);
    each_seed(600, |seed| {
        let mut log = SimOptions::new(LOG_LENGTH);
        (log.write_error_rate, log.late_max) = (0.03, 11);
        if seed % 3 == 0 {
            // Only superblocks fail.
            (log.write_error_rate, log.write_error_end) = (0.3, fathom_wal::RING_OFFSET);
            log.late_max = 100;
        }
        let Some(mut rig) = Rig::new(seed, 0.1, log) else { return };
        cases += 1;
        let mut harness = rig.harness(seed);
        let mut workload = workload(seed);
        for _ in 0..20 {
            rig.switch();
            harness.run(&mut workload, 10, |model: &ModelDisk| rig.check_crashes(model));
            if !rig.has_failed() {
                continue;
            }
            match rig.recover(&mut harness) {
                Err(WalError::InUse(_)) => waits += 1,
                Err(WalError::Volume(_)) | Ok(()) => {}
                Err(error) => panic!("{error}"),
            }
        }
        harness.drain(|model: &ModelDisk| rig.check_crashes(model));
        harness.verify(CAPACITY);
        recoveries += rig.volume.recoveries();
    });
    assert!(
        recoveries > cases && waits > cases / 10,
        "{cases} cases, {recoveries} recoveries, {waits} waits"
    );
}

/// A log that another daemon has opened meanwhile, whose superblocks are older than they were, or
/// that lacks a durable record stays failed.
#[test]
fn a_log_that_is_not_what_it_was_stays_failed() {
    let mut refused = [0; 3];
    each_seed(60, |seed| {
        let rig = Rig::new(seed, 0.0, SimOptions::new(LOG_LENGTH)).unwrap();
        let mut harness = rig.harness(seed);
        let mut workload = workload(seed);
        harness.run(&mut workload, 70, |_| {});
        let (older, rounds) = (rig.log.durable(), rig.wal.status().rounds);
        harness.run(&mut workload, 30, |_| {});
        rig.log.die();
        harness.run(&mut workload, 30, |_| {});
        if !rig.has_failed() {
            return;
        }
        while matches!(rig.volume.recover(Duration::ZERO), Err(WalError::InUse(_))) {
            harness.step();
        }
        rig.log.revive();
        let which = seed as usize % 3;
        match which {
            0 => {
                let elsewhere: Arc<dyn Backend> = Arc::clone(&rig.log) as _;
                let volume = Arc::new(LogVolume::new(elsewhere));
                let options = WalOptions { completion: Completion::Durable, ..options() };
                drop(Wal::open(&volume, &options).unwrap());
            }
            1 if rig.wal.status().rounds > rounds + 1 => {
                let mut image = rig.log.image();
                let superblocks = ..fathom_wal::RING_OFFSET as usize;
                image[superblocks].copy_from_slice(&older[superblocks]);
                rig.log.replace(&image);
            }
            2 if !rig.wal.ranges().is_empty() => {
                let mut image = rig.log.image();
                image[fathom_wal::RING_OFFSET as usize..].fill(0);
                rig.log.replace(&image);
            }
            _ => return,
        }
        let Err(error) = rig.volume.recover(Duration::ZERO) else { panic!("{which}") };
        assert!(matches!(error, WalError::Changed(_)), "{which}: {error}");
        assert!(rig.has_failed());
        refused[which] += 1;
    });
    assert!(refused.iter().all(|count| *count > 4), "{refused:?}");
}
