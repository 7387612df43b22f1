//! `/metrics`: Prometheus' text format, version 0.0.4.

mod layers;

use std::fmt::{Display, Write as _};

use fathom_control::{
    DaemonInfo, DiskList, DiskStatistics, DiskStatus, FrontendStatus, OperationStatistics, Problem,
    Statistics, VhostUserStatus,
};
use rustix::time::{ClockId, clock_gettime};

use crate::daemon::Daemon;
use crate::features::FEATURES;

/// The content type of the response.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The bounds of the latency buckets, in nanoseconds, and as Prometheus shows them in seconds.
const BOUNDS: [(u64, &str); 18] = [
    (10_000, "0.00001"),
    (20_000, "0.00002"),
    (50_000, "0.00005"),
    (100_000, "0.0001"),
    (200_000, "0.0002"),
    (500_000, "0.0005"),
    (1_000_000, "0.001"),
    (2_000_000, "0.002"),
    (5_000_000, "0.005"),
    (10_000_000, "0.01"),
    (20_000_000, "0.02"),
    (50_000_000, "0.05"),
    (100_000_000, "0.1"),
    (200_000_000, "0.2"),
    (500_000_000, "0.5"),
    (1_000_000_000, "1"),
    (5_000_000_000, "5"),
    (30_000_000_000, "30"),
];

/// The value of a family for one item.
pub(crate) type Value<Thing, Number = u64> = fn(&Thing) -> Number;
/// A family: its name, its type, its help text, and its value for one item.
pub(crate) type Family<'a, Thing, Number = u64> = (&'a str, &'a str, &'a str, Value<Thing, Number>);
/// Called with the labels and the counts of each operation.
type Visit<'a> = dyn FnMut(&[(&str, &str)], &OperationStatistics) + 'a;

/// The daemon at the time of a page, for the features' metrics.
pub(crate) struct Scrape<'d> {
    pub daemon: &'d Daemon,
    pub info: DaemonInfo,
    pub disks: DiskList,
}

/// All metrics as text. Waits for file systems and guests for a limited time.
pub(crate) fn text(daemon: &Daemon) -> String {
    let scrape = Scrape { daemon, info: daemon.info(), disks: daemon.disk_list() };
    let Scrape { info, disks, .. } = &scrape;
    let statistics = daemon.statistics();
    let mut page = MetricsText::default();
    of_daemon(&mut page, info);
    of_process(&mut page, info);
    of_disks(&mut page, info, disks, &statistics);
    of_operations(&mut page, &statistics);
    layers::of_layers(&mut page, disks);
    of_guests(&mut page, disks);
    for feature in FEATURES {
        feature.metrics(&scrape, &mut page);
    }
    page.text
}

fn of_daemon(page: &mut MetricsText, info: &DaemonInfo) {
    page.family("fathom_build_info", "gauge", "The daemon's version; always 1.");
    page.sample("fathom_build_info", &[("version", &info.version)], 1);
    page.family("fathom_ready_seconds", "gauge", "Time that the daemon needed to be ready.");
    page.sample("fathom_ready_seconds", &[], info.ready_us as f64 / 1e6);
    page.family("fathom_disks", "gauge", "Served disks.");
    page.sample("fathom_disks", &[], info.disks);
    let unserved = "fathom_disks_unserved";
    page.family(unserved, "gauge", "Disks of the configuration that are not served.");
    page.sample(unserved, &[], info.disks_unserved);
    let problems = "fathom_problem";
    page.family(problems, "gauge", "A problem of the daemon as a whole, by kind; always 1.");
    for problem in info.problems.iter().filter(|problem| problem.disk.is_none()) {
        page.sample(problems, &problem_labels(problem), 1);
    }
    let failed = "fathom_failed_threads_total";
    page.family(failed, "counter", "Threads that failed because of a bug in the daemon.");
    page.sample(failed, &[], info.failed_threads);
    let dropped = "fathom_log_lines_dropped_total";
    page.family(dropped, "counter", "Lines of the log dropped because nobody read standard error.");
    page.sample(dropped, &[], info.log_lines_dropped);
}

