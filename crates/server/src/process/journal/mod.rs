//! The journal: log lines on standard error, and the same lines kept for the control interface.
//!
//! A misbehaving guest or client must not be able to fill a disk with log lines. So each cause (a
//! line of code, and the disk that it reports on) has a small allowance of lines, which regenerates
//! slowly. Lines beyond it are dropped and counted, and the next line of that cause has their
//! number. There is no timer: an idle daemon sleeps. A thread writes the lines (`writer`).

mod writer;

use std::collections::{HashMap, VecDeque};
use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fathom_control::{DaemonEvent, EventLevel, EventList};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, callsite};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use crate::configuration::LogLevel;
use writer::Writer;
pub(crate) use writer::dropped as dropped_lines;

/// The most lines of a cause in a burst.
const BURST: f64 = 10.0;
/// The lines per second of a cause in the long term.
const LINES_PER_SECOND: f64 = 0.5;
/// The most causes with separate allowances; further causes share one.
const CAUSES_MAX: usize = 4096;
/// The most events kept for the control interface.
const KEPT_MAX: usize = 1024;
/// The longest line, in bytes.
const LINE_MAX: usize = 4096;
/// The target of lines with a separate limit: those of `log` layers.
pub(crate) const REQUESTS: &str = "fathom::requests";
/// The target of lines of kept queries, which have separate limits as well.
pub(crate) const QUERIES: &str = "fathom::queries";

/// The log of this process.
pub struct Journal {
    level: AtomicU8,
    colours: bool,
    /// Writes to standard error, unless the events are only kept.
    writer: Option<Arc<Writer>>,
    kept: Mutex<Kept>,
    allowances: Mutex<HashMap<(callsite::Identifier, String), Allowance>>,
    arrived: Notify,
}

#[derive(Default)]
struct Kept {
    events: VecDeque<DaemonEvent>,
    last: u64,
}

struct Allowance {
    lines: f64,
    since: Instant,
    dropped: u64,
}

impl Journal {
    /// A journal that writes to standard error, or, if `quiet`, only keeps its events.
    pub fn new(level: LogLevel, quiet: bool) -> Arc<Self> {
        Arc::new(Self {
            level: AtomicU8::new(level as u8),
            colours: io::stderr().is_terminal(),
            writer: (!quiet).then(|| Writer::new(Box::new(io::stderr()))),
            kept: Mutex::default(),
            allowances: Mutex::default(),
            arrived: Notify::new(),
        })
    }

    /// Makes this the log of the whole process. Does nothing if the process already has one.
    pub fn install(self: &Arc<Self>) {
        let subscriber = tracing_subscriber::registry().with(JournalLayer(Arc::clone(self)));
        let _ = tracing::subscriber::set_global_default(subscriber);
    }

    /// Waits until all lines are written, for at most `limit`.
    pub fn flush(&self, limit: Duration) {
        if let Some(writer) = &self.writer {
            writer.flush(limit);
        }
    }

    /// Sets the log level. Returns false if it is unchanged.
    pub fn set_level(&self, level: LogLevel) -> bool {
        let changed = self.level.swap(level as u8, Ordering::Relaxed) != level as u8;
        if changed {
            callsite::rebuild_interest_cache();
        }
        changed
    }

    /// The events after number `after`.
    pub fn events(&self, after: u64) -> EventList {
        let kept = self.kept();
        let first = kept.events.front().map_or(kept.last + 1, |event| event.sequence);
        let events = kept.events.iter().filter(|event| event.sequence > after).cloned().collect();
        // A number of an earlier daemon requests all events.
        let lost = if after > kept.last { 0 } else { first.saturating_sub(after + 1) };
        EventList { events, last: kept.last, lost }
    }

    /// The events after number `after`, waiting up to `wait` for the first.
    pub async fn events_within(&self, after: u64, wait: Duration) -> EventList {
        let mut arrived = std::pin::pin!(self.arrived.notified());
        // Enabled before the list is read, so that no event between the two is missed.
        arrived.as_mut().enable();
        let list = self.events(after);
        if !list.events.is_empty() || wait.is_zero() {
            return list;
        }
        let _ = tokio::time::timeout(wait, arrived).await;
        self.events(after)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let level_max = match self.level.load(Ordering::Relaxed) {
            0 => Level::ERROR,
            1 => Level::WARN,
            2 => Level::INFO,
            _ => Level::DEBUG,
        };
        // Informational lines of other libraries are of no use to an operator.
        let foreign = !metadata.target().starts_with("fathom");
        *metadata.level() <= level_max && (!foreign || *metadata.level() <= Level::WARN)
    }

    /// Returns the number of lines of this cause that were dropped before this one, or `None` if
    /// this one is dropped, too.
    fn allow(&self, metadata: &Metadata<'_>, disk: &str) -> Option<u64> {
        if [REQUESTS, QUERIES].contains(&metadata.target()) {
            return Some(0);
        }
        let now = Instant::now();
        let mut allowances = self.allowances.lock();
        let mut key = (metadata.callsite(), disk.to_owned());
        if allowances.len() >= CAUSES_MAX && !allowances.contains_key(&key) {
            key.1.clear();
        }
        let allowance =
            allowances.entry(key).or_insert(Allowance { lines: BURST, since: now, dropped: 0 });
        let passed = now.saturating_duration_since(allowance.since).as_secs_f64();
        allowance.lines = (allowance.lines + passed * LINES_PER_SECOND).min(BURST);
        allowance.since = now;
        if allowance.lines < 1.0 {
            allowance.dropped += 1;
            return None;
        }
        allowance.lines -= 1.0;
        Some(std::mem::take(&mut allowance.dropped))
    }

