//! The dashboard for Grafana.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::pages::{Family, plain};

pub const FILE: &str = "packaging/grafana/fathom.json";

/// A panel: its title, the unit of its axis, and its expressions, each with its legend. `{hosts`
/// and `{disks` begin a selector of what the page's variables select.
type Panel = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

const DISK: &str = "{{disk}}";
const HOST: &str = "{{instance}}";

/// The rows with their panels.
const ROWS: &[(&str, &[Panel])] = &[
    (
        "Problems",
        &[
            ("Problems of disks", "table", &[("fathom_disk_problem{disks} == 1", "")]),
            ("Problems of daemons", "table", &[("fathom_problem{hosts} == 1", "")]),
            ("Alerts", "table", &[("ALERTS{alertname=~\"Fathom.*\",alertstate=\"firing\"}", "")]),
            ("Problems by disk", "short", &[("fathom_disk_problems{disks} > 0", DISK)]),
        ],
    ),
    (
        "Hosts",
        &[
            ("Daemons", "table", &[("fathom_build_info{hosts}", "")]),
            (
                "Disks",
                "short",
                &[
                    ("fathom_disks{hosts}", "{{instance}} served"),
                    ("fathom_disks_unserved{hosts}", "{{instance}} not served"),
                ],
            ),
            (
                "Processor time of the daemon",
                "percentunit",
                &[(
                    "rate(process_cpu_seconds_total{hosts,job=\"fathom\"}[$__rate_interval])",
                    HOST,
                )],
            ),
            (
                "Memory of the daemon",
                "bytes",
                &[("process_resident_memory_bytes{hosts,job=\"fathom\"}", HOST)],
            ),
            (
                "Devices beneath, busy",
                "percentunit",
                &[(
                    "rate(fathom_device_host_busy_seconds_total{hosts}[$__rate_interval])",
                    "{{instance}} {{device}}",
                )],
            ),
            (
                "Devices beneath, bytes",
                "Bps",
                &[
                    (
                        "rate(fathom_device_host_read_bytes_total{hosts}[$__rate_interval])",
                        "{{instance}} {{device}} read",
                    ),
                    (
                        "rate(fathom_device_host_written_bytes_total{hosts}[$__rate_interval])",
                        "{{instance}} {{device}} write",
                    ),
                ],
            ),
        ],
    ),
    (
        "Disks",
        &[
            (
                "Requests",
                "iops",
                &[(
                    "sum by (instance, disk, operation) (rate(fathom_disk_request_seconds_count{disks}[$__rate_interval]))",
                    "{{disk}} {{operation}}",
                )],
            ),
            (
                "Bytes",
                "Bps",
                &[(
                    "sum by (instance, disk, operation) (rate(fathom_disk_bytes_total{disks}[$__rate_interval]))",
                    "{{disk}} {{operation}}",
                )],
            ),
            (
                "Mean queue depth",
                "short",
                &[("rate(fathom_disk_depth_seconds_total{disks}[$__rate_interval])", DISK)],
            ),
            (
                "Time with requests in flight",
                "percentunit",
                &[("rate(fathom_disk_busy_seconds_total{disks}[$__rate_interval])", DISK)],
            ),
            (
                "Failed requests",
                "ops",
                &[(
                    "sum by (instance, disk, operation, error) (rate(fathom_disk_errors_total{disks}[$__rate_interval]))",
                    "{{disk}} {{operation}} {{error}}",
                )],
            ),
            ("Dirty data in guests", "bytes", &[("fathom_disk_dirty_bytes{disks}", DISK)]),
        ],
    ),
    (
        "Latency",
        &[
            (
                "99th percentile",
                "s",
                &[(
                    "histogram_quantile(0.99, sum by (instance, disk, le) (rate(fathom_disk_request_seconds_bucket{disks}[$__rate_interval])))",
                    DISK,
                )],
            ),
            (
                "Median",
                "s",
                &[(
                    "histogram_quantile(0.5, sum by (instance, disk, le) (rate(fathom_disk_request_seconds_bucket{disks}[$__rate_interval])))",
                    DISK,
                )],
            ),
            (
                "Flushes, 99th percentile",
                "s",
                &[(
                    "histogram_quantile(0.99, sum by (instance, disk, le) (rate(fathom_disk_request_seconds_bucket{disks,operation=\"flush\"}[$__rate_interval])))",
                    DISK,
                )],
            ),
            (
                "All requests by latency",
                "heatmap",
                &[(
                    "sum by (le) (increase(fathom_disk_request_seconds_bucket{disks}[$__rate_interval]))",
                    "{{le}}",
                )],
            ),
        ],
    ),
    (
        "Who",
        &[
            (
                "Containers that write most",
                "Bps",
                &[(
                    "topk(10, sum by (vm, cgroup) (rate(fathom_usage_bytes_total{disks,operation=\"write\"}[$__rate_interval])))",
                    "{{vm}} {{cgroup}}",
                )],
            ),
            (
                "Containers that read most",
                "Bps",
                &[(
                    "topk(10, sum by (vm, cgroup) (rate(fathom_usage_bytes_total{disks,operation=\"read\"}[$__rate_interval])))",
                    "{{vm}} {{cgroup}}",
                )],
            ),
            (
                "Kinds of data written",
                "Bps",
                &[(
                    "sum by (kind) (rate(fathom_usage_bytes_total{disks,operation=\"write\"}[$__rate_interval]))",
                    "{{kind}}",
                )],
            ),
        ],
    ),
    (
        "Cache",
        &[
            (
                "Reads that the cache had",
                "percentunit",
                &[(
                    "sum by (instance, disk) (rate(fathom_cache_hits_total{disks}[$__rate_interval])) / sum by (instance, disk) (rate(fathom_cache_reads_total{disks}[$__rate_interval]))",
                    DISK,
                )],
            ),
            (
                "Bytes from the cache",
                "Bps",
                &[(
                    "sum by (instance, disk) (rate(fathom_cache_hit_bytes_total{disks}[$__rate_interval]))",
                    DISK,
                )],
            ),
            ("Cache in use", "bytes", &[("fathom_cache_used_bytes{disks}", DISK)]),
            (
                "Miss ratio with another size",
                "percentunit",
                &[("fathom_cache_miss_ratio_estimate{disks}", "{{disk}} {{size}} %")],
            ),
        ],
    ),
    (
        "Logs",
        &[
            (
                "Log in use",
                "percentunit",
                &[(
                    "fathom_layer_wal_used_bytes{disks} / fathom_layer_wal_size_bytes{disks}",
                    DISK,
                )],
            ),
            (
                "Write-back rounds",
                "ops",
                &[("rate(fathom_layer_wal_rounds_total{disks}[$__rate_interval])", DISK)],
            ),
            ("Load carried elsewhere", "bytes", &[("fathom_offload_log_used_bytes{disks}", DISK)]),
            (
                "Background work that waits",
                "bytes",
                &[("fathom_background_waiting_bytes{hosts}", "{{instance}} {{device}}")],
            ),
        ],
    ),
    (
        "Pools",
        &[
            (
                "Pool in use",
                "percentunit",
                &[(
                    "fathom_store_store_pool_used_bytes{disks} / fathom_store_store_pool_bytes{disks}",
                    DISK,
                )],
            ),
            (
                "Kept once, or not written",
                "ops",
                &[
                    (
                        "rate(fathom_store_store_pool_shared_blocks_total{disks}[$__rate_interval])",
                        "{{disk}} equal to another",
                    ),
                    (
                        "rate(fathom_store_store_pool_unchanged_blocks_total{disks}[$__rate_interval])",
                        "{{disk}} unchanged",
                    ),
                ],
            ),
            (
                "Memory of the pool",
                "bytes",
                &[("fathom_store_store_pool_memory_bytes{disks}", DISK)],
            ),
        ],
    ),
    (
        "Pagers",
        &[
            (
                "Memory of guests that is swapped out",
                "bytes",
                &[("fathom_guest_memory_swapped_bytes{disks}", DISK)],
            ),
            (
                "Memory of guests in memory",
                "bytes",
                &[("fathom_guest_memory_resident_bytes{disks}", DISK)],
            ),
            (
                "Needless I/O",
                "Bps",
                &[
                    (
                        "rate(fathom_layer_swap_watch_stale_read_bytes_total{disks}[$__rate_interval])",
                        "{{disk}} stale reads",
                    ),
                    (
                        "rate(fathom_layer_swap_watch_double_paging_bytes_total{disks}[$__rate_interval])",
                        "{{disk}} double paging",
                    ),
                    (
                        "rate(fathom_layer_swap_watch_silent_write_bytes_total{disks}[$__rate_interval])",
                        "{{disk}} silent writes",
                    ),
                    (
                        "rate(fathom_layer_swap_watch_reread_bytes_total{disks}[$__rate_interval])",
                        "{{disk}} rereads",
                    ),
                ],
            ),
        ],
    ),
];

