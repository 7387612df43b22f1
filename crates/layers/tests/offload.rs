//! Runs the layer `offload`, by seed, over a faulty log volume and a faulty disk, while it is
//! started and stopped at random. Whenever both crash, all flushed changes survive, and nothing old
//! reappears.

use std::time::Duration;

use fathom_block::{ErrorKind, Flags, Operation};
use fathom_layers::offload::{CarryKind, OffloadState};
use fathom_sim::{Action, HarnessOptions, ModelDisk, SimOptions, each_seed};

#[path = "support/images.rs"]
mod images;
#[path = "support/offload.rs"]
mod offload;

use fathom_sim::Harness;
use fathom_wal::RING_OFFSET;

use offload::{
    CAPACITY, LOG_LENGTH, Rig, action, blank, flush, read, recovered, settings, workload, write,
};

/// If changes went home whenever they do not overlap the map of the log, instead of all that a scan
/// could find, this test fails: between the end of a round and its durable superblock, old content
/// would reappear after a crash. So do the tests of several crashes, of errors and of a full log.
#[test]
fn flushed_changes_survive_crashes_while_the_layer_is_switched() {
    let (mut cases, mut crashes, mut bypassed, mut rests, mut held) = (0, 0, 0, 0, 0);
    each_seed(300, |seed| {
        cases += 1;
        let mut rig = Rig::new(seed, 0.1, blank());
        let mut harness = rig.harness(seed);
        let mut workload = workload(seed);
        for _ in 0..4 {
            for _ in 0..8 {
                rig.switch().unwrap();
                harness.run(&mut workload, 1 + seed as usize % 5, |model: &ModelDisk| {
                    crashes += rig.check_crashes(model);
                });
            }
            rig.pin(&mut harness);
            rig.switch().unwrap();
            rig.rest(&mut harness, seed as usize % 50);
            harness.verify(CAPACITY);
        }
        rig.offload.stop();
        rig.rest(&mut harness, 300);
        harness.rest(|_| {});
        let status = rig.offload.status();
        assert_eq!((status.state, status.used), (OffloadState::Resting, 0));
        assert_eq!(harness.model().check_now(&rig.home.image()), Ok(()));
        harness.verify(CAPACITY);
        bypassed += status.bypassed;
        held += status.held;
        rests += u64::from(status.rounds > 0);
    });
    assert!(crashes > 40 * cases, "{crashes} crashes");
    assert!(
        bypassed > 2 * cases as u64 && rests * 2 > cases as u64 && held * 20 > cases as u64,
        "{bypassed} changes past the log, {held} held, {rests} of {cases} with write-back"
    );
}

/// Several lives: each begins with the data that the crash before it left in both stores. Some end
/// while the log is opened or returns.
#[test]
fn a_disk_is_right_after_each_crash() {
    let (mut openings, mut returning) = (0, 0);
    each_seed(120, |seed| {
        let mut images = blank();
        let mut before = vec![0; CAPACITY as usize];
        let mut workload = workload(seed);
        for life in 0..8 {
            let life_seed = seed * 100 + life;
            let mut rig = Rig::new(life_seed, 0.1, images.clone());
            for crash in rig.record.crashes() {
                assert!(recovered(&crash) == before, "an opening has changed the content");
                openings += 1;
            }
            returning += u64::from(rig.offload.status().state == OffloadState::Returning);
            let mut harness = rig.harness(life_seed);
            harness.model_mut().restart(&before);
            for _ in 0..if life % 3 == 2 { 0 } else { 10 } {
                rig.switch().unwrap();
                harness.run(&mut workload, 5, |model: &ModelDisk| {
                    rig.check_crashes(model);
                });
            }
            if life % 3 == 2 {
                rig.rest(&mut harness, seed as usize % 40);
            }
            if life == 3 || life == 5 {
                rig.pin(&mut harness);
                harness.verify(CAPACITY);
            }
            // The crash occurs with requests in flight.
            images = rig.record.crash();
            before = recovered(&images);
            assert_eq!(harness.model().check_crash(&before), Ok(()));
        }
    });
    assert!(
        openings > 100 && returning > 200,
        "{openings} crashes at openings, {returning} returns"
    );
}

