//! Compares the predictors of idle time: for each trace and modelled disk, what share of the idle
//! time steps of background work use, and what they cost the guest's requests. Prints a line of
//! JSON for each predictor. `bench/idle` makes a table of them. Arguments: the folder of the
//! traces, a text that the trace, the disk and the predictor have to contain (`default` stands for
//! the daemon's predictor and the oracle), and the number of seeds.

#![allow(dead_code, reason = "the tests use the other parts")]

#[path = "../tests/support/replay.rs"]
mod replay;

use std::io::{IsTerminal, stderr};
use std::path::Path;

use fathom_backend::model::{HddParameters, Model, SsdParameters};
use fathom_devices::Predictor;
use fathom_devices::predict::{all_predictors, default_predictor};
use replay::{Arrival, CAPACITY, Comparison, Replay, Rule, bursts, cloudphysics, tencent};

/// A modelled disk, with the length of a step in bytes.
const MODELS: [(&str, u64); 2] = [("hdd", 512 << 10), ("ssd", 256 << 10)];
/// The number of seeds of a modelled SSD, if there is no such argument. Its times hardly depend on
/// the seed.
const SSD_SEEDS: u64 = 4;

/// A trace.
struct Trace {
    name: &'static str,
    /// The disks on which it is replayed.
    disks: &'static [&'static str],
    /// The number of seeds of a modelled hard disk: as many as the longest queues need.
    hdd_seeds: u64,
    /// The requests, if the trace is present.
    arrivals: Option<Vec<Arrival>>,
}

fn model(name: &str, seed: u64) -> Model {
    match name {
        "hdd" => Model::hdd(HddParameters::spanning(CAPACITY), seed),
        _ => Model::ssd(SsdParameters::sata(), seed),
    }
}

/// Shows on a terminal what runs.
fn show(text: &str) {
    if stderr().is_terminal() {
        eprint!("\r\x1b[K{text}");
    }
}

/// The mean of a figure.
fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1);
    values.sum::<f64>() / count as f64
}

/// The share of requests that are slower by more than `step_ns` in each of some runs than in each
/// run without work.
fn pairs(runs: &[Replay], without: &[Replay], step_ns: u64) -> Vec<Vec<f64>> {
    let of = |run: &Replay| without.iter().map(|other| run.slowed(other, step_ns)).collect();
    runs.iter().map(of).collect()
}

/// The mean of the pairs of runs with different seeds, without those of one seed.
fn mean_of_pairs(pairs: &[Vec<f64>], left_out: Option<usize>) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for (one, row) in pairs.iter().enumerate() {
        for (other, share) in row.iter().enumerate() {
            if one != other && left_out != Some(one) && left_out != Some(other) {
                sum += share;
                count += 1;
            }
        }
    }
    sum / f64::from(count.max(1))
}

/// The standard error of the difference of two means, because of the seeds: the jackknife.
fn error(slowed: &[Vec<f64>], chance: &[Vec<f64>]) -> f64 {
    let without = |seed| mean_of_pairs(slowed, Some(seed)) - mean_of_pairs(chance, Some(seed));
    let differences: Vec<f64> = (0..slowed.len()).map(without).collect();
    let average = mean(differences.iter().copied());
    let deviation = mean(differences.iter().map(|found| (found - average).powi(2)));
    (deviation * (slowed.len() - 1) as f64).sqrt()
}

fn main() {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "../shared/traces".into());
    let folder = Path::new(&folder);
    let only = std::env::args().nth(2).unwrap_or_default();
    let seeds: Option<u64> = std::env::args().nth(3).and_then(|seeds| seeds.parse().ok());
    let trace = |name, disks, hdd_seeds, arrivals| Trace { name, disks, hdd_seeds, arrivals };
    let tencent = |volumes| tencent(&folder.join("tencent-cbs.bz2"), volumes);
    let both: &[&str] = &["hdd", "ssd"];
    let traces = [
        trace("cloudphysics", both, 24, cloudphysics(&folder.join("cloudphysics.vscsi"))),
        trace("tencent, 1 volume", &["hdd"], 96, tencent(1)),
        trace("tencent, 20 volumes", &["ssd"], 0, tencent(20)),
        trace("bursts of 20, 500 ms", both, 8, Some(bursts(1, 30_000, 20, 500))),
        trace("single, 100 ms", both, 8, Some(bursts(2, 30_000, 1, 100))),
    ];
    for Trace { name, disks, hdd_seeds, arrivals } in traces {
        let Some(arrivals) = arrivals else {
            eprintln!("skipped: {name} is not in {}", folder.display());
            continue;
        };
        for (disk, step) in MODELS.iter().filter(|(disk, _)| disks.contains(disk)) {
            let usual = if *disk == "hdd" { hdd_seeds } else { SSD_SEEDS };
            // The error needs three.
            let seeds = seeds.unwrap_or(usual).max(3);
            compare((name, disk), *step, &arrivals, &only, seeds);
        }
    }
    show("");
}

