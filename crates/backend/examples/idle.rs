//! Compares the predictors of idle time: for each trace and modelled disk, what share of the idle
//! time steps of background work use, and what they cost the guest's requests. Prints a line of JSON
//! for each predictor. `bench/idle` makes a table of them. Arguments: the folder of the traces, a text
//! that the trace, the disk and the predictor have to contain (`default` stands for the daemon's
//! predictor and the oracle), and the number of seeds.

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
/// The numbers of seeds of the modelled disks, if there is no such argument. The times of an SSD hardly
/// depend on the seed.
const SEEDS: [(&str, u64); 2] = [("hdd", 24), ("ssd", 4)];

/// A trace: its name, the disks on which it is replayed, and its requests if it is present.
type Trace = (&'static str, &'static [&'static str], Option<Vec<Arrival>>);

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

fn main() {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "../shared/traces".into());
    let folder = Path::new(&folder);
    let only = std::env::args().nth(2).unwrap_or_default();
    let seeds: Option<u64> = std::env::args().nth(3).and_then(|seeds| seeds.parse().ok());
    let traces: [Trace; 5] = [
        ("cloudphysics", &["hdd", "ssd"], cloudphysics(&folder.join("cloudphysics.vscsi"))),
        ("tencent, 1 volume", &["hdd"], tencent(&folder.join("tencent-cbs.bz2"), 1)),
        ("tencent, 20 volumes", &["ssd"], tencent(&folder.join("tencent-cbs.bz2"), 20)),
        ("bursts of 20, 500 ms", &["hdd", "ssd"], Some(bursts(1, 30_000, 20, 500))),
        ("single, 100 ms", &["hdd", "ssd"], Some(bursts(2, 30_000, 1, 100))),
    ];
    for (trace, disks, arrivals) in traces {
        let Some(arrivals) = arrivals else {
            eprintln!("skipped: {trace} is not in {}", folder.display());
            continue;
        };
        for (disk, step) in MODELS.iter().filter(|(disk, _)| disks.contains(disk)) {
            let usual = SEEDS.iter().find(|(name, _)| name == disk).map_or(2, |(_, seeds)| *seeds);
            let seeds = seeds.unwrap_or(usual).max(2);
            compare((trace, disk), *step, &arrivals, &only, seeds);
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
        // The runs without work, compared with each other by the same length of a step.
        let step_ns = with.iter().map(|run| run.step_ns).max().unwrap_or(0);
        let chance: Vec<f64> = without
            .iter()
            .enumerate()
            .flat_map(|(index, one)| {
                let others = without.iter().enumerate().filter(move |(other, _)| *other != index);
                let one = Replay { step_ns, ..one.clone() };
                others.map(move |(_, other)| one.compare(other).slowed)
            })
            .collect();
        let of = |figure: fn(&Comparison) -> f64| mean(found.iter().map(figure));
        let slowed = of(|found| found.slowed);
        let deviation = mean(found.iter().map(|found| (found.slowed - slowed).powi(2))).sqrt();
        println!(
            "{{\"trace\": {trace:?}, \"disk\": {disk:?}, \"predictor\": {name:?}, \
             \"default\": {}, \"requests\": {}, \"idle\": {idle:.4}, \"used\": {:.4}, \
             \"met\": {:.5}, \"slowed\": {slowed:.5}, \"slowed_error\": {:.5}, \
             \"hastened\": {:.5}, \"chance\": {:.5}, \
             \"latency_ns\": {mean_ns:.0}, \"added_ns\": {:.0}, \"step_ns\": {step_ns}}}",
            is_default(index),
            arrivals.len(),
            of(|found| found.used),
            of(|found| found.met),
            deviation / ((seeds - 1) as f64).sqrt(),
            of(|found| found.hastened),
            mean(chance.iter().copied()),
            of(|found| found.mean_ns),
        );
    }
}
