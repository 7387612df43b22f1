//! Several queues, snapshots, clones, roll-backs, deletions and power losses, by seed.

use fathom_sim::{SimOptions, each_seed};
use fathom_store::Rules;

mod support;

use support::storm::{DEVICE, Kind, Storm, StormOptions};

#[test]
fn nothing_is_lost_while_volumes_are_snapshotted_cloned_and_walked() {
    let (mut walks, mut cases) = (0, 0);
    each_seed(15, |seed| {
        let rules = Rules { walk_step: 1 + seed as usize % 3, ..Rules::default() };
        let mut storm = Storm::new(StormOptions::new(Kind::Mixed, rules), seed);
        storm.run();
        (walks, cases) = (walks + storm.counts.walks, cases + 1);
    });
    assert!(cases < 9 || walks > cases / 2, "{walks} in {cases} cases");
}

#[test]
fn nothing_is_lost_when_power_losses_walks_and_full_devices_are_frequent() {
    let (mut punched, mut cases) = (0, 0);
    each_seed(16, |seed| {
        let kinds = [Kind::Cold, Kind::Walks, Kind::Drops, Kind::Tight];
        let kind = kinds[seed as usize % 4];
        let rules = Rules { walk_step: 1 + seed as usize % 2, ..Rules::default() };
        let mut storm = Storm::new(StormOptions::new(kind, rules), seed);
        storm.run();
        (punched, cases) = (punched + storm.counts.punched, cases + 1);
    });
    assert!(cases < 9 || punched > cases, "{punched} in {cases} cases");
}

#[test]
fn nothing_is_lost_when_most_blocks_are_equal() {
    let (mut shared, mut unequal, mut merged, mut walks, mut cases) = (0, 0, 0, 0, 0_u64);
    each_seed(20, |seed| {
        let rules = Rules {
            walk_step: 1 + seed as usize % 3,
            fingerprint_bits: if seed % 2 == 0 { 56 } else { 2 },
            ..Rules::default()
        };
        let kind = if seed % 4 == 3 { Kind::EqualSlow } else { Kind::Equal };
        let mut storm = Storm::new(StormOptions::new(kind, rules), seed);
        storm.run();
        (shared, unequal) = (shared + storm.counts.shared, unequal + storm.counts.unequal);
        (walks, cases) = (walks + storm.counts.walks, cases + 1);
        merged += storm.counts.merged;
    });
    println!("{shared} {unequal} {merged} {walks} in {cases} cases");
    let is_enough = shared > 10 * cases && unequal > 5 * cases && walks > cases / 4;
    assert!(cases < 9 || is_enough, "{shared} {unequal} {walks} in {cases} cases");
}

#[test]
fn nothing_is_lost_when_what_was_read_is_written_and_hints_are_wrong() {
    let (mut copied, mut kept, mut unequal, mut unique, mut cases) = (0, 0, 0, 0, 0_u64);
    each_seed(16, |seed| {
        let rules = Rules {
            walk_step: 1 + seed as usize % 3,
            fingerprint_bits: if seed % 2 == 0 { 56 } else { 2 },
            ..Rules::default()
        };
        let mut storm = Storm::new(StormOptions::new(Kind::Copies, rules), seed);
        storm.run();
        let counts = storm.counts;
        (copied, kept) = (copied + counts.copied, kept + counts.kept);
        (unequal, unique) = (unequal + counts.unequal, unique + counts.unique);
        cases += 1;
    });
    println!("{copied} {kept} {unequal} {unique} in {cases} cases");
    let is_enough = copied > 5 * cases && kept > 2 * cases && unequal > 5 * cases;
    let is_enough = is_enough && unique > 10 * cases;
    assert!(cases < 9 || is_enough, "{copied} {kept} {unequal} {unique} in {cases} cases");
}

#[test]
fn nothing_is_lost_while_blocks_are_put_together() {
    let (mut relocated, mut cases) = (0, 0_u64);
    each_seed(16, |seed| {
        let walk_step = 1 + seed as usize % 3;
        // Second copies of pages take places to which blocks are relocated.
        let rules = Rules { walk_step, copies_pages: seed % 4 < 2, ..Rules::default() };
        let kind = if seed % 2 == 0 { Kind::Apart } else { Kind::ApartEqual };
        let crashes_recoveries = seed % 8 == 0;
        let steps = if crashes_recoveries { 120 } else { 700 };
        let options = StormOptions { steps, crashes_recoveries, ..StormOptions::new(kind, rules) };
        let mut storm = Storm::new(options, seed);
        storm.run();
        (relocated, cases) = (relocated + storm.counts.relocated, cases + 1);
    });
    println!("{relocated} in {cases} cases");
    assert!(cases < 9 || relocated > 10 * cases, "{relocated} in {cases} cases");
}

#[test]
fn a_recovery_that_loses_its_power_is_carried_out_again() {
    each_seed(4, |seed| {
        let rules = Rules { walk_step: 2, ..Rules::default() };
        let options = StormOptions {
            crashes_recoveries: true,
            steps: 120,
            ..StormOptions::new(Kind::Mixed, rules)
        };
        Storm::new(options, seed).run();
    });
}

#[test]
fn nothing_is_lost_that_a_failing_device_does_not_lose() {
    each_seed(15, |seed| {
        let rules = Rules { walk_step: 2, ..Rules::default() };
        let sim = SimOptions {
            rounds_max: 4,
            write_error_rate: 0.01,
            read_error_rate: if seed % 2 == 0 { 0.0 } else { 0.005 },
            flush_error_rate: if seed % 3 == 0 { 0.02 } else { 0.0 },
            late_max: if seed % 4 == 0 { 20 } else { 0 },
            loses_writes: seed % 5 == 0,
            ..SimOptions::new(DEVICE)
        };
        let options =
            StormOptions { sim, has_faults: true, ..StormOptions::new(Kind::Mixed, rules) };
        Storm::new(options, seed).run();
    });
}
