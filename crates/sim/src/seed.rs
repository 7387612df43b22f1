//! The seeds that a test runs.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Runs `case` with `cases` seeds. The environment variables `FATHOM_SEED` (the first seed) and
/// `FATHOM_CASES` (the number of seeds) replace the defaults. If a case panics, its seed is
/// printed.
///
/// # Panics
/// When `case` panics, or when one of the variables is not a number.
pub fn each_seed(cases: u64, mut case: impl FnMut(u64)) {
    for seed in seeds(cases) {
        run(seed, || case(seed));
    }
}

/// As [`each_seed`], with `lanes` seeds at a time. After a panic no further seed begins.
///
/// # Panics
/// When `case` panics, or when one of the variables is not a number.
pub fn each_seed_beside(cases: u64, lanes: usize, case: impl Fn(u64) + Sync) {
    let seeds = seeds(cases);
    let next = AtomicU64::new(seeds.start);
    let lane = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed, || case(seed)))) {
                next.store(seeds.end, Ordering::Relaxed);
                resume_unwind(panic);
            }
        }
    };
    let panic = thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        lanes.into_iter().filter_map(|lane| lane.join().err()).last()
    });
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
}

fn seeds(cases: u64) -> Range<u64> {
    let variable = |name: &str| {
        std::env::var(name).ok().map(|text| {
            text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text} is not a number"))
        })
    };
    match variable("FATHOM_SEED") {
        Some(seed) => seed..seed + variable("FATHOM_CASES").unwrap_or(1),
        None => 0..variable("FATHOM_CASES").unwrap_or(cases),
    }
}

fn run(seed: u64, case: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(case)) {
        eprintln!("failed with FATHOM_SEED={seed}");
        resume_unwind(panic);
    }
}
