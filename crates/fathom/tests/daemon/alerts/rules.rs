//! The alerts, and the file with them for Prometheus.

use std::fmt::Write as _;

use fathom_control::ProblemKind;

use super::pages::{decisions, meanings, plain};

pub const FILE: &str = "packaging/prometheus/fathom.rules.yml";

const HEAD: &str = "\
# Alerts of Fathom, for `rule_files` of Prometheus. docs/metrics.md lists them, and docs/operating.md says what to do.
# The job that scrapes the daemons has to be named `fathom`.
# Made by `FATHOM_WRITE_DOCS=1 scripts/cargo test -p fathom --test daemon alerts::`; do not edit.
";

/// A rule that alerts.
pub struct Alert {
    pub name: String,
    pub severity: String,
    /// How long the expression has to hold.
    pub after: String,
    pub expression: String,
    pub summary: String,
    pub remedy: String,
}

/// Alerts on metrics, beside those on problems: name, severity, after, expression, summary, remedy.
const ON_METRICS: &[[&str; 6]] = &[
    [
        "FathomDown",
        "critical",
        "2m",
        "up{job=\"fathom\"} == 0",
        "The daemon does not answer.",
        "Start it: systemctl status fathom. Guests wait for it, and lose no request.",
    ],
    [
        "FathomRestarts",
        "warning",
        "0m",
        "changes(process_start_time_seconds{job=\"fathom\"}[30m]) > 2",
        "The daemon has been started more than twice in half an hour.",
        "Read the journal for the reason: journalctl -u fathom.",
    ],
    [
        "FathomThreadsFail",
        "critical",
        "0m",
        "increase(fathom_failed_threads_total[30m]) > 0",
        "A thread of the daemon has failed: a bug in Fathom.",
        "Keep the journal, and restart the daemon when the guests allow it.",
    ],
    [
        "FathomLogLinesDropped",
        "warning",
        "0m",
        "increase(fathom_log_lines_dropped_total[30m]) > 0",
        "Lines of the daemon's log were dropped, because nobody read its standard error.",
        "Look at journald, or at the program that reads the daemon's output.",
    ],
    [
        "FathomUnservedDisks",
        "warning",
        "15m",
        "fathom_disks_unserved > 0",
        "Disks of the configuration have not been served for 15 minutes.",
        "fathom disk list shows which, with the reasons.",
    ],
    [
        "FathomUnknownProblem",
        "warning",
        "1m",
        "",
        "The daemon has a problem that these rules do not know: {{ $labels.kind }}.",
        "fathom doctor shows it with its remedy. Install the rules of the daemon's version.",
    ],
    [
        "FathomDiskErrors",
        "warning",
        "5m",
        "sum by (instance, disk, vm, operation) \
         (increase(fathom_disk_errors_total{operation!=\"get-id\"}[5m])) > 0",
        "Requests ({{ $labels.operation }}) of disk {{ $labels.disk }} have failed for 5 minutes.",
        "fathom disk info shows what fails; the journal has the places.",
    ],
    [
        "FathomDiskSlow",
        "warning",
        "15m",
        "histogram_quantile(0.99, sum by (instance, disk, vm, le) \
         (rate(fathom_disk_request_seconds_bucket{operation=~\"read|write\"}[10m]))) > 1",
        "One in a hundred requests of disk {{ $labels.disk }} takes more than a second.",
        "fathom explain-io DISK slowest shows where the time went.",
    ],
    [
        "FathomLogFull",
        "warning",
        "5m",
        "fathom_layer_wal_used_bytes / fathom_layer_wal_size_bytes > 0.8",
        "The log of disk {{ $labels.disk }} is more than 80 % full; a full one slows the disk down to home's rate.",
        "Make the log larger, or find out why home is slow: fathom disk info, fathom devices.",
    ],
    [
        "FathomPoolFull",
        "warning",
        "10m",
        "fathom_store_store_pool_used_bytes / fathom_store_store_pool_bytes > 0.85",
        "The pool of disk {{ $labels.disk }} is more than 85 % full.",
        "Delete snapshots, or make the pool larger: fathom store list.",
    ],
    [
        "FathomPoolNearlyFull",
        "critical",
        "5m",
        "fathom_store_store_pool_used_bytes / fathom_store_store_pool_bytes > 0.95",
        "The pool of disk {{ $labels.disk }} is more than 95 % full. Writes of all its disks will fail or wait.",
        "Delete snapshots, or make the pool larger, now: fathom store list.",
    ],
    [
        "FathomPoolWrongBlocks",
        "critical",
        "0m",
        "increase(fathom_store_store_pool_wrong_blocks_total[1h]) > 0",
        "Blocks of the pool of disk {{ $labels.disk }} have another content than was written.",
        "Run fathom store check, and restore the blocks that it names from a backup or an older snapshot.",
    ],
    [
        "FathomCacheMismatches",
        "warning",
        "0m",
        "increase(fathom_layer_cache_mismatches_total[1h]) > 0",
        "Blocks in the cache of disk {{ $labels.disk }} had another content than was written; they were read from home.",
        "Examine the cache's device, or its memory, and detach the cache: fathom cache detach.",
    ],
    [
        "FathomGuestMemoryLost",
        "warning",
        "0m",
        "increase(fathom_guest_memory_losses_total[30m]) > 0",
        "The VMM of disk {{ $labels.disk }} was disconnected, because memory that it shared was lost.",
        "Read the journal of the host for errors of memory, and of the VMM.",
    ],
    [
        "FathomGuestInvalid",
        "warning",
        "0m",
        "increase(fathom_guest_broken_queues_total[30m]) > 0 or \
         increase(fathom_guest_protocol_errors_total[30m]) > 0",
        "The guest or the VMM of disk {{ $labels.disk }} has violated its protocol.",
        "Look at what the guest runs, and at the version of its VMM.",
    ],
    [
        "FathomGuestSwapped",
        "info",
        "30m",
        "fathom_guest_memory_swapped_bytes / \
         (fathom_guest_memory_resident_bytes + fathom_guest_memory_swapped_bytes) > 0.2",
        "The host has swapped out more than a fifth of the memory of the guest of disk {{ $labels.disk }}.",
        "Give the host less to do or more memory; fathom pager shows what is needless.",
    ],
    [
        "FathomInsightWrong",
        "warning",
        "15m",
        "rate(fathom_insight_mismatches_total[10m]) > 0.5 * rate(fathom_insight_requests_total[10m])",
        "More than half of the requests of disk {{ $labels.disk }} do not match the structures of the guest's kernel.",
        "Files and containers of this guest may be wrong: fathom doctor. The data is not concerned.",
    ],
    [
        "FathomFlushesIncomplete",
        "warning",
        "0m",
        "increase(fathom_guest_flushes_incomplete_total[1h]) > 3",
        "Flushes of the guest {{ $labels.vm }} end before all of its dirty data is written.",
        "fathom dirty shows what is dirty; the guest writes more than its disk takes.",
    ],
    [
        "FathomBackgroundBehind",
        "warning",
        "1h",
        "rate(fathom_background_forced_steps_total[30m]) > 0.5 * rate(fathom_background_steps_total[30m])",
        "Most background work on {{ $labels.device }} begins because of its deadline: the device is hardly ever idle.",
        "fathom background shows what waits. Move load elsewhere.",
    ],
    [
        "FathomQueryStopped",
        "warning",
        "5m",
        "fathom_query_running == 0",
        "The kept query {{ $labels.query }} does not run.",
        "fathom query list shows why.",
    ],
    [
        "FathomQueryDropsEvents",
        "warning",
        "0m",
        "increase(fathom_query_events_dropped_total[10m]) > 0",
        "The kept query {{ $labels.query }} is too slow, and events were dropped: its results lack them.",
        "Filter earlier, or make windows shorter: fathom query explain.",
    ],
    [
        "FathomQueryActionsLost",
        "warning",
        "0m",
        "increase(fathom_query_lost_total[10m]) > 0",
        "Actions of the kept query {{ $labels.query }} have failed for good.",
        "The journal says why; look at what receives them.",
    ],
    [
        "FathomMonitorLosesRows",
        "warning",
        "0m",
        "increase(fathom_monitor_dropped_rows_total[10m]) > 0 or \
         increase(fathom_monitor_dropped_events_total[10m]) > 0",
        "Rows for the centre were dropped: its queries lack them.",
        "fathom monitor status at the centre shows the hosts; look at the network, and at the load of the centre.",
    ],
    [
        "FathomNbdRefused",
        "warning",
        "0m",
        "increase(fathom_nbd_refused_total[10m]) > 0",
        "NBD connections to {{ $labels.address }} were refused, because there are too many.",
        "Find the client that opens them: fathom disk info lists the clients of each disk.",
    ],
    [
        "FathomNbdClientsInvalid",
        "info",
        "0m",
        "increase(fathom_nbd_protocol_errors_total[10m]) > 10",
        "NBD clients at {{ $labels.address }} violate the protocol, or fail to authenticate.",
        "The journal has their addresses.",
    ],
];