/// Compares all wanted predictors on one disk.
fn compare((trace, disk): (&str, &str), step: u64, arrivals: &[Arrival], only: &str, seeds: u64) {
    let default = default_predictor().name();
    // The last one is the oracle.
    let count = all_predictors().len();
    let made =
        |index: usize| -> Option<Box<dyn Predictor>> { all_predictors().into_iter().nth(index) };
    let name = |index: usize| made(index).map_or("oracle".into(), |predictor| predictor.name());
    let is_default = |index: usize| name(index) == default;
    let is_wanted = |index: &usize| {
        let mark = if is_default(*index) || *index == count { " default" } else { "" };
        format!("{trace} {disk} {}{mark}", name(*index)).contains(only)
    };
    let wanted: Vec<usize> = (0..=count).filter(is_wanted).collect();
    if wanted.is_empty() {
        return;
    }
    let run = |seed: u64, what: &str, rule: Rule<'_>| {
        show(&format!("{trace}, {disk}: {what}, run {seed} of {seeds}"));
        replay::replay(arrivals, model(disk, seed), step, rule)
    };
    // Another seed changes only random parts of the service times. A disk that chooses among the
    // waiting requests then serves them in another order, and a long queue takes a little more or
    // less time.
    let without: Vec<Replay> =
        (1..=seeds).map(|seed| run(seed, "without work", Rule::Never)).collect();
    let total_ns = arrivals[arrivals.len() - 1].at_ns - arrivals[0].at_ns;
    let idle = mean(without.iter().map(|run| run.idle_ns as f64)) / total_ns as f64;
    let latencies = without.iter().map(|run| {
        let sum: f64 = run.latencies_ns.iter().map(|ns| *ns as f64).sum();
        sum / arrivals.len() as f64
    });
    let mean_ns = mean(latencies);
    for index in wanted {
        let name = name(index);
        let with: Vec<Replay> = (1..=seeds)
            .map(|seed| match made(index) {
                Some(mut predictor) => run(seed, &name, Rule::Predictor(&mut *predictor)),
                None => run(seed, &name, Rule::Oracle),
            })
            .collect();
        let found: Vec<Comparison> =
            with.iter().zip(&without).map(|(with, without)| with.compare(without)).collect();
        let step_ns = with.iter().map(|run| run.step_ns).max().unwrap_or(0);
        let slowed = pairs(&with, &without, step_ns);
        let chance = pairs(&without, &without, step_ns);
        let of = |figure: fn(&Comparison) -> f64| mean(found.iter().map(figure));
        println!(
            "{{\"trace\": {trace:?}, \"disk\": {disk:?}, \"predictor\": {name:?}, \
             \"default\": {}, \"requests\": {}, \"idle\": {idle:.4}, \"used\": {:.4}, \
             \"met\": {:.5}, \"slowed\": {:.5}, \"slowed_error\": {:.5}, \
             \"hastened\": {:.5}, \"chance\": {:.5}, \
             \"latency_ns\": {mean_ns:.0}, \"added_ns\": {:.0}, \"step_ns\": {step_ns}}}",
            is_default(index),
            arrivals.len(),
            of(|found| found.used),
            of(|found| found.met),
            mean_of_pairs(&slowed, None),
            error(&slowed, &chance),
            of(|found| found.hastened),
            mean_of_pairs(&chance, None),
            of(|found| found.mean_ns),
        );
    }
}
