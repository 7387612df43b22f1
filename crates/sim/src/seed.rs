//! The seeds that a test runs.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Runs `case` with `cases` seeds. The environment variables `FATHOM_SEED` (the first seed) and
/// `FATHOM_CASES` (the number of seeds) replace the defaults. If a case panics, its seed is
/// printed.
///
/// # Panics
/// When `case` panics, or when one of the variables is not a number.
pub fn each_seed(cases: u64, mut case: impl FnMut(u64)) {
    let variable = |name: &str| {
        std::env::var(name).ok().map(|text| {
            text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text} is not a number"))
        })
    };
    let seeds = match variable("FATHOM_SEED") {
        Some(seed) => seed..seed + variable("FATHOM_CASES").unwrap_or(1),
        None => 0..variable("FATHOM_CASES").unwrap_or(cases),
    };
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| case(seed))) {
            eprintln!("failed with FATHOM_SEED={seed}");
            resume_unwind(panic);
        }
    }
}