/// `writes-lost` as `WritesLost`.
fn camel(kind: &str) -> String {
    let mut made = String::new();
    for word in kind.split('-') {
        made.extend(word.chars().take(1).map(|first| first.to_ascii_uppercase()));
        made.extend(word.chars().skip(1));
    }
    made
}

fn of_problem(kind: ProblemKind) -> Alert {
    let name = kind.name();
    let meanings = meanings();
    let meaning = meanings.get(name).unwrap_or_else(|| panic!("docs/control.md lacks {name}"));
    let mut decisions = decisions();
    let decision = decisions
        .remove(name)
        .unwrap_or_else(|| panic!("docs/operating.md does not say what to do about {name}"));
    // A disk that is not served is listed beside the other disks.
    let is_of_daemon = meaning.starts_with("of the daemon: ") && kind != ProblemKind::NotServed;
    let (family, whose) = if is_of_daemon {
        ("fathom_problem", "The daemon")
    } else {
        ("fathom_disk_problem", "Disk {{ $labels.disk }}")
    };
    let meaning = plain(meaning.trim_start_matches("of the daemon: "));
    Alert {
        name: format!("Fathom{}", camel(name)),
        severity: decision.severity,
        after: decision.after,
        expression: format!("{family}{{kind=\"{name}\"}} == 1"),
        summary: format!("{whose} has the problem {name}: {meaning}"),
        remedy: plain(&decision.remedy),
    }
}

