//! Compares the predictors of idle time: for each trace and modelled disk, what share of the idle
//! time steps of background work use, and what they cost the guest's requests. Prints a line of JSON
//! for each predictor. `bench/idle` makes a table of them. Arguments: the folder of the traces, and a
//! text that the trace, the disk and the predictor have to contain; `default` is the daemon's predictor.

#![allow(dead_code, reason = "the tests use the other parts")]

#[path = "../tests/support/replay.rs"]
mod replay;

use std::path::Path;

use fathom_backend::model::{HddParameters, Model, SsdParameters};
use fathom_devices::predict::{all_predictors, default_predictor};
use replay::{Arrival, CAPACITY, Replay, bursts, cloudphysics, tencent};

/// A modelled disk, with the length of a step in bytes.
const MODELS: [(&str, u64); 2] = [("hdd", 512 << 10), ("ssd", 256 << 10)];

/// A trace: its name, the disks on which it is replayed, and its requests if it is present.
type Trace = (&'static str, &'static [&'static str], Option<Vec<Arrival>>);

fn model(name: &str, seed: u64) -> Model {
    match name {
        "hdd" => Model::hdd(HddParameters::spanning(CAPACITY), seed),
        _ => Model::ssd(SsdParameters::sata(), seed),
    }
}

fn main() {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "../shared/traces".into());
    let folder = Path::new(&folder);
    let only = std::env::args().nth(2).unwrap_or_default();
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
            let title = format!("{trace} {disk}");
            let all = all_predictors();
            let default = default_predictor().name();
            let is_wanted = |name: &str| {
                let mark = if name == default { " default" } else { "" };
                format!("{title} {name}{mark}").contains(&only)
            };
            if !all.iter().any(|predictor| is_wanted(&predictor.name())) {
                continue;
            }
            let without = replay::replay(&arrivals, model(disk, 1), *step, None);
            // Another seed changes only random parts of the service times. A disk that chooses among
            // the waiting requests then serves them in another order.
            let again = replay::replay(&arrivals, model(disk, 2), *step, None);
            let total_ns = arrivals[arrivals.len() - 1].at_ns - arrivals[0].at_ns;
            let idle = without.idle_ns as f64 / total_ns as f64;
            let mean_ns = without.latencies_ns.iter().map(|ns| *ns as f64).sum::<f64>()
                / arrivals.len() as f64;
            for mut predictor in all {
                if !is_wanted(&predictor.name()) {
                    continue;
                }
                let with = replay::replay(&arrivals, model(disk, 1), *step, Some(&mut *predictor));
                let found = with.compare(&without);
                let chance = Replay { steps_ns: with.steps_ns.clone(), ..again.clone() };
                let chance = chance.compare(&without).slowed;
                println!(
                    "{{\"trace\": {trace:?}, \"disk\": {disk:?}, \"predictor\": {:?}, \
                     \"default\": {}, \"requests\": {}, \"idle\": {idle:.4}, \"used\": {:.4}, \
                     \"met\": {:.5}, \"slowed\": {:.5}, \"chance\": {chance:.5}, \"latency_ns\": {mean_ns:.0}, \
                     \"added_ns\": {:.0}, \"step_ns\": {}}}",
                    predictor.name(),
                    predictor.name() == default,
                    arrivals.len(),
                    found.used,
                    found.met,
                    found.slowed,
                    found.mean_ns,
                    found.step_ns,
                );
            }
        }
    }
}
