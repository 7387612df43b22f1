//! What disks did, and for whom: since counting began, or between two samples.
use std::collections::BTreeSet;

use fathom_control::{DiskUsage, UsageCount, UsageCounts, UsageReport, UsageRow};

use super::group::{FLUSHES, FOLDED, Scope};

/// What disks did in an interval. Here the rows of a disk are complete: what the daemon tells
/// apart from them has rows of its own, and a control group that was idle has an empty one.
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
    /// Everything since counting began.
    pub fn all(report: &UsageReport) -> Self {
        let disks = report.disks.iter().map(|disk| complete(disk.clone(), disk)).collect();
        Self { unix_time_ns: report.unix_time_ns, seconds: 0.0, disks }
    }

    /// What was done between two samples. A disk that is new, or counts anew, has done nothing
    /// yet: since when it counts is not known.
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

    /// What is the same for all of them: the machine, where there is one. Columns need not say it.
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

/// The name that a disk's machine goes by. A disk without one stands for its own.
pub fn machine(disk: &DiskUsage) -> &str {
    if disk.vm.is_empty() { &disk.name } else { &disk.vm }
}

/// `disk` with rows for what has none, and for the groups of `ever` that did nothing.
fn complete(mut disk: DiskUsage, ever: &DiskUsage) -> DiskUsage {
    let unknown = UsageCounts { other: UsageCount::default(), ..disk.unknown.clone() };
    // A flush is about everything that was written, by whomever.
    let flushes = UsageCounts { other: disk.unknown.other.clone(), ..UsageCounts::default() };
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
        // So that its machine is there.
        disk.rows.push(UsageRow { kind: "unknown".into(), ..UsageRow::default() });
    }
    disk
}

#[cfg(test)]
mod tests {
    use super::super::tests::{row, usage};
    use super::*;

    #[test]
    fn an_interval_is_complete_and_knows_idle_groups() {
        let (before, mut after) = (usage(), usage());
        after.time_ns = 2_000_000_000;
        after.disks[0].rows[1] = row("/web", "/srv/b", 40);
        after.disks[0].total.merge(&row("", "", 10).counts);
        after.disks[0].unknown.other.requests = 4;
        after.disks.push(DiskUsage {
            name: "new".into(),
            rows: vec![row("/x", "/x", 9)],
            ..DiskUsage::default()
        });
        let accounts = Accounts::between(&before, &after);
        assert!((accounts.seconds - 2.0).abs() < 1e-9);
        let told: Vec<(&str, &str, u64)> = accounts.disks[0]
            .rows
            .iter()
            .map(|row| (row.kind.as_str(), row.cgroup.as_str(), row.counts.sum().requests))
            .collect();
        let idle = [("", "/", 0), ("", "/database", 0)];
        assert_eq!(told[..2], [("data", "/web", 10), (FLUSHES, "", 4)]);
        assert_eq!(told[2..], idle);
        // What a new disk did before is not of this interval.
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