/// All alerts: those on problems first.
pub fn alerts() -> Vec<Alert> {
    let known: Vec<_> = ProblemKind::ALL.into_iter().map(ProblemKind::name).collect();
    let known = known.join("|");
    let on_metrics = ON_METRICS.iter().map(|row| {
        let [name, severity, after, expression, summary, remedy] = row.map(str::to_owned);
        let expression = if expression.is_empty() {
            format!("fathom_disk_problem{{kind!~\"{known}\"}} == 1 or fathom_problem{{kind!~\"{known}\"}} == 1")
        } else {
            expression
        };
        Alert { name, severity, after, expression, summary, remedy }
    });
    ProblemKind::ALL.into_iter().map(of_problem).chain(on_metrics).collect()
}

/// A string of YAML.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// The file of the rules.
pub fn file(alerts: &[Alert]) -> String {
    let mut made = format!("{HEAD}groups:\n");
    let (problems, metrics) = alerts.split_at(ProblemKind::ALL.len());
    let parts = [
        ("fathom-problems", problems, "operating.md#when-there-is-a-problem"),
        ("fathom-metrics", metrics, "metrics.md#alerts"),
    ];
    for (group, alerts, page) in parts {
        writeln!(made, "  - name: {group}\n    rules:").unwrap();
        for alert in alerts {
            let Alert { name, severity, after, .. } = alert;
            let (expression, summary) = (quoted(&alert.expression), quoted(&alert.summary));
            let remedy = quoted(&alert.remedy);
            write!(
                made,
                "      - alert: {name}\n        expr: {expression}\n        for: {after}\n        \
                 labels:\n          severity: {severity}\n        annotations:\n          summary: \
                 {summary}\n          remedy: {remedy}\n          page: \
                 /usr/share/doc/fathom/docs/{page}\n"
            )
            .unwrap();
        }
    }
    made
}

/// The table of `docs/metrics.md`.
pub fn table(alerts: &[Alert]) -> String {
    let mut made =
        String::from("| alert | severity | after | when | what to do |\n|---|---|---|---|---|\n");
    for alert in &alerts[ProblemKind::ALL.len()..] {
        let Alert { name, severity, after, .. } = alert;
        let after = if after == "0m" { "at once" } else { after };
        let summary = alert.summary.replace("{{ $labels.", "").replace(" }}", "");
        writeln!(made, "| {name} | {severity} | {after} | {summary} | {} |", alert.remedy).unwrap();
    }
    made
}
