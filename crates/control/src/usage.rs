//! The usage of disks, by file, control group, process and kind of data.
//!
//! All counts start with the disk's counting and only grow. A reader that needs an interval keeps
//! its last sample and takes the difference ([`DiskUsage::since`]).

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::Histogram;
use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Blocking, Endpoint, Query};

/// The usage by file, control group and process.
pub const USAGE: Endpoint<Blocking, (), UsageQuery, (), UsageReport> = Endpoint::get(
    "/v1/usage",
    "the usage by file, control group and process, of all disks or of those named",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&USAGE];

/// The usage of which disks is reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageQuery {
    /// Only this disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Only the disks of this virtual machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
}

impl Query for UsageQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[("disk", "NAME"), ("vm", "NAME")];
}

/// A sample of some disks, taken at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UsageReport {
    /// The time of the sample, by the host's monotonic clock, in nanoseconds: for intervals.
    pub time_ns: u64,
    /// The time of the sample, in nanoseconds since 1970: for display.
    pub unix_time_ns: u64,
    /// The disks, in order of name.
    pub disks: Vec<DiskUsage>,
}

/// The usage of one disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskUsage {
    /// The disk's name.
    pub name: String,
    /// The virtual machine that the disk belongs to; may be empty.
    pub vm: String,
    /// Identifies the instance of the counters. If it differs from that of an earlier sample, the
    /// counts began at zero again, and no difference can be taken.
    pub instance: u64,
    /// Whether the disk has the layer `classify`. Without it, all other fields are empty.
    pub counted: bool,
    /// All requests that succeeded, without exception.
    pub total: UsageCounts,
    /// The successful requests of unknown meaning.
    pub unknown: UsageCounts,
    /// The numbers of requests that failed: reads, writes and others with flushes.
    pub errors: [u64; 3],
    /// The usage by cause, as far as it is known. The bytes of the rows, of `folded` and of
    /// `dropped_bytes` add up to the bytes of `total` less `unknown`.
    pub rows: Vec<UsageRow>,
    /// The sum of the counts of the rows that were removed to make room for others.
    pub folded: UsageCounts,
    /// The number of rows that were removed to make room for others.
    pub folded_rows: u64,
    /// The number of parts of requests that are in no row, because the daemon had no time to count
    /// them.
    pub dropped: u64,
    /// The bytes of these parts.
    pub dropped_bytes: u64,
}

/// The usage of one file by one process, as far as they are known. Unknown texts are empty, and
/// unknown numbers 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageRow {
    /// `unknown`, `data`, `metadata`, `journal`, `swap`, `direct`, `directory` or `device`.
    pub kind: String,
    /// The path of the control group to which the requests are charged; `/` is the root group.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup: String,
    /// The command of the process.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub process: String,
    /// The number of the process.
    #[serde(skip_serializing_if = "is_zero")]
    pub process_id: u64,
    /// The start of the process, in nanoseconds since the guest's boot, to a hundredth of a second.
    #[serde(skip_serializing_if = "is_zero")]
    pub process_start_ns: u64,
    /// The type of the file system.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub file_system: String,
    /// The name of the block device that the guest's kernel gives the file system (`s_id`).
    #[serde(skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// The file's inode number.
    #[serde(skip_serializing_if = "is_zero")]
    pub inode: u64,
    /// The file's path from the root of its file system.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// The file's size when it was last seen, in bytes.
    #[serde(skip_serializing_if = "is_zero")]
    pub file_size_bytes: u64,
    /// The file's owner, a user number of the guest.
    #[serde(skip_serializing_if = "is_zero")]
    pub owner: u64,
    /// The database system of the data: `sqlite`, `innodb` or `postgresql`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub database_system: String,
    /// The part of the database: `table`, `index`, `log` or `other`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub database_part: String,
    /// The number of the table or index within its database.
    #[serde(skip_serializing_if = "is_zero")]
    pub database_index: u64,
    /// Identifies the instance of the row. If it differs from that in an earlier sample, the row
    /// was removed and added again: its earlier counts are in `folded`.
    pub instance: u64,
    /// The counts. A request of several parts counts in the row of each part.
    #[serde(flatten)]
    pub counts: UsageCounts,
}

/// The identity of a row across samples.
#[derive(Debug, PartialEq, Eq, Hash)]
struct RowKey<'a> {
    texts: [&'a str; 8],
    numbers: [u64; 4],
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
                &self.database_system,
                &self.database_part,
            ],
            numbers: [self.process_id, self.inode, self.instance, self.database_index],
        }
    }
}