/// Errors of either store are reported. What was acknowledged is read, and survives if it was
/// flushed. After the log has failed, changes of what the log does not have succeed.
#[test]
fn flushed_changes_survive_errors_of_a_store() {
    let (mut cases, mut failed, mut stopped, mut succeeded) = (0, 0, 0, 0);
    each_seed(300, |seed| {
        let (mut log, mut home) = (SimOptions::new(LOG_LENGTH), SimOptions::new(CAPACITY));
        if seed % 3 == 0 {
            log.write_error_rate = 0.02;
            log.flush_error_rate = 0.02;
        } else {
            home.write_error_rate = 0.1;
            home.flush_error_rate = 0.1;
        }
        let Some(mut rig) = Rig::with(seed, 0.1, blank(), log, home, settings()) else { return };
        rig.record.crashes();
        cases += 1;
        let mut harness = rig.harness(seed);
        harness.allow_errors();
        let mut workload = workload(seed);
        for _ in 0..30 {
            let before = harness.statistics();
            // An error is expected after the log has failed.
            let started = rig.switch();
            assert!(started.is_ok() || rig.offload.status().log_failed.is_some());
            harness.run(&mut workload, 6, |model: &ModelDisk| {
                rig.check_crashes(model);
            });
            if rig.offload.status().log_failed.is_some() {
                succeeded += harness.statistics().succeeded - before.succeeded;
            }
        }
        harness.drain(|model: &ModelDisk| {
            rig.check_crashes(model);
        });
        failed += harness.statistics().failed;
        stopped += u64::from(rig.offload.status().log_failed.is_some());
        harness.verify(CAPACITY);
    });
    assert!(
        failed > cases && stopped * 10 > cases && succeeded > cases,
        "{failed} failed, {stopped} logs of {cases} failed, {succeeded} succeeded after that"
    );
}

/// A log that is full lets changes go home that it has nothing of, and makes the others wait.
#[test]
fn a_full_log_fails_no_change() {
    let (mut bypassed, mut rounds) = (0, 0);
    each_seed(100, |seed| {
        let rig = Rig::new(seed, 0.05, blank());
        let mut harness = rig.harness(seed);
        rig.offload.start().unwrap();
        let mut workload = workload(seed);
        harness.run(&mut workload, 250, |model: &ModelDisk| {
            rig.check_crashes(model);
        });
        rig.pin(&mut harness);
        harness.verify(CAPACITY);
        let status = rig.offload.status();
        assert_eq!(status.state, OffloadState::Carrying);
        bypassed += status.bypassed;
        rounds += status.rounds;
    });
    assert!(bypassed > 20 && rounds > 100, "{bypassed} changes past the log, {rounds} rounds");
}

/// A log volume has died while the log rested. A start finds that out before it carries a change:
/// none fails.
#[test]
fn a_log_that_has_died_unnoticed_fails_no_change() {
    let (mut tried, mut carried) = (0, 0);
    each_seed(100, |seed| {
        let rig = Rig::new(seed, 0.05, blank());
        let mut harness = rig.harness(seed);
        let mut workload = workload(seed);
        harness.run(&mut workload, 30, |model: &ModelDisk| {
            rig.check_crashes(model);
        });
        let is_dead = seed % 3 > 0;
        if is_dead {
            rig.log.die();
        }
        assert_eq!(rig.offload.begin(), Ok(false));
        tried += 1;
        harness.run(&mut workload, 100, |model: &ModelDisk| {
            rig.check_crashes(model);
        });
        assert_eq!(harness.statistics().failed, 0, "seed {seed}");
        let status = rig.offload.status();
        assert!(!rig.offload.is_tried_out());
        assert_eq!(status.log_failed.is_some(), is_dead);
        let expected = if is_dead { OffloadState::Resting } else { OffloadState::Carrying };
        assert_eq!((status.state, status.carried == 0), (expected, is_dead));
        carried += status.carried;
        assert_eq!(rig.offload.unfit().is_some(), is_dead);
        // The changes are at home, and the log has none.
        if !is_dead {
            rig.offload.stop();
        }
        rig.pin(&mut harness);
        harness.verify(CAPACITY);
    });
    assert!(tried > 50 && carried > 1000, "{tried} trials, {carried} changes in the log");
}

