//! A million mutations of a synthetic guest's memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::synthetic::{Effort, MUTATION, Outcome, Shape, Subject, fuzz_introspection};

/// Says which seed it was when a test fails, and when it hangs.
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

/// The bytes of one run: most have one mutation or two, some have many.
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

/// Adds up what came of many runs.
#[derive(Debug, Default)]
pub(super) struct Sum {
    pub runs: u64,
    pub attached: u64,
    pub outcome: Outcome,
}

impl Sum {
    /// Has a guest tampered with for each seed.
    pub fn of(
        what: &'static str,
        subject: &mut Subject,
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
            sum.nonsense.extend(outcome.nonsense.iter().map(|text| format!("{seed}: {text}")));
        }
        let Outcome { same, unsure, explained, reads_max, nonsense, .. } = &all.outcome;
        println!(
            "{what}: {} runs, {} with a kernel; answers: {same} the same, {unsure} unsure, \
             {explained} that the memory tells, {} without a reason; {reads_max} reads at most",
            all.runs,
            all.attached,
            nonsense.len()
        );
        all
    }
}

/// A wrong answer that claims to be sure comes of a pointer that by chance leads to another thing
/// of the same kind: not once in so many mutations.
const CHANCE: u64 = 100_000;

fn tamper(what: &'static str, shape: &Shape, effort: Effort, runs: u64) {
    let mut subject = Subject::new(shape);
    let sum = Sum::of(what, &mut subject, effort, 0..runs);
    let nonsense = &sum.outcome.nonsense;
    assert!(nonsense.len() as u64 <= 1 + runs / CHANCE, "{what}:\n{}", nonsense.join("\n"));
    // Otherwise it tests nothing.
    assert!(sum.attached * 4 > runs * 3);
    assert!(sum.outcome.same > sum.outcome.unsure && sum.outcome.unsure > runs / 10);
}

#[test]
fn requests_early() {
    tamper("requests, early", &Shape::default(), Effort::Request, 480_000);
}

#[test]
fn requests_recent() {
    tamper("requests, recent", &Shape::recent(), Effort::Request, 480_000);
}

#[test]
fn everything_early() {
    tamper("everything, early", &Shape::default(), Effort::Everything, 20_000);
}

#[test]
fn everything_recent() {
    tamper("everything, recent", &Shape::recent(), Effort::Everything, 20_000);
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