    fn record(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let disk = text.disk.as_deref().unwrap_or("");
        let Some(dropped) = self.allow(event.metadata(), disk) else { return };
        let mut message = text.message;
        message.push_str(&text.fields);
        if dropped > 0 {
            let _ = write!(message, " ({dropped} similar lines were dropped)");
        }
        let level = match *event.metadata().level() {
            Level::ERROR => EventLevel::Error,
            Level::WARN => EventLevel::Warning,
            Level::INFO => EventLevel::Info,
            Level::DEBUG | Level::TRACE => EventLevel::Debug,
        };
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if let Some(writer) = &self.writer {
            let line = self.line(since_1970, level, text.disk.as_deref(), &message);
            // A guest's requests never wait for their lines.
            writer.write(line, event.metadata().target() != REQUESTS);
        }
        let mut kept = self.kept();
        kept.last += 1;
        let sequence = kept.last;
        if kept.events.len() == KEPT_MAX {
            kept.events.pop_front();
        }
        kept.events.push_back(DaemonEvent {
            sequence,
            unix_time_ns: u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX),
            level,
            disk: text.disk,
            message,
            left_out: dropped,
        });
        drop(kept);
        self.arrived.notify_waiters();
    }

    fn line(
        &self,
        since_1970: Duration,
        level: EventLevel,
        disk: Option<&str>,
        message: &str,
    ) -> String {
        let (word, colour) = match level {
            EventLevel::Error => ("error", "\x1b[31m"),
            EventLevel::Warning => ("warning", "\x1b[33m"),
            EventLevel::Info => ("info", "\x1b[32m"),
            EventLevel::Debug => ("debug", "\x1b[2m"),
        };
        let (colour, end) = if self.colours { (colour, "\x1b[0m") } else { ("", "") };
        let mut line = format!("{} {colour}{word:7}{end} ", Time(since_1970));
        if let Some(disk) = disk {
            let _ = write!(line, "{disk}: ");
        }
        line.push_str(message);
        line.push('\n');
        line
    }
}

/// The layer of `tracing` that writes to the journal.
struct JournalLayer(Arc<Journal>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for JournalLayer {
    fn register_callsite(
        &self,
        metadata: &'static Metadata<'static>,
    ) -> tracing::subscriber::Interest {
        if metadata.is_event() && self.0.enabled(metadata) {
            tracing::subscriber::Interest::always()
        } else {
            tracing::subscriber::Interest::never()
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>, _context: Context<'_, S>) -> bool {
        metadata.is_event() && self.0.enabled(metadata)
    }

    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        self.0.record(event);
    }
}

/// An event's message, its disk, and its other fields as `name=value`.
#[derive(Default)]
struct Text {
    message: String,
    disk: Option<String>,
    fields: String,
}

impl Text {
    fn put(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        let mut printed = String::new();
        let _ = write!(printed, "{value}");
        let clean = clean(&printed);
        match field.name() {
            "message" => self.message = clean,
            "disk" => self.disk = Some(clean),
            // Empty values, such as the virtual machine of a disk without one.
            _ if clean.is_empty() => {}
            name => {
                let _ = write!(self.fields, " {name}={clean}");
            }
        }
    }
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format_args!("{value:?}"));
    }
}

/// Returns `text` with control characters escaped, so that it cannot forge a line or control a
/// terminal, and cut at the longest line.
fn clean(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for character in text.chars() {
        if clean.len() >= LINE_MAX {
            clean.push('…');
            break;
        }
        if character.is_control() {
            clean.extend(character.escape_default());
        } else {
            clean.push(character);
        }
    }
    clean
}

/// A time since 1970 as `2026-01-31T12:34:56.789Z`.
struct Time(Duration);

impl fmt::Display for Time {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        // Years begin in March here, so that the leap day is the last day of a year; 400 years are
        // an era of 146,097 days.
        let days = days + 719_468;
        let (era, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = era * 400 + year + u64::from(month <= 2);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let milliseconds = self.0.subsec_millis();
        write!(
            formatter,
            "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milliseconds:03}Z"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        let at = |seconds| Time(Duration::new(seconds, 7_000_000)).to_string();
        assert_eq!(at(0), "1970-01-01T00:00:00.007Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.007Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59.007Z");
        assert_eq!(at(4_102_444_799), "2099-12-31T23:59:59.007Z");
    }

    #[test]
    fn lines_cannot_be_forged() {
        assert_eq!(clean("a\nb\x1b[31m\tc"), "a\\nb\\u{1b}[31m\\tc");
        assert!(clean(&"x".repeat(10_000)).len() < LINE_MAX + 8);
    }

    #[test]
    fn a_flood_is_bounded_for_each_disk_and_counted() {
        let journal = Journal::new(LogLevel::Info, true);
        let subscriber = tracing_subscriber::registry().with(JournalLayer(Arc::clone(&journal)));
        tracing::subscriber::with_default(subscriber, || {
            for round in 0..1000 {
                for disk in ["a", "b"] {
                    tracing::warn!(disk, round, "refused");
                }
            }
            tracing::debug!("not for operators");
        });
        let list = journal.events(0);
        let of_a = list.events.iter().filter(|event| event.disk.as_deref() == Some("a")).count();
        assert!((10..=12).contains(&of_a), "{of_a}");
        assert_eq!(list.events[0].message, "refused round=0");
        assert_eq!(list.events[0].level, EventLevel::Warning);
        assert!(list.events.len() <= 24);
        assert_eq!(journal.events(list.last).events, []);
    }
}
