//! What the disks have done, for `fathom top` and for metrics.
//!
//! All counts grow from the start of the disk's counting on. A reader who wants rates keeps its
//! last sample and takes the difference ([`OperationStatistics::since`]), so that any number of
//! readers each have an interval of their own.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Histogram;
use crate::problem::Problem;

/// A sample of all disks, taken at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// When, by the host's monotonic clock, in nanoseconds: for intervals.
    pub time_ns: u64,
    /// When, in nanoseconds since 1970: for people.
    pub unix_time_ns: u64,
    /// The disks, in order of name.
    pub disks: Vec<DiskStatistics>,
}

/// What one disk has done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskStatistics {
    /// The disk's name.
    pub name: String,
    /// The virtual machine that it belongs to; may be empty.
    pub vm: String,
    /// The disk's size, in bytes.
    pub capacity_bytes: u64,
    /// Another number here than in an earlier sample means that counting began anew: take no
    /// difference then.
    pub instance: u64,
    /// Whether the disk has a tap. Without one, nothing is counted.
    pub counted: bool,
    /// The problems that the disk has now; empty on a sound disk.
    #[serde(default)]
    pub problems: Vec<Problem>,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Requests that a crossing refused: out of range, not offered, contradictory.
    pub refused: u64,
    /// The time during which a queue had anything in flight, summed over the queues.
    pub busy_ns: u64,
    /// The integral of the requests in flight over time. Its growth divided by the time passed is
    /// the mean queue depth.
    pub depth_ns: u64,
    /// By operation, those that occurred, in the order of `fathom_block::Operation`.
    pub operations: Vec<OperationStatistics>,
}

/// What one disk has done by one operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OperationStatistics {
    /// `read`, `write`, `flush`, `discard`, `write-zeroes`, `get-id` or `extents`.
    pub operation: String,
    /// Requests that succeeded.
    pub count: u64,
    /// The bytes that they asked for.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// The same by kind of error, for example `out of range`; those that occurred.
    pub errors_by_kind: BTreeMap<String, u64>,
    /// The sum of the latencies of those that succeeded.
    pub latency_sum_ns: u64,
    /// The latencies of those that succeeded, in nanoseconds.
    pub latency: Histogram,
    /// The same by size of request, those that occurred, in ascending order.
    pub sizes: Vec<SizeStatistics>,
}

/// The requests of one operation whose lengths lie in one range.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SizeStatistics {
    /// The longest that belongs here, in bytes: 512 times a power of two. The entry for 1 MiB holds
    /// everything longer too.
    pub length_max_bytes: u64,
    /// Requests that succeeded.
    pub count: u64,
    /// The bytes that they asked for.
    pub bytes: u64,
    /// Their latencies, in nanoseconds.
    pub latency: Histogram,
}

impl Statistics {
    /// The disk called `name`.
    pub fn disk(&self, name: &str) -> Option<&DiskStatistics> {
        self.disks.iter().find(|disk| disk.name == name)
    }
}

impl DiskStatistics {
    /// The operation called `name`.
    pub fn operation(&self, name: &str) -> Option<&OperationStatistics> {
        self.operations.iter().find(|operation| operation.operation == name)
    }

    /// What the disk did since the sample `before`: the counts of the interval, and what is in
    /// flight now. Everything, where `before` is of another instance.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        if self.instance != before.instance || self.name != before.name {
            return self.clone();
        }
        let mut difference = self.clone();
        difference.refused = self.refused.saturating_sub(before.refused);
        difference.busy_ns = self.busy_ns.saturating_sub(before.busy_ns);
        difference.depth_ns = self.depth_ns.saturating_sub(before.depth_ns);
        for operation in &mut difference.operations {
            if let Some(earlier) = before.operation(&operation.operation) {
                *operation = operation.since(earlier);
            }
        }
        difference
    }

    /// All operations together, under the name `all`.
    pub fn total(&self) -> OperationStatistics {
        let mut total = OperationStatistics { operation: "all".into(), ..Default::default() };
        for operation in &self.operations {
            total.count += operation.count;
            total.bytes += operation.bytes;
            total.errors += operation.errors;
            for (kind, count) in &operation.errors_by_kind {
                *total.errors_by_kind.entry(kind.clone()).or_default() += count;
            }
            total.latency_sum_ns += operation.latency_sum_ns;
            total.latency.merge(&operation.latency);
        }
        total
    }
}

impl OperationStatistics {
    /// What was done since the sample `before` of the same operation.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let sizes = self.sizes.iter().map(|size| {
            match before.sizes.iter().find(|old| old.length_max_bytes == size.length_max_bytes) {
                None => size.clone(),
                Some(old) => SizeStatistics {
                    length_max_bytes: size.length_max_bytes,
                    count: size.count.saturating_sub(old.count),
                    bytes: size.bytes.saturating_sub(old.bytes),
                    latency: size.latency.since(&old.latency),
                },
            }
        });
        Self {
            operation: self.operation.clone(),
            count: self.count.saturating_sub(before.count),
            bytes: self.bytes.saturating_sub(before.bytes),
            errors: self.errors.saturating_sub(before.errors),
            errors_by_kind: grown(&self.errors_by_kind, &before.errors_by_kind),
            latency_sum_ns: self.latency_sum_ns.saturating_sub(before.latency_sum_ns),
            latency: self.latency.since(&before.latency),
            sizes: sizes.collect(),
        }
    }
}

/// The counts that have grown, and by how much.
fn grown(now: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    now.iter()
        .map(|(kind, count)| {
            (kind.clone(), count.saturating_sub(before.get(kind).copied().unwrap_or(0)))
        })
        .filter(|(_, count)| *count > 0)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_since_another_is_the_interval_and_a_new_instance_counts_in_full() {
        let sample = |count: u64, instance| {
            let mut latency = Histogram::default();
            latency.record(1_000, count);
            let read = OperationStatistics {
                operation: "read".into(),
                count,
                bytes: count * 4096,
                latency_sum_ns: count * 1_000,
                latency,
                ..Default::default()
            };
            DiskStatistics { instance, operations: vec![read], ..Default::default() }
        };
        let interval = sample(10, 1).since(&sample(4, 1));
        assert_eq!(interval.operations, sample(6, 1).operations);
        assert_eq!(interval.total().count, 6);
        assert_eq!(sample(10, 2).since(&sample(4, 1)).operations, sample(10, 2).operations);
    }
}
