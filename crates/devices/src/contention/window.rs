//! The last steps of a disk, and what they say together.

use std::collections::VecDeque;

use fathom_histogram::Histogram;

use super::Batch;

/// The most steps of a window.
pub(super) const STEPS_MAX: usize = 64;
/// The share of the requests that the quantile of times does not exceed, in percent.
const PERCENT: f64 = 90.0;

/// The times of requests, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// The mean.
    pub mean_ns: u64,
    /// The 90th percentile.
    pub p90_ns: u64,
}

impl Times {
    /// By how much the 90th percentile exceeds the mean, in nanoseconds.
    pub fn deviation_ns(&self) -> u64 {
        self.p90_ns.saturating_sub(self.mean_ns)
    }
}

/// The steps of a disk within the window.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    steps: VecDeque<(u64, Batch)>,
    times: Histogram,
}

/// The sums over some of the latest steps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    pub seconds: f64,
    pub arrivals: f64,
    pub reads: f64,
    pub carried: f64,
    pub queue: f64,
    pub time_ns: f64,
}

impl Sums {
    /// Arrivals a second.
    pub fn rate(&self) -> f64 {
        if self.seconds > 0.0 { self.arrivals / self.seconds } else { 0.0 }
    }

    /// Arrivals a second, with what was carried elsewhere.
    pub fn rate_with_carried(&self) -> f64 {
        if self.seconds > 0.0 { (self.arrivals + self.carried) / self.seconds } else { 0.0 }
    }
}

impl Window {
    /// Adds a step, and forgets those beyond `steps_max`.
    pub fn push(&mut self, length_ns: u64, batch: Batch, steps_max: usize) {
        self.times.merge(&batch.times_ns);
        self.steps.push_back((length_ns, batch));
        while self.steps.len() > steps_max.clamp(1, STEPS_MAX) {
            if let Some((_, old)) = self.steps.pop_front() {
                self.times = self.times.since(&old.times_ns);
            }
        }
    }

    /// The sums over the latest `count` steps.
    pub fn sums(&self, count: usize) -> Sums {
        let mut sums = Sums::default();
        for (length_ns, batch) in self.steps.iter().rev().take(count) {
            sums.seconds += *length_ns as f64 / 1e9;
            sums.arrivals += batch.arrivals() as f64;
            sums.reads += batch.reads as f64;
            sums.carried += batch.carried as f64;
            sums.queue += batch.queue_sum as f64;
            sums.time_ns += batch.time_sum_ns as f64;
        }
        sums
    }

    /// The requests of the latest step that had found the device idle, and the sum of their times.
    pub fn alone(&self) -> (u64, u64) {
        self.steps.back().map_or((0, 0), |(_, batch)| (batch.alone, batch.alone_sum_ns))
    }

    /// The requests that completed within the window.
    pub fn completed(&self) -> u64 {
        self.times.count()
    }

    /// Their times; `None` if fewer than `least` requests completed.
    pub fn times(&self, least: u64) -> Option<Times> {
        let count = self.completed();
        if count < least.max(1) {
            return None;
        }
        let mean_ns = (self.sums(STEPS_MAX).time_ns / count as f64) as u64;
        Some(Times { mean_ns, p90_ns: self.times.percentile(PERCENT) })
    }
}
