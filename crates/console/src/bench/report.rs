//! The results of measurements: medians by workload and server, and ratios.
use std::fmt;

use serde::Serialize;

use crate::{
    failure::{CommandResult, Failure},
    load::{BlockOrder, LoadReport, OperationReport},
    output::{
        latency, rate, short_number,
        style::{self, Style},
        table::{Table, TableColumn},
    },
};

/// The server of the measured disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServerKind {
    /// Fathom.
    Fathom,
    /// Any server, reached by a socket that the user named.
    Socket,
    /// `qemu-storage-daemon`.
    Peer,
}

impl ServerKind {
    /// The server's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fathom => "Fathom",
            Self::Socket => "the socket's",
            Self::Peer => "qemu-storage-daemon",
        }
    }
}

/// One kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Workload {
    #[serde(serialize_with = "order")]
    pub order: BlockOrder,
    pub read_percent: u8,
    pub depth: u16,
    pub queues: u16,
    pub block_size: u32,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn order<S: serde::Serializer>(order: &BlockOrder, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match order {
        BlockOrder::Random => "random",
        BlockOrder::Sequential => "sequential",
    })
}

impl fmt::Display for Workload {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self.order {
            BlockOrder::Random => "random",
            BlockOrder::Sequential => "sequential",
        };
        let operation = match self.read_percent {
            100 => "reads",
            0 => "writes",
            _ => "reads and writes",
        };
        let size = fathom_control::Bytes(self.block_size.into());
        write!(formatter, "{order} {operation} of {size}, depth {}", self.depth)?;
        if self.queues > 1 {
            write!(formatter, " × {} queues", self.queues)?;
        }
        Ok(())
    }
}

/// One workload on one server in one round.
#[derive(Clone, Debug, Serialize)]
pub struct Measurement {
    pub server: ServerKind,
    pub workload: Workload,
    pub round: u16,
    pub report: LoadReport,
}

/// The medians of a workload's rounds on one server.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub server: ServerKind,
    pub workload: Workload,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub latency_us_p50: f64,
    pub latency_us_p99: f64,
    pub latency_us_max: f64,
    pub server_cpu_us_per_request: Option<f64>,
}

/// The peer's medians compared with Fathom's: above 1, Fathom is better.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratio {
    pub workload: Workload,
    pub iops: f64,
    pub latency_p50: f64,
    pub latency_p99: f64,
    pub server_cpu_per_request: Option<f64>,
}

/// All measurements, with their summaries.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    rounds: u16,
    summaries: Vec<Summary>,
    ratios: Vec<Ratio>,
    measurements: Vec<Measurement>,
}

impl Report {
    /// A report without measurements.
    pub fn new(rounds: u16) -> Self {
        Self { rounds, summaries: vec![], ratios: vec![], measurements: vec![] }
    }

    /// Adds a measurement.
    pub fn add(&mut self, measurement: Measurement) {
        self.measurements.push(measurement);
        self.summarise();
    }

    fn summarise(&mut self) {
        self.summaries.clear();
        self.ratios.clear();
        let mut workloads: Vec<Workload> = Vec::new();
        for measurement in &self.measurements {
            if !workloads.contains(&measurement.workload) {
                workloads.push(measurement.workload);
            }
        }
        for workload in workloads {
            let fathom = self.summary(ServerKind::Fathom, workload);
            let socket = self.summary(ServerKind::Socket, workload);
            let peer = self.summary(ServerKind::Peer, workload);
            if let (Some(fathom), Some(peer)) = (&fathom, &peer) {
                let cpu = fathom.server_cpu_us_per_request.zip(peer.server_cpu_us_per_request);
                self.ratios.push(Ratio {
                    workload,
                    iops: fathom.iops / peer.iops,
                    latency_p50: peer.latency_us_p50 / fathom.latency_us_p50,
                    latency_p99: peer.latency_us_p99 / fathom.latency_us_p99,
                    server_cpu_per_request: cpu.map(|(fathom, peer)| peer / fathom),
                });
            }
            self.summaries.extend([fathom, socket, peer].into_iter().flatten());
        }
    }

    fn summary(&self, server: ServerKind, workload: Workload) -> Option<Summary> {
        let reports: Vec<&LoadReport> = self
            .measurements
            .iter()
            .filter(|m| m.server == server && m.workload == workload)
            .map(|m| &m.report)
            .collect();
        let operation = |report: &LoadReport| -> OperationReport {
            if workload.read_percent == 0 { report.writes.clone() } else { report.reads.clone() }
        };
        let of = |value: fn(&OperationReport) -> f64| {
            median(reports.iter().map(|report| value(&operation(report))).collect())
        };
        Some(Summary {
            server,
            workload,
            iops: of(|o| o.iops)?,
            bytes_per_second: of(|o| o.bytes_per_second)?,
            latency_us_p50: of(|o| o.latency_us_p50)?,
            latency_us_p99: of(|o| o.latency_us_p99)?,
            latency_us_max: of(|o| o.latency_us_max)?,
            server_cpu_us_per_request: median(
                reports.iter().filter_map(|report| report.server_cpu_us_per_request).collect(),
            ),
        })
    }

