//! How far a host's clock is off: measured as NTP does it, from pings.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The pings of which the quickest counts.
const SAMPLES: usize = 16;
/// A clock is not corrected for less, in nanoseconds.
const CHANGE_MIN_NS: i64 = 200_000;

/// Nanoseconds since 1970.
pub fn unix_time_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// The time of day as it was at the start, going on steadily from there.
#[derive(Clone, Copy, Debug)]
pub struct SteadyClock {
    begun: Instant,
    begun_ns: i64,
}

impl SteadyClock {
    pub fn new() -> Self {
        // Both clocks are read at nearly the same moment, unless the thread is held up in between.
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

/// A time as a number of nanoseconds.
pub fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

/// What a ping says of a clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measurement {
    /// From the ping to its answer, in nanoseconds.
    pub round_trip_ns: i64,
    /// How far the other clock is ahead, in nanoseconds.
    pub offset_ns: i64,
}

impl Measurement {
    /// Of a ping that was sent and answered at these times of the own clock, where the other clock
    /// showed `other_ns` in between.
    pub fn new(sent_ns: i64, answered_ns: i64, other_ns: i64) -> Self {
        let round_trip_ns = answered_ns.saturating_sub(sent_ns).max(0);
        let middle_ns = sent_ns.saturating_add(round_trip_ns / 2);
        Self { round_trip_ns, offset_ns: other_ns.saturating_sub(middle_ns) }
    }

    /// How far the truth may be from the offset, in nanoseconds.
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

    /// How many there are.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// The one that is known best.
    pub fn best(&self) -> Option<Measurement> {
        // Of those that are alike the latest.
        self.samples.iter().rev().min_by_key(|sample| sample.round_trip_ns).copied()
    }

    /// Another correction than the one in use, what is added to the other clock, where that is
    /// known to be wrong.
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
    fn a_clock_is_corrected_by_what_is_certain() {
        // Three minutes ahead, over a path of 10 ms and back.
        let minutes = 180_000_000_000;
        let sample = Measurement::new(1_000_000_000, 1_010_000_000, 1_005_000_000 + minutes);
        assert_eq!(sample, Measurement { round_trip_ns: 10_000_000, offset_ns: minutes });
        let correction = |sample| {
            let mut offset = Offset::default();
            offset.add(sample);
            offset.change(0)
        };
        assert_eq!(correction(sample), Some(-minutes));
        // An answer that came by the slow way only: its middle is 4 ms off, which nobody knows.
        let sample = Measurement::new(0, 10_000_000, 1_000_000);
        assert_eq!((sample.offset_ns, correction(sample)), (-4_000_000, None));
        // Hostile clocks overflow nothing.
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