/// The metrics that every Prometheus client library has.
fn of_process(page: &mut MetricsText, info: &DaemonInfo) {
    page.family("process_start_time_seconds", "gauge", "When the daemon started, since 1970.");
    page.sample("process_start_time_seconds", &[], info.started_unix_time_ns as f64 / 1e9);
    let used = clock_gettime(ClockId::ProcessCPUTime);
    page.family("process_cpu_seconds_total", "counter", "Processor time used.");
    let seconds = used.tv_sec as f64 + used.tv_nsec as f64 / 1e9;
    page.sample("process_cpu_seconds_total", &[], seconds);
    let resident = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok());
    if let Some(pages) = resident {
        let page_size = rustix::param::page_size() as u64;
        page.family("process_resident_memory_bytes", "gauge", "Memory in use.");
        page.sample("process_resident_memory_bytes", &[], pages * page_size);
    }
    if let Ok(entries) = std::fs::read_dir("/proc/self/fd") {
        page.family("process_open_fds", "gauge", "Descriptors in use.");
        page.sample("process_open_fds", &[], entries.count());
    }
}

/// What tells a problem from others. An empty label is the same as none.
fn problem_labels(problem: &Problem) -> Vec<(&str, &str)> {
    let more = [("layer", problem.layer.as_str()), ("cause", problem.cause.as_str())];
    let more = more.into_iter().filter(|(_, value)| !value.is_empty());
    std::iter::once(("kind", problem.kind.name())).chain(more).collect()
}

fn of_disks(page: &mut MetricsText, info: &DaemonInfo, disks: &DiskList, statistics: &Statistics) {
    let families: [Family<'_, DiskStatus>; 1] =
        [("fathom_disk_read_only", "gauge", "Whether the disk refuses writes.", |d| {
            u64::from(d.read_only)
        })];
    let disks = disks.disks.iter();
    page.families(&families, &disks.clone().map(|disk| (disk_labels(&disk.name, &disk.vm), disk)));
    let problems = "fathom_disk_problems";
    page.family(problems, "gauge", "The number of the disk's problems.");
    for disk in disks.clone() {
        page.sample(problems, &disk_labels(&disk.name, &disk.vm), disk.problems.len());
    }
    let unserved = |problem: &Problem| problem.disk.clone().map(|name| (name, problem.kind.name()));
    let unserved: Vec<_> = info.problems.iter().filter_map(unserved).collect();
    for (name, _) in &unserved {
        page.sample(problems, &disk_labels(name, ""), 1);
    }
    let kinds = "fathom_disk_problem";
    page.family(kinds, "gauge", "A problem that the disk has now, by kind; always 1.");
    for (name, kind) in &unserved {
        let [name, vm] = disk_labels(name, "");
        page.sample(kinds, &[name, vm, ("kind", kind)], 1);
    }
    for disk in disks {
        for problem in &disk.problems {
            let mut labels = disk_labels(&disk.name, &disk.vm).to_vec();
            labels.extend(problem_labels(problem));
            page.sample(kinds, &labels, 1);
        }
    }
    let families: [Family<'_, DiskStatistics, f64>; 5] = [
        ("fathom_disk_capacity_bytes", "gauge", "The disk's size.", |d| d.capacity_bytes as f64),
        ("fathom_disk_in_flight", "gauge", "Requests in flight.", |d| d.in_flight as f64),
        (
            "fathom_disk_busy_seconds_total",
            "counter",
            "Time during which a queue had requests in flight, summed over the queues.",
            |d| d.busy_ns as f64 / 1e9,
        ),
        (
            "fathom_disk_depth_seconds_total",
            "counter",
            "Requests in flight, integrated over time: its rate is the mean queue depth.",
            |d| d.depth_ns as f64 / 1e9,
        ),
        (
            "fathom_disk_refused_total",
            "counter",
            "Requests that were invalid or unsupported.",
            |d| d.refused as f64,
        ),
    ];
    let disks = statistics.disks.iter();
    page.families(&families, &disks.map(|disk| (disk_labels(&disk.name, &disk.vm), disk)));
}

/// The labels of a disk.
pub(crate) fn disk_labels<'a>(name: &'a str, vm: &'a str) -> [(&'static str, &'a str); 2] {
    [("disk", name), ("vm", vm)]
}