/// The row of what no other panel and no alert has.
const REST: &str = "Everything else";

/// All expressions of panels, as Grafana sends them.
pub fn expressions(dashboard: &Value) -> Vec<String> {
    let panels = dashboard["panels"].as_array().expect("panels");
    let inner = panels.iter().flat_map(|panel| panel["panels"].as_array().into_iter().flatten());
    panels
        .iter()
        .chain(inner)
        .flat_map(|panel| panel["targets"].as_array().into_iter().flatten())
        .map(|target| target["expr"].as_str().expect("an expression").to_owned())
        .collect()
}

/// The names of Fathom's metrics in an expression, without the suffixes of histograms.
pub fn names(expression: &str) -> Vec<String> {
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
    expression
        .split(|character| !is_part(character))
        .filter(|word| word.starts_with("fathom_") || word.starts_with("process_"))
        .map(|word| match word.strip_prefix("fathom_disk_request_seconds") {
            Some("_bucket" | "_sum" | "_count") => "fathom_disk_request_seconds".to_owned(),
            _ => word.to_owned(),
        })
        .collect()
}

fn source() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}

fn selected(expression: &str) -> String {
    expression
        .replace("{hosts", "{instance=~\"$instance\"")
        .replace("{disks", "{instance=~\"$instance\",disk=~\"$disk\"")
}

