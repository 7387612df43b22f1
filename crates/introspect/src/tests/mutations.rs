//! A million mutations of a synthetic guest's memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::synthetic::{
    Effort, MUTATION, MutationOutcome, MutationSubject, Shape, fuzz_introspection,
};

/// Prints the seed when a test fails or hangs.
pub(super) struct Seed {
    what: &'static str,
    current: Arc<AtomicU64>,
}

const ENDED: u64 = u64::MAX;

impl Seed {
    pub fn new(what: &'static str) -> Self {
        let current = Arc::new(AtomicU64::new(0));
        let watched = Arc::clone(&current);
        std::thread::spawn(move || {
            let mut before = ENDED;
            loop {
                std::thread::sleep(Duration::from_secs(30));
                let seed = watched.load(Ordering::Relaxed);
                if seed == ENDED {
                    break;
                }
                if seed == before {
                    eprintln!("{what}: seed {seed} hangs");
                    std::process::abort();
                }
                before = seed;
            }
        });
        Self { what, current }
    }

    pub fn set(&self, seed: u64) {
        self.current.store(seed, Ordering::Relaxed);
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        let seed = self.current.swap(ENDED, Ordering::Relaxed);
        if std::thread::panicking() {
            eprintln!("{}: failed with seed {seed}", self.what);
        }
    }
}

/// The bytes of one run: mostly one or two mutations, sometimes many.
pub(super) fn bytes(seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let count = match random.u8(..) {
        0..160 => 1,
        160..220 => 2,
        220..250 => random.usize(3..6),
        _ => random.usize(6..40),
    };
    let mut bytes = vec![0; 1 + MUTATION * count];
    random.fill(&mut bytes);
    bytes
}

/// The sum of the results of many runs.
#[derive(Debug, Default)]
pub(super) struct Sum {
    pub runs: u64,
    pub attached: u64,
    pub outcome: MutationOutcome,
}

impl Sum {
    /// Manipulates a guest once for each seed.
    pub fn of(
        what: &'static str,
        subject: &mut MutationSubject,
        effort: Effort,
        seeds: Range<u64>,
    ) -> Self {
        let watch = Seed::new(what);
        let mut all = Self::default();
        for seed in seeds {
            watch.set(seed);
            let outcome = subject.run(effort, &bytes(seed));
            all.runs += 1;
            all.attached += u64::from(outcome.attached);
            let sum = &mut all.outcome;
            sum.same += outcome.same;
            sum.unsure += outcome.unsure;
            sum.explained += outcome.explained;
            sum.reads_max = sum.reads_max.max(outcome.reads_max);
            sum.unexplained
                .extend(outcome.unexplained.iter().map(|text| format!("{seed}: {text}")));
        }
        let MutationOutcome { same, unsure, explained, reads_max, unexplained, .. } = &all.outcome;
        println!(
            "{what}: {} runs, {} with a kernel; facts: {same} the same, {unsure} unsure, \
             {explained} that the memory explains, {} unexplained; {reads_max} reads at most",
            all.runs,
            all.attached,
            unexplained.len()
        );
        all
    }
}

/// The number of mutations in which at most one result is wrong and claims to be sure: a changed
/// pointer may by chance lead to another object of the same kind.
const CHANCE: u64 = 100_000;

fn manipulate(what: &'static str, shape: &Shape, effort: Effort, runs: u64) {
    let mut subject = MutationSubject::new(shape);
    let sum = Sum::of(what, &mut subject, effort, 0..runs);
    let unexplained = &sum.outcome.unexplained;
    assert!(unexplained.len() as u64 <= 1 + runs / CHANCE, "{what}:\n{}", unexplained.join("\n"));
    // Otherwise the test has no effect. A few manipulations affect all requests, so the number of
    // unsure facts depends on chance.
    assert!(sum.attached * 4 > runs * 3);
    assert!(sum.outcome.same > sum.outcome.unsure && sum.outcome.unsure > runs / 20);
}

#[test]
fn requests_early() {
    manipulate("requests, early", &Shape::default(), Effort::Request, 480_000);
}

#[test]
fn requests_recent() {
    manipulate("requests, recent", &Shape::recent(), Effort::Request, 480_000);
}

#[test]
fn everything_early() {
    manipulate("everything, early", &Shape::default(), Effort::Everything, 20_000);
}

#[test]
fn everything_recent() {
    manipulate("everything, recent", &Shape::recent(), Effort::Everything, 20_000);
}

#[test]
fn any_bytes_of_a_fuzzer() {
    fuzz_introspection(&[]);
    for seed in 0..500 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bytes = vec![0; random.usize(1..400)];
        random.fill(&mut bytes);
        fuzz_introspection(&bytes);
    }
}