fn of_operations(page: &mut MetricsText, statistics: &Statistics) {
    let each = |visit: &mut Visit<'_>| {
        for disk in &statistics.disks {
            for operation in &disk.operations {
                let labels = [
                    ("disk", disk.name.as_str()),
                    ("vm", disk.vm.as_str()),
                    ("operation", operation.operation.as_str()),
                ];
                visit(&labels, operation);
            }
        }
    };
    let bytes = "fathom_disk_bytes_total";
    page.family(bytes, "counter", "Bytes of requests that succeeded.");
    each(&mut |labels, operation| page.sample(bytes, labels, operation.bytes));
    let errors = "fathom_disk_errors_total";
    page.family(errors, "counter", "Requests that failed, by kind of error.");
    each(&mut |labels, operation| {
        for (kind, count) in &operation.errors_by_kind {
            let mut labels = labels.to_vec();
            labels.push(("error", kind));
            page.sample(errors, &labels, count);
        }
    });
    let seconds = "fathom_disk_request_seconds";
    page.family(seconds, "histogram", "Latency of requests that succeeded.");
    each(&mut |labels, operation| {
        let mut labels = labels.to_vec();
        for (bound_ns, bound) in BOUNDS {
            labels.push(("le", bound));
            page.sample(
                "fathom_disk_request_seconds_bucket",
                &labels,
                operation.latency.count_to(bound_ns),
            );
            labels.pop();
        }
        // The sum of the buckets, so that it agrees with the last bucket.
        let count = operation.latency.count();
        labels.push(("le", "+Inf"));
        page.sample("fathom_disk_request_seconds_bucket", &labels, count);
        labels.pop();
        page.sample(
            "fathom_disk_request_seconds_sum",
            &labels,
            operation.latency_sum_ns as f64 / 1e9,
        );
        page.sample("fathom_disk_request_seconds_count", &labels, count);
    });
}

fn of_guests(page: &mut MetricsText, disks: &DiskList) {
    let families: [Family<'_, VhostUserStatus>; 8] = [
        ("fathom_guest_connected", "gauge", "Whether a VMM is connected.", |g| {
            u64::from(g.connected)
        }),
        ("fathom_guest_queues", "gauge", "Queues started by the guest.", |g| {
            u64::from(g.queues_active)
        }),
        ("fathom_guest_connections_total", "counter", "Connections of VMMs.", |g| g.connections),
        ("fathom_guest_refused_total", "counter", "Malformed requests of the guest.", |g| {
            g.refused
        }),
        (
            "fathom_guest_broken_queues_total",
            "counter",
            "Rings with inconsistent indexes or descriptors.",
            |g| g.broken_queues,
        ),
        ("fathom_guest_protocol_errors_total", "counter", "VMMs that broke the protocol.", |g| {
            g.protocol_errors
        }),
        (
            "fathom_guest_memory_losses_total",
            "counter",
            "VMMs disconnected because shared memory was lost.",
            |g| g.memory_losses,
        ),
        (
            "fathom_guest_recovered_total",
            "counter",
            "Requests in flight at the death of an earlier daemon that were repeated.",
            |g| g.recovered,
        ),
    ];
    let guests = disks.disks.iter().flat_map(|disk| {
        disk.frontends.iter().filter_map(|frontend| match frontend {
            FrontendStatus::VhostUser(guest) => Some((disk_labels(&disk.name, &disk.vm), guest)),
            FrontendStatus::Nbd(_) => None,
        })
    });
    page.families(&families, &guests);
}

