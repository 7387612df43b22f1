//! The model of one disk: what it learns, and the rule for its state.

use super::forecast::{Base, Forecast, Prediction};
use super::growth::Growth;
use super::low::{Bound, Low};
use super::verdict::{ContentionState, Verdict, VerdictBasis};
use super::window::{STEPS_MAX, Sums, Times, Window};
use super::{Batch, Carriable, ContentionOptions, Moment, WINDOWS_MIN};

/// The weight of a window in the mean errors, and the greatest error of a window.
const ERROR_WEIGHT: f64 = 0.05;
const ERROR_MAX: f64 = 2.0;
/// The windows that are compared before the model may count as bad.
const ERROR_WINDOWS_MIN: u64 = 10;
/// The model is used again when its error has fallen to this share of the bound.
const ERROR_RECOVERED: f64 = 0.8;
/// The greatest time that counts, in nanoseconds: an hour.
const TIME_MAX_NS: f64 = 3.6e12;

/// For how long a condition has held, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Held(u64);

impl Held {
    fn update(&mut self, holds: bool, length_ns: u64) -> u64 {
        self.0 = if holds { self.0.saturating_add(length_ns) } else { 0 };
        self.0
    }
}

/// A disk.
#[derive(Clone, Debug, Default)]
pub(super) struct DiskModel {
    batch: Batch,
    window: Window,
    low: Low,
    growth: Growth,
    /// What was predicted for the current window at its beginning, without the headroom.
    pending: Option<Prediction>,
    observed: Held,
    calm: Held,
    verdict: Verdict,
}

impl DiskModel {
    pub fn record(&mut self, batch: &Batch) {
        self.batch.merge(batch);
    }

    /// Drops what was recorded since the last step.
    pub fn forget(&mut self) {
        self.batch = Batch::default();
    }

    /// Ends the step.
    pub fn push(&mut self, length_ns: u64, steps_max: usize) {
        self.window.push(length_ns, std::mem::take(&mut self.batch), steps_max);
    }

    /// In the last `seconds` requests arrived at this rate, one of `count`.
    pub fn grow(&mut self, rate: f64, seconds: f64, count: usize) {
        self.growth.step(rate, seconds, count);
    }

    /// A window has ended.
    pub fn learn_growth(&mut self, rate: f64, seconds: f64, is_low: bool) {
        self.growth.learn(rate, seconds, is_low);
    }

    pub fn growth(&self) -> &Growth {
        &self.growth
    }

    pub fn sums(&self, steps: usize) -> Sums {
        self.window.sums(steps)
    }

    pub fn completed(&self) -> u64 {
        self.window.completed()
    }

    pub fn observed(&self) -> Option<Times> {
        self.verdict.observed
    }

    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// The mean time of a request on the idle device, in nanoseconds. If it is not known, an
    /// estimate from what waited before it.
    pub fn service_ns(&self) -> f64 {
        let known = self.low.service_ns().or_else(|| {
            let (sums, times) = (self.window.sums(STEPS_MAX), self.window.times(1)?);
            Some(times.mean_ns as f64 / (1.0 + sums.queue / sums.arrivals.max(1.0)))
        });
        known.unwrap_or(0.0).clamp(0.0, TIME_MAX_NS)
    }

    fn base(&self) -> Base {
        let low = self.low.times();
        Base { service_ns: self.service_ns(), low, low_load: self.low.load }
    }

    /// Learns from the step.
    pub fn learn(&mut self, options: &ContentionOptions, moment: &Moment) {
        self.verdict.observed = self.window.times(options.requests_min);
        // While requests are carried elsewhere, those that are left are of another kind: reads, for
        // example.
        if moment.is_low && !moment.is_carried {
            let (count, sum_ns) = self.window.alone();
            self.low.alone(count, sum_ns);
        }
        if !moment.is_window_end {
            return;
        }
        let Some(observed) = self.verdict.observed else { return };
        // The load is lower than it is without, too.
        if moment.is_low && !moment.is_carried {
            self.low.window(observed, moment.load);
        }
        if let Some(pending) = self.pending.take().filter(|_| !moment.is_carried) {
            let errors = &mut self.verdict.errors;
            errors.windows = errors.windows.saturating_add(1);
            let weight = ERROR_WEIGHT.max(1.0 / errors.windows as f64);
            let error = |predicted_ns: f64, observed_ns: u64| {
                let observed_ns = (observed_ns as f64).max(1.0);
                ((predicted_ns - observed_ns).abs() / observed_ns).min(ERROR_MAX)
            };
            let mean = error(pending.mean_ns, observed.mean_ns);
            let p90 = error(pending.p90_ns, observed.p90_ns);
            errors.mean += (mean - errors.mean) * weight;
            errors.p90 += (p90 - errors.p90) * weight;
            let totals = &mut self.verdict.totals;
            totals.mean += mean;
            totals.p90 += p90;
            totals.windows = totals.windows.saturating_add(1);
        }
    }

