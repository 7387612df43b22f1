//! Contention of a device that several disks share, foreseen by a model.
//!
//! While the load of the device is low, the deviation of each disk's times is learned: by how much
//! the 90th percentile exceeds the mean. A [`Forecast`] predicts the mean and the 90th percentile
//! at a load that is higher than the present one by a headroom. If the predicted deviation exceeds
//! that under the low load, a peak is foreseen, and a disk can be chosen whose load is carried
//! elsewhere ([`Contention::choose`]). The model is compared with what follows all the time. While
//! it is bad, only what is observed counts.
//!
//! The model is that of the paper `VirtCache` (Vellore Arumugam et al.), with differences that
//! `docs/offload.md` explains.
//!
//! ```text
//!  queues ── Batch ─▶ record ─▶ window of each disk ─▶ loads ─▶ Forecast ─▶ predicted times ─┐
//!                                  └─▶ observed times ─┬────────────────────────────────────┴▶ Verdict
//!                                                      └─ while the load is low: Low
//! ```
//!
//! A step takes time in proportion to the number of disks. The memory of a disk is bounded.

mod batch;
mod choice;
mod curve;
mod disk;
pub mod forecast;
mod growth;
mod low;
mod queue;
mod trend;
mod verdict;
mod window;

use std::collections::BTreeMap;

pub use batch::Batch;
pub use choice::{Carriable, DiskChoice};
pub use curve::Sample;
pub use verdict::{ContentionState, Errors, Verdict, VerdictBasis};
pub use window::Times;

use disk::DiskModel;
use forecast::Forecast;
use growth::Growth;
use low::Quantiles;
use window::{STEPS_MAX, Sums};

/// The most disks of a device.
pub const DISKS_MAX: usize = 4096;
/// The greatest load that counts.
const LOAD_MAX: f64 = 1e6;
/// The load is low up to this many times the difference between the first quartile and the median
/// above the median.
const LOW_SPREADS: f64 = 3.0;
/// The unit of queues and loads in quantiles, which resolve no numbers below one.
const QUEUE_UNIT: f64 = 1000.0;
/// The windows under a low load from which on the model is used.
const WINDOWS_MIN: u32 = 10;
/// The requests of a device from which on a window counts for the curve.
const SAMPLE_MIN: u64 = 20;

/// How contention is foreseen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ContentionOptions {
    /// The shortest time between two steps, in nanoseconds.
    pub step_ns: u64,
    /// The time over which the mean and the 90th percentile are taken, in nanoseconds; at most 64
    /// steps.
    pub window_ns: u64,
    /// The load is low while fewer requests than this are in flight at the device on average.
    pub queue_low: f64,
    /// By what share the load of the prediction is higher than the expected one.
    pub headroom: f64,
    /// By what share the 90th percentile and the deviation exceed those under a low load in a peak.
    pub margin: f64,
    /// The share of the windows under a low load that do not exceed what a prediction is compared
    /// with.
    pub share: f64,
    /// The same for what is observed.
    pub share_observed: f64,
    /// The share of the windows under a low load whose queue is at most the one without which no
    /// peak is foreseen.
    pub share_queue: f64,
    /// How long what is observed exceeds its bound before there is a peak, in nanoseconds.
    pub dwell_observed_ns: u64,
    /// How long it is not before a peak ends, in nanoseconds.
    pub hold_ns: u64,
    /// The mean relative error of the 90th percentile from which on the model is not used.
    pub error_max: f64,
    /// The fewest requests in a window from which a 90th percentile is taken.
    pub requests_min: u64,
}

impl Default for ContentionOptions {
    fn default() -> Self {
        Self {
            step_ns: 100_000_000,
            window_ns: 2_000_000_000,
            queue_low: 4.0,
            headroom: 0.1,
            margin: 0.05,
            share: 0.9,
            share_observed: 0.99,
            share_queue: 0.95,
            dwell_observed_ns: 1_000_000_000,
            hold_ns: 5_000_000_000,
            error_max: 0.3,
            requests_min: 20,
        }
    }
}

impl ContentionOptions {
    /// The same within bounds.
    fn bounded(self) -> Self {
        let number = |value: f64, usual: f64, least: f64, most: f64| {
            if value.is_finite() { value.clamp(least, most) } else { usual }
        };
        let usual = Self::default();
        let step_ns = self.step_ns.clamp(1_000_000, 60_000_000_000);
        Self {
            step_ns,
            window_ns: self.window_ns.clamp(step_ns, step_ns * STEPS_MAX as u64),
            queue_low: number(self.queue_low, usual.queue_low, 0.1, 1e6),
            headroom: number(self.headroom, usual.headroom, 0.0, 10.0),
            margin: number(self.margin, usual.margin, 0.0, 100.0),
            share: number(self.share, usual.share, 0.0, 1.0),
            share_observed: number(self.share_observed, usual.share_observed, 0.0, 1.0),
            share_queue: number(self.share_queue, usual.share_queue, 0.0, 1.0),
            error_max: number(self.error_max, usual.error_max, 0.0, 100.0),
            ..self
        }
    }
}

