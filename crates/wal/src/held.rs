//! What a log holds, in words.

use std::fmt;

/// The records of a log that are not known to be at home.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Their number.
    pub records: u64,
    /// Their length in the log, in bytes.
    pub bytes: u64,
    /// When the first and the last of them were written, in nanoseconds since 1970; 0 if that is
    /// not known.
    pub first_ns: u64,
    /// See `first_ns`.
    pub last_ns: u64,
}

impl fmt::Display for Held {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { records, bytes, first_ns, last_ns } = *self;
        let plural = if records == 1 { "" } else { "s" };
        write!(formatter, "{records} record{plural} of changes, {} KiB", bytes.div_ceil(1024))?;
        if last_ns > 0 {
            write!(formatter, ", from {} to {}", Utc(first_ns), Utc(last_ns))?;
        }
        Ok(())
    }
}

/// A time in nanoseconds since 1970, to be shown in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Utc(pub u64);

impl fmt::Display for Utc {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0 / 1_000_000_000;
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        // The days from a 1 March on, in cycles of 400 years.
        let days = days + 719_468;
        let (cycle, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = 400 * cycle + year + u64::from(month <= 2);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(formatter, "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_as_dates() {
        let shown = |seconds: u64| Utc(seconds * 1_000_000_000).to_string();
        assert_eq!(shown(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(shown(951_782_399), "2000-02-28 23:59:59 UTC");
        assert_eq!(shown(951_868_800), "2000-03-01 00:00:00 UTC");
        assert_eq!(shown(1_795_807_445), "2026-11-27 19:24:05 UTC");
    }
}
