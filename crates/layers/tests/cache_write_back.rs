//! Runs the cache over a write-ahead log on the same volume, by seed: the mode `write-back`. Both
//! the volume and the disk beneath are faulty. Whenever both crash, all acknowledged changes
//! survive, and nothing old is read.

use std::sync::atomic::Ordering;
use std::time::Duration;

use fathom_block::{Flags, Operation};
use fathom_sim::{Action, Harness, HarnessOptions, ModelDisk, SimOptions, each_seed};

#[path = "support/images.rs"]
mod images;
#[path = "support/kept.rs"]
mod kept;
#[path = "support/write_back.rs"]
mod write_back;

use kept::{REGION_SHIFT, harness};
use write_back::{CAPACITY, Knowledge, Rig, blank, content, wait, workload};

#[test]
fn acknowledged_changes_survive_crashes_and_nothing_old_is_read() {
    let (mut cases, mut crashes, mut mappings, mut hits, mut rounds) = (0, 0, 0, 0, 0);
    each_seed(30, |seed| {
        cases += 1;
        let rig = Rig::new(seed, 0, 0.1, blank(seed));
        let mut harness = harness(&rig.disk, seed);
        let mut inspect = |model: &ModelDisk| {
            let (more, found) = rig.watch.check_crashes(model);
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
        hits += status.reads.hits;
        rounds += rig.wal.status().rounds;
        rig.wal.drain(&rig.disk, Duration::from_secs(20)).unwrap();
        assert_eq!(harness.model().check_now(&rig.home.image()), Ok(()));
        assert_eq!(rig.watch.mark.0.load(Ordering::Relaxed), 7);
    });
    assert!(crashes > 50 * cases && mappings > crashes, "{crashes} crashes, {mappings} mappings");
    assert!(rounds > cases as u64 && hits > cases as u64, "{rounds} rounds, {hits} hits");
}

/// Several lives: each begins with what the crash before it left, of both stores. Some end at once,
/// while the log is recovered and the tables are loaded.
#[test]
fn a_disk_is_right_after_any_number_of_crashes() {
    let (mut kept, mut openings) = (0, 0);
    each_seed(20, |seed| {
        let mut images = blank(seed);
        let mut before = vec![0; CAPACITY as usize];
        let mut workload = workload(seed);
        for life in 0..8 {
            let rig = Rig::new(seed, life, 0.05, images.clone());
            openings += rig.watch.check_openings(&before);
            let mut harness = harness(&rig.disk, seed * 100 + life);
            harness.model_mut().restart(&before);
            let mut inspect = |model: &ModelDisk| {
                rig.watch.check_crashes(model);
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
            images = rig.watch.record.crash();
            before = content(seed, &images);
            assert_eq!(harness.model().check_crash(&before), Ok(()));
        }
    });
    assert!(kept > 100 && openings > 24, "{kept} blocks, {openings} crashes at openings");
}

/// Errors of the volume take the cache out of service, and let changes fail. Errors of the disk
/// beneath fail changes only when the log is full. What was acknowledged is read.
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
        let rig = Rig::with(Knowledge::Full, seed, 0, 0.05, images, volume, home);
        let Some(rig) = rig else { return };
        cases += 1;
        let mut harness = harness(&rig.disk, seed);
        harness.allow_errors();
        let mut inspect = |model: &ModelDisk| {
            rig.watch.check_crashes(model);
        };
        harness.run(&mut workload(seed), 100, &mut inspect);
        harness.drain(&mut inspect);
        harness.verify(CAPACITY);
        failed += harness.statistics().failed;
        out += u64::from(rig.cache.status().failed.is_some());
        stopped += u64::from(rig.wal.status().log_failed.is_some());
    });
    assert!(
        failed > cases && out * 8 > cases && stopped * 8 > cases,
        "{failed} failed, {out} caches and {stopped} logs of {cases} out of service"
    );
}