/// The text of the metrics.
#[derive(Default)]
pub(crate) struct MetricsText {
    pub(crate) text: String,
}

impl MetricsText {
    pub(crate) fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Writes families whose samples are of the same items, each item with its labels.
    pub(crate) fn families<'a, Thing: 'a, Number: Display, const LABELS: usize>(
        &mut self,
        families: &[Family<'_, Thing, Number>],
        things: &(impl Iterator<Item = ([(&'a str, &'a str); LABELS], &'a Thing)> + Clone),
    ) {
        for (name, kind, help, value) in families {
            self.family(name, kind, help);
            for (labels, thing) in things.clone() {
                self.sample(name, &labels, value(thing));
            }
        }
    }

    pub(crate) fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.text.push_str(name);
        for (index, (label, of)) in labels.iter().enumerate() {
            self.text.push(if index == 0 { '{' } else { ',' });
            let _ = write!(self.text, "{label}=\"");
            for character in of.chars() {
                match character {
                    '\\' => self.text.push_str("\\\\"),
                    '"' => self.text.push_str("\\\""),
                    '\n' => self.text.push_str("\\n"),
                    other => self.text.push(other),
                }
            }
            self.text.push('"');
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }
}

/// Checks that `docs/metrics.md` has each family of a page.
#[cfg(test)]
pub(crate) fn assert_documented(page: &str) {
    let documented = include_str!("../../../../../docs/metrics.md");
    let families = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    for family in families.map(|line| line.split(' ').next().unwrap_or(line)) {
        assert!(documented.contains(&format!("`{family}`")), "{family} is not in docs/metrics.md");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use crate::configuration::{Configuration, LogLevel};
    use crate::process::journal::Journal;

    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut page = MetricsText::default();
        page.sample("a", &[("disk", "x\"} 1\n\\"), ("vm", "")], 7);
        assert_eq!(page.text, "a{disk=\"x\\\"} 1\\n\\\\\",vm=\"\"} 7\n");
    }

    #[test]
    fn a_histogram_adds_up() {
        let mut operation = OperationStatistics { operation: "read".into(), ..Default::default() };
        operation.latency.record(15_000, 3);
        operation.latency.record(60_000_000_000, 1);
        operation.latency_sum_ns = 60_000_045_000;
        let disk =
            DiskStatistics { name: "a".into(), operations: vec![operation], ..Default::default() };
        let mut page = MetricsText::default();
        of_operations(&mut page, &Statistics { disks: vec![disk], ..Default::default() });
        let labels = "disk=\"a\",vm=\"\",operation=\"read\"";
        for line in [
            format!("fathom_disk_request_seconds_bucket{{{labels},le=\"0.00001\"}} 0"),
            format!("fathom_disk_request_seconds_bucket{{{labels},le=\"0.00002\"}} 3"),
            format!("fathom_disk_request_seconds_bucket{{{labels},le=\"30\"}} 3"),
            format!("fathom_disk_request_seconds_bucket{{{labels},le=\"+Inf\"}} 4"),
            format!("fathom_disk_request_seconds_sum{{{labels}}} 60.000045"),
            format!("fathom_disk_request_seconds_count{{{labels}}} 4"),
        ] {
            assert!(page.text.contains(&line), "{line}\n{}", page.text);
        }
    }

    #[test]
    fn every_metric_of_a_daemon_without_disks_is_documented() {
        let journal = Journal::new(LogLevel::Info, false);
        let folder = tempfile::tempdir().unwrap();
        let mut configuration = Configuration::default();
        configuration.daemon.definition.control = folder.path().join("control.sock");
        let daemon = Daemon::new(&configuration, None, journal, Instant::now());
        let page = text(&daemon);
        assert!(page.contains("# TYPE fathom_nbd_connections gauge"), "{page}");
        assert!(page.contains("# TYPE fathom_guest_flushes_total counter"), "{page}");
        assert_documented(&page);
    }
}
