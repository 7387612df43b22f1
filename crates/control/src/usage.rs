//! Who causes how much: what disks did, by file, control group, process and kind.
//!
//! All counts grow from the start of the counting on; whoever wants an interval keeps its last
//! sample and takes the difference ([`DiskUsage::since`]).

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::Histogram;

/// A sample of some disks, taken at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UsageReport {
    /// When, by the host's monotonic clock, in nanoseconds: for intervals.
    pub time_ns: u64,
    /// When, in nanoseconds since 1970: for people.
    pub unix_time_ns: u64,
    /// The disks, in order of name.
    pub disks: Vec<DiskUsage>,
}

/// What one disk did, and for whom.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskUsage {
    /// The disk's name.
    pub name: String,
    /// The virtual machine that it belongs to; may be empty.
    pub vm: String,
    /// Another number here than in an earlier sample means that counting began anew: take no
    /// difference then.
    pub instance: u64,
    /// Whether the disk finds out what requests mean. Without that, all else is empty.
    pub counted: bool,
    /// All requests that succeeded. Nothing is missing here.
    pub total: UsageCounts,
    /// Those of them that nothing is known about.
    pub unknown: UsageCounts,
    /// Requests that failed: reads, writes and others.
    pub errors: [u64; 3],
    /// What is known, by what it is about; the bytes of these, of `folded` and of `dropped_bytes`
    /// are those of `total` less `unknown`.
    pub rows: Vec<UsageRow>,
    /// What rows have counted that had to make room for others.
    pub folded: UsageCounts,
    /// How many these were.
    pub folded_rows: u64,
    /// Parts of requests that are in no row: the daemon had no time for them.
    pub dropped: u64,
    /// Their bytes.
    pub dropped_bytes: u64,
}

/// What was done for one file by one process, or as much of that as is known. Texts are empty and
/// numbers 0 where nothing is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageRow {
    /// `unknown`, `data`, `metadata`, `journal`, `swap`, `direct`, `directory` or `device`.
    pub kind: String,
    /// The path of the control group that is charged; `/` is the root group.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup: String,
    /// The command of the process.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub process: String,
    /// Its number.
    #[serde(skip_serializing_if = "is_zero")]
    pub process_id: u64,
    /// The type of the file system.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub file_system: String,
    /// The block device that it names itself by.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// The file's number in its file system.
    #[serde(skip_serializing_if = "is_zero")]
    pub inode: u64,
    /// Its path from the root of its file system.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// Its size when it was last seen, in bytes.
    #[serde(skip_serializing_if = "is_zero")]
    pub file_size_bytes: u64,
    /// Its owner, a user number of the guest.
    #[serde(skip_serializing_if = "is_zero")]
    pub owner: u64,
    /// Another number than in an earlier sample means that the row was counted anew: what it had
    /// counted is in `folded`.
    pub instance: u64,
    /// What was done. A request of several parts counts in the row of each.
    #[serde(flatten)]
    pub counts: UsageCounts,
}

/// What makes a row the same in two samples.
#[derive(Debug, PartialEq, Eq, Hash)]
struct RowKey<'a> {
    texts: [&'a str; 6],
    numbers: [u64; 3],
}

impl UsageRow {
    fn key(&self) -> RowKey<'_> {
        RowKey {
            texts: [
                &self.kind,
                &self.cgroup,
                &self.process,
                &self.file_system,
                &self.device,
                &self.path,
            ],
            numbers: [self.process_id, self.inode, self.instance],
        }
    }
}

/// Reads, writes and other requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageCounts {
    /// Reads.
    #[serde(skip_serializing_if = "UsageCount::is_empty")]
    pub read: UsageCount,
    /// Writes.
    #[serde(skip_serializing_if = "UsageCount::is_empty")]
    pub write: UsageCount,
    /// Flushes, discards, zeroes and the rest.
    #[serde(skip_serializing_if = "UsageCount::is_empty")]
    pub other: UsageCount,
}

/// Some requests that succeeded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageCount {
    /// How many.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How long they took together, in nanoseconds.
    pub latency_sum_ns: u64,
    /// How long the slowest took, in nanoseconds.
    pub latency_max_ns: u64,
    /// How many took how long, to a factor of two: each counts as the middle of its step.
    pub latency: Histogram,
}

impl UsageCount {
    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.requests == 0
    }

    /// Adds what `other` counted.
    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.latency_sum_ns = self.latency_sum_ns.saturating_add(other.latency_sum_ns);
        self.latency_max_ns = self.latency_max_ns.max(other.latency_max_ns);
        self.latency.merge(&other.latency);
    }

    /// What was counted since the sample `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let latency = self.latency.since(&before.latency);
        let latency_max_ns = if self.latency_max_ns > before.latency_max_ns {
            self.latency_max_ns
        } else {
            latency.max().min(self.latency_max_ns)
        };
        Self {
            requests: self.requests.saturating_sub(before.requests),
            bytes: self.bytes.saturating_sub(before.bytes),
            latency_sum_ns: self.latency_sum_ns.saturating_sub(before.latency_sum_ns),
            latency_max_ns,
            latency,
        }
    }
}