/// What is known of the device after a step.
#[derive(Clone, Copy, Debug)]
struct Moment {
    length_ns: u64,
    is_low: bool,
    /// Whether a window ends with the step.
    is_window_end: bool,
    /// Whether requests wait more than is usual under a low load.
    is_waiting: bool,
    /// Whether those of a disk, or of all, come faster than is usual.
    is_growing: bool,
    /// Whether the queue is longer than nearly always under a low load.
    is_queue_long: bool,
    /// The load of the device within the window.
    load: f64,
    /// Whether requests have been carried elsewhere within the window.
    is_carried: bool,
}

/// The contention of one device. Its clock is that of the callers.
pub struct Contention {
    options: ContentionOptions,
    forecast: Box<dyn Forecast>,
    disks: BTreeMap<u64, DiskModel>,
    /// The time of the last step.
    step_ns: Option<u64>,
    /// How much of the current window has passed, in nanoseconds.
    window_ns: u64,
    /// The load within the window, and the mean queue that arrivals found.
    load: f64,
    queue: f64,
    /// The loads of windows with a short queue.
    loads: Quantiles,
    load_windows: u32,
    /// The queues of windows under a low load.
    queues: Quantiles,
    low_windows: u32,
    /// The arrivals of all disks.
    growth: Growth,
}

impl Contention {
    /// A device without disks.
    pub fn new(options: ContentionOptions, forecast: Box<dyn Forecast>) -> Self {
        Self {
            options: options.bounded(),
            forecast,
            disks: BTreeMap::new(),
            step_ns: None,
            window_ns: 0,
            load: 0.0,
            queue: 0.0,
            loads: Quantiles::default(),
            load_windows: 0,
            queues: Quantiles::default(),
            low_windows: 0,
            growth: Growth::default(),
        }
    }

    /// Adds a disk. Returns whether it is there; a device has at most [`DISKS_MAX`].
    pub fn open(&mut self, disk: u64) -> bool {
        if !self.disks.contains_key(&disk) && self.disks.len() >= DISKS_MAX {
            return false;
        }
        self.disks.entry(disk).or_default();
        true
    }

    /// Removes a disk.
    pub fn close(&mut self, disk: u64) {
        self.disks.remove(&disk);
    }

    /// What a disk's requests did since its last batch. A batch of an unknown disk is dropped.
    pub fn record(&mut self, disk: u64, batch: &Batch) {
        if let Some(model) = self.disks.get_mut(&disk) {
            model.record(batch);
        }
    }

    /// The time has come to `now_ns`. Returns whether a step was made: earlier than a step's length
    /// after the last one, nothing happens.
    pub fn step(&mut self, now_ns: u64) -> bool {
        let Some(last_ns) = self.step_ns else {
            // What came before belongs to no time.
            self.step_ns = Some(now_ns);
            self.disks.values_mut().for_each(DiskModel::forget);
            return false;
        };
        if now_ns < last_ns {
            self.step_ns = Some(now_ns);
            return false;
        }
        let length_ns = now_ns - last_ns;
        if length_ns < self.options.step_ns {
            return false;
        }
        self.step_ns = Some(now_ns);
        let steps = (self.options.window_ns / self.options.step_ns) as usize;
        for disk in self.disks.values_mut() {
            disk.push(length_ns, steps);
        }
        let moment = self.moment(length_ns);
        for disk in self.disks.values_mut() {
            disk.learn(&self.options, &moment);
        }
        if moment.is_window_end {
            self.end_window(&moment);
        }
        for disk in self.disks.values_mut() {
            let is_known = self.low_windows >= WINDOWS_MIN;
            disk.decide(&self.options, &*self.forecast, &moment, is_known);
        }
        true
    }

