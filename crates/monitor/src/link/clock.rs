//! The offset of a host's clock, measured by pings as in NTP.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The number of recent pings, of which the quickest is used.
const SAMPLES: usize = 16;
/// The smallest error of a clock that is corrected, in nanoseconds.
const CHANGE_MIN_NS: i64 = 200_000;

/// Nanoseconds since 1970.
pub fn unix_time_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// A monotonic clock that starts at the time of day.
#[derive(Clone, Copy, Debug)]
pub struct SteadyClock {
    begun: Instant,
    begun_ns: i64,
}

impl SteadyClock {
    pub fn new() -> Self {
        // The thread may be interrupted between reading the two clocks. Of several attempts, the
        // one with the shortest time between the reads is used.
        let read = |_| {
            let before = Instant::now();
            let begun_ns = unix_time_ns();
            (before.elapsed(), Self { begun: before, begun_ns })
        };
        let (_, clock) =
            (1..8).map(read).fold(read(0), |best, next| if next.0 < best.0 { next } else { best });
        clock
    }

    /// The time, in nanoseconds since 1970.
    pub fn now_ns(&self) -> i64 {
        self.begun_ns.saturating_add(nanoseconds(self.begun.elapsed()))
    }
}

/// A duration as a number of nanoseconds.
pub fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

/// The result of a ping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measurement {
    /// The time from the ping to its answer, in nanoseconds.
    pub round_trip_ns: i64,
    /// How far the other clock is ahead, in nanoseconds.
    pub offset_ns: i64,
}

impl Measurement {
    /// The result of a ping that was sent and answered at these times of the own clock, when the
    /// other clock showed `other_ns`.
    pub fn new(sent_ns: i64, answered_ns: i64, other_ns: i64) -> Self {
        let round_trip_ns = answered_ns.saturating_sub(sent_ns).max(0);
        let middle_ns = sent_ns.saturating_add(round_trip_ns / 2);
        Self { round_trip_ns, offset_ns: other_ns.saturating_sub(middle_ns) }
    }

    /// The largest error of the offset, in nanoseconds.
    pub fn uncertainty_ns(&self) -> i64 {
        self.round_trip_ns / 2 + 1
    }
}

/// The last measurements of a clock.
#[derive(Debug, Default)]
pub struct Offset {
    samples: VecDeque<Measurement>,
}

impl Offset {
    pub fn add(&mut self, sample: Measurement) {
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// The number of measurements.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// The measurement with the smallest error.
    pub fn best(&self) -> Option<Measurement> {
        // The latest of several with the same round trip.
        self.samples.iter().rev().min_by_key(|sample| sample.round_trip_ns).copied()
    }

    /// The correction to add to the other clock, if the measurements show that the current one is
    /// wrong; otherwise `None`. In nanoseconds.
    pub fn change(&self, correction_ns: i64) -> Option<i64> {
        let best = self.best()?;
        let wrong_by = best.offset_ns.saturating_add(correction_ns).saturating_abs();
        let wrong = wrong_by > best.uncertainty_ns().saturating_add(CHANGE_MIN_NS);
        wrong.then(|| best.offset_ns.saturating_neg())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_corrected_only_beyond_the_uncertainty() {
        // The other clock is three minutes ahead; the round trip takes 10 ms.
        let minutes = 180_000_000_000;
        let sample = Measurement::new(1_000_000_000, 1_010_000_000, 1_005_000_000 + minutes);
        assert_eq!(sample, Measurement { round_trip_ns: 10_000_000, offset_ns: minutes });
        let correction = |sample| {
            let mut offset = Offset::default();
            offset.add(sample);
            offset.change(0)
        };
        assert_eq!(correction(sample), Some(-minutes));
        // Only the answer's path was slow, so the offset is wrong by 4 ms, within its uncertainty.
        let sample = Measurement::new(0, 10_000_000, 1_000_000);
        assert_eq!((sample.offset_ns, correction(sample)), (-4_000_000, None));
        // Extreme clocks do not cause an overflow.
        for (sent, answered, other) in [(0, i64::MAX, i64::MIN), (i64::MAX, 0, i64::MAX)] {
            let sample = Measurement::new(sent, answered, other);
            assert!(sample.uncertainty_ns() > 0 && correction(sample) != Some(i64::MIN));
        }
    }

    #[test]
    fn the_quickest_ping_counts_and_drift_is_followed() {
        let mut offset = Offset::default();
        let of = |round_trip_ns, offset_ns| Measurement { round_trip_ns, offset_ns };
        assert_eq!((offset.best(), offset.change(0)), (None, None));
        offset.add(of(1_000_000, 100));
        offset.add(of(900_000_000, 440_000_000));
        assert_eq!(offset.best(), Some(of(1_000_000, 100)));
        assert_eq!(offset.change(0), None);
        for _ in 0..SAMPLES {
            offset.add(of(1_000_000, 5_000_000));
        }
        assert_eq!(offset.len(), SAMPLES);
        assert_eq!(offset.change(0), Some(-5_000_000));
        assert_eq!(offset.change(-5_000_000), None);
    }
}
