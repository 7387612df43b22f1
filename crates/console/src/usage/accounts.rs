//! The activity of disks by its source: since counting began, or between two samples.
use std::collections::BTreeSet;

use fathom_control::{DiskUsage, UsageCount, UsageCounts, UsageReport, UsageRow};

use super::group::{FLUSHES, FOLDED, Scope};

/// The activity of disks in an interval. The rows of a disk are complete: the daemon's separate
/// counts have rows of their own, and an idle control group has an empty row.
#[derive(Clone, Debug, Default)]
pub struct Accounts {
    /// The end of the interval, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// Its length, in seconds; 0 for all time.
    pub seconds: f64,
    /// The disks.
    pub disks: Vec<DiskUsage>,
}

impl Accounts {
    /// The activity since counting began.
    pub fn all(report: &UsageReport) -> Self {
        let disks = report.disks.iter().map(|disk| complete(disk.clone(), disk)).collect();
        Self { unix_time_ns: report.unix_time_ns, seconds: 0.0, disks }
    }

    /// The activity between two samples. A new disk, or one whose counters have restarted, counts
    /// as idle, because the start of its counting is not known.
    pub fn between(before: &UsageReport, after: &UsageReport) -> Self {
        let nanoseconds = after.time_ns.saturating_sub(before.time_ns).max(1);
        let disks = after.disks.iter().map(|disk| {
            let earlier = before.disk(&disk.name).filter(|old| old.instance == disk.instance);
            complete(disk.since(earlier.unwrap_or(disk)), disk)
        });
        Self {
            unix_time_ns: after.unix_time_ns,
            seconds: nanoseconds as f64 / 1e9,
            disks: disks.collect(),
        }
    }

    /// The properties that are the same for all disks: the machine, if there is only one. They need
    /// no column.
    pub fn common(&self) -> Scope {
        let mut machines = self.disks.iter().map(machine);
        let first = machines.next();
        let machine = first.filter(|first| machines.all(|other| other == *first));
        Scope { machine: machine.map(str::to_owned), ..Scope::default() }
    }

    /// The disk called `name`.
    pub fn disk(&self, name: &str) -> Option<&DiskUsage> {
        self.disks.iter().find(|disk| disk.name == name)
    }
}

/// The name of a disk's machine, or the disk's name if it has no machine.
pub fn machine(disk: &DiskUsage) -> &str {
    if disk.vm.is_empty() { &disk.name } else { &disk.vm }
}

/// Adds rows for counts without rows, and for the control groups of `ever` that were idle.
fn complete(mut disk: DiskUsage, ever: &DiskUsage) -> DiskUsage {
    // Flushes whose process or container is known.
    for row in &mut disk.rows {
        let UsageCounts { read, write, flush, other } = &row.counts;
        let has_flushes = [read, write, other].iter().all(|count| count.is_empty());
        if row.kind == "unknown" && has_flushes && !flush.is_empty() {
            row.kind = FLUSHES.into();
        }
    }
    let unknown = UsageCounts { flush: UsageCount::default(), ..disk.unknown.clone() };
    // Flushes that are not given to anybody.
    let flushes = UsageCounts { flush: disk.unknown.flush.clone(), ..UsageCounts::default() };
    for (kind, counts) in [("unknown", unknown), (FLUSHES, flushes), (FOLDED, disk.folded.clone())]
    {
        if !counts.is_empty() {
            disk.rows.push(UsageRow { kind: kind.into(), counts, ..UsageRow::default() });
        }
    }
    let groups = |disk: &DiskUsage| -> BTreeSet<String> {
        let known = disk.rows.iter().filter(|row| !row.cgroup.is_empty());
        known.map(|row| row.cgroup.clone()).collect()
    };
    let idle: Vec<String> = groups(ever).difference(&groups(&disk)).cloned().collect();
    disk.rows.extend(idle.into_iter().map(|cgroup| UsageRow { cgroup, ..UsageRow::default() }));
    if disk.rows.is_empty() {
        // An empty row, so that the machine is listed.
        disk.rows.push(UsageRow { kind: "unknown".into(), ..UsageRow::default() });
    }
    disk
}

#[cfg(test)]
mod tests {
    use super::super::tests::{row, usage};
    use super::*;

    #[test]
    fn an_interval_is_complete_and_has_idle_groups() {
        let (before, mut after) = (usage(), usage());
        after.time_ns = 2_000_000_000;
        after.disks[0].rows[1] = row("/web", "/srv/b", 40);
        after.disks[0].total.merge(&row("", "", 10).counts);
        after.disks[0].unknown.flush.requests = 4;
        after.disks.push(DiskUsage {
            name: "new".into(),
            rows: vec![row("/x", "/x", 9)],
            ..DiskUsage::default()
        });
        let accounts = Accounts::between(&before, &after);
        assert!((accounts.seconds - 2.0).abs() < 1e-9);
        let rows: Vec<(&str, &str, u64)> = accounts.disks[0]
            .rows
            .iter()
            .map(|row| (row.kind.as_str(), row.cgroup.as_str(), row.counts.sum().requests))
            .collect();
        let idle = [("", "/", 0), ("", "/database", 0)];
        assert_eq!(rows[..2], [("data", "/web", 10), (FLUSHES, "", 4)]);
        assert_eq!(rows[2..], idle);
        // Earlier requests of a new disk do not count in this interval.
        assert_eq!(
            accounts.disks[1].rows.iter().map(|row| row.counts.sum().requests).sum::<u64>(),
            0
        );
        assert_eq!(accounts.common(), Scope::default());
        assert_eq!(Accounts::all(&before).common().machine.as_deref(), Some("shop"));
        let all = Accounts::all(&after);
        assert_eq!(all.disk("new").expect("it is there").rows[0].counts.sum().requests, 9);
    }
}
