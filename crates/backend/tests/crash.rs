//! Crash points: whichever writes a store keeps before it dies, it keeps all flushed data.

#![allow(unsafe_code)]

mod support;

use std::io;
use std::sync::Arc;

use fathom_block::{
    Backend, Capabilities, Crossing, Layer, LayerPart, LayerQueue, OpenContext, Operation, Outcome,
    Request,
};
use fathom_layers::{Fault, FaultEffect, FaultRule};
use fathom_sim::{
    Harness, HarnessOptions, SimBackend, SimOptions, Workload, WorkloadOptions, each_seed,
};

const CAPACITY: u64 = 64 << 10;

fn options() -> SimOptions {
    SimOptions { journal: true, ..SimOptions::new(CAPACITY) }
}

fn workload(seed: u64) -> Workload {
    let mut options = WorkloadOptions::new(CAPACITY);
    options.length_max = 8 << 10;
    // Mostly operations that matter after a crash.
    options.weights = [10, 50, 12, 5, 5, 0, 0];
    Workload::new(options, seed)
}

/// After any prefix of the writes in the store, and with any of the unflushed sectors lost, the
/// image holds the flushed data.
fn crash_points(stack: &str, seed: u64, faults: Vec<Arc<dyn Layer>>) {
    let store = Arc::new(SimBackend::new(options(), seed));
    let may_fail = !faults.is_empty();
    let mut layers = support::layers(stack, seed);
    layers.extend(faults);
    let disk = support::disk(layers, Arc::clone(&store) as Arc<dyn Backend>);
    let depth = 1 + (seed as usize * 5) % 16;
    let options = HarnessOptions { queues: 2, depth, simulated: true };
    let mut harness = Harness::new(&disk, &options, seed);
    if may_fail {
        harness.allow_errors();
    }
    let mut checked = 0;
    let mut round = 0;
    let mut inspect = |model: &fathom_sim::ModelDisk| {
        let length = store.journal_length();
        for prefix in checked..=length {
            if let Err(violation) = model.check_crash(&store.image_after(prefix)) {
                panic!("after {prefix} writes under {stack}: {violation}");
            }
        }
        checked = length;
        round += 1;
        for attempt in 0..2 {
            let image = store.crash(seed ^ (round << 8 | attempt));
            if let Err(violation) = model.check_crash(&image) {
                panic!("crash {attempt} in round {round} under {stack}: {violation}");
            }
        }
    };
    harness.run(&mut workload(seed), 120, &mut inspect);
    harness.drain(&mut inspect);
    // With nothing in flight, the model's knowledge is complete.
    if let Err(violation) = harness.model().check_crash(&store.crash(seed)) {
        panic!("at the end under {stack}: {violation}");
    }
}

#[test]
fn flushed_data_is_kept() {
    each_seed(6, |seed| {
        for stack in support::STACKS {
            crash_points(stack, seed, Vec::new());
        }
    });
}

#[test]
fn flushed_data_is_kept_if_writes_tear() {
    each_seed(6, |seed| {
        for stack in ["plain", "tap", "all"] {
            let rules = [FaultEffect::Refused, FaultEffect::Late, FaultEffect::Short]
                .into_iter()
                .chain([FaultEffect::Torn])
                .map(|effect| FaultRule { effect, rate: 0.08, ..FaultRule::default() })
                .collect();
            crash_points(stack, seed, vec![Arc::new(Fault::new(rules, seed))]);
        }
    });
}

/// Several lives: each begins with the image that the last crash left.
#[test]
fn a_disk_continues_after_each_crash() {
    each_seed(6, |seed| {
        let mut image = vec![0; CAPACITY as usize];
        let mut workload = workload(seed);
        for life in 0..5 {
            let life_seed = seed * 100 + life;
            let store = Arc::new(SimBackend::with_image(options(), life_seed, image));
            let layers = support::layers("all", life_seed);
            let disk = support::disk(layers, Arc::clone(&store) as Arc<dyn Backend>);
            let mut harness = Harness::new(&disk, &HarnessOptions::default(), life_seed);
            harness.model_mut().restart(&store.image());
            // The crash happens with requests in flight.
            harness.run(&mut workload, 100, |_| {});
            image = store.crash(life_seed);
            if let Err(violation) = harness.model().check_crash(&image) {
                panic!("life {life}: {violation}");
            }
        }
    });
}

/// A layer that violates its contract.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Liar {
    /// It completes flushes without passing them on.
    Flushes,
    /// It passes durable writes on as ordinary ones.
    Durability,
    /// It completes discards and write-zeroes without passing them on.
    Zeroes,
}

impl Layer for Liar {
    fn name(&self) -> &'static str {
        "liar"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(*self))
    }
}

impl LayerQueue for Liar {
    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        match request.operation {
            Operation::Flush if *self == Self::Flushes => next.complete(request, Ok(())),
            Operation::Discard | Operation::WriteZeroes if *self == Self::Zeroes => {
                next.complete(request, Ok(()));
            }
            _ => {
                if *self == Self::Durability {
                    request.flags.force_unit_access = false;
                }
                next.submit(request);
            }
        }
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }
}

/// The suite finds the violations that it tests for.
#[test]
fn violations_are_found() {
    for liar in [Liar::Flushes, Liar::Durability, Liar::Zeroes] {
        let found = (0..20).any(|seed| {
            let store = Arc::new(SimBackend::new(options(), seed));
            let disk = support::disk(vec![Arc::new(liar)], Arc::clone(&store) as Arc<dyn Backend>);
            let mut harness = Harness::new(&disk, &HarnessOptions::default(), seed);
            let mut found = false;
            let mut round = 0;
            let mut inspect = |model: &fathom_sim::ModelDisk| {
                round += 1;
                found |= model.check_crash(&store.crash(seed << 16 | round)).is_err();
                found |= model.check_now(&store.image()).is_err();
            };
            // A read that finds the violation would fail the run, so this workload has no reads.
            let mut options = WorkloadOptions::new(CAPACITY);
            options.weights = [0, 50, 12, 5, 5, 0, 0];
            harness.run(&mut Workload::new(options, seed), 100, &mut inspect);
            harness.drain(&mut inspect);
            found
        });
        assert!(found, "{liar:?}");
    }
}
