//! Accounts put together.
use std::{cmp::Ordering, collections::BTreeMap};

use clap::ValueEnum;
use fathom_control::{DiskUsage, UsageCount, UsageCounts, UsageReport, UsageRow};
use serde::Serialize;

use super::describe;
use crate::top::SortKey;

/// What accounts are put together by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grouping {
    /// The virtual machine
    Vm,
    /// The control group: a container, a service
    Container,
    /// The process, where it is known
    Process,
    /// The file, or what of a file system it is
    File,
    /// The kind of data
    Kind,
}

impl Grouping {
    /// All, from the coarsest to the finest, and kinds.
    pub const ALL: [Self; 5] = [Self::Vm, Self::Container, Self::Process, Self::File, Self::Kind];

    /// The heading of its column.
    pub fn heading(self) -> &'static str {
        match self {
            Self::Vm => "MACHINE",
            Self::Container => "CONTAINER",
            Self::Process => "PROCESS",
            Self::File => "FILE",
            Self::Kind => "KIND",
        }
    }

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vm => "machine",
            Self::Container => "container",
            Self::Process => "process",
            Self::File => "file",
            Self::Kind => "kind",
        }
    }

    /// The next one, round and round.
    #[must_use]
    pub fn next(self) -> Self {
        let place = Self::ALL.iter().position(|&it| it == self).unwrap_or(0);
        Self::ALL[(place + 1) % Self::ALL.len()]
    }
}

/// What is looked at: everything, or what is one machine's, one container's and so on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope(pub Vec<(Grouping, String)>);

impl Scope {
    /// Whether a row of a disk belongs to it.
    fn holds(&self, vm: &str, row: &UsageRow) -> bool {
        self.0.iter().all(|(grouping, key)| key_of(*grouping, vm, row) == *key)
    }

    /// `guest › /web › fio 12`.
    pub fn text(&self) -> String {
        let names: Vec<&str> = self.0.iter().map(|(_, key)| key.as_str()).collect();
        names.join(" › ")
    }
}

/// One line: all that has the same key.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Entry {
    /// What it is: a path, a control group and so on.
    pub name: String,
    /// The machine, where all of it is one's.
    pub vm: String,
    /// The container, likewise.
    pub container: String,
    /// The kind of data, likewise.
    pub kind: String,
    /// The file's size in bytes; 0 where it is no file, or unknown.
    pub file_size_bytes: u64,
    /// What was done.
    #[serde(flatten)]
    pub counts: UsageCounts,
}

impl Entry {
    /// All requests.
    pub fn requests(&self) -> u64 {
        self.counts.read.requests + self.counts.write.requests + self.counts.other.requests
    }

    /// The bytes read and written.
    pub fn bytes(&self) -> u64 {
        self.counts.read.bytes + self.counts.write.bytes
    }

    /// The mean latency, in nanoseconds.
    pub fn latency_mean_ns(&self) -> u64 {
        let sum = self.counts.sum();
        sum.latency_sum_ns.checked_div(sum.requests).unwrap_or(0)
    }
}

/// Accounts of an interval (or of all time), put together.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Groups {
    /// The end of the interval, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// Its length, in seconds; 0 where the accounts are of all time.
    pub seconds: f64,
    /// The lines.
    pub entries: Vec<Entry>,
}

impl Groups {
    /// Puts the rows of `usage` together that belong to `scope`.
    pub fn of(usage: &UsageReport, seconds: f64, grouping: Grouping, scope: &Scope) -> Self {
        let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
        for disk in &usage.disks {
            let vm = machine(disk);
            for row in disk.rows.iter().chain(&rest(disk)) {
                if !scope.holds(vm, row) {
                    continue;
                }
                let name = key_of(grouping, vm, row);
                // The same path on two disks is two files.
                let mut key = name.clone();
                if grouping >= Grouping::Container && grouping != Grouping::Kind {
                    key = format!("{vm}\0{name}");
                }
                if grouping == Grouping::File {
                    key = format!("{key}\0{}\0{}", disk.name, row.inode);
                }
                let first = !entries.contains_key(&key);
                let entry = entries.entry(key).or_default();
                if first {
                    entry.name = name;
                }
                merge_text(&mut entry.vm, vm, first);
                merge_text(&mut entry.container, &row.cgroup, first);
                merge_text(&mut entry.kind, &row.kind, first);
                entry.file_size_bytes = entry.file_size_bytes.max(row.file_size_bytes);
                entry.counts.merge(&row.counts);
            }
        }
        let entries = entries.into_values().collect();
        Self { unix_time_ns: usage.unix_time_ns, seconds, entries }
    }

    /// Leaves the entries in which the text occurs.
    pub fn filter(&mut self, text: &str) {
        let text = text.to_lowercase();
        self.entries.retain(|entry| {
            [&entry.name, &entry.vm, &entry.container, &entry.kind]
                .iter()
                .any(|field| field.to_lowercase().contains(&text))
        });
    }

    /// Brings the entries in an order; equal ones by name. Accounts know neither depth nor errors:
    /// those orders are by requests.
    pub fn sort(&mut self, key: SortKey) {
        let value = |entry: &Entry| match key {
            SortKey::Iops | SortKey::Depth | SortKey::Errors => entry.requests(),
            SortKey::Throughput => entry.bytes(),
            SortKey::Latency => entry.latency_mean_ns(),
            SortKey::Name => 0,
        };
        self.entries.sort_by(|left, right| match value(right).cmp(&value(left)) {
            Ordering::Equal => left.name.cmp(&right.name),
            order => order,
        });
    }

