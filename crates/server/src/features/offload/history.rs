//! The last minutes of a disk's forecast.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fathom_control::{OffloadForecast, OffloadSample};

/// The time between two samples.
const INTERVAL: Duration = Duration::from_secs(1);
/// The most samples: of 20 minutes with requests.
const SAMPLES_MAX: usize = 1200;

/// Samples of a disk, oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    samples: VecDeque<OffloadSample>,
    latest: Option<Instant>,
}

impl History {
    /// Notes what a step has found. Seconds without requests have no sample.
    pub(crate) fn note(
        &mut self,
        now: Instant,
        unix_time_ns: u64,
        forecast: &OffloadForecast,
        is_carried: bool,
    ) {
        if self.latest.is_some_and(|latest| now - latest < INTERVAL) {
            // A peak, or the begin of carrying, within the second is seen.
            if let Some(sample) = self.samples.back_mut() {
                sample.is_peak |= forecast.is_peak;
                sample.is_carried |= is_carried;
            }
            return;
        }
        if forecast.observed_mean_ns == 0 {
            return;
        }
        self.latest = Some(now);
        if self.samples.len() == SAMPLES_MAX {
            self.samples.pop_front();
        }
        self.samples.push_back(OffloadSample {
            unix_time_ns,
            arrivals_per_second: forecast.arrivals_per_second,
            observed_mean_ns: forecast.observed_mean_ns,
            observed_p90_ns: forecast.observed_p90_ns,
            predicted_mean_ns: forecast.predicted_mean_ns,
            predicted_p90_ns: forecast.predicted_p90_ns,
            low_p90_ns: forecast.low_p90_ns,
            error: forecast.error,
            is_peak: forecast.is_peak,
            is_carried,
        });
    }

    pub(crate) fn samples(&self) -> Vec<OffloadSample> {
        self.samples.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_one_sample_with_what_it_had_and_memory_is_bounded() {
        let (mut history, begin) = (History::default(), Instant::now());
        let forecast = |is_peak| OffloadForecast {
            observed_mean_ns: 5,
            is_peak,
            ..OffloadForecast::default()
        };
        for tenth in 0..15 {
            let now = begin + Duration::from_millis(100 * tenth);
            history.note(now, tenth, &forecast(tenth == 3), tenth == 12);
        }
        let samples = history.samples();
        let seen: Vec<_> =
            samples.iter().map(|it| (it.unix_time_ns, it.is_peak, it.is_carried)).collect();
        assert_eq!(seen, [(0, true, false), (10, false, true)]);
        history.note(begin + Duration::from_secs(9), 90, &OffloadForecast::default(), false);
        assert_eq!(history.samples().len(), 2, "a second without requests");
        for second in 10..3000 {
            history.note(begin + Duration::from_secs(second), second, &forecast(false), false);
        }
        let samples = history.samples();
        assert_eq!((samples.len(), samples[0].unix_time_ns), (SAMPLES_MAX, 1800));
    }
}
