//! Common parts of the seeded suites: all stacks of layers that must not change any result.

#![allow(dead_code, reason = "each suite uses a part of it")]

use std::sync::Arc;

use fathom_block::{Backend, Disk, DiskOptions, Layer};
use fathom_layers::tap::Labels;
use fathom_layers::{Delay, DelayTime, Fault, FaultRule, Log, Passthrough, Tap};

/// The names of the stacks, for [`layers`].
pub const STACKS: [&str; 7] = ["plain", "passthrough", "tap", "delay", "fault", "log", "all"];

/// The layers of the stack `name`, by `seed`.
pub fn layers(name: &str, seed: u64) -> Vec<Arc<dyn Layer>> {
    match name {
        "plain" => Vec::new(),
        "passthrough" => vec![Arc::new(Passthrough)],
        "tap" => vec![Arc::new(Tap::new(1, Labels::default()))],
        "delay" => {
            let delay = Delay::every(DelayTime { fixed_ns: 2_000, jitter_ns: 30_000 }, seed);
            vec![Arc::new(delay)]
        }
        // The layer is enabled, but never injects a fault.
        "fault" => {
            let rule = FaultRule { rate: 0.0, ..FaultRule::default() };
            vec![Arc::new(Fault::new(vec![rule], seed))]
        }
        "log" => vec![Arc::new(Log::to_writer("disk", 1000, std::io::sink()))],
        "all" => {
            let names = ["tap", "delay", "passthrough", "fault", "log"];
            names.iter().flat_map(|name| layers(name, seed)).collect()
        }
        other => unreachable!("there is no stack {other}"),
    }
}

/// A disk with `layers` over `backend`.
pub fn disk(layers: Vec<Arc<dyn Layer>>, backend: Arc<dyn Backend>) -> Arc<Disk> {
    let options = DiskOptions { serial: "suite".into(), ..DiskOptions::default() };
    Disk::new(options, layers, backend).expect("few layers")
}
