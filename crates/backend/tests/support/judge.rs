//! Compares the verdicts on contention with what the requests experienced.

use fathom_devices::contention::{Contention, ContentionOptions, Times, VerdictBasis};
use fathom_histogram::Histogram;

use crate::consolidate::Peak;

/// The share of the windows without a peak whose 90th percentile lies in the band.
const BAND: f64 = 0.99;
/// How long the 90th percentile lies above the band before it has left it, in nanoseconds.
const LEFT_NS: u64 = 1_000_000_000;

/// A step of a run.
#[derive(Clone, Debug, Default)]
pub struct Step {
    pub now_ns: u64,
    /// The observed times of each disk.
    pub observed: Vec<Option<Times>>,
    /// Whether fewer requests than the threshold were in flight on average.
    pub is_low: bool,
    /// Whether each forecast has a peak.
    pub is_peak: Vec<bool>,
}

/// The steps of a run, and the errors of the forecasts.
#[derive(Clone, Debug, Default)]
pub struct Record {
    pub steps: Vec<Step>,
    pub forecasts: Vec<Errors>,
}

/// The end of a run for a forecast.
#[derive(Clone, Debug, Default)]
pub struct Errors {
    pub name: String,
    /// The mean relative errors of the mean and of the 90th percentile, over all disks and windows.
    pub mean: f64,
    pub p90: f64,
    pub parallelism: Option<f64>,
    /// The share of the steps in which the model was used.
    pub used: f64,
}

/// What a forecast achieved in a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Score {
    pub peaks: usize,
    /// The peaks in which a 90th percentile left its band.
    pub left: usize,
    /// Those among them in which the verdict was a peak before.
    pub foreseen: usize,
    /// The mean and the median of the time from the verdict until then, in nanoseconds. It is
    /// negative if the verdict came later.
    pub lead_mean_ns: f64,
    pub lead_median_ns: f64,
    /// Times with a verdict of a peak outside of peaks, and those of them in which no 90th
    /// percentile left its band.
    pub alarms: usize,
    pub false_alarms: usize,
    /// The time outside of peaks, in hours, and the share of it with a verdict of a peak.
    pub hours: f64,
    pub on: f64,
}

/// The observed 90th percentiles above their bands, by step.
fn above(steps: &[Step], is_usual: impl Fn(&Step) -> bool) -> Vec<bool> {
    let disks = steps.first().map_or(0, |step| step.observed.len());
    let p90 = |step: &Step, disk: usize| step.observed[disk].map(|times| times.p90_ns);
    let bands: Vec<u64> = (0..disks)
        .map(|disk| {
            let mut usual = Histogram::default();
            for step in steps.iter().filter(|step| is_usual(step)) {
                if let Some(p90_ns) = p90(step, disk) {
                    usual.record(p90_ns, 1);
                }
            }
            usual.percentile(100.0 * BAND)
        })
        .collect();
    let is_above = |step: &Step, disk: usize| p90(step, disk).is_some_and(|it| it > bands[disk]);
    steps.iter().map(|step| (0..disks).any(|disk| is_above(step, disk))).collect()
}

/// The runs of steps with a property.
fn runs(steps: impl Iterator<Item = bool>) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (index, _) in steps.enumerate().filter(|(_, holds)| *holds) {
        match runs.last_mut() {
            Some(run) if run.end == index => run.end = index + 1,
            Some(_) | None => runs.push(index..index + 1),
        }
    }
    runs
}

