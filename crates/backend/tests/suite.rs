//! One seeded suite over every back end, without layers and under layers, compared with a plain
//! model.

#![allow(unsafe_code)]

mod support;

use std::sync::Arc;

use fathom_backend::{FileBackend, FileOptions, Memory};
use fathom_block::{Backend, Capabilities, Layer, Operation};
use fathom_layers::{Fault, FaultEffect, FaultRule};
use fathom_sim::{
    Harness, HarnessOptions, SimBackend, SimOptions, Workload, WorkloadOptions, each_seed,
};

const CAPACITY: u64 = 512 << 10;
const REQUESTS: usize = 250;

/// A workload with only the operations that `backend` offers.
fn workload(backend: &dyn Backend, seed: u64) -> Workload {
    let mut options = WorkloadOptions::new(backend.capacity());
    options.alignment = u64::from(backend.geometry().alignment).max(512);
    let Capabilities { flush, force_unit_access, discard, write_zeroes, .. } =
        backend.capabilities();
    for (offered, operation) in [
        (flush, Operation::Flush),
        (discard, Operation::Discard),
        (write_zeroes, Operation::WriteZeroes),
    ] {
        if !offered {
            options.weights[operation as usize] = 0;
        }
    }
    if !force_unit_access {
        options.force_unit_access_rate = 0.0;
    }
    Workload::new(options, seed)
}

/// Runs the suite over the back ends of `make`, under every stack.
fn suite(cases: u64, simulated: bool, make: impl Fn(u64) -> Option<Arc<dyn Backend>>) {
    each_seed(cases, |seed| {
        for stack in support::STACKS {
            let Some(backend) = make(seed) else { return };
            let disk = support::disk(support::layers(stack, seed), Arc::clone(&backend));
            let depth = 1 + (seed as usize * 7) % 24;
            let options = HarnessOptions { queues: 2, depth, simulated };
            let mut harness = Harness::new(&disk, &options, seed);
            harness.run(&mut workload(&*backend, seed), REQUESTS, |_| {});
            harness.verify(disk.capacity());
            assert!(harness.statistics().succeeded >= REQUESTS as u64, "under {stack}");
        }
    });
}

fn file(direct: bool) -> Option<Arc<dyn Backend>> {
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    image.as_file().set_len(CAPACITY).unwrap();
    let options = FileOptions { path: image.path().into(), direct, ..FileOptions::default() };
    match FileBackend::open(&options) {
        Ok(backend) => Some(Arc::new(backend)),
        Err(error) if direct => {
            eprintln!("skipped: no direct I/O here: {error:?}");
            None
        }
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn memory() {
    suite(12, true, |_| Some(Arc::new(Memory::new(CAPACITY))));
}

#[test]
fn memory_in_large_pages() {
    suite(4, true, |_| Memory::open_large(CAPACITY).ok().map(|disk| Arc::new(disk) as _));
}

#[test]
fn file_buffered() {
    suite(4, false, |_| file(false));
}

#[test]
fn file_direct() {
    suite(3, false, |_| file(true));
}

#[test]
fn sim() {
    suite(8, true, |seed| Some(Arc::new(SimBackend::new(SimOptions::new(CAPACITY), seed))));
}

#[test]
fn sim_in_order_with_blocks_of_4096() {
    let options = SimOptions { alignment: 4096, rounds_max: 0, ..SimOptions::new(CAPACITY) };
    suite(4, true, |seed| Some(Arc::new(SimBackend::new(options.clone(), seed))));
}

/// A store that fails occasionally: its outcomes must still be consistent with its contents.
#[test]
fn a_store_with_errors() {
    each_seed(12, |seed| {
        let options = SimOptions {
            read_error_rate: 0.05,
            write_error_rate: 0.1,
            flush_error_rate: 0.2,
            room: CAPACITY / 2,
            ..SimOptions::new(CAPACITY)
        };
        let backend: Arc<dyn Backend> = Arc::new(SimBackend::new(options, seed));
        let disk = support::disk(support::layers("all", seed), Arc::clone(&backend));
        let mut harness = Harness::new(&disk, &HarnessOptions::default(), seed);
        harness.allow_errors();
        harness.run(&mut workload(&*backend, seed), 600, |_| {});
        harness.verify(CAPACITY);
        assert!(harness.statistics().failed > 0, "nothing failed");
    });
}

/// Faults of every kind over each back end, switched on and off while requests are in flight.
#[test]
fn faults_over_every_back_end() {
    let effects = [FaultEffect::Refused, FaultEffect::Late, FaultEffect::Short, FaultEffect::Torn];
    each_seed(8, |seed| {
        let backends: [Arc<dyn Backend>; 3] = [
            Arc::new(Memory::new(CAPACITY)),
            Arc::new(SimBackend::new(SimOptions::new(CAPACITY), seed)),
            file(false).expect("a buffered file opens anywhere"),
        ];
        for backend in backends {
            let rules = effects
                .into_iter()
                .map(|effect| FaultRule { effect, rate: 0.05, ..FaultRule::default() })
                .collect();
            let fault = Arc::new(Fault::new(rules, seed));
            let mut layers = support::layers("tap", seed);
            layers.push(Arc::clone(&fault) as Arc<dyn Layer>);
            layers.extend(support::layers("delay", seed));
            let disk = support::disk(layers, Arc::clone(&backend));
            let simulated = backend.name() != "file";
            let options = HarnessOptions { simulated, ..HarnessOptions::default() };
            let mut harness = Harness::new(&disk, &options, seed);
            harness.allow_errors();
            let mut workload = workload(&*backend, seed);
            for _ in 0..3 {
                fault.set_enabled(true);
                harness.run(&mut workload, 150, |_| {});
                fault.set_enabled(false);
                harness.run(&mut workload, 30, |_| {});
            }
            harness.drain(|_| {});
            let failed = harness.statistics().failed;
            assert_eq!(fault.strikes().iter().sum::<u64>(), failed, "every strike is an error");
            assert!(failed > 0, "nothing failed");
            harness.verify(CAPACITY);
        }
    });
}