    /// Sums up the disks, and reports the load to the forecast.
    fn moment(&mut self, length_ns: u64) -> Moment {
        let (mut all, mut load, mut step_load) = (Sums::default(), 0.0, 0.0);
        let (mut recent, mut step_rate) = (Sums::default(), 0.0);
        let (seconds, count) = (length_ns as f64 / 1e9, self.disks.len());
        let short = (1_000_000_000 / self.options.step_ns).max(1) as usize;
        for disk in self.disks.values_mut() {
            let window = disk.sums(STEPS_MAX);
            let service_seconds = disk.service_ns() / 1e9;
            load += window.rate() * service_seconds;
            let rate = disk.sums(1).rate_with_carried();
            disk.grow(rate, seconds, count);
            step_rate += rate;
            step_load += rate * service_seconds;
            all.arrivals += window.arrivals;
            all.queue += window.queue;
            all.carried += window.carried;
            let sums = disk.sums(short);
            recent.arrivals += sums.arrivals;
            recent.queue += sums.queue;
        }
        self.load = load.min(LOAD_MAX);
        self.queue = all.queue / all.arrivals.max(1.0);
        self.growth.step(step_rate, seconds, count);
        self.forecast.step(step_load.min(LOAD_MAX), seconds);
        self.window_ns = self.window_ns.saturating_add(length_ns);
        let is_window_end = self.window_ns >= self.options.window_ns;
        if is_window_end {
            self.window_ns = 0;
        }
        let mut growths = self.disks.values().map(DiskModel::growth).chain([&self.growth]);
        let recent_queue = recent.queue / recent.arrivals.max(1.0);
        Moment {
            length_ns,
            is_low: self.is_queue_short() && self.is_load_usual(),
            is_window_end,
            is_queue_long: self.queue * QUEUE_UNIT > self.queues.at(self.options.share_observed),
            is_growing: growths.any(|growth| growth.is_unusual(count)),
            is_waiting: recent_queue * QUEUE_UNIT >= self.queues.at(self.options.share_queue),
            load: self.load,
            is_carried: all.carried > 0.0,
        }
    }

    fn is_queue_short(&self) -> bool {
        self.queue < self.options.queue_low
    }

    /// Whether the load is about that of most windows: few peaks of a device with a short queue do
    /// not count as low. The lower half of the loads says how far they spread, as peaks are in the
    /// upper one.
    fn is_load_usual(&self) -> bool {
        let (quartile, median) = (self.loads.at(0.25), self.loads.at(0.5));
        let most = median + LOW_SPREADS * (median - quartile);
        self.load_windows < WINDOWS_MIN || self.load * QUEUE_UNIT <= most
    }

    /// The forecast learns from a window.
    fn end_window(&mut self, moment: &Moment) {
        let (mut rate, seconds) = (0.0, self.options.window_ns as f64 / 1e9);
        let is_low = moment.is_low && !moment.is_carried;
        for disk in self.disks.values_mut() {
            let disk_rate = disk.sums(STEPS_MAX).rate();
            disk.learn_growth(disk_rate, seconds, is_low);
            rate += disk_rate;
        }
        self.growth.learn(rate, seconds, is_low);
        let (mut completed, mut work_ns, mut mean_ns, mut p90_ns) = (0_u64, 0.0, 0.0, 0.0);
        for disk in self.disks.values() {
            let Some(times) = disk.observed() else { continue };
            let count = disk.completed();
            completed = completed.saturating_add(count);
            work_ns += count as f64 * disk.service_ns();
            mean_ns += count as f64 * times.mean_ns as f64;
            p90_ns += count as f64 * times.p90_ns as f64;
        }
        // What is left while requests are carried says nothing of all.
        if completed < SAMPLE_MIN || work_ns <= 0.0 || moment.is_carried {
            return;
        }
        if self.is_queue_short() {
            self.load_windows = self.load_windows.saturating_add(1);
            self.loads.add(self.load * QUEUE_UNIT);
        }
        if moment.is_low {
            self.low_windows = self.low_windows.saturating_add(1);
            self.queues.add(self.queue * QUEUE_UNIT);
        }
        let sample = Sample { load: self.load, mean: mean_ns / work_ns, p90: p90_ns / work_ns };
        self.forecast.learn(sample, work_ns / completed as f64);
    }

    /// The verdict on a disk after the last step.
    pub fn verdict(&self, disk: u64) -> Option<&Verdict> {
        self.disks.get(&disk).map(DiskModel::verdict)
    }

    /// The requests of a disk that arrived at the device in a second of the last window; 0 for an
    /// unknown disk.
    pub fn arrivals(&self, disk: u64) -> f64 {
        self.disks.get(&disk).map_or(0.0, |model| model.sums(STEPS_MAX).rate())
    }

    /// The verdicts on all disks after the last step.
    pub fn verdicts(&self) -> impl Iterator<Item = (u64, &Verdict)> {
        self.disks.iter().map(|(disk, model)| (*disk, model.verdict()))
    }

    /// Whether a peak of the device is foreseen or present: for any of its disks.
    pub fn is_peak(&self) -> bool {
        self.disks.values().any(|disk| disk.verdict().state.is_peak())
    }

    /// The load of the device in the last window: the requests that would be in service on average
    /// if none waited.
    pub fn load(&self) -> f64 {
        self.load
    }

    /// The requests of all disks that a request found in flight at the device, on average over the
    /// last window.
    pub fn queue(&self) -> f64 {
        self.queue
    }

    /// The requests that the device serves at a time, as far as it is known.
    pub fn parallelism(&self) -> Option<f64> {
        self.forecast.parallelism()
    }

    /// The name of the forecast.
    pub fn forecast(&self) -> String {
        self.forecast.name()
    }
}

#[cfg(test)]
mod tests;
