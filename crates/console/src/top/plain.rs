//! Intervals as lines of text.

use std::collections::BTreeMap;

use fathom_control::Problem;

use crate::output::{latency, rate, short_bytes, short_number, text::shorten, time::clock};

use super::model::{Activity, Interval, Layer};

/// The number of lines after which the heading is repeated.
const HEADING_EVERY: usize = 24;

/// Prints lines under a heading.
#[derive(Default)]
pub struct Printer {
    lines_since_heading: Option<usize>,
    name_width: usize,
    /// Whether a guest has had a pager.
    shows_away: bool,
    /// The problems printed for each disk; they are printed again only after a change.
    problems: BTreeMap<String, Vec<Problem>>,
    /// The printed figures of each disk's layers, which are printed again only if they change.
    figures: BTreeMap<String, Vec<String>>,
}

impl Printer {
    /// The lines of an interval: one for each disk.
    pub fn lines(&mut self, interval: &Interval, width: Option<usize>) -> String {
        let mut lines = Vec::new();
        let widest = interval.disks.iter().map(|disk| disk.name.chars().count()).max();
        self.name_width = self.name_width.max(widest.unwrap_or(0)).clamp(5, 32);
        let is_new = !self.shows_away && interval.total.away_bytes.is_some();
        self.shows_away |= is_new;
        let due = is_new || self.lines_since_heading.is_none_or(|lines| lines >= HEADING_EVERY);
        if due {
            self.lines_since_heading = Some(0);
            lines.push(self.heading());
        }
        let time = clock(interval.unix_time_ns);
        for disk in &interval.disks {
            let name = shorten(&disk.name, self.name_width);
            let name_width = self.name_width;
            let line = if disk.counted {
                let away = if self.shows_away { away(&disk.activity) } else { String::new() };
                format!("{time}  {name:<name_width$}{}{away}", cells(&disk.activity))
            } else {
                format!("{time}  {name:<name_width$}  not measured: it has no tap")
            };
            lines.push(line);
            if self.problems.get(&disk.name) != Some(&disk.problems) {
                for Problem { kind, message, .. } in &disk.problems {
                    let kind = kind.name();
                    lines.push(format!("{time}  {name:<name_width$}  ! {kind}: {message}"));
                }
                self.problems.insert(disk.name.clone(), disk.problems.clone());
            }
            let figures: Vec<String> = disk.layers.iter().filter_map(Layer::text).collect();
            if self.figures.get(&disk.name) != Some(&figures) {
                for text in &figures {
                    lines.push(format!("{time}  {name:<name_width$}  {text}"));
                }
                self.figures.insert(disk.name.clone(), figures);
            }
        }
        if interval.disks.is_empty() {
            lines.push(format!("{time}  no disks"));
        }
        self.lines_since_heading =
            self.lines_since_heading.map(|count| count + interval.disks.len().max(1));
        let fit = |line: &String| width.map_or_else(|| line.clone(), |width| shorten(line, width));
        lines.iter().map(fit).collect::<Vec<_>>().join("\n")
    }

    fn heading(&self) -> String {
        let name_width = self.name_width;
        let away = if self.shows_away { "     AWAY" } else { "" };
        format!(
            "{:<8}  {:<name_width$}  {:>7} {:>7} {:>11} {:>11} {:>6} {:>8} {:>8} {:>8} {:>6} {:>6} {:>8}{away}",
            "TIME",
            "DISK",
            "READ/S",
            "WRITE/S",
            "READ",
            "WRITE",
            "DEPTH",
            "P50",
            "P99",
            "MAX",
            "ERRORS",
            "HELD",
            "DIRTY"
        )
    }
}

fn away(activity: &Activity) -> String {
    let bytes = activity.away_bytes.map(|bytes| short_bytes(bytes as f64));
    format!(" {:>8}", bytes.unwrap_or_else(|| "–".into()))
}

fn cells(activity: &Activity) -> String {
    format!(
        "  {:>7} {:>7} {:>11} {:>11} {:>6.1} {:>8} {:>8} {:>8} {:>6} {:>6} {:>8}",
        short_number(activity.reads_per_second),
        short_number(activity.writes_per_second),
        rate(activity.read_bytes_per_second),
        rate(activity.write_bytes_per_second),
        activity.depth,
        latency(activity.latency_ns_p50),
        latency(activity.latency_ns_p99),
        latency(activity.latency_ns_max),
        activity.errors,
        activity.held,
        activity.dirty_bytes.map_or_else(|| "–".into(), |bytes| short_bytes(bytes as f64))
    )
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::{pagers, sample, with_log};
    use super::*;

    #[test]
    fn lines_are_aligned_with_their_heading() {
        let before = sample(1_000_000_000, &[("root", 1000), ("a-long-name", 50)]);
        let after = sample(2_000_000_000, &[("root", 25_000), ("a-long-name", 50)]);
        let interval = Interval::between(&before, &after);
        let mut printer = Printer::default();
        let text = printer.lines(&interval, None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert_eq!(lines[0].chars().count(), lines[1].chars().count(), "{text}");
        assert!(lines[1].contains("24.0k") && lines[1].contains("48.0k"), "{text}");
        assert!(lines[2].contains('–'), "{text}");
        assert_eq!(printer.lines(&interval, Some(40)).lines().count(), 2);
    }

    #[test]
    fn memory_that_is_away_has_a_column_once_a_guest_has_a_pager() {
        let before = sample(1_000_000_000, &[("a", 1000), ("b", 50)]);
        let mut interval = Interval::between(&before, &before);
        let mut printer = Printer::default();
        assert!(!printer.lines(&interval, None).contains("AWAY"));
        interval.set_away(&pagers(["a", "x"], 3 << 20));
        for is_first in [true, false] {
            let text = printer.lines(&interval, None);
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!(text.contains("AWAY"), is_first, "{text}");
            assert_eq!(lines.len(), 2 + usize::from(is_first), "{text}");
            let widths: Vec<_> = lines.iter().map(|line| line.chars().count()).collect();
            assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
            let row = lines[lines.len() - 2];
            assert!(row.ends_with(" 3.00M") && lines[lines.len() - 1].ends_with('–'), "{text}");
            interval.set_away(&pagers(["a", "x"], 3 << 20));
        }
    }

    #[test]
    fn figures_of_layers_are_printed_when_they_change() {
        let at = |seconds: u64, rounds| {
            with_log(sample(seconds * 1_000_000_000, &[("root", 1000)]), rounds)
        };
        let mut printer = Printer::default();
        let mut lines =
            |before: &_, after: &_| printer.lines(&Interval::between(before, after), None);
        let text = lines(&at(1, 5), &at(2, 7));
        assert!(text.ends_with("  root   wal: 1 MiB used, 2 rounds/s"), "{text}");
        assert_eq!(lines(&at(2, 7), &at(3, 9)).lines().count(), 1);
        assert_eq!(lines(&at(3, 9), &at(4, 9)).lines().count(), 2);
    }
}