/// Gives panels their places, and numbers.
#[derive(Default)]
struct Grid {
    number: usize,
    line: usize,
    column: usize,
}

impl Grid {
    fn row(&mut self, title: &str, panels: &[Value]) -> Value {
        self.line += 8;
        self.column = 0;
        self.number += 1;
        let place = json!({ "h": 1, "w": 24, "x": 0, "y": self.line });
        self.line += 1;
        json!({ "type": "row", "id": self.number, "title": title, "gridPos": place,
            "collapsed": !panels.is_empty(), "panels": panels })
    }

    fn panel(
        &mut self,
        title: &str,
        unit: &str,
        help: &str,
        targets: &[(String, String)],
    ) -> Value {
        if self.column == 24 {
            self.line += 8;
            self.column = 0;
        }
        self.number += 1;
        let place = json!({ "h": 8, "w": 8, "x": self.column, "y": self.line });
        self.column += 8;
        let letters = ('A'..='Z').map(String::from);
        let is_table = unit == "table";
        let targets: Vec<_> = targets
            .iter()
            .zip(letters)
            .map(|((expression, legend), letter)| {
                let format = match unit {
                    "table" => "table",
                    "heatmap" => "heatmap",
                    _ => "time_series",
                };
                json!({ "refId": letter, "expr": expression, "legendFormat": legend,
                    "datasource": source(), "format": format, "instant": is_table, "range": !is_table })
            })
            .collect();
        let kind = if is_table || unit == "heatmap" { unit } else { "timeseries" };
        let unit = if kind == "timeseries" { unit } else { "none" };
        let mut panel = json!({
            "type": kind, "id": self.number, "title": title, "description": help,
            "gridPos": place, "datasource": source(), "targets": targets,
            "fieldConfig": { "defaults": { "unit": unit }, "overrides": [] }, "options": {},
        });
        if is_table {
            let hidden = json!({ "Time": true, "Value": true, "__name__": true, "job": true });
            panel["transformations"] =
                json!([{ "id": "organize", "options": { "excludeByName": hidden } }]);
        } else if kind == "heatmap" {
            panel["options"] = json!({ "calculate": false, "yAxis": { "unit": "s" } });
        }
        panel
    }
}

