//! The waiting that was observed at each load, at the load to which the trend leads.

use super::curve::{Curve, Fit, Sample, waiting};
use super::forecast::{Base, Forecast, Prediction};

/// The steps before there is a trend.
const FIRST_STEPS: u64 = 10;
/// The greatest growth within the horizon, as a share of the level.
const GROWTH_MAX: f64 = 1.0;

/// How a trend is found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrendOptions {
    /// How far ahead it leads, in seconds.
    pub horizon: f64,
    /// The time over which the load is smoothed, in seconds.
    pub smoothed: f64,
}

impl Default for TrendOptions {
    fn default() -> Self {
        Self { horizon: 3.0, smoothed: 1.0 }
    }
}

impl TrendOptions {
    /// The same within bounds.
    fn bounded(self) -> Self {
        let number = |value: f64, usual: f64, least: f64, most: f64| {
            if value.is_finite() { value.clamp(least, most) } else { usual }
        };
        let usual = Self::default();
        Self {
            horizon: number(self.horizon, usual.horizon, 0.0, 60.0),
            smoothed: number(self.smoothed, usual.smoothed, 0.1, 600.0),
        }
    }
}

/// Holt's linear trend of the load, and the times at the load that it leads to.
///
/// The mean and the 90th percentile are lines over u / (1 − u), with the utilisation u = load / n;
/// both lines and n are fitted to what was observed. So a device whose queue has another variance
/// than the paper's formula assumes, or that serves requests faster while it has many, is described
/// by its own curve. What a request waits is the same for all disks, and is added to the times of
/// each under a low load.
#[derive(Clone, Debug)]
pub struct Trend {
    options: TrendOptions,
    level: f64,
    /// The growth of the load for each second.
    growth: f64,
    steps: u64,
    /// The mean time of a request on the idle device, in nanoseconds.
    service_ns: f64,
    curve: Curve,
    fit: Option<Fit>,
}

impl Trend {
    /// A trend with these options.
    pub fn new(options: TrendOptions) -> Self {
        Self {
            options: options.bounded(),
            level: 0.0,
            growth: 0.0,
            steps: 0,
            service_ns: 0.0,
            curve: Curve::new(),
            fit: None,
        }
    }

    /// The load to which the trend leads.
    fn expected(&self) -> f64 {
        let growth = self.growth.max(0.0) * self.options.horizon;
        self.level.max(0.0) + growth.min(self.level.max(0.0) * GROWTH_MAX)
    }
}

impl Forecast for Trend {
    fn name(&self) -> String {
        let TrendOptions { horizon, smoothed } = self.options;
        if horizon <= 0.0 {
            return "curve".into();
        }
        if self.options == (TrendOptions { horizon, ..TrendOptions::default() }) {
            return format!("trend of {horizon} s");
        }
        format!("trend {horizon} {smoothed}")
    }

    fn step(&mut self, load: f64, seconds: f64) {
        if !load.is_finite() || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        self.steps = self.steps.saturating_add(1);
        let expected = self.level + self.growth * seconds;
        let error = load - expected;
        if self.steps < FIRST_STEPS {
            self.level += error / self.steps as f64;
        } else {
            // A filter with critical damping: both orders have the same time.
            let kept = (-seconds / self.options.smoothed).exp();
            self.level = expected + (1.0 - kept * kept) * error;
            self.growth += (1.0 - kept).powi(2) * error / seconds;
        }
    }

    fn learn(&mut self, sample: Sample, service_ns: f64) {
        self.curve.add(sample);
        self.fit = self.curve.fit();
        self.service_ns = service_ns;
    }

    fn predict(&self, base: &Base, headroom: f64) -> Option<Prediction> {
        let fit = self.fit?;
        let load = self.expected() * (1.0 + headroom);
        let more = waiting(load, fit.parallelism) - waiting(base.low_load, fit.parallelism);
        let added_ns = |slope: f64| slope * more * self.service_ns;
        // At less than the low load, the curve may lead below what the device needs.
        let low = base.low;
        let mean_ns = (low.mean_ns as f64 + added_ns(fit.mean.slope)).max(base.service_ns / 2.0);
        let p90_ns = (low.p90_ns as f64 + added_ns(fit.p90.slope)).max(mean_ns);
        Some(Prediction { mean_ns, p90_ns })
    }

    fn parallelism(&self) -> Option<f64> {
        self.fit.map(|fit| fit.parallelism)
    }
}
