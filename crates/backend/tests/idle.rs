//! The daemon's predictor of idle time: it uses most of the idle time and slows hardly any request
//! by more than a step, on modelled disks. `bench/idle` compares all predictors.

#[path = "support/replay.rs"]
mod replay;

use std::path::{Path, PathBuf};

use fathom_backend::model::{HddParameters, Model, SsdParameters};
use fathom_devices::predict::{Fixed, default_predictor};
use replay::{Arrival, CAPACITY, Comparison, Replay, Rule, bursts, cloudphysics, tencent};

const HDD_STEP: u64 = 512 << 10;
const SSD_STEP: u64 = 256 << 10;

fn ssd() -> Model {
    Model::ssd(SsdParameters::sata(), 1)
}

fn hdd(seed: u64) -> Model {
    Model::hdd(HddParameters::spanning(CAPACITY), seed)
}

fn on_ssd(arrivals: &[Arrival]) -> Comparison {
    let without = replay::replay(arrivals, ssd(), SSD_STEP, Rule::Never);
    let mut predictor = default_predictor();
    replay::replay(arrivals, ssd(), SSD_STEP, Rule::Predictor(&mut *predictor)).compare(&without)
}

fn check(found: &Comparison, what: &str) {
    println!("{what}: {found:?}");
    assert!(found.used >= 0.7, "{what}: {found:?}");
    assert!(found.slowed <= 0.01, "{what}: {found:?}");
}

#[test]
fn most_idle_time_is_used_and_few_requests_are_slowed_by_more_than_a_step() {
    for seed in 0..2 {
        let found = on_ssd(&bursts(seed, 1500, 20, 500));
        check(&found, &format!("bursts, seed {seed}, SSD"));
        assert!(found.met <= 0.12, "the gaps within bursts are not used: {found:?}");
    }
    check(&on_ssd(&bursts(7, 400, 1, 100)), "single requests, SSD");
    // On a hard disk, a burst in a hundred is slowed: enough of them are needed.
    let arrivals = bursts(1, 15_000, 20, 500);
    let without = replay::replay(&arrivals, hdd(1), HDD_STEP, Rule::Never);
    let mut predictor = default_predictor();
    let with = replay::replay(&arrivals, hdd(1), HDD_STEP, Rule::Predictor(&mut *predictor));
    check(&with.compare(&without), "bursts, HDD");
}

#[test]
fn the_same_holds_for_traces() {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let folder = std::env::var_os("FATHOM_TRACES").map_or_else(beside, PathBuf::from);
    let traces = [
        ("CloudPhysics", 2000, cloudphysics(&folder.join("cloudphysics.vscsi"))),
        ("Tencent, 20 volumes", 50_000, tencent(&folder.join("tencent-cbs.bz2"), 20)),
    ];
    for (name, count, arrivals) in traces {
        match arrivals {
            // The first part is enough for a test.
            Some(arrivals) => check(&on_ssd(&arrivals[..arrivals.len().min(count)]), name),
            None => eprintln!("skipped: the trace {name} is absent"),
        }
    }
}

#[test]
fn a_replay_without_work_is_repeated_exactly_and_one_with_work_is_not_free() {
    let arrivals = bursts(3, 2000, 10, 300);
    let run = |work: bool| -> Replay {
        let mut predictor = Fixed::new(0);
        let rule = if work { Rule::Predictor(&mut predictor) } else { Rule::Never };
        replay::replay(&arrivals, hdd(1), HDD_STEP, rule)
    };
    let without = run(false);
    let again = run(false).compare(&without);
    assert_eq!((again.used, again.met, again.mean_ns), (0.0, 0.0, 0.0));
    assert_eq!((again.slowed, again.hastened), (0.0, 0.0));
    let with = run(true).compare(&without);
    assert!(with.used > 0.9 && with.met > 0.05 && with.mean_ns > 0.0, "{with:?}");
    assert!(with.mean_ns < with.step_ns as f64, "a request is delayed by at most a step: {with:?}");
}

#[test]
fn an_oracle_meets_no_request() {
    let arrivals = bursts(1, 1500, 20, 500);
    let without = replay::replay(&arrivals, ssd(), SSD_STEP, Rule::Never);
    let found = replay::replay(&arrivals, ssd(), SSD_STEP, Rule::Oracle).compare(&without);
    assert!(found.used > 0.7, "{found:?}");
    assert!(found.met <= 0.001, "only a step that is longer than all before: {found:?}");
    assert!(found.slowed <= 0.001, "{found:?}");
}