    /// Where Enter leads from an entry: one step finer, leaving out processes that nobody knows.
    pub fn below(usage: &UsageReport, grouping: Grouping, scope: &Scope) -> Grouping {
        match grouping {
            Grouping::Vm => Grouping::Container,
            Grouping::Container => {
                let known = usage.disks.iter().any(|disk| {
                    let vm = machine(disk);
                    disk.rows.iter().any(|row| !row.process.is_empty() && scope.holds(vm, row))
                });
                if known { Grouping::Process } else { Grouping::File }
            }
            Grouping::Process | Grouping::File | Grouping::Kind => Grouping::File,
        }
    }
}

/// Keeps a text while all parts agree on it.
fn merge_text(text: &mut String, part: &str, first: bool) {
    if first {
        part.clone_into(text);
    } else if text != part {
        text.clear();
    }
}

/// A disk without a machine's name stands for its own.
fn machine(disk: &DiskUsage) -> &str {
    if disk.vm.is_empty() { &disk.name } else { &disk.vm }
}

/// What no row tells: what nothing is known about, and what made room.
fn rest(disk: &DiskUsage) -> Vec<UsageRow> {
    let row = |kind: &str, counts: &UsageCounts| {
        (!counts.is_empty()).then(|| UsageRow {
            kind: kind.into(),
            counts: counts.clone(),
            ..UsageRow::default()
        })
    };
    // A flush is about everything that was written, by whomever.
    let flushes = UsageCounts { other: disk.unknown.other.clone(), ..UsageCounts::default() };
    let unknown = UsageCounts { other: UsageCount::default(), ..disk.unknown.clone() };
    [("unknown", &unknown), ("flushes", &flushes), ("folded", &disk.folded)]
        .into_iter()
        .filter_map(|(kind, counts)| row(kind, counts))
        .collect()
}

/// What a row is called in a grouping.
fn key_of(grouping: Grouping, vm: &str, row: &UsageRow) -> String {
    match grouping {
        Grouping::Vm => vm.to_owned(),
        Grouping::Container if row.cgroup.is_empty() => match row.kind.as_str() {
            "flushes" | "folded" => format!("({})", row.kind),
            _ => "(unknown)".into(),
        },
        Grouping::Container => row.cgroup.clone(),
        Grouping::Process if row.process.is_empty() => match row.kind.as_str() {
            "flushes" | "folded" => format!("({})", row.kind),
            _ => "(not known)".into(),
        },
        Grouping::Process => format!("{} {}", row.process, row.process_id),
        Grouping::File => describe::object(row),
        Grouping::Kind => row.kind.clone(),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A row with so many writes.
    pub fn row(cgroup: &str, path: &str, writes: u64) -> UsageRow {
        let write = UsageCount {
            requests: writes,
            bytes: writes * 4096,
            latency_sum_ns: writes * 50_000,
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
            ..DiskUsage::default()
        };
        UsageReport { disks: vec![disk], ..UsageReport::default() }
    }

    fn names(groups: &Groups) -> Vec<(&str, u64)> {
        groups.entries.iter().map(|entry| (entry.name.as_str(), entry.requests())).collect()
    }

    #[test]
    fn accounts_are_put_together_and_lead_to_finer_ones() {
        let usage = usage();
        let mut scope = Scope::default();
        let all = Groups::of(&usage, 1.0, Grouping::Vm, &scope);
        assert_eq!(names(&all), [("shop", 97)]);
        scope.0.push((Grouping::Vm, "shop".into()));
        let mut groups = Groups::of(&usage, 1.0, Grouping::Container, &scope);
        groups.sort(SortKey::Iops);
        assert_eq!(names(&groups), [("/database", 50), ("/web", 40), ("/", 5), ("(unknown)", 2)]);
        assert_eq!(groups.entries[1].latency_mean_ns(), 50_000);
        // Nobody knows a process of /web; of /database one is known.
        scope.0.push((Grouping::Container, "/web".into()));
        assert_eq!(Groups::below(&usage, Grouping::Container, &scope), Grouping::File);
        let files = Groups::of(&usage, 1.0, Grouping::File, &scope);
        assert_eq!(names(&files), [("/srv/a", 10), ("/srv/b", 30)]);
        scope.0[1].1 = "/database".into();
        assert_eq!(Groups::below(&usage, Grouping::Container, &scope), Grouping::Process);
        assert_eq!(scope.text(), "shop › /database");
    }

    #[test]
    fn a_filter_looks_at_every_text() {
        let mut groups = Groups::of(&usage(), 1.0, Grouping::File, &Scope::default());
        assert_eq!(groups.entries.len(), 5);
        groups.filter("WEB");
        assert_eq!(names(&groups), [("/srv/a", 10), ("/srv/b", 30)]);
        let kinds = Groups::of(&usage(), 1.0, Grouping::Kind, &Scope::default());
        assert_eq!(names(&kinds), [("data", 90), ("metadata", 5), ("unknown", 2)]);
    }
}
