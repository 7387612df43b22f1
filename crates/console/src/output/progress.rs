//! Progress of work that takes longer than a second, on standard error: a bar on a terminal, else a
//! line every ten seconds.
use std::{
    io::{self, IsTerminal},
    thread,
    time::{Duration, Instant},
};

use fathom_control::Bytes;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::rate;

/// The time before progress is shown.
const DELAY: Duration = Duration::from_secs(1);
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// The most drawings of a bar per second.
const BARS_PER_SECOND: u8 = 10;
/// A label, a bar of the remaining width, and the state of the work.
const TEMPLATE: &str = "{prefix} [{wide_bar}] {msg}";

/// The progress of one piece of work, counted in bytes.
#[derive(Debug)]
pub struct Progress {
    label: String,
    total: u64,
    started: Instant,
    /// The time of the last line, without a terminal.
    shown: Option<Instant>,
    terminal: bool,
    /// The bar on a terminal, once it is shown.
    bar: Option<ProgressBar>,
    silent: bool,
}

impl Progress {
    /// Starts now; `total` is in bytes.
    pub fn new(label: impl Into<String>, total: u64) -> Self {
        Self {
            label: label.into(),
            total,
            started: Instant::now(),
            shown: None,
            terminal: io::stderr().is_terminal(),
            bar: None,
            silent: false,
        }
    }

    /// Shows nothing if `silent` is set.
    #[must_use]
    pub fn silent(mut self, silent: bool) -> Self {
        self.silent = silent;
        self
    }

    /// Sets the number of bytes completed.
    pub fn update(&mut self, done: u64) {
        let elapsed = self.started.elapsed();
        if self.silent {
        } else if !self.terminal {
            if self.shown.unwrap_or(self.started).elapsed() >= LINE_INTERVAL {
                self.shown = Some(Instant::now());
                note!("{}: {}", self.label, summary(done, self.total, elapsed));
            }
        } else if elapsed >= DELAY {
            let target = || ProgressDrawTarget::stderr_with_hz(BARS_PER_SECOND);
            let bar = self.bar.get_or_insert_with(|| bar(&self.label, self.total, target()));
            bar.set_message(summary(done, self.total, elapsed));
            bar.set_position(done);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Waits for some time. On a terminal, a bar shows it if it is long.
pub fn wait(label: &str, time: Duration) {
    const STEP: Duration = Duration::from_millis(100);
    let end = Instant::now() + time;
    let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let shown = (time > DELAY && io::stderr().is_terminal()).then(|| {
        let target = ProgressDrawTarget::stderr_with_hz(BARS_PER_SECOND);
        bar(label, milliseconds(time), target)
    });
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        if let Some(bar) = &shown {
            bar.set_message(format!("{} left", time_left(left.as_secs_f64())));
            bar.set_position(milliseconds(time.saturating_sub(left)));
        }
        thread::sleep(left.min(STEP));
    }
    if let Some(bar) = shown {
        bar.finish_and_clear();
    }
}

fn bar(label: &str, total: u64, target: ProgressDrawTarget) -> ProgressBar {
    let style = ProgressStyle::with_template(TEMPLATE).expect("the template is valid");
    ProgressBar::with_draw_target(Some(total), target)
        .with_style(style.progress_chars("█·"))
        .with_prefix(label.to_owned())
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

#[cfg(test)]
mod tests {
    use indicatif::InMemoryTerm;

    use super::*;

    #[test]
    fn bars_fit() {
        for width in [20, 40, 80, 200] {
            let terminal = InMemoryTerm::new(4, width);
            let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
            let bar = bar("Reading", 1 << 30, target);
            bar.set_message(summary(512 << 20, 1 << 30, Duration::from_secs(1)));
            bar.set_position(512 << 20);
            bar.tick();
            let shown = terminal.contents();
            assert!(shown.starts_with("Reading ["), "{shown}");
            if width >= 80 {
                assert!(shown.contains("█·"), "{shown}");
                assert!(shown.ends_with("]  50 % of 1 GiB, 512 MiB/s, 1 s left"), "{shown}");
            }
            assert!(shown.lines().count() == 1 || width < 80, "{shown}");
            bar.finish_and_clear();
            assert_eq!(terminal.contents(), "");
        }
        assert_eq!(time_left(75.0), "1:15 min");
    }
}
