//! Grouped accounts.
use std::collections::BTreeMap;

use clap::ValueEnum;
use fathom_control::{DiskUsage, UsageCounts, UsageRow};
use serde::Serialize;

use super::{
    accounts::{Accounts, machine},
    describe,
    entry::{Mix, Object, UsageEntry},
};

/// The kind of the row for flushes, which carry no data and concern all data.
pub const FLUSHES: &str = "flushes";
/// The kind of the row for evicted rows.
pub const FOLDED: &str = "folded";

/// The grouping of accounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grouping {
    /// The virtual machine
    Vm,
    /// The control group: a container or a service
    Container,
    /// The process, if it is known
    Process,
    /// The file, or the kind of data without a file
    File,
    /// The kind of data
    Kind,
    /// The table, index or log of a database
    Database,
}

impl Grouping {
    /// All groupings, from the coarsest to the finest, then kinds and parts of databases.
    pub const ALL: [Self; 6] =
        [Self::Vm, Self::Container, Self::Process, Self::File, Self::Kind, Self::Database];

    /// The heading of its column.
    pub fn heading(self) -> &'static str {
        match self {
            Self::Vm => "MACHINE",
            Self::Container => "CONTAINER",
            Self::Process => "PROCESS",
            Self::File => "FILE",
            Self::Kind => "KIND",
            Self::Database => "DATABASE",
        }
    }

    /// The next grouping, wrapping around.
    #[must_use]
    pub fn next(self) -> Self {
        let place = Self::ALL.iter().position(|&it| it == self).unwrap_or(0);
        Self::ALL[(place + 1) % Self::ALL.len()]
    }
}

/// The identity of a file. Data without a file, such as a journal, is identified by its kind. A
/// file that is created again with the same path (as logs are) stays the same.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey {
    disk: String,
    file_system: String,
    device: String,
    path: String,
    inode: u64,
    kind: String,
}

impl FileKey {
    fn of(disk: &str, row: &UsageRow) -> Self {
        let is_file = describe::is_file(&row.kind, &row.path, row.inode);
        Self {
            disk: disk.into(),
            file_system: row.file_system.clone(),
            device: row.device.clone(),
            path: row.path.clone(),
            inode: if row.path.is_empty() && is_file { row.inode } else { 0 },
            kind: if is_file { String::new() } else { row.kind.clone() },
        }
    }
}

/// The identity of a part of a database: its file, the part's name, and the number of the table or
/// index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DatabaseKey {
    file: FileKey,
    part: String,
    index: u64,
}

impl DatabaseKey {
    fn of(disk: &str, row: &UsageRow) -> Self {
        let (part, index) = (row.database_part.clone(), row.database_index);
        Self { file: FileKey::of(disk, row), part, index }
    }
}

/// A selection of accounts by properties. `None` means any value; an empty text means an unknown
/// value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope {
    /// The disk.
    pub disk: Option<String>,
    /// The virtual machine.
    pub machine: Option<String>,
    /// The control group.
    pub container: Option<String>,
    /// The process, and its number.
    pub process: Option<(String, u64)>,
    /// The file.
    pub file: Option<FileKey>,
    /// The kind of data.
    pub kind: Option<String>,
    /// The part of a database.
    pub database: Option<DatabaseKey>,
}

/// The control group of a row, or the kind of a row without an owner.
fn container(row: &UsageRow) -> &str {
    if has_no_owner(row) { &row.kind } else { &row.cgroup }
}

/// Whether a row has no owner: flushes of nobody who is known, and evicted rows.
fn has_no_owner(row: &UsageRow) -> bool {
    let is_known = !row.process.is_empty() || !row.cgroup.is_empty();
    row.kind == FLUSHES && !is_known || row.kind == FOLDED
}

impl Scope {
    /// All accounts of a disk.
    pub fn of_disk(disk: &str) -> Self {
        Self { disk: Some(disk.into()), ..Self::default() }
    }

    /// Whether accounts of a disk may belong to the scope.
    fn holds_disk(&self, disk: &DiskUsage) -> bool {
        self.disk.as_ref().is_none_or(|name| *name == disk.name)
            && self.machine.as_ref().is_none_or(|name| name == machine(disk))
    }

    /// Whether the scope consists of whole disks.
    fn is_whole_disks(&self) -> bool {
        let Self { disk: _, machine: _, container, process, file, kind, database } = self;
        let has_no_owner = container.is_none() && process.is_none();
        has_no_owner && file.is_none() && kind.is_none() && database.is_none()
    }