    /// The table.
    pub fn text(&self, width: Option<usize>) -> String {
        let mut table = Table::new([
            TableColumn::text("WORKLOAD").flexible(),
            TableColumn::text("SERVER").flexible().importance(9),
            TableColumn::number("IOPS"),
            TableColumn::number("BANDWIDTH").importance(5),
            TableColumn::number("P50").importance(8),
            TableColumn::number("P99").importance(7),
            TableColumn::number("MAX").importance(4),
            TableColumn::number("CPU").importance(6),
        ]);
        let time = |us: f64| latency((us * 1e3) as u64);
        for summary in &self.summaries {
            let is_peer = summary.server == ServerKind::Peer;
            table.row([
                if is_peer { String::new() } else { summary.workload.to_string() },
                summary.server.name().to_owned(),
                short_number(summary.iops),
                rate(summary.bytes_per_second),
                time(summary.latency_us_p50),
                time(summary.latency_us_p99),
                time(summary.latency_us_max),
                summary.server_cpu_us_per_request.map_or_else(|| "–".into(), time),
            ]);
            if let Some(ratio) =
                self.ratios.iter().find(|r| is_peer && r.workload == summary.workload)
            {
                let times = |value: f64| format!("{value:.2}×");
                table.row([
                    String::new(),
                    "Fathom is better by".to_owned(),
                    times(ratio.iops),
                    String::new(),
                    times(ratio.latency_p50),
                    times(ratio.latency_p99),
                    String::new(),
                    ratio.server_cpu_per_request.map_or_else(String::new, times),
                ]);
            }
        }
        let mut text = table.render(width, Style::stdout());
        if self.rounds > 1 {
            text += &format!("\nMedians of {} rounds.", self.rounds);
        }
        let verified: u64 = self.measurements.iter().map(|m| m.report.blocks_verified).sum();
        if verified > 0 && self.wrong() == 0 {
            text += &format!(
                "\n{} {} read back and compared",
                Style::stdout().paint(style::GOOD, "✓"),
                fathom_control::count(verified, "block")
            );
        }
        text
    }

    fn wrong(&self) -> u64 {
        self.measurements.iter().map(|m| m.report.blocks_wrong).sum()
    }

    /// Returns an error if requests failed or data was wrong.
    pub fn verdict(&self) -> CommandResult {
        let errors: u64 = self.measurements.iter().map(|m| m.report.errors).sum();
        let wrong = self.wrong();
        if errors == 0 && wrong == 0 {
            return Ok(());
        }
        let first = self.measurements.iter().find_map(|m| m.report.block_wrong_first);
        let place = first.map_or_else(String::new, |block| format!(", the first is block {block}"));
        let (errors, wrong) = (
            fathom_control::count(errors, "failed request"),
            fathom_control::count(wrong, "wrong block"),
        );
        Err(Failure::new(format!("{errors}, {wrong}{place}")))
    }
}

/// The median: the middle value, or the mean of the two middle values.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.is_empty() {
        None
    } else if values.len() % 2 == 1 {
        Some(values[middle])
    } else {
        Some(f64::midpoint(values[middle - 1], values[middle]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measurement(server: ServerKind, round: u16, iops: f64) -> Measurement {
        let operation = |iops: f64| OperationReport {
            requests: iops as u64,
            iops,
            bytes_per_second: iops * 4096.0,
            latency_us_mean: 1e6 / iops,
            latency_us_p50: 1e6 / iops,
            latency_us_p90: 1e6 / iops,
            latency_us_p99: 2e6 / iops,
            latency_us_p999: 2e6 / iops,
            latency_us_max: 3e6 / iops,
        };
        let workload = Workload {
            order: BlockOrder::Random,
            read_percent: 100,
            depth: 32,
            queues: 1,
            block_size: 4096,
        };
        let report = LoadReport {
            seconds: 1.0,
            reads: operation(iops),
            writes: operation(1.0),
            errors: 0,
            blocks_verified: 0,
            blocks_wrong: 0,
            block_wrong_first: None,
            server_process_id: None,
            server_cpu_share: None,
            server_cpu_us_per_request: Some(1e5 / iops),
            client_cpu_share: 0.5,
            client_wakeups: 0,
            client_notifications: 0,
        };
        Measurement { server, workload, round, report }
    }

    #[test]
    fn medians_and_ratios_are_shown() {
        let mut report = Report::new(3);
        for (round, iops) in [(0, 100_000.0), (1, 300_000.0), (2, 200_000.0)] {
            report.add(measurement(ServerKind::Fathom, round, iops));
            report.add(measurement(ServerKind::Peer, round, iops / 2.0));
        }
        let text = report.text(None);
        for part in ["random reads of 4 KiB, depth 32", "200k", "100k", "2.00×", "Medians of 3"] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        assert!((report.ratios[0].server_cpu_per_request.expect("CPU") - 2.0).abs() < 1e-9);
        for width in [40, 80] {
            let text = report.text(Some(width));
            assert!(text.lines().all(|line| line.chars().count() <= width), "{text}");
        }
        assert!(report.verdict().is_ok());
    }

    #[test]
    fn wrong_data_is_a_failure() {
        let mut report = Report::new(1);
        let mut wrong = measurement(ServerKind::Fathom, 0, 1000.0);
        wrong.report.blocks_wrong = 1;
        wrong.report.block_wrong_first = Some(77);
        report.add(wrong);
        assert!(report.verdict().expect_err("it fails").to_string().contains("block 77"));
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0]), Some(2.5));
    }
}