/// A trial that is ended before its record is durable leaves a log that becomes empty again.
#[test]
fn a_trial_can_be_ended() {
    for seed in 0..50 {
        let rig = Rig::new(seed, 0.0, blank());
        let mut harness = rig.harness(seed);
        assert_eq!(rig.offload.begin(), Ok(false));
        for _ in 0..seed % 5 {
            harness.step();
        }
        rig.offload.stop();
        for _ in 0..3000 {
            harness.step();
        }
        let status = rig.offload.status();
        assert_eq!((status.state, status.used), (OffloadState::Resting, 0), "seed {seed}");
        assert_eq!(rig.offload.begin(), Ok(false));
    }
}

/// While it carries, nothing is written home before the log is half full. Changes are durable when
/// they complete.
#[test]
fn write_back_stands_still_while_the_layer_carries() {
    let rig = Rig::new(1, 0.0, blank());
    let mut harness = rig.harness(3);
    rig.offload.start().unwrap();
    // Less than half of the log.
    for place in 0..2 {
        harness.submit(0, &write(place * 4096, place + 1));
    }
    harness.drain(|_| {});
    let before = rig.home.counts();
    for _ in 0..2000 {
        harness.step();
    }
    assert_eq!(rig.home.counts(), before);
    assert_eq!(rig.offload.status().carried, 2);
    assert_eq!(harness.model().check_now(&recovered(&rig.record.crash())), Ok(()));
    // A flush has nothing to wait for but what home had before.
    for _ in 0..3 {
        harness.submit(1, &flush());
        harness.drain(|_| {});
    }
    let flushes = rig.home.counts().flushes;
    harness.submit(0, &write(0, 9));
    harness.drain(|_| {});
    harness.submit(0, &flush());
    harness.drain(|_| {});
    assert_eq!(rig.home.counts().flushes, flushes, "what the log has needs no flush of home");
    rig.offload.stop();
    rig.rest(&mut harness, 500);
    assert_eq!(rig.offload.status().state, OffloadState::Resting);
    assert_eq!(harness.model().check_now(&rig.home.image()), Ok(()));
}

/// While the log returns, changes of other regions go home, and those of its own regions through
/// the log. A flush after a change that went home flushes home.
#[test]
fn a_change_goes_past_the_log_if_no_scan_could_find_its_region() {
    let home = SimOptions { rounds_max: 1, ..SimOptions::new(CAPACITY) };
    let log = SimOptions { rounds_max: 40, ..SimOptions::new(LOG_LENGTH) };
    let rig = Rig::with(5, 0.0, blank(), log, home, settings()).unwrap();
    let mut harness =
        Harness::new(&rig.disk, &HarnessOptions { queues: 1, depth: 8, simulated: true }, 1);
    rig.offload.start().unwrap();
    harness.submit(0, &write(0, 1));
    harness.submit(0, &write(8192, 2));
    harness.drain(|_| {});
    // The same region as before, and one that the log does not have.
    harness.submit(0, &flush());
    harness.drain(|_| {});
    rig.offload.stop();
    let (writes, carried) = (rig.home.counts().writes, rig.offload.status().carried);
    harness.submit(0, &write(20480, 3));
    harness.submit(0, &action(Operation::Write, 512, 512, 4));
    harness.drain(|_| {});
    let status = rig.offload.status();
    assert_eq!((status.carried - carried, status.bypassed), (1, 1));
    assert!(rig.home.counts().writes > writes);
    let flushes = rig.home.counts().flushes;
    harness.submit(0, &flush());
    harness.drain(|_| {});
    assert!(rig.home.counts().flushes > flushes, "the change that went home needs it");
    assert_eq!(harness.model().check_crash(&recovered(&rig.record.crash())), Ok(()));
    harness.verify(CAPACITY);
}

