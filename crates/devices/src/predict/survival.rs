//! Predictors that take into account how long the device has already been idle.

use super::Predictor;

/// The number of buckets for each doubling of the length.
const PER_OCTAVE: usize = 4;
/// The first bucket ends at this length, in nanoseconds.
const SHORTEST_NS: f64 = 65_536.0;
const BUCKETS: usize = 24 * PER_OCTAVE;
/// How many periods it takes until a count has half its weight.
const HALF_LIFE: f64 = 2000.0;
/// The weight of the assumption, before any period is known, that all magnitudes are equally
/// likely.
const PRIOR: f64 = 1e-4;
/// The number of periods from which on the past is used.
const LEARNED: u32 = 16;
/// The wait before that, in nanoseconds.
const INITIAL_NS: u64 = 20_000_000;
/// A risk that is accepted at any age.
const RISK_MIN: f64 = 0.005;
/// Risks that differ by less than this factor count as equal, because the difference may be chance.
const TOLERANCE: f64 = 1.25;

/// The lengths of past idle periods: a histogram with logarithmic buckets, in which old periods
/// lose weight.
#[derive(Clone, Debug)]
struct Past {
    /// The weight of each bucket. New periods have a growing weight, which is the same as a
    /// decreasing one for old periods.
    weights: Vec<f64>,
    weight: f64,
    count: u32,
}

/// The upper end of a bucket, in nanoseconds.
fn end_ns(bucket: usize) -> f64 {
    SHORTEST_NS * (bucket as f64 / PER_OCTAVE as f64).exp2()
}

fn bucket(length_ns: f64) -> usize {
    let octaves = (length_ns / SHORTEST_NS).max(1e-9).log2();
    let bucket = (octaves * PER_OCTAVE as f64).ceil().max(0.0) as usize;
    bucket.min(BUCKETS - 1)
}

impl Past {
    fn new() -> Self {
        Self { weights: vec![PRIOR; BUCKETS], weight: 1.0, count: 0 }
    }

    fn add(&mut self, length_ns: u64) {
        self.count = self.count.saturating_add(1);
        self.weight *= (1.0 / HALF_LIFE).exp2();
        self.weights[bucket(length_ns as f64)] += self.weight;
        if self.weight > 1e9 {
            for weight in &mut self.weights {
                *weight = *weight / self.weight + PRIOR;
            }
            self.weight = 1.0;
        }
    }

    /// The weight of the periods that are longer than `length_ns`.
    fn longer(&self, length_ns: f64) -> f64 {
        let index = bucket(length_ns);
        let above: f64 = self.weights[index + 1..].iter().sum();
        let start_ns = if index == 0 { 0.0 } else { end_ns(index - 1) };
        let end_ns = end_ns(index);
        let part = ((end_ns - length_ns) / (end_ns - start_ns)).clamp(0.0, 1.0);
        above + self.weights[index] * part
    }

    /// The probability that a request comes during a step that begins after `idle_ns`.
    fn risk(&self, idle_ns: f64, step_ns: f64) -> f64 {
        let longer = self.longer(idle_ns);
        // Nothing is known of such long periods.
        if longer <= 0.0 { 0.0 } else { 1.0 - self.longer(idle_ns + step_ns) / longer }
    }

    /// How long to wait until the risk of a step is at most `risk`.
    fn wait_ns(&self, risk: f64, idle_ns: u64, step_ns: u64) -> u64 {
        let (idle, step) = (idle_ns as f64, step_ns as f64);
        if self.count < LEARNED {
            return INITIAL_NS.saturating_sub(idle_ns);
        }
        if self.risk(idle, step) <= risk {
            return 0;
        }
        let mut later = (bucket(idle)..BUCKETS).map(end_ns).filter(|age_ns| *age_ns > idle);
        let age_ns = later.find(|age_ns| self.risk(*age_ns, step) <= risk);
        let age_ns = age_ns.unwrap_or_else(|| end_ns(BUCKETS - 1) * 2.0);
        (age_ns as u64).saturating_sub(idle_ns).max(1)
    }
}

/// Work begins if, of the past periods that were at least as long as the current one, at most a
/// share ended within the duration of a step.
#[derive(Clone, Debug)]
pub struct Survival {
    risk: f64,
    past: Past,
}

impl Survival {
    /// A step may begin if a request comes during it with at most the probability `risk`.
    pub fn new(risk: f64) -> Self {
        Self { risk, past: Past::new() }
    }
}

impl Predictor for Survival {
    fn name(&self) -> String {
        format!("survival {}", self.risk)
    }

    fn ended(&mut self, length_ns: u64) {
        self.past.add(length_ns);
    }

    fn wait_ns(&self, idle_ns: u64, step_ns: u64) -> u64 {
        self.past.wait_ns(self.risk, idle_ns, step_ns)
    }
}

/// Work begins in the quietest part of the idle time. Of all ages that periods reached in the past,
/// those count as quiet at which the risk of a step was least, as many of them as make up a given
/// share of the idle time. No other choice by age uses as much time and meets as few requests.
#[derive(Clone, Debug)]
pub struct Quietest {
    share: f64,
    past: Past,
}

impl Quietest {
    /// Work uses this share of the idle time.
    pub fn new(share: f64) -> Self {
        Self { share, past: Past::new() }
    }

    /// The largest risk within the share.
    fn risk(&self, step_ns: f64) -> f64 {
        let (mut longer, mut all_ns) = (0.0, 0.0);
        let mut ages: Vec<(f64, f64)> = Vec::with_capacity(BUCKETS);
        for index in (0..BUCKETS).rev() {
            let start_ns = if index == 0 { 0.0 } else { end_ns(index - 1) };
            let length_ns = end_ns(index) - start_ns;
            // The time that all periods spent at these ages.
            let spent_ns = (longer + self.past.weights[index] / 2.0) * length_ns;
            longer += self.past.weights[index];
            all_ns += spent_ns;
            ages.push((self.past.risk(start_ns, step_ns), spent_ns));
        }
        ages.sort_by(|one, other| one.0.total_cmp(&other.0));
        let mut left_ns = all_ns * self.share;
        for (risk, spent_ns) in ages {
            left_ns -= spent_ns;
            if left_ns <= 0.0 {
                return risk;
            }
        }
        1.0
    }
}

impl Predictor for Quietest {
    fn name(&self) -> String {
        format!("quietest {}", self.share)
    }

    fn ended(&mut self, length_ns: u64) {
        self.past.add(length_ns);
    }

    fn wait_ns(&self, idle_ns: u64, step_ns: u64) -> u64 {
        let risk = (self.risk(step_ns as f64) * TOLERANCE).max(RISK_MIN);
        self.past.wait_ns(risk, idle_ns, step_ns)
    }
}
