//! The output of commands: tables, sheets of facts, JSON, progress.

#[macro_use]
pub mod screen;

pub mod progress;
pub mod sheet;
pub mod style;
pub mod svg;
pub mod table;
pub mod text;
pub mod time;

use std::io::{self, IsTerminal, Write};

use fathom_wal::Utc;
use serde::Serialize;

use crate::failure::{CommandResult, Failure};

/// The format of results.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Format {
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

/// The width of the terminal on standard output; `None` if it is no terminal.
pub fn width() -> Option<usize> {
    if !io::stdout().is_terminal() {
        return None;
    }
    ratatui::crossterm::terminal::size().ok().map(|(columns, _)| columns.max(20).into())
}

/// Prints a value as JSON.
pub fn json(value: &impl Serialize) -> CommandResult {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?;
    let mut output = screen::DataOutput::stdout();
    written(output.write_all(text.as_bytes()).and_then(|()| output.write_all(b"\n")))
}

/// Prints text and ends the line. A broken pipe is no failure.
pub fn text_line(text: &str) -> CommandResult {
    let mut stdout = io::stdout().lock();
    let text = screen::safe(text);
    written(stdout.write_all(text.as_bytes()).and_then(|()| stdout.write_all(b"\n")))
}

fn written(result: io::Result<()>) -> CommandResult {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("cannot write the result: {error}")))
        }
        _ => Ok(()),
    }
}

/// A number with few digits and a metric prefix: `950`, `12.3k`, `4.56M`.
pub fn short_number(value: f64) -> String {
    let (value, unit) = match value {
        v if v < 9_999.5 => return format!("{v:.0}"),
        v if v < 999_950.0 => (v / 1e3, "k"),
        v if v < 999_950_000.0 => (v / 1e6, "M"),
        v => (v / 1e9, "G"),
    };
    let digits = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.digits$}{unit}")
}

/// A rate in binary units: `512 B/s`, `12.3 MiB/s`.
pub fn rate(bytes_per_second: f64) -> String {
    format!("{}/s", fathom_control::Bytes(bytes_per_second.round() as u64))
}

/// Bytes in at most five characters: `512`, `97.7K`, `1.46G`.
pub fn short_bytes(bytes: f64) -> String {
    const UNITS: [&str; 6] = ["", "K", "M", "G", "T", "P"];
    let mut value = bytes;
    let mut unit = 0;
    // A value that rounds to 1000 takes the next unit.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$}{}", UNITS[unit])
}

/// A layer's figure. Its name ends with its unit.
pub fn figure(name: &str, value: u64) -> String {
    let words = name.strip_suffix("_total").unwrap_or(name);
    let (value, words) = if let Some(words) = words.strip_suffix("_bytes") {
        (fathom_control::Bytes(value).to_string(), words)
    } else if let Some(words) = words.strip_suffix("_seconds") {
        (format!("{value} s"), words)
    } else if let Some(words) = words.strip_suffix("_nanoseconds") {
        (fathom_control::Nanoseconds(value).to_string(), words)
    } else {
        (value.to_string(), words)
    };
    format!("{value} {}", words.replace('_', " "))
}

/// A latency with at most three digits: `850 ns`, `12.3 µs`, `4.5 ms`; `–` for 0.
pub fn latency(nanoseconds: u64) -> String {
    if nanoseconds == 0 {
        "–".into()
    } else {
        fathom_control::Nanoseconds(nanoseconds).to_string()
    }
}

/// An instant, given in seconds since 1970, as `2026-11-29 12:00:00Z`.
pub fn instant(time_s: u64) -> String {
    Utc(time_s.saturating_mul(1_000_000_000)).to_string().replace(" UTC", "Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_short() {
        assert_eq!(short_number(0.4), "0");
        assert_eq!(short_number(9_999.0), "9999");
        assert_eq!(short_number(12_345.0), "12.3k");
        assert_eq!(short_number(123_456.0), "123k");
        assert_eq!(short_number(1_234_567.0), "1.23M");
        assert_eq!(rate(1536.0), "1.5 KiB/s");
        assert_eq!(short_bytes(0.0), "0");
        assert_eq!(short_bytes(4096.0 * 25_000.0), "97.7M");
        assert_eq!(short_bytes(1023.0 * 1024.0), "1.00M");
        assert_eq!(latency(0), "–");
    }

    #[test]
    fn instants_are_those_of_the_calendar() {
        assert_eq!(instant(0), "1970-01-01 00:00:00Z");
        assert_eq!(instant(951_782_400), "2000-02-29 00:00:00Z");
        assert_eq!(instant(951_868_800), "2000-03-01 00:00:00Z");
        assert_eq!(instant(1_798_761_599), "2026-12-31 23:59:59Z");
        assert_eq!(instant(4_107_542_400), "2100-03-01 00:00:00Z");
    }
}