/// Of two changes in flight at the same time, one past the log and one in it, either may be the
/// last. But once both have completed, the content stays. If a round copied before the change past
/// the log has completed, the other's content would be found first, and this one's after
/// write-back.
#[test]
fn a_change_past_the_log_and_one_in_it_have_one_order() {
    each_seed(200, |seed| {
        let home = SimOptions { rounds_max: 40, ..SimOptions::new(CAPACITY) };
        let log_store = SimOptions { rounds_max: 1, ..SimOptions::new(LOG_LENGTH) };
        let rig = Rig::with(seed, 0.0, blank(), log_store, home, settings()).unwrap();
        let options = HarnessOptions { queues: 2, depth: 4, simulated: true };
        let mut harness = Harness::new(&rig.disk, &options, seed);
        if seed % 2 == 0 {
            // The change goes past a log that is not empty.
            rig.offload.start().unwrap();
            harness.submit(0, &write(32768, 9));
            harness.drain(|_| {});
            rig.offload.stop();
        }
        harness.submit(0, &write(0, 1));
        rig.offload.start().unwrap();
        harness.submit(1, &write(0, 2));
        while harness.statistics().succeeded == u64::from(seed % 2 == 0) {
            harness.step();
        }
        rig.offload.stop();
        harness.drain(|_| {});
        let content = rig.content();
        for _ in 0..200 {
            harness.step();
            assert!(rig.content() == content, "the content has changed by itself");
        }
        harness.verify(CAPACITY);
    });
}

/// A queue that ends with a change in flight does not stop write-back.
#[test]
fn a_queue_that_ended_does_not_stop_write_back() {
    each_seed(100, |seed| {
        let rig = Rig::new(seed, 0.0, blank());
        let one = HarnessOptions { queues: 1, depth: 8, simulated: true };
        let mut kept = Harness::new(&rig.disk, &one, 1);
        let mut lost = Harness::new(&rig.disk, &one, 2);
        lost.submit(0, &write(0, 1));
        if seed % 2 == 0 {
            lost.step();
        }
        rig.offload.start().unwrap();
        lost.submit(0, &write(4096, 2));
        if seed % 3 == 0 {
            lost.step();
        }
        if seed % 5 == 0 {
            rig.offload.stop();
            lost.submit(0, &write(8192, 2));
        }
        drop(lost);
        kept.submit(0, &write(32768, 3));
        kept.drain(|_| {});
        rig.offload.stop();
        for _ in 0..1000 {
            kept.step();
        }
        let status = rig.offload.status();
        assert_eq!((status.state, status.used), (OffloadState::Resting, 0), "seed {seed}");
    });
}

/// A store that keeps zeroes in little space gets back what the log has used, when the layer rests.
#[test]
fn the_space_of_an_empty_log_is_released() {
    each_seed(100, |seed| {
        let log = SimOptions { frees_zeroes: true, ..SimOptions::new(LOG_LENGTH) };
        let rig = Rig::on(seed, 0.1, log);
        let mut harness = rig.harness(seed);
        let mut workload = workload(seed);
        let mut inspect = |model: &ModelDisk| {
            rig.check_crashes(model);
        };
        for _ in 0..4 {
            rig.offload.start().unwrap();
            // A release may be in flight.
            harness.run(&mut workload, 12, &mut inspect);
            rig.offload.stop();
            harness.drain(&mut inspect);
            for _ in 0..seed % 60 {
                harness.step();
                inspect(harness.model());
            }
        }
        rig.pin(&mut harness);
        for _ in 0..2000 {
            harness.step();
        }
        let status = rig.offload.status();
        assert_eq!((status.state, status.used), (OffloadState::Resting, 0), "seed {seed}");
        assert!(status.carried > 0, "seed {seed}");
        let left = rig.log.image()[RING_OFFSET as usize..].iter().position(|byte| *byte != 0);
        assert_eq!(left, None, "seed {seed}: what is left of the log");
        rig.check_crashes(harness.model());
        harness.verify(CAPACITY);
    });
}