/// The score of a forecast in a run with these peaks, or in a trace without known ones.
pub fn score(
    record: &Record,
    forecast: usize,
    peaks: &[Peak],
    options: &ContentionOptions,
) -> Score {
    let steps = &record.steps;
    let in_peak = |now_ns: u64| {
        peaks
            .iter()
            .any(|peak| (peak.start_ns..peak.end_ns() + options.window_ns).contains(&now_ns))
    };
    let is_trace = peaks.is_empty();
    let above = above(steps, |step| if is_trace { step.is_low } else { !in_peak(step.now_ns) });
    let alarms = runs(steps.iter().map(|step| step.is_peak[forecast]));
    let left_steps = (LEFT_NS / options.step_ns) as usize;
    let excursions = runs(above.iter().copied());
    let mut score = Score { peaks: peaks.len(), ..Score::default() };
    let mut leads: Vec<f64> = Vec::new();
    for peak in peaks {
        let start = steps.partition_point(|step| step.now_ns < peak.start_ns);
        let end = steps.partition_point(|step| step.now_ns < peak.end_ns());
        // What was above before counts from the beginning of the peak.
        let within =
            excursions.iter().filter(|run| run.end.min(end) >= run.start.max(start) + left_steps);
        let Some(left) = within.map(|run| run.start.max(start)).next() else { continue };
        score.left += 1;
        let Some(alarm) = alarms.iter().find(|run| run.end > left && run.start < end) else {
            leads.push(-(steps[end - 1].now_ns as f64 - steps[left].now_ns as f64));
            continue;
        };
        let begin_ns = steps[alarm.start.max(start)].now_ns;
        leads.push(steps[left].now_ns as f64 - begin_ns as f64);
        score.foreseen += usize::from(alarm.start < left || alarm.start <= start);
    }
    leads.sort_by(f64::total_cmp);
    score.lead_mean_ns = leads.iter().sum::<f64>() / leads.len().max(1) as f64;
    score.lead_median_ns = leads.get(leads.len() / 2).copied().unwrap_or_default();
    let later = (options.window_ns / options.step_ns) as usize;
    for alarm in alarms {
        // What begins in a peak and lasts is no further alarm. What begins before one is judged up
        // to it.
        if in_peak(steps[alarm.start].now_ns) {
            continue;
        }
        score.alarms += 1;
        let after = &steps[alarm.start..(alarm.end + later).min(steps.len())];
        let length = after.iter().take_while(|step| !in_peak(step.now_ns)).count();
        let excursions = &above[alarm.start..alarm.start + length];
        score.false_alarms += usize::from(!excursions.iter().any(|it| *it));
    }
    let outside = || steps.iter().filter(|step| !in_peak(step.now_ns));
    let on = outside().filter(|step| step.is_peak[forecast]).count();
    let outside = outside().count();
    score.on = on as f64 / outside.max(1) as f64;
    score.hours = outside as f64 * options.step_ns as f64 / 3.6e12;
    score
}

/// Follows the forecasts through a run.
pub struct Judge {
    pub contentions: Vec<Contention>,
    queue_low: f64,
    record: Record,
    used: Vec<u64>,
}

impl Judge {
    /// All disks are added to each.
    pub fn new(mut contentions: Vec<Contention>, disks: usize, queue_low: f64) -> Self {
        for contention in &mut contentions {
            assert!((0..disks as u64).all(|disk| contention.open(disk)));
        }
        let used = vec![0; contentions.len()];
        Self { contentions, queue_low, record: Record::default(), used }
    }

    /// A step of the run.
    pub fn step(&mut self, now_ns: u64, batches: &[fathom_devices::contention::Batch]) {
        for contention in &mut self.contentions {
            for (disk, batch) in batches.iter().enumerate() {
                contention.record(disk as u64, batch);
            }
            contention.step(now_ns);
        }
        let first = &self.contentions[0];
        self.record.steps.push(Step {
            now_ns,
            observed: first.verdicts().map(|(_, verdict)| verdict.observed).collect(),
            is_low: first.queue() < self.queue_low,
            is_peak: self.contentions.iter().map(Contention::is_peak).collect(),
        });
        for (used, contention) in self.used.iter_mut().zip(&self.contentions) {
            *used += u64::from(contention.verdicts().any(|it| it.1.source == VerdictBasis::Model));
        }
    }

    /// The record of the run.
    pub fn end(mut self) -> Record {
        let steps = self.record.steps.len().max(1) as f64;
        for (contention, used) in self.contentions.iter().zip(self.used) {
            let errors: Vec<_> = contention.verdicts().map(|(_, verdict)| verdict.totals).collect();
            let windows = errors.iter().map(|it| it.windows).sum::<u64>().max(1) as f64;
            self.record.forecasts.push(Errors {
                name: contention.forecast(),
                mean: errors.iter().map(|it| it.mean).sum::<f64>() / windows,
                p90: errors.iter().map(|it| it.p90).sum::<f64>() / windows,
                parallelism: contention.parallelism(),
                used: used as f64 / steps,
            });
        }
        self.record
    }
}