    /// Whether the model is good enough for this disk.
    fn source(&self, options: &ContentionOptions) -> VerdictBasis {
        let verdict = &self.verdict;
        let bound = match verdict.source {
            VerdictBasis::Model => options.error_max,
            VerdictBasis::Observed => options.error_max * ERROR_RECOVERED,
        };
        let is_new = verdict.errors.windows < ERROR_WINDOWS_MIN;
        if is_new || verdict.errors.p90 <= bound {
            VerdictBasis::Model
        } else {
            VerdictBasis::Observed
        }
    }

    /// Predicts, and decides on the state.
    pub fn decide(
        &mut self,
        options: &ContentionOptions,
        forecast: &dyn Forecast,
        moment: &Moment,
        is_known: bool,
    ) {
        let base = self.base();
        let is_learned = is_known && self.low.windows >= WINDOWS_MIN;
        let valid = |prediction: Prediction| {
            let is_finite = prediction.mean_ns.is_finite() && prediction.p90_ns.is_finite();
            is_finite.then(|| Prediction {
                mean_ns: prediction.mean_ns.clamp(0.0, TIME_MAX_NS),
                p90_ns: prediction.p90_ns.clamp(0.0, TIME_MAX_NS),
            })
        };
        let predict = |headroom| {
            is_learned.then(|| forecast.predict(&base, headroom)).flatten().and_then(valid)
        };
        if moment.is_window_end {
            self.pending = predict(0.0);
        }
        let predicted = predict(options.headroom).map(|prediction| prediction.times());
        let source =
            if predicted.is_some() { self.source(options) } else { VerdictBasis::Observed };
        let bound = self.low.bound(options.share, options.margin);
        let bound_observed = self.low.bound_observed(options.share_observed, options.margin);
        let verdict = &mut self.verdict;
        verdict.source = source;
        verdict.predicted = predicted;
        verdict.low = (self.low.windows > 0).then(|| self.low.times());
        verdict.bound_ns = bound.deviation_ns.min(TIME_MAX_NS) as u64;
        verdict.bound_observed_ns = bound_observed.deviation_ns.min(TIME_MAX_NS) as u64;
        verdict.service_ns = base.service_ns as u64;
        if !is_learned {
            verdict.state = ContentionState::Learning;
            return;
        }
        let predicted = predicted.filter(|_| source == VerdictBasis::Model);
        let exceeds =
            |bound: &Bound, times: Option<Times>| times.is_some_and(|it| bound.is_exceeded(it));
        // No peak comes without more requests than usual.
        let is_coming = exceeds(&bound, predicted) && moment.is_growing;
        // A low queue contradicts the model: for example, requests that follow each other take less
        // time. Requests that take long without a queue do not wait for each other.
        let is_predicted = is_coming && moment.is_waiting;
        // While requests are carried elsewhere, those that are left are of another kind, and may
        // wait for what returns. The model counts the carried ones, and decides.
        let is_comparable = !moment.is_carried || predicted.is_none();
        let is_observed =
            is_comparable && exceeds(&bound_observed, verdict.observed) && moment.is_queue_long;
        let is_calm = !is_coming && !is_observed;
        let length_ns = moment.length_ns;
        let observed_for_ns = self.observed.update(is_observed, length_ns);
        let calm_for_ns = self.calm.update(is_calm, length_ns);
        if is_observed && observed_for_ns >= options.dwell_observed_ns {
            verdict.state = ContentionState::Contended;
        } else if is_predicted {
            verdict.state = ContentionState::Foreseen;
        } else if !verdict.state.is_peak() || calm_for_ns >= options.hold_ns {
            verdict.state = ContentionState::Calm;
        }
    }

    /// The share of the disk's requests that can be carried elsewhere, and the share of the
    /// device's time that its requests need.
    pub fn carried(&self, carriable: Carriable) -> (f64, f64) {
        let sums = self.window.sums(STEPS_MAX);
        let part = |share: f64| if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
        let writes = (sums.arrivals - sums.reads).max(0.0);
        let carried = writes * part(carriable.writes) + sums.reads * part(carriable.reads);
        let share = carried / sums.arrivals.max(1.0);
        (share, sums.rate() * self.service_ns() / 1e9)
    }
}