/// A change that is carried while the space of the whole ring is being released is not overwritten.
#[test]
fn a_release_in_flight_overwrites_no_record() {
    let mut carried = 0;
    each_seed(100, |seed| {
        let log = SimOptions { frees_zeroes: true, rounds_max: 40, ..SimOptions::new(LOG_LENGTH) };
        let rig = Rig::on(seed, 0.02, log);
        rig.record.crashes();
        let mut harness = rig.harness(seed);
        let mut workload = workload(seed);
        let mut inspect = |model: &ModelDisk| {
            rig.check_crashes(model);
        };
        for _ in 0..5 {
            rig.offload.start().unwrap();
            harness.run(&mut workload, 60, &mut inspect);
            rig.offload.stop();
            harness.drain(&mut inspect);
            for _ in 0..5000 {
                if rig.offload.status().state == OffloadState::Resting {
                    break;
                }
                harness.step();
                inspect(harness.model());
            }
        }
        harness.verify(CAPACITY);
        carried += rig.offload.status().carried;
    });
    assert!(carried > 5000, "{carried} changes were carried");
}

/// The layer leaves a disk at any time with all content at home, and drains without other queues.
#[test]
fn a_drain_brings_everything_home() {
    each_seed(60, |seed| {
        let mut rig = Rig::new(seed, 0.0, blank());
        let mut harness = rig.harness(seed);
        let mut workload = workload(seed);
        for _ in 0..6 {
            rig.switch().unwrap();
            harness.run(&mut workload, 10, |_| {});
        }
        harness.drain(|_| {});
        rig.pin(&mut harness);
        harness.rest(|_| {});
        let model = harness.model().check_now(&rig.content());
        assert_eq!(model, Ok(()));
        let content = rig.content();
        drop(harness);
        rig.offload.drain(&rig.disk, Duration::from_secs(20)).unwrap();
        assert!(rig.home.image() == content && rig.offload.status().used == 0);
        assert_eq!(rig.offload.status().state, OffloadState::Resting);
    });
}

/// At rest, each request of a guest is one request of the disk beneath, and the log is not used.
#[test]
fn at_rest_requests_pass_straight_down() {
    let log = SimOptions { rounds_max: 0, ..SimOptions::new(LOG_LENGTH) };
    let home = SimOptions { rounds_max: 0, ..SimOptions::new(CAPACITY) };
    let rig = Rig::with(1, 0.0, blank(), log, home, settings()).unwrap();
    let mut harness = rig.harness(1);
    let log = rig.log.counts();
    for count in 1..=10 {
        for action in [write(4096, count), read(0, 8192), flush()] {
            harness.submit(0, &action);
            harness.drain(|_| {});
        }
        let counts = rig.home.counts();
        assert_eq!((counts.writes, counts.reads, counts.flushes), (count, count, count));
    }
    assert_eq!(rig.log.counts(), log);
    let status = rig.offload.status();
    assert_eq!((status.carried, status.bypassed, status.rounds), (0, 0, 0));
    let durable = Flags { force_unit_access: true, ..Flags::default() };
    harness.submit(0, &Action { flags: durable, ..write(0, 99) });
    harness.drain(|_| {});
    assert_eq!(harness.model().check_now(&recovered(&rig.record.crash())), Ok(()));
}

/// A layer that carries nothing, or only reads, sends no change to the log.
#[test]
fn only_what_is_configured_is_carried() {
    for (carry, state) in
        [(CarryKind::Off, OffloadState::Resting), (CarryKind::Reads, OffloadState::Carrying)]
    {
        let settings = fathom_layers::offload::OffloadOptions { carry, ..settings() };
        let (log, home) = (SimOptions::new(LOG_LENGTH), SimOptions::new(CAPACITY));
        let rig = Rig::with(1, 0.0, blank(), log, home, settings).unwrap();
        let mut harness = rig.harness(1);
        rig.offload.start().unwrap();
        harness.submit(0, &write(0, 1));
        harness.drain(|_| {});
        let status = rig.offload.status();
        assert_eq!((status.state, status.carried, status.used), (state, 0, 0));
        rig.offload.stop();
        assert_eq!(rig.offload.status().state, OffloadState::Resting);
        harness.verify(CAPACITY);
    }
}

/// A shrink is refused, as with the layer `wal`.
#[test]
fn a_shrink_is_refused() {
    let rig = Rig::new(1, 0.0, blank());
    assert_eq!(rig.disk.resize(CAPACITY / 2), Err(ErrorKind::Unsupported));
}
