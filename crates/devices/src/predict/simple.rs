//! Predictors that compare the time already idle with one number.

use std::collections::VecDeque;

use super::Predictor;

/// Longer periods count as an hour, in nanoseconds.
const LENGTH_MAX_NS: u64 = 3_600_000_000_000;

/// Work begins when the device has been idle for a fixed time.
#[derive(Clone, Debug)]
pub struct Fixed {
    timeout_ns: u64,
}

impl Fixed {
    /// Waits for `timeout_ns` in each period.
    pub fn new(timeout_ns: u64) -> Self {
        Self { timeout_ns }
    }
}

impl Predictor for Fixed {
    fn name(&self) -> String {
        format!("fixed {} ms", self.timeout_ns / 1_000_000)
    }

    fn ended(&mut self, _: u64) {}

    fn wait_ns(&self, idle_ns: u64, _: u64) -> u64 {
        self.timeout_ns.saturating_sub(idle_ns)
    }
}

/// The length of a period is expected to be the moving average of the past. Work begins if the step
/// fits into the rest of the expected length, or when the period has exceeded it.
#[derive(Clone, Debug)]
pub struct MovingAverage {
    /// How far a period has to exceed the average.
    factor: f64,
    average_ns: f64,
}

impl MovingAverage {
    /// The weight of the newest period.
    const WEIGHT: f64 = 1.0 / 16.0;

    /// Work begins when a period is `factor` times as long as the average.
    pub fn new(factor: f64) -> Self {
        Self { factor, average_ns: 100e6 }
    }
}

impl Predictor for MovingAverage {
    fn name(&self) -> String {
        format!("average × {}", self.factor)
    }

    fn ended(&mut self, length_ns: u64) {
        let length_ns = length_ns.min(LENGTH_MAX_NS);
        self.average_ns += (length_ns as f64 - self.average_ns) * Self::WEIGHT;
    }

    fn wait_ns(&self, idle_ns: u64, step_ns: u64) -> u64 {
        let expected_ns = (self.average_ns * self.factor) as u64;
        // Twice the step, so that a step does not end just before the next request.
        if idle_ns.saturating_add(step_ns.saturating_mul(2)) <= expected_ns {
            return 0;
        }
        expected_ns.saturating_sub(idle_ns)
    }
}

/// Work begins when a period is longer than a share of the recent ones.
#[derive(Clone, Debug)]
pub struct Quantile {
    share: f64,
    recent: VecDeque<u64>,
    sorted: Vec<u64>,
}

impl Quantile {
    /// The number of recent periods.
    const RECENT: usize = 256;
    /// The wait before the first periods are known, in nanoseconds.
    const INITIAL_NS: u64 = 100_000_000;

    /// Work begins when a period is longer than this share of the recent ones.
    pub fn new(share: f64) -> Self {
        Self { share, recent: VecDeque::new(), sorted: Vec::new() }
    }
}

impl Predictor for Quantile {
    fn name(&self) -> String {
        format!("quantile {}", self.share)
    }

    fn ended(&mut self, length_ns: u64) {
        let length_ns = length_ns.min(LENGTH_MAX_NS);
        if self.recent.len() == Self::RECENT {
            if let Some(oldest) = self.recent.pop_front() {
                let index = self.sorted.partition_point(|length| *length < oldest);
                self.sorted.remove(index);
            }
        }
        self.recent.push_back(length_ns);
        let index = self.sorted.partition_point(|length| *length < length_ns);
        self.sorted.insert(index, length_ns);
    }

    fn wait_ns(&self, idle_ns: u64, _: u64) -> u64 {
        let index = (self.share * self.sorted.len() as f64) as usize;
        let wanted_ns = match self.sorted.get(index) {
            Some(length_ns) if self.sorted.len() >= 16 => *length_ns,
            _ => Self::INITIAL_NS,
        };
        wanted_ns.saturating_sub(idle_ns)
    }
}