impl UsageCounts {
    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.read.is_empty() && self.write.is_empty() && self.other.is_empty()
    }

    /// Adds what `other` counted.
    pub fn merge(&mut self, other: &Self) {
        self.read.merge(&other.read);
        self.write.merge(&other.write);
        self.other.merge(&other.other);
    }

    /// What was counted since the sample `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            read: self.read.since(&before.read),
            write: self.write.since(&before.write),
            other: self.other.since(&before.other),
        }
    }

    /// Reads, writes and others together.
    pub fn sum(&self) -> UsageCount {
        let mut sum = self.read.clone();
        sum.merge(&self.write);
        sum.merge(&self.other);
        sum
    }
}

impl UsageReport {
    /// The disk called `name`.
    pub fn disk(&self, name: &str) -> Option<&DiskUsage> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// What was done since the sample `before`. Disks that are not in it count in full.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let disks = self.disks.iter().map(|disk| match before.disk(&disk.name) {
            Some(earlier) => disk.since(earlier),
            None => disk.clone(),
        });
        Self { time_ns: self.time_ns, unix_time_ns: self.unix_time_ns, disks: disks.collect() }
    }
}

impl DiskUsage {
    /// What the disk did since the sample `before`; everything, where `before` is of another
    /// instance. Rows in which nothing happened are left out.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        if self.instance != before.instance || self.name != before.name {
            return self.clone();
        }
        let mut earlier: HashMap<RowKey<'_>, &UsageRow> =
            before.rows.iter().map(|row| (row.key(), row)).collect();
        let mut rows = Vec::new();
        for row in &self.rows {
            let counts = match earlier.remove(&row.key()) {
                Some(old) => row.counts.since(&old.counts),
                None => row.counts.clone(),
            };
            if !counts.is_empty() {
                rows.push(UsageRow { counts, ..row.clone() });
            }
        }
        // What is left was folded meanwhile, with all that it had counted before.
        let mut folded_before = before.folded.clone();
        for row in earlier.values() {
            folded_before.merge(&row.counts);
        }
        Self {
            name: self.name.clone(),
            vm: self.vm.clone(),
            instance: self.instance,
            counted: self.counted,
            total: self.total.since(&before.total),
            unknown: self.unknown.since(&before.unknown),
            errors: std::array::from_fn(|index| {
                self.errors[index].saturating_sub(before.errors[index])
            }),
            rows,
            folded: self.folded.since(&folded_before),
            folded_rows: self.folded_rows.saturating_sub(before.folded_rows),
            dropped: self.dropped.saturating_sub(before.dropped),
            dropped_bytes: self.dropped_bytes.saturating_sub(before.dropped_bytes),
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(requests: u64) -> UsageCounts {
        let mut latency = Histogram::default();
        latency.record(1_000, requests);
        let read = UsageCount { requests, bytes: requests * 512, latency, ..UsageCount::default() };
        UsageCounts { read, ..UsageCounts::default() }
    }

    fn row(inode: u64, instance: u64, requests: u64) -> UsageRow {
        let kind = "data".into();
        UsageRow { kind, inode, instance, counts: count(requests), ..UsageRow::default() }
    }

    #[test]
    fn an_interval_has_what_happened_in_it_even_where_rows_were_folded() {
        let before = DiskUsage {
            total: count(100),
            rows: vec![row(1, 1, 60), row(2, 2, 30)],
            folded: count(10),
            ..DiskUsage::default()
        };
        // The second row did 5 more, was folded, came again and did 1; the first did nothing.
        let after = DiskUsage {
            total: count(106),
            rows: vec![row(1, 1, 60), row(2, 3, 1)],
            folded: count(45),
            folded_rows: 1,
            ..DiskUsage::default()
        };
        let interval = after.since(&before);
        assert_eq!(interval.rows, [row(2, 3, 1)]);
        assert_eq!(interval.folded, count(5));
        assert_eq!(interval.total, count(6));
        let anew = DiskUsage { instance: 9, ..after.clone() };
        assert_eq!(anew.since(&before), anew);
    }

    #[test]
    fn a_row_survives_json_and_leaves_out_what_is_not_known() {
        let text = serde_json::to_string(&row(7, 1, 2)).unwrap();
        assert!(!text.contains("cgroup") && !text.contains("write"), "{text}");
        assert_eq!(serde_json::from_str::<UsageRow>(&text).unwrap(), row(7, 1, 2));
    }
}