    /// Whether a row of a disk belongs to the scope.
    fn holds(&self, disk: &DiskUsage, row: &UsageRow) -> bool {
        let is = |wanted: &Option<String>, text: &str| wanted.as_ref().is_none_or(|w| w == text);
        self.holds_disk(disk)
            && is(&self.container, container(row))
            && is(&self.kind, &row.kind)
            && self
                .process
                .as_ref()
                .is_none_or(|(command, id)| row.process == *command && row.process_id == *id)
            && self.file.as_ref().is_none_or(|file| FileKey::of(&disk.name, row) == *file)
            && self.database.as_ref().is_none_or(|key| DatabaseKey::of(&disk.name, row) == *key)
    }

    /// The key of the line to which a row belongs.
    fn line(grouping: Grouping, disk: &DiskUsage, row: &UsageRow) -> Self {
        let machine = Some(machine(disk).to_owned());
        let container = Some(container(row).to_owned());
        let none = Self::default();
        match grouping {
            Grouping::Vm => Self { machine, ..none },
            Grouping::Container => Self { machine, container, ..none },
            Grouping::Process => {
                let process = Some((row.process.clone(), row.process_id));
                Self { machine, container, process, ..none }
            }
            Grouping::File => Self { machine, file: Some(FileKey::of(&disk.name, row)), ..none },
            Grouping::Kind => Self { kind: Some(row.kind.clone()), ..none },
            Grouping::Database => {
                let database = Some(DatabaseKey::of(&disk.name, row));
                Self { machine, database, ..none }
            }
        }
    }

    /// A scope with the properties of both; those of `other` take precedence.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let other = other.clone();
        Self {
            disk: other.disk.or_else(|| self.disk.clone()),
            machine: other.machine.or_else(|| self.machine.clone()),
            container: other.container.or_else(|| self.container.clone()),
            process: other.process.or_else(|| self.process.clone()),
            file: other.file.or_else(|| self.file.clone()),
            kind: other.kind.or_else(|| self.kind.clone()),
            database: other.database.or_else(|| self.database.clone()),
        }
    }

    /// The scope as text: `guest › /web › fio 12`.
    pub fn text(&self) -> String {
        let mut names = Vec::new();
        names.extend(self.machine.clone());
        names.extend(self.disk.as_ref().map(|disk| format!("disk {disk}")));
        names.extend(self.kind.clone());
        names.extend(self.container.as_deref().map(container_name));
        names.extend(self.process.as_ref().map(|(command, id)| describe::process(command, *id)));
        names.join(" › ")
    }
}

/// A control group's name for display, or the kind of a row without an owner.
pub fn container_name(cgroup: &str) -> String {
    match cgroup {
        "" => "(unknown)".into(),
        FLUSHES | FOLDED => format!("({cgroup})"),
        cgroup => describe::container(cgroup),
    }
}

/// The order of the lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UsageOrder {
    /// Requests, most first
    #[value(alias = "iops")]
    Requests,
    /// Bytes read and written, most first
    Throughput,
    /// Bytes read, most first
    Read,
    /// Bytes written, most first
    Written,
    /// Flushes, most first
    Flushes,
    /// Sum of the requests' latencies, longest first
    Time,
    /// Mean latency, longest first
    Latency,
    /// Size of the file, largest first
    Size,
    /// Name
    Name,
}

/// Grouped accounts: a line for each machine, container and so on.
#[derive(Clone, Debug, Default)]
pub struct Groups {
    /// The end of the interval, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// Its length, in seconds; 0 for all time.
    pub seconds: f64,
    /// The lines.
    pub entries: Vec<UsageEntry>,
    /// The sum of all lines, regardless of a filter.
    pub total: UsageCounts,
}

