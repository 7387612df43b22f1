//! A million mutations of a synthetic guest's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::synthetic::{Effort, Outcome, Shape, Subject};

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
    let mut bytes = vec![0; 1 + 11 * count];
    random.fill(&mut bytes);
    bytes
}

/// Adds up what came of many runs.
#[derive(Debug, Default)]
pub(super) struct Sum {
    runs: u64,
    attached: u64,
    outcome: Outcome,
}

impl Sum {
    pub fn add(&mut self, outcome: Outcome) {
        self.runs += 1;
        self.attached += u64::from(outcome.attached);
        let sum = &mut self.outcome;
        sum.same += outcome.same;
        sum.unsure += outcome.unsure;
        sum.explained += outcome.explained;
        sum.reads_max = sum.reads_max.max(outcome.reads_max);
        sum.nonsense.extend(outcome.nonsense);
    }
}

fn tamper(what: &'static str, shape: &Shape, effort: Effort, seeds: std::ops::Range<u64>) {
    let mut subject = Subject::new(shape);
    let seed = Seed::new(what);
    let mut sum = Sum::default();
    let start = std::time::Instant::now();
    for number in seeds {
        seed.set(number);
        sum.add(subject.run(effort, &bytes(number)));
    }
    println!(
        "{what}: {:?} {} runs, {} attached, same {}, unsure {}, explained {}, reads {}, nonsense {}",
        start.elapsed(),
        sum.runs,
        sum.attached,
        sum.outcome.same,
        sum.outcome.unsure,
        sum.outcome.explained,
        sum.outcome.reads_max,
        sum.outcome.nonsense.len()
    );
    for line in &sum.outcome.nonsense {
        println!("  {line}");
    }
}

fn count(default: u64) -> u64 {
    std::env::var("COUNT").ok().and_then(|c| c.parse().ok()).unwrap_or(default)
}

#[test]
fn requests_early() {
    tamper("requests, early", &Shape::default(), Effort::Request, 0..count(1000));
}

#[test]
fn requests_recent() {
    tamper("requests, recent", &Shape::recent(), Effort::Request, 0..count(1000));
}

#[test]
fn everything_early() {
    tamper("everything, early", &Shape::default(), Effort::Everything, 0..count(1000) / 10);
}

#[test]
fn everything_recent() {
    tamper("everything, recent", &Shape::recent(), Effort::Everything, 0..count(1000) / 10);
}
