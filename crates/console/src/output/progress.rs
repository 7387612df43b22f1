//! Progress of what takes longer than a second, on standard error: a bar on a terminal, else a
//! line now and then.
use std::{
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use fathom_control::Bytes;

use super::{rate, text::shorten};

/// Nothing is shown before.
const PATIENCE: Duration = Duration::from_secs(1);
const BAR_INTERVAL: Duration = Duration::from_millis(100);
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// The progress of one piece of work, counted in bytes.
#[derive(Debug)]
pub struct Progress {
    label: String,
    total: u64,
    started: Instant,
    shown: Option<Instant>,
    terminal: bool,
    silent: bool,
}

impl Progress {
    /// Begins now.
    pub fn new(label: impl Into<String>, total: u64) -> Self {
        Self {
            label: label.into(),
            total,
            started: Instant::now(),
            shown: None,
            terminal: io::stderr().is_terminal(),
            silent: false,
        }
    }

    /// Shows nothing if so asked.
    #[must_use]
    pub fn silent(mut self, silent: bool) -> Self {
        self.silent = silent;
        self
    }

    /// Says how many bytes are done.
    pub fn update(&mut self, done: u64) {
        let interval = if self.terminal { BAR_INTERVAL } else { LINE_INTERVAL };
        let due = match self.shown {
            Some(shown) => shown.elapsed() >= interval,
            None if self.terminal => self.started.elapsed() >= PATIENCE,
            None => self.started.elapsed() >= LINE_INTERVAL,
        };
        if !due || self.silent {
            return;
        }
        self.shown = Some(Instant::now());
        let elapsed = self.started.elapsed();
        if self.terminal {
            let width = ratatui::crossterm::terminal::size().map_or(80, |(columns, _)| columns);
            let line = bar(&self.label, done, self.total, elapsed, width.into());
            eprint!("\r\x1b[2K{line}");
            let _ = io::stderr().flush();
        } else {
            eprintln!("{}: {}", self.label, summary(done, self.total, elapsed));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.terminal && self.shown.is_some() {
            eprint!("\r\x1b[2K");
        }
    }
}

fn share(done: u64, total: u64) -> f64 {
    if total == 0 { 1.0 } else { (done as f64 / total as f64).min(1.0) }
}

fn summary(done: u64, total: u64, elapsed: Duration) -> String {
    let share = share(done, total);
    let seconds = elapsed.as_secs_f64().max(0.001);
    let left = if share > 0.0 { seconds / share - seconds } else { 0.0 };
    format!(
        "{:3.0} % of {}, {}, {} left",
        share * 100.0,
        Bytes(total),
        rate(done as f64 / seconds),
        time_left(left)
    )
}

fn time_left(seconds: f64) -> String {
    let seconds = seconds.ceil() as u64;
    if seconds < 60 {
        format!("{seconds} s")
    } else {
        format!("{}:{:02} min", seconds / 60, seconds % 60)
    }
}

/// One line with a bar that takes what room there is.
fn bar(label: &str, done: u64, total: u64, elapsed: Duration, width: usize) -> String {
    let summary = summary(done, total, elapsed);
    // One column stays free: some terminals wrap when the last is written.
    let room = width.saturating_sub(label.chars().count() + summary.chars().count() + 5).min(40);
    if room < 5 {
        return shorten(&format!("{label} {summary}"), width.saturating_sub(1));
    }
    let full = (share(done, total) * room as f64) as usize;
    format!("{label} [{}{}] {summary}", "█".repeat(full), "·".repeat(room - full))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_fit() {
        let second = Duration::from_secs(1);
        for width in [20, 40, 80, 200] {
            let line = bar("Reading", 512 << 20, 1 << 30, second, width);
            assert!(line.chars().count() < width, "{line}");
        }
        let line = bar("Reading", 512 << 20, 1 << 30, second, 80);
        assert!(line.contains("50 % of 1 GiB, 512 MiB/s, 1 s left"), "{line}");
        assert!(line.contains("█·"));
        assert_eq!(time_left(75.0), "1:15 min");
    }
}