/// The panel of a family that no other panel has.
fn of_family(grid: &mut Grid, name: &str, family: &Family) -> Value {
    let select =
        if family.labels.iter().any(|label| label == "disk") { "{disks}" } else { "{hosts}" };
    let is_counter = family.kind == "counter";
    let expression = if is_counter {
        format!("rate({name}{select}[$__rate_interval])")
    } else {
        format!("{name}{select}")
    };
    let unit = match name.trim_end_matches("_total") {
        name if name.ends_with("_bytes") => {
            if is_counter {
                "Bps"
            } else {
                "bytes"
            }
        }
        name if name.ends_with("_seconds") => {
            if is_counter {
                "percentunit"
            } else {
                "s"
            }
        }
        name if name.ends_with("_ratio") => "percentunit",
        _ => {
            if is_counter {
                "ops"
            } else {
                "short"
            }
        }
    };
    let labels = family.labels.iter().filter(|label| *label != "vm");
    let legend: Vec<_> = labels.map(|label| format!("{{{{{label}}}}}")).collect();
    let legend = format!("{{{{instance}}}} {}", legend.join(" "));
    let targets = [(selected(&expression), legend.trim_end().to_owned())];
    let title = name.trim_start_matches("fathom_").replace('_', " ");
    grid.panel(&title, unit, &plain(&family.meaning), &targets)
}

fn variable(name: &str, label: &str, query: &str) -> Value {
    json!({ "name": name, "label": label, "type": "query", "datasource": source(),
        "query": { "query": query, "refId": name }, "definition": query, "refresh": 2,
        "multi": true, "includeAll": true, "allValue": ".*", "sort": 1,
        "current": { "text": ["All"], "value": ["$__all"] } })
}

/// The dashboard. `families` are all metrics, and `alerted` says of a name whether an alert has it.
pub fn made(families: &BTreeMap<String, Family>, alerted: impl Fn(&str) -> bool) -> Value {
    let mut grid = Grid::default();
    let mut panels = Vec::new();
    let mut shown = Vec::new();
    for (title, of_row) in ROWS {
        panels.push(grid.row(title, &[]));
        for (title, unit, targets) in *of_row {
            shown.extend(targets.iter().flat_map(|(expression, _)| names(expression)));
            let help = shown.last().and_then(|name| families.get(name));
            let help = help.map_or_else(String::new, |family| plain(&family.meaning));
            let targets: Vec<_> = targets
                .iter()
                .map(|(expression, legend)| (selected(expression), (*legend).to_owned()))
                .collect();
            panels.push(grid.panel(title, unit, &help, &targets));
        }
    }
    let rest: Vec<_> = families
        .iter()
        .filter(|(name, _)| !shown.contains(name) && !alerted(name))
        .map(|(name, family)| of_family(&mut grid, name, family))
        .collect();
    panels.push(grid.row(REST, &rest));
    json!({
        "uid": "fathom", "title": "Fathom", "tags": ["fathom", "storage"], "schemaVersion": 39,
        "version": 1, "editable": true, "graphTooltip": 1, "refresh": "30s", "timezone": "browser",
        "time": { "from": "now-1h", "to": "now" }, "annotations": { "list": [] }, "links": [],
        "templating": { "list": [
            { "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus",
                "current": {}, "refresh": 1 },
            variable("instance", "Host", "label_values(fathom_build_info, instance)"),
            variable("disk", "Disk",
                "label_values(fathom_disk_capacity_bytes{instance=~\"$instance\"}, disk)"),
        ] },
        "panels": panels,
    })
}