/// A busy disk, whose log is half full again and again before the time has come to write the
/// tables. Only the log has the bits of regions written then. If it does not wait for them, it
/// brings changes home that no start knows of, and the cache has old content: the checks of the
/// crashes find that.
#[test]
fn a_log_brings_changes_home_only_when_their_regions_have_bits() {
    let (mut rounds, mut found) = (0, 0);
    each_seed(20, |seed| {
        for knowledge in [Knowledge::Full, Knowledge::NoNotes] {
            let rig = Rig::knowing(knowledge, seed, 0, 0.2, blank(seed));
            // Time does not pass while requests can be submitted.
            let options = HarnessOptions { queues: 2, depth: 1000, simulated: true };
            let mut harness = Harness::new(&rig.disk, &options, seed);
            let mut violation = None;
            let mut inspect = |model: &ModelDisk| {
                violation = violation.take().or(rig.watch.violations(model).err());
            };
            let mut workload = workload(seed);
            for _ in 0..3 {
                for _ in 0..60 {
                    harness.run(&mut workload, 1, &mut inspect);
                }
                rounds += rig.wal.status().rounds;
                wait(&mut harness, &rig, &mut inspect);
            }
            if knowledge == Knowledge::Full {
                assert_eq!(violation, None);
            } else {
                found += usize::from(violation.is_some());
            }
        }
    });
    assert!(rounds > 100 && found > 2, "{rounds} rounds, {found} mistakes of 20 found");
}

/// The first change of a region that was quiet costs no more than any other: one write of the
/// volume. A flush after it costs one flush of the volume.
#[test]
fn the_first_change_of_a_region_costs_one_write_and_its_flush_one_flush() {
    for knowledge in [Knowledge::Full, Knowledge::NoLog] {
        let images = blank(1);
        // Time does not pass while a change is in flight.
        let volume = SimOptions { rounds_max: 0, ..SimOptions::new(images[0].len() as u64) };
        let home = SimOptions::new(CAPACITY);
        let rig = Rig::with(knowledge, 1, 0, 0.0, images, volume, home).unwrap();
        let options = HarnessOptions { queues: 1, depth: 1, simulated: true };
        let mut harness = Harness::new(&rig.disk, &options, 1);
        wait(&mut harness, &rig, |_| {});
        rig.wal.set_age(u64::MAX);
        for region in 0..CAPACITY >> REGION_SHIFT {
            // The log's flushes: the cache may write and flush the region's bit meanwhile.
            let log_flushes = || rig.wal.status().volume_flushes;
            let mut carry_out = |operation, offset, length| {
                let before = rig.store.counts();
                let flags = Flags::default();
                harness.submit(0, &Action { operation, offset, length, flags, content: 1 });
                harness.drain(|_| {});
                let after = rig.store.counts();
                (after.writes - before.writes, after.flushes - before.flushes)
            };
            let (writes, flushes) = carry_out(Operation::Write, region << REGION_SHIFT, 512);
            if knowledge == Knowledge::Full {
                assert_eq!((writes, flushes), (1, 0), "region {region}");
                let before = log_flushes();
                carry_out(Operation::Flush, 0, 0);
                carry_out(Operation::Flush, 0, 0);
                assert_eq!(log_flushes(), before + 1, "region {region}");
            } else {
                assert!(writes == 2 && flushes >= 1, "region {region}: {writes}, {flushes}");
            }
        }
        harness.verify(CAPACITY);
    }
}

/// All changes with FUA that wait at the same time share a write and a flush of the volume for each
/// queue and batch.
#[test]
fn changes_that_wait_share_a_flush() {
    const QUEUES: usize = 4;
    const EACH: usize = 8;
    // All writes take equally long.
    let images = blank(1);
    let volume = SimOptions { rounds_max: 1, ..SimOptions::new(images[0].len() as u64) };
    let home = SimOptions::new(CAPACITY);
    let rig = Rig::with(Knowledge::Full, 1, 0, 0.0, images, volume, home).unwrap();
    let options = HarnessOptions { queues: QUEUES, depth: EACH, simulated: true };
    let mut harness = Harness::new(&rig.disk, &options, 1);
    let flags = Flags { force_unit_access: true, ..Flags::default() };
    let write = |place: u64, content| {
        let (operation, offset) = (Operation::Write, place * 4096);
        Action { operation, offset, length: 512, flags, content }
    };
    wait(&mut harness, &rig, |_| {});
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
