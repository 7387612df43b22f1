//! Predictions of the times of requests from the load of their device.
//!
//! `bench/foresee` compares all of them; [`default_forecast`] is the best of them.

use super::curve::Sample;
use super::window::Times;

pub use super::queue::Queue;
pub use super::trend::{Trend, TrendOptions};

/// What is known of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Base {
    /// The mean time of a request on an idle device, in nanoseconds.
    pub service_ns: f64,
    /// The times under a low load.
    pub low: Times,
    /// The average load of the device then.
    pub low_load: f64,
}

/// Predicts the times of a device's requests. The caller reports its load after each step, and what
/// was observed after each window.
pub trait Forecast: Send {
    /// Its name in tables.
    fn name(&self) -> String;

    /// In the last `seconds` the load was `load`: λ·d, summed over the disks.
    fn step(&mut self, load: f64, seconds: f64);

    /// A window has ended.
    fn learn(&mut self, sample: Sample, service_ns: f64);

    /// The times of a disk's requests soon, if the load is a share of `headroom` higher than
    /// expected. `None` if too little is known.
    fn predict(&self, base: &Base, headroom: f64) -> Option<Prediction>;

    /// The number of requests that the device serves at a time, as far as it is known.
    fn parallelism(&self) -> Option<f64>;
}

/// The predicted times of a disk's requests, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prediction {
    /// The mean.
    pub mean_ns: f64,
    /// The 90th percentile.
    pub p90_ns: f64,
}

impl Prediction {
    /// The same in whole nanoseconds.
    pub fn times(&self) -> Times {
        Times { mean_ns: self.mean_ns as u64, p90_ns: self.p90_ns as u64 }
    }
}

/// The forecast that the daemon uses.
pub fn default_forecast() -> Box<dyn Forecast> {
    Box::new(Trend::new(TrendOptions::default()))
}

/// All forecasts with their usual settings, for comparisons.
pub fn all_forecasts() -> Vec<Box<dyn Forecast>> {
    let trend = |horizon| Trend::new(TrendOptions { horizon, ..TrendOptions::default() });
    vec![
        Box::new(Queue::new(Some(16.0))),
        Box::new(Queue::new(None)),
        Box::new(trend(0.0)),
        Box::new(trend(1.5)),
        Box::new(trend(3.0)),
    ]
}
