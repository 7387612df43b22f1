//! Which of a rule's snapshots of a volume it keeps.
//!
//! Of each period that has snapshots, such as a day, the last one is kept, for so many periods as
//! the rule says, from the newest on. So the clock decides nothing by itself: however it jumps, a
//! new snapshot takes the place of one other of each kind of period at most, and without new ones
//! nothing is deleted. Snapshots are in the order in which they were taken, not in that of their
//! times.

use std::collections::BTreeSet;

use fathom_layers::wal::Utc;

/// How many snapshots are kept, by period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Keep {
    /// The last ones, whenever they were taken.
    pub(super) last: u32,
    pub(super) hourly: u32,
    pub(super) daily: u32,
    pub(super) weekly: u32,
    pub(super) monthly: u32,
    pub(super) yearly: u32,
}

/// The period of a time, in seconds since 1970: it is equal for times of the same period.
type PeriodOf = fn(u64) -> String;

/// The beginning of a time as a text, such as `2026-11-29 12`, has its period.
fn beginning(time_s: u64, length: usize) -> String {
    let text = Utc(time_s.saturating_mul(1_000_000_000)).to_string();
    text.get(..length).unwrap_or(&text).to_owned()
}

/// The weeks since the one of 1 January 1970, which began on Monday, 29 December 1969.
fn week(time_s: u64) -> String {
    ((time_s / 86_400 + 3) / 7).to_string()
}

impl Keep {
    /// The most snapshots of a volume that are kept.
    pub(super) fn total(&self) -> u64 {
        self.periods().iter().map(|(count, _)| u64::from(*count)).sum::<u64>()
            + u64::from(self.last)
    }

    fn periods(&self) -> [(u32, PeriodOf); 5] {
        [
            (self.hourly, |time_s| beginning(time_s, "2026-11-29 12".len())),
            (self.daily, |time_s| beginning(time_s, "2026-11-29".len())),
            (self.weekly, week),
            (self.monthly, |time_s| beginning(time_s, "2026-11".len())),
            (self.yearly, |time_s| beginning(time_s, "2026".len())),
        ]
    }

    /// Which snapshots are not kept, of those with these times in seconds since 1970, in the order
    /// in which they were taken: their indexes.
    pub(super) fn superfluous(&self, times_s: &[u64]) -> Vec<usize> {
        let mut kept: BTreeSet<usize> = (0..times_s.len()).rev().take(self.last as usize).collect();
        for (count, period_of) in self.periods() {
            let mut periods = BTreeSet::new();
            for (index, time_s) in times_s.iter().enumerate().rev() {
                if periods.len() == count as usize {
                    break;
                }
                if periods.insert(period_of(*time_s)) {
                    kept.insert(index);
                }
            }
        }
        (0..times_s.len()).filter(|index| !kept.contains(index)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-11-29 00:00:00 UTC, a Sunday.
    const SUNDAY: u64 = 1_795_910_400;
    const HOUR: u64 = 3600;
    const DAY: u64 = 24 * HOUR;

    /// The snapshots that are there after each of these was taken and the rest was thinned.
    struct Rolling {
        keep: Keep,
        times_s: Vec<u64>,
    }

    impl Rolling {
        /// Returns how many were deleted.
        fn take(&mut self, time_s: u64) -> usize {
            self.times_s.push(time_s);
            let gone = self.keep.superfluous(&self.times_s);
            for index in gone.iter().rev() {
                self.times_s.remove(*index);
            }
            gone.len()
        }
    }

    #[test]
    fn of_each_period_the_last_one_is_kept() {
        let keep = Keep { last: 2, hourly: 3, daily: 3, weekly: 2, monthly: 2, yearly: 1 };
        let mut rolling = Rolling { keep, times_s: Vec::new() };
        // Every ten minutes for 40 days, until noon on Sunday.
        let begin = SUNDAY - 39 * DAY;
        for index in 0..40 * 144 - 72 {
            rolling.take(begin + index * 600 + 1);
        }
        let shown: Vec<String> =
            rolling.times_s.iter().map(|time_s| beginning(*time_s, 16)).collect();
        let expected = [
            "2026-10-31 23:50",
            "2026-11-22 23:50",
            "2026-11-27 23:50",
            "2026-11-28 23:50",
            "2026-11-29 09:50",
            "2026-11-29 10:50",
            "2026-11-29 11:40",
            "2026-11-29 11:50",
        ];
        assert_eq!(shown, expected);
        assert_eq!(week(SUNDAY + DAY - 1), week(SUNDAY - 6 * DAY));
        assert_ne!(week(SUNDAY + DAY), week(SUNDAY));
    }

    #[test]
    fn a_rule_that_keeps_hours_has_the_last_hours() {
        let mut rolling =
            Rolling { keep: Keep { hourly: 24, ..Keep::default() }, times_s: Vec::new() };
        for index in 0..1000 {
            rolling.take(SUNDAY + index * 600);
        }
        let now = (SUNDAY + 999 * 600) / HOUR;
        let hours: Vec<u64> = rolling.times_s.iter().map(|time_s| now - time_s / HOUR).collect();
        assert_eq!(hours, (0..24).rev().collect::<Vec<_>>());
    }

    /// Whatever the clock does, the newest snapshot stays, there are never more than the rule says,
    /// and a new one takes the place of few.
    #[test]
    fn no_clock_deletes_much_or_keeps_too_much() {
        let (mut jumps, mut deleted) = (0, 0);
        fathom_sim::each_seed(300, |seed| {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut count = |most: u32| if random.bool() { random.u32(..most) } else { 0 };
            let keep = Keep {
                last: count(5),
                hourly: count(30),
                daily: count(10),
                weekly: count(5),
                monthly: count(5),
                yearly: count(3).max(1),
            };
            let periods = 1 + keep.periods().iter().filter(|(count, _)| *count > 0).count();
            let mut rolling = Rolling { keep, times_s: Vec::new() };
            let mut now = SUNDAY;
            for _ in 0..400 {
                now = match random.u8(..40) {
                    0 => random.u64(..8_000_000_000),
                    1 => now.saturating_sub(random.u64(..400 * DAY)),
                    2 => now.saturating_add(random.u64(..400 * DAY)),
                    3 => now.saturating_sub(random.u64(..2 * HOUR)),
                    4 => u64::MAX - random.u64(..3),
                    _ => now.min(8_000_000_000) + random.u64(..HOUR),
                };
                jumps += 1;
                let gone = rolling.take(now);
                deleted += gone;
                assert!(gone <= periods, "{gone} are deleted at once: {keep:?}");
                assert_eq!(rolling.times_s.last(), Some(&now), "the newest one stays");
                assert!(rolling.times_s.len() as u64 <= keep.total(), "{keep:?}");
                let again = keep.superfluous(&rolling.times_s);
                assert!(again.is_empty(), "without a new snapshot nothing is deleted");
            }
        });
        assert!(deleted > jumps / 2, "{deleted} of {jumps}");
    }
}
