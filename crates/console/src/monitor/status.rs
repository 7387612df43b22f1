//! The status of the hosts, as a table or as JSON.
use std::time::{Duration, Instant};

use fathom_monitor::link::{CentreStatus, HostStatus, Watch, unix_time_ns};
use serde::Serialize;

use crate::output::{
    latency, rate,
    style::Style,
    table::{Table, TableColumn},
    text::clean,
};

/// Prints the status of the hosts at an interval.
pub struct StatusPrinter {
    interval: Duration,
    json: bool,
    printed: Option<Instant>,
}

impl StatusPrinter {
    /// A printer that prints at most once in `interval`, as JSON if `json` is set.
    pub fn new(interval: Duration, json: bool) -> Self {
        Self { interval, json, printed: None }
    }

    /// Prints the status if the interval has passed.
    pub fn print_if_due(&mut self, watch: &Watch) {
        if self.printed.is_some_and(|printed| printed.elapsed() < self.interval) {
            return;
        }
        self.printed = Some(Instant::now());
        let status = watch.status();
        let text =
            if self.json { json(&status) } else { table(&status, unix_time_ns(), Style::stderr()) };
        note!("{text}");
    }
}

/// A host as JSON.
#[derive(Serialize)]
struct Host<'s> {
    name: &'s str,
    address: &'s str,
    state: &'static str,
    since_unix_time_ns: i64,
    connections: u64,
    problem: Option<&'s str>,
    lag_ns: Option<i64>,
    clock_offset_ns: Option<i64>,
    clock_uncertainty_ns: Option<i64>,
    round_trip_ns: Option<i64>,
    correction_ns: i64,
    events: u64,
    events_per_second: f64,
    rows: u64,
    bytes: u64,
    bytes_per_second: f64,
    dropped_events: u64,
    dropped_rows: u64,
    late: u64,
}

/// All hosts, and the refused connections.
#[derive(Serialize)]
struct Report<'s> {
    watermark_unix_time_ns: i64,
    hosts: Vec<Host<'s>>,
    refused: u64,
    last_refused: Option<&'s str>,
}

fn host(status: &HostStatus) -> Host<'_> {
    let clock = status.clock.as_ref();
    Host {
        name: &status.name,
        address: &status.address,
        state: status.state.name(),
        since_unix_time_ns: status.since_unix_ns,
        connections: status.connections,
        problem: status.problem.as_deref(),
        lag_ns: status.lag_ns,
        clock_offset_ns: clock.map(|clock| clock.offset_ns),
        clock_uncertainty_ns: clock.map(fathom_monitor::link::Measurement::uncertainty_ns),
        round_trip_ns: clock.map(|clock| clock.round_trip_ns),
        correction_ns: status.correction_ns,
        events: status.events,
        events_per_second: status.events_per_second,
        rows: status.rows,
        bytes: status.bytes,
        bytes_per_second: status.bytes_per_second,
        dropped_events: status.dropped_events,
        dropped_rows: status.dropped_rows,
        late: status.late,
    }
}

fn json(status: &CentreStatus) -> String {
    let report = Report {
        watermark_unix_time_ns: status.watermark_ns,
        hosts: status.hosts.iter().map(host).collect(),
        refused: status.refused,
        last_refused: status.refusals.last().map(|refusal| refusal.reason.as_str()),
    };
    serde_json::to_string(&report).unwrap_or_default()
}

/// A duration with its sign.
fn signed(ns: i64) -> String {
    let sign = if ns < 0 { "-" } else { "" };
    format!("{sign}{}", latency(ns.unsigned_abs()))
}

fn table(status: &CentreStatus, now_ns: i64, style: Style) -> String {
    let mut table = Table::new([
        TableColumn::text("host"),
        TableColumn::text("state"),
        TableColumn::number("connected"),
        TableColumn::number("lag"),
        TableColumn::number("clock"),
        TableColumn::number("events/s"),
        TableColumn::number("sent"),
        TableColumn::number("dropped"),
        TableColumn::number("late"),
        TableColumn::text("problem").flexible().optional(),
    ]);
    for host in &status.hosts {
        let connected = match host.since_unix_ns {
            0 => String::new(),
            since_ns => latency(now_ns.saturating_sub(since_ns).max(0).unsigned_abs()),
        };
        let clock = host.clock.map(|clock| {
            let known = clock.offset_ns.saturating_abs() > clock.uncertainty_ns();
            if known {
                signed(clock.offset_ns)
            } else {
                format!("±{}", signed(clock.uncertainty_ns()))
            }
        });
        table.row([
            host.name.clone(),
            host.state.name().to_owned(),
            connected,
            host.lag_ns.map(signed).unwrap_or_default(),
            clock.unwrap_or_default(),
            format!("{:.0}", host.events_per_second),
            rate(host.bytes_per_second),
            (host.dropped_events.saturating_add(host.dropped_rows)).to_string(),
            host.late.to_string(),
            clean(host.problem.as_deref().unwrap_or_default()),
        ]);
    }
    let mut text = table.render(None, style);
    if let Some(last) = status.refusals.last() {
        let (count, reason) = (status.refused, &last.reason);
        text += &format!("\n{count} refused; the last, {}: {reason}", last.address);
    }
    text
}

#[cfg(test)]
mod tests {
    use fathom_monitor::link::{HostState, Measurement, Refusal};

    use super::*;

    #[test]
    fn hosts_are_shown() {
        let fine = HostStatus {
            name: "alpha".into(),
            state: HostState::Running,
            since_unix_ns: 1_000_000_000,
            lag_ns: Some(60_000_000),
            clock: Some(Measurement { round_trip_ns: 400_000, offset_ns: 100 }),
            events_per_second: 1200.4,
            ..HostStatus::default()
        };
        let away = HostStatus {
            name: "beta".into(),
            problem: Some("the other side left".into()),
            clock: Some(Measurement { round_trip_ns: 400_000, offset_ns: -180_000_000_000 }),
            dropped_events: 3,
            dropped_rows: 4,
            late: 5,
            ..HostStatus::default()
        };
        let refusal =
            Refusal { unix_ns: 0, address: "10.0.0.9:1".into(), reason: "no TLS: x".into() };
        let status = CentreStatus {
            watermark_ns: 7,
            hosts: vec![fine, away],
            refused: 9,
            refusals: vec![refusal],
        };
        let text = table(&status, 61_000_000_000, Style::PLAIN);
        let alpha = text.lines().find(|line| line.starts_with("alpha")).unwrap();
        assert!(alpha.contains("running") && alpha.contains(" 1200 "), "{text}");
        assert!(alpha.contains('±') && alpha.contains("60.0 ms"), "{text}");
        let beta = text.lines().find(|line| line.starts_with("beta")).unwrap();
        assert!(beta.contains("away") && beta.contains(" 7 ") && beta.contains("left"), "{text}");
        assert!(text.ends_with("9 refused; the last, 10.0.0.9:1: no TLS: x"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&json(&status)).unwrap();
        assert_eq!(json["hosts"][1]["clock_offset_ns"], -180_000_000_000_i64);
        assert_eq!(json["hosts"][0]["state"], "running");
    }
}