/// A line under construction.
#[derive(Default)]
struct Builder<'a> {
    counts: UsageCounts,
    machines: BTreeMap<&'a str, u64>,
    disks: BTreeMap<&'a str, u64>,
    containers: BTreeMap<&'a str, u64>,
    processes: BTreeMap<(&'a str, u64), u64>,
    kinds: BTreeMap<&'a str, u64>,
    devices: BTreeMap<&'a str, u64>,
    /// The rows of files, with their requests.
    files: BTreeMap<(&'a str, &'a str), (u64, &'a UsageRow)>,
    /// The row with the most requests.
    most: Option<(u64, &'a UsageRow)>,
}

impl<'a> Builder<'a> {
    fn add(&mut self, disk: &'a DiskUsage, row: &'a UsageRow) {
        let requests = requests(&row.counts);
        *self.machines.entry(machine(disk)).or_default() += requests;
        *self.disks.entry(&disk.name).or_default() += requests;
        *self.containers.entry(container(row)).or_default() += requests;
        *self.kinds.entry(&row.kind).or_default() += requests;
        if !row.process.is_empty() {
            *self.processes.entry((&row.process, row.process_id)).or_default() += requests;
        }
        if !row.device.is_empty() {
            *self.devices.entry(&row.device).or_default() += requests;
        }
        if requests > 0 && describe::is_file(&row.kind, &row.path, row.inode) {
            let file = self.files.entry((&disk.name, &row.path)).or_insert((0, row));
            file.0 += requests;
        }
        if self.most.is_none_or(|(most, _)| requests > most) {
            self.most = Some((requests, row));
        }
        self.counts.merge(&row.counts);
    }

    fn finish(self, grouping: Grouping, key: Scope) -> UsageEntry {
        let text = |text: &&str| (*text).to_owned();
        let row = self.most.map(|(_, row)| row);
        let hottest = self.files.values().max_by_key(|(requests, _)| *requests);
        let name = match grouping {
            Grouping::Vm => key.machine.clone().unwrap_or_default(),
            Grouping::Container => container_name(key.container.as_deref().unwrap_or_default()),
            Grouping::Process => {
                let no_owner =
                    row.filter(|row| has_no_owner(row)).map(|row| container_name(&row.kind));
                let (command, id) = key.process.clone().unwrap_or_default();
                no_owner.unwrap_or_else(|| describe::process(&command, id))
            }
            Grouping::File => row.map(describe::object).unwrap_or_default(),
            Grouping::Kind => key.kind.clone().unwrap_or_default(),
            Grouping::Database => row.map(describe::database).unwrap_or_default(),
        };
        UsageEntry {
            name,
            machine: Mix::of(&self.machines, text),
            disk: Mix::of(&self.disks, text),
            container: Mix::of(&self.containers, text),
            only_process: match self.processes.keys().next() {
                Some((command, id)) if self.processes.len() == 1 => {
                    Some(((*command).to_owned(), *id))
                }
                _ => None,
            },
            process: Mix::of(&self.processes, |(command, id)| describe::process(command, *id)),
            kind: Mix::of(&self.kinds, text),
            device: Mix::of(&self.devices, text),
            hottest: hottest.map(|(_, row)| describe::object(row)),
            file: matches!(grouping, Grouping::File | Grouping::Database)
                .then(|| row.map(Object::of))
                .flatten(),
            counts: self.counts,
            key,
        }
    }
}

impl Groups {
    /// Groups the accounts that belong to `scope`.
    pub fn of(accounts: &Accounts, grouping: Grouping, scope: &Scope) -> Self {
        let mut lines: BTreeMap<Scope, Builder<'_>> = BTreeMap::new();
        let mut total = UsageCounts::default();
        for disk in &accounts.disks {
            let kept = grouping == Grouping::Vm || grouping == Grouping::Container;
            for row in disk.rows.iter().filter(|row| kept || !row.counts.is_empty()) {
                let is_shown = grouping != Grouping::Database || !row.database_part.is_empty();
                if is_shown && scope.holds(disk, row) {
                    total.merge(&row.counts);
                    lines.entry(Scope::line(grouping, disk, row)).or_default().add(disk, row);
                }
            }
        }
        let entries = lines.into_iter().map(|(key, line)| line.finish(grouping, key));
        let mut entries: Vec<UsageEntry> = entries.collect();
        // A request of several parts counts in the row of each part. For whole disks the number of
        // whole requests is known.
        if scope.is_whole_disks() {
            total = UsageCounts::default();
            let shown = accounts.disks.iter().filter(|disk| scope.holds_disk(disk));
            for disk in shown.clone() {
                total.merge(&disk.total);
            }
            if grouping == Grouping::Vm {
                for entry in &mut entries {
                    entry.counts = UsageCounts::default();
                    let is_its = |disk: &&DiskUsage| entry.key.holds_disk(disk);
                    for disk in shown.clone().filter(is_its) {
                        entry.counts.merge(&disk.total);
                    }
                }
            }
        }
        Self { unix_time_ns: accounts.unix_time_ns, seconds: accounts.seconds, entries, total }
    }

    /// Keeps the entries in which the text occurs.
    pub fn filter(&mut self, text: &str) {
        let text = text.to_lowercase();
        self.entries.retain(|entry| text.is_empty() || entry.contains(&text));
    }

    /// Sorts the entries; equal ones by name.
    pub fn sort(&mut self, order: UsageOrder) {
        let value = |entry: &UsageEntry| match order {
            UsageOrder::Requests => entry.requests(),
            UsageOrder::Throughput => entry.counts.read.bytes + entry.counts.write.bytes,
            UsageOrder::Read => entry.counts.read.bytes,
            UsageOrder::Written => entry.counts.write.bytes,
            UsageOrder::Flushes => entry.counts.flush.requests,
            UsageOrder::Time => entry.time_ns(),
            UsageOrder::Latency => entry.latency_mean_ns(),
            UsageOrder::Size => entry.file.as_ref().map_or(0, |file| file.size_bytes),
            UsageOrder::Name => 0,
        };
        self.entries.sort_by(|left, right| {
            let order = value(right).cmp(&value(left));
            order.then_with(|| left.name.cmp(&right.name)).then_with(|| left.key.cmp(&right.key))
        });
    }

    /// The grouping that Enter opens from a line: the next finer one. `scope` is the scope of that
    /// line. Groupings with only one machine or container, and unknown processes, are skipped.
    pub fn below(accounts: &Accounts, grouping: Grouping, scope: &Scope) -> Grouping {
        let rows = || {
            accounts.disks.iter().flat_map(|disk| {
                disk.rows
                    .iter()
                    .filter(move |row| scope.holds(disk, row))
                    .map(move |row| (disk, row))
            })
        };
        let several = |text: fn(&DiskUsage, &UsageRow) -> String| {
            let mut texts = rows().map(|(disk, row)| text(disk, row));
            texts.next().is_some_and(|first| texts.any(|text| text != first))
        };
        let from = if grouping >= Grouping::Kind { None } else { Some(grouping) };
        let candidates = [Grouping::Vm, Grouping::Container, Grouping::Process];
        let next = candidates.into_iter().filter(|&next| from.is_none_or(|from| next > from));
        let makes_sense = |grouping: &Grouping| match grouping {
            Grouping::Vm => scope.machine.is_none() && several(|disk, _| machine(disk).to_owned()),
            Grouping::Container => {
                scope.container.is_none()
                    && (from == Some(Grouping::Vm) || several(|_, row| container(row).to_owned()))
            }
            _ => {
                scope.process.is_none()
                    && rows().any(|(_, row)| !row.process.is_empty() && !row.counts.is_empty())
            }
        };
        next.into_iter().find(makes_sense).unwrap_or(Grouping::File)
    }
}

/// The number of requests.
pub fn requests(counts: &UsageCounts) -> u64 {
    counts.read.requests + counts.write.requests + counts.flush.requests + counts.other.requests
}

#[cfg(test)]
mod tests {
    use fathom_control::UsageReport;

    use super::super::tests::{row, usage};
    use super::*;

    fn groups(usage: &UsageReport, grouping: Grouping, scope: &Scope) -> Groups {
        let mut groups = Groups::of(&Accounts::all(usage), grouping, scope);
        groups.sort(UsageOrder::Requests);
        groups
    }

    fn names(groups: &Groups) -> Vec<(&str, u64)> {
        groups.entries.iter().map(|entry| (entry.name.as_str(), entry.requests())).collect()
    }

    #[test]
    fn accounts_are_grouped_and_lead_to_finer_groupings() {
        let usage = usage();
        let accounts = Accounts::all(&usage);
        let everything = Scope::default();
        let all = groups(&usage, Grouping::Vm, &everything);
        assert_eq!(names(&all), [("shop", 97)]);
        let scope = everything.and(&all.entries[0].key);
        assert_eq!(Groups::below(&accounts, Grouping::Vm, &scope), Grouping::Container);
        let containers = groups(&usage, Grouping::Container, &scope);
        assert_eq!(
            names(&containers),
            [("/database", 50), ("/web", 40), ("/", 5), ("(unknown)", 2)]
        );
        assert_eq!(containers.entries[1].latency_mean_ns(), 50_000);
        assert_eq!(containers.entries[1].hottest.as_deref(), Some("/srv/b"));
        // No process of /web is known; one of /database is.
        let web = scope.and(&containers.entries[1].key);
        assert_eq!(Groups::below(&accounts, Grouping::Container, &web), Grouping::File);
        let files = groups(&usage, Grouping::File, &web);
        assert_eq!(names(&files), [("/srv/b", 30), ("/srv/a", 10)]);
        assert_eq!(files.total.write.requests, 40);
        let database = scope.and(&containers.entries[0].key);
        assert_eq!(Groups::below(&accounts, Grouping::Container, &database), Grouping::Process);
        assert_eq!(database.text(), "shop › /database");
        let processes = groups(&usage, Grouping::Process, &database);
        assert_eq!(names(&processes), [("fio 12", 50)]);
        let fio = database.and(&processes.entries[0].key);
        assert_eq!(fio.text(), "shop › /database › fio 12");
        assert_eq!(Groups::below(&accounts, Grouping::Process, &fio), Grouping::File);
        let file = &groups(&usage, Grouping::File, &fio).entries[0];
        assert_eq!(
            (file.name.as_str(), file.container.only()),
            ("/srv/table.dat", Some("/database"))
        );
        // From a kind, Enter opens the first grouping in which its rows differ.
        let data = Scope { kind: Some("data".into()), ..Scope::default() };
        assert_eq!(Groups::below(&accounts, Grouping::Kind, &data), Grouping::Container);
        let metadata = Scope { kind: Some("metadata".into()), ..Scope::default() };
        assert_eq!(Groups::below(&accounts, Grouping::Kind, &metadata), Grouping::File);
    }

    #[test]
    fn the_same_name_on_two_disks_is_two_files_and_one_created_again_stays_one() {
        let mut usage = usage();
        let recreated = UsageRow { inode: 77, ..row("/web", "/srv/a", 7) };
        usage.disks[0].rows.push(recreated);
        let mut other = usage.disks[0].clone();
        other.name = "data".into();
        other.rows.truncate(1);
        usage.disks.push(other);
        let files = groups(&usage, Grouping::File, &Scope::default());
        let a: Vec<u64> = files
            .entries
            .iter()
            .filter(|entry| entry.name == "/srv/a")
            .map(UsageEntry::requests)
            .collect();
        assert_eq!(a, [17, 10]);
        let of_disk = groups(&usage, Grouping::File, &Scope::of_disk("data"));
        assert!(of_disk.entries.iter().all(|entry| entry.disk.only() == Some("data")));
        // Flushes have no owner, but are not unknown.
        usage.disks[0].unknown.flush.requests = 3;
        let containers = groups(&usage, Grouping::Container, &Scope::of_disk("root"));
        assert!(names(&containers).contains(&("(flushes)", 3)));
        let flushes = containers.entries.iter().find(|entry| entry.name == "(flushes)");
        let scope = flushes.expect("they are there").key.clone();
        assert_eq!(names(&groups(&usage, Grouping::File, &scope)), [("(flushes)", 3)]);
    }

    #[test]
    fn a_machine_counts_whole_requests_even_if_they_have_parts() {
        let mut usage = usage();
        usage.disks[0].total = row("", "", 90).counts;
        let machines = groups(&usage, Grouping::Vm, &Scope::default());
        assert_eq!((machines.entries[0].requests(), requests(&machines.total)), (90, 90));
        let containers = groups(&usage, Grouping::Container, &Scope::default());
        assert_eq!(requests(&containers.total), 90);
    }

    #[test]
    fn a_filter_searches_every_text_and_orders_differ() {
        let mut files = groups(&usage(), Grouping::File, &Scope::default());
        assert_eq!(files.entries.len(), 5);
        files.filter("WEB");
        assert_eq!(names(&files), [("/srv/b", 30), ("/srv/a", 10)]);
        files.sort(UsageOrder::Name);
        assert_eq!(names(&files), [("/srv/a", 10), ("/srv/b", 30)]);
        files.sort(UsageOrder::Written);
        assert_eq!(files.entries[0].name, "/srv/b");
        files.sort(UsageOrder::Latency);
        assert_eq!(files.entries[0].name, "/srv/a");
        let kinds = groups(&usage(), Grouping::Kind, &Scope::default());
        assert_eq!(names(&kinds), [("data", 90), ("metadata", 5), ("unknown", 2)]);
    }
}