/// The counts of reads, writes, flushes and other requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageCounts {
    /// Reads.
    #[serde(skip_serializing_if = "UsageCount::is_empty")]
    pub read: UsageCount,
    /// Writes.
    #[serde(skip_serializing_if = "UsageCount::is_empty")]
    pub write: UsageCount,
    /// Flushes. That of an older daemon are in `other`.
    #[serde(skip_serializing_if = "UsageCount::is_empty")]
    pub flush: UsageCount,
    /// Discards, writes of zeroes, and all other requests.
    #[serde(skip_serializing_if = "UsageCount::is_empty")]
    pub other: UsageCount,
}

/// The count of some successful requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageCount {
    /// The number of requests.
    pub requests: u64,
    /// The sum of their lengths, in bytes.
    pub bytes: u64,
    /// The sum of their latencies, in nanoseconds.
    pub latency_sum_ns: u64,
    /// The greatest of their latencies, in nanoseconds.
    pub latency_max_ns: u64,
    /// The distribution of their latencies, in nanoseconds, to a factor of two: each latency counts
    /// as the middle of its step.
    pub latency: Histogram,
    /// The requests of which a cache has reported whether it had the data.
    #[serde(skip_serializing_if = "is_zero")]
    pub cache_requests: u64,
    /// Those of which it had all data.
    #[serde(skip_serializing_if = "is_zero")]
    pub cache_hits: u64,
}

impl UsageCount {
    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.requests == 0
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.latency_sum_ns = self.latency_sum_ns.saturating_add(other.latency_sum_ns);
        self.latency_max_ns = self.latency_max_ns.max(other.latency_max_ns);
        self.latency.merge(&other.latency);
        self.cache_requests += other.cache_requests;
        self.cache_hits += other.cache_hits;
    }

    /// The share of the requests that a cache had wholly, from 0 to 1; `None` without a cache.
    pub fn hit_ratio(&self) -> Option<f64> {
        (self.cache_requests > 0).then(|| self.cache_hits as f64 / self.cache_requests as f64)
    }

    /// The difference to the sample `before`.
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
            cache_requests: self.cache_requests.saturating_sub(before.cache_requests),
            cache_hits: self.cache_hits.saturating_sub(before.cache_hits),
        }
    }
}

impl UsageCounts {
    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        [&self.read, &self.write, &self.flush, &self.other].iter().all(|count| count.is_empty())
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.read.merge(&other.read);
        self.write.merge(&other.write);
        self.flush.merge(&other.flush);
        self.other.merge(&other.other);
    }

    /// The difference to the sample `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            read: self.read.since(&before.read),
            write: self.write.since(&before.write),
            flush: self.flush.since(&before.flush),
            other: self.other.since(&before.other),
        }
    }

    /// The sum of all of them.
    pub fn sum(&self) -> UsageCount {
        let mut sum = self.read.clone();
        sum.merge(&self.write);
        sum.merge(&self.flush);
        sum.merge(&self.other);
        sum
    }
}

impl UsageReport {
    /// The disk called `name`.
    pub fn disk(&self, name: &str) -> Option<&DiskUsage> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// The difference to the sample `before`. A disk that is not in `before` counts in full.
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
    /// The difference to the sample `before`. If `before` is of another instance, all counts are
    /// returned. Rows without a difference are omitted.
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
        // The remaining earlier rows have been folded since, with all their earlier counts.
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

impl Client {
    /// The usage by file, control group and process: of all disks, of the disk `disk`, or of the
    /// disks of `vm`.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn usage(&self, disk: Option<&str>, vm: Option<&str>) -> Result<UsageReport, ClientError> {
        let query = UsageQuery { disk: disk.map(str::to_owned), vm: vm.map(str::to_owned) };
        self.ask(&USAGE, &(), &query, &())
    }
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
    fn an_interval_has_its_own_counts_even_if_rows_were_folded() {
        let before = DiskUsage {
            total: count(100),
            rows: vec![row(1, 1, 60), row(2, 2, 30)],
            folded: count(10),
            ..DiskUsage::default()
        };
        // The second row counted 5 more, was folded, was added again and counted 1. The first row
        // counted nothing.
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
        let restarted = DiskUsage { instance: 9, ..after.clone() };
        assert_eq!(restarted.since(&before), restarted);
    }

    #[test]
    fn a_row_survives_json_and_omits_unknown_fields() {
        let text = serde_json::to_string(&row(7, 1, 2)).unwrap();
        assert!(!text.contains("cgroup") && !text.contains("write"), "{text}");
        assert_eq!(serde_json::from_str::<UsageRow>(&text).unwrap(), row(7, 1, 2));
    }
}
