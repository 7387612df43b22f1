//! The product-form queue of `VirtCache`: R = d / (1 − Σ (λ/n)·d).

use std::collections::VecDeque;

use super::curve::{Curve, PARALLELISM_MAX, Sample, waiting};
use super::forecast::{Base, Forecast, Prediction};

/// The steps over which the rates of arrivals are smoothed.
const SMOOTHED: usize = 5;
/// The steps whose predictions make up the distribution.
const STEPS: usize = 20;
/// The share of the steps that the 90th percentile exceeds.
const SHARE: f64 = 0.9;
/// The bounds of the ratio of the 90th percentile to the mean.
const SHAPE: (f64, f64) = (1.0, 10.0);

/// The formula of the paper, for each of the latest steps. The mean of the steps is the predicted
/// mean. Their 90th percentile is that of requests, times the ratio of both that was observed under
/// a low load.
#[derive(Clone, Debug)]
pub struct Queue {
    /// The parallelism that is given.
    fixed: Option<f64>,
    fitted: Option<f64>,
    curve: Curve,
    loads: VecDeque<(f64, f64)>,
}

impl Queue {
    /// With a given parallelism of the device, or one that is fitted to what is observed.
    pub fn new(parallelism: Option<f64>) -> Self {
        let fixed =
            parallelism.filter(|it| it.is_finite()).map(|it| it.clamp(0.5, PARALLELISM_MAX));
        Self { fixed, fitted: None, curve: Curve::new(), loads: VecDeque::new() }
    }
}

impl Forecast for Queue {
    fn name(&self) -> String {
        match self.fixed {
            Some(parallelism) => format!("queue, n = {parallelism}"),
            None => "queue, n fitted".into(),
        }
    }

    fn step(&mut self, load: f64, seconds: f64) {
        self.loads.push_back((load, seconds));
        while self.loads.len() > STEPS + SMOOTHED - 1 {
            self.loads.pop_front();
        }
    }

    fn learn(&mut self, sample: Sample, _service_ns: f64) {
        self.curve.add(sample);
        self.fitted = self.curve.parallelism();
    }

    fn predict(&self, base: &Base, headroom: f64) -> Option<Prediction> {
        let parallelism = self.parallelism()?;
        let first = self.loads.len().saturating_sub(STEPS);
        let mut times: Vec<f64> = (first..self.loads.len())
            .map(|last| {
                let steps = self.loads.range((last + 1).saturating_sub(SMOOTHED)..=last);
                let sum = |sums: (f64, f64), step: &(f64, f64)| {
                    (sums.0 + step.0 * step.1, sums.1 + step.1)
                };
                let (work, seconds) = steps.fold((0.0, 0.0), sum);
                let load = work / seconds.max(1e-9) * (1.0 + headroom);
                base.service_ns * (1.0 + waiting(load, parallelism))
            })
            .collect();
        if times.is_empty() {
            return None;
        }
        let mean_ns = times.iter().sum::<f64>() / times.len() as f64;
        times.sort_by(f64::total_cmp);
        let index = (SHARE * times.len() as f64).ceil() as usize;
        let p90_ns = times[index.clamp(1, times.len()) - 1];
        let shape = base.low.p90_ns as f64 / (base.low.mean_ns as f64).max(1.0);
        Some(Prediction { mean_ns, p90_ns: p90_ns * shape.clamp(SHAPE.0, SHAPE.1) })
    }

    fn parallelism(&self) -> Option<f64> {
        self.fixed.or(self.fitted)
    }
}
