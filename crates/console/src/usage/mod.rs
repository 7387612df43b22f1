//! Accounts of a daemon's disks, grouped by machine, container, process, file or kind; and
//! descriptions of slow requests.

mod accounts;
mod describe;
mod entry;
mod explain;
mod files;
mod group;
pub mod insight;
mod plain;
mod words;

pub use accounts::Accounts;
pub use entry::{Line, Numbers, UsageEntry, longest, percentile};
pub use explain::{ExplainOptions, run as explain};
pub use files::{FilesOptions, run as files};
pub use group::{Grouping, Groups, Scope, UsageOrder, container_name, requests};
pub use plain::{AccountColumn, Context, Role, columns, detail, facts, omitted, table};

#[cfg(test)]
pub mod tests {
    use fathom_control::{DiskUsage, UsageCount, UsageCounts, UsageReport, UsageRow};

    /// A row with a number of writes.
    pub fn row(cgroup: &str, path: &str, writes: u64) -> UsageRow {
        let write = UsageCount {
            requests: writes,
            bytes: writes * 4096,
            latency_sum_ns: writes * 50_000,
            latency_max_ns: 50_000,
            ..UsageCount::default()
        };
        UsageRow {
            kind: if path.is_empty() { "metadata" } else { "data" }.into(),
            cgroup: cgroup.into(),
            path: path.into(),
            file_system: "ext4".into(),
            device: "vda".into(),
            counts: UsageCounts { write, ..UsageCounts::default() },
            ..UsageRow::default()
        }
    }

    /// Two containers on one disk of one machine.
    pub fn usage() -> UsageReport {
        let mut fio = row("/database", "/srv/table.dat", 50);
        (fio.process, fio.process_id) = ("fio".into(), 12);
        let disk = DiskUsage {
            name: "root".into(),
            vm: "shop".into(),
            counted: true,
            rows: vec![row("/web", "/srv/a", 10), row("/web", "/srv/b", 30), fio, row("/", "", 5)],
            unknown: row("", "", 2).counts,
            total: row("", "", 97).counts,
            ..DiskUsage::default()
        };
        UsageReport { disks: vec![disk], ..UsageReport::default() }
    }
}
