//! Which seeds a test runs.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Runs `case` with `cases` seeds, or with what `FATHOM_SEED` (one seed) and `FATHOM_CASES` (how
/// many) say. A case that panics has its seed printed.
///
/// # Panics
/// When `case` does, or when one of the variables is no number.
pub fn each_seed(cases: u64, mut case: impl FnMut(u64)) {
    let variable = |name: &str| {
        std::env::var(name).ok().map(|text| {
            text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text} is no number"))
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
