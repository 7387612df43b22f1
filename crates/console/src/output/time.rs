//! Times as people read them, in the host's time zone.

#![expect(unsafe_code, reason = "only the C library knows the time zone")]

/// The time of day, as `HH:MM:SS`.
pub fn clock(unix_time_ns: u64) -> String {
    let time = local(unix_time_ns);
    format!("{:02}:{:02}:{:02}", time.tm_hour, time.tm_min, time.tm_sec)
}

/// The day and the time of day, as `YYYY-MM-DD HH:MM:SS`.
pub fn day_and_time(unix_time_ns: u64) -> String {
    let time = local(unix_time_ns);
    let (year, month) = (i64::from(time.tm_year) + 1900, time.tm_mon + 1);
    format!("{year:04}-{month:02}-{:02} {}", time.tm_mday, clock(unix_time_ns))
}

/// The day and the time of day to a microsecond, as `YYYY-MM-DD HH:MM:SS.ssssss`: for rows on a
/// terminal.
pub fn precise(unix_time_ns: u64) -> String {
    format!("{}.{:06}", day_and_time(unix_time_ns), unix_time_ns % 1_000_000_000 / 1000)
}

/// The time by ISO 8601, to a nanosecond and with the distance from UTC, as
/// `YYYY-MM-DDTHH:MM:SS.sssssssss+HH:MM`: for files and programs.
pub fn iso(unix_time_ns: u64) -> String {
    let minutes = local(unix_time_ns).tm_gmtoff / 60;
    let sign = if minutes < 0 { '-' } else { '+' };
    let (hours, rest) = (minutes.abs() / 60, minutes.abs() % 60);
    let fraction = unix_time_ns % 1_000_000_000;
    let seconds = day_and_time(unix_time_ns).replacen(' ', "T", 1);
    format!("{seconds}.{fraction:09}{sign}{hours:02}:{rest:02}")
}

fn local(unix_time_ns: u64) -> libc::tm {
    let seconds = (unix_time_ns / 1_000_000_000) as libc::time_t;
    let mut time = std::mem::MaybeUninit::<libc::tm>::zeroed();
    // SAFETY: both point to local variables, and a zeroed `tm` is valid if nothing is written.
    unsafe {
        libc::localtime_r(&raw const seconds, time.as_mut_ptr());
        time.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_from_utc_gives_the_instant_back() {
        // Whatever the zone of this machine is.
        let text = iso(1_700_000_000_123_456_789);
        let number = |range: std::ops::Range<usize>| text[range].parse::<i64>().unwrap();
        let days = number(8..10) - 14;
        let local = days * 86_400 + number(11..13) * 3600 + number(14..16) * 60 + number(17..19);
        let distance = number(30..32) * 3600 + number(33..35) * 60;
        let distance = if &text[29..30] == "-" { -distance } else { distance };
        // 2023-11-14 22:13:20 UTC.
        assert_eq!(local - distance, 22 * 3600 + 13 * 60 + 20);
        assert_eq!(&text[19..29], ".123456789");
    }

    #[test]
    fn a_time_has_a_fixed_width() {
        for time in [0, 1_700_000_000_000_000_000, u64::MAX] {
            let text = day_and_time(time);
            assert_eq!(text.len(), 19, "{text}");
            assert!(text.ends_with(&clock(time)));
            assert_eq!(iso(time).len(), 35, "{}", iso(time));
            assert_eq!(iso(time)[..19], text.replace(' ', "T"));
            assert_eq!(precise(time).len(), 26);
        }
    }
}
