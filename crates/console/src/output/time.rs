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
    fn a_time_has_a_fixed_width() {
        for time in [0, 1_700_000_000_000_000_000, u64::MAX] {
            let text = day_and_time(time);
            assert_eq!(text.len(), 19, "{text}");
            assert!(text.ends_with(&clock(time)));
        }
    }
}
