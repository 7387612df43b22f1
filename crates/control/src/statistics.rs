//! The statistics of the disks, for `fathom top` and for metrics.
//!
//! All counts start with the disk's counting and only grow. A reader that needs rates keeps its
//! last sample and takes the difference ([`OperationStatistics::since`]). So each of any number of
//! readers has its own interval.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Histogram;
use crate::client::{Client, ClientError};
use crate::disk::LayerFigures;
use crate::endpoint::{AnyEndpoint, AtOnce, Endpoint};
use crate::problem::Problem;

/// The statistics of all disks.
pub const STATISTICS: Endpoint<AtOnce, (), (), (), Statistics> =
    Endpoint::get("/v1/statistics", "a [sample](#statistics) of the statistics of all disks");

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&STATISTICS];

/// A sample of all disks, taken at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// The time of the sample, by the host's monotonic clock, in nanoseconds: for intervals.
    pub time_ns: u64,
    /// The time of the sample, in nanoseconds since 1970: for display.
    pub unix_time_ns: u64,
    /// The disks, in order of name.
    pub disks: Vec<DiskStatistics>,
}

/// The statistics of one disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskStatistics {
    /// The disk's name.
    pub name: String,
    /// The virtual machine that the disk belongs to; may be empty.
    pub vm: String,
    /// The disk's size, in bytes.
    pub capacity_bytes: u64,
    /// Identifies the instance of the counters. If it differs from that of an earlier sample, the
    /// counts began at zero again, and no difference can be taken.
    pub instance: u64,
    /// Whether the disk has a tap. Without one, nothing is counted.
    pub counted: bool,
    /// The current problems; empty on a sound disk.
    #[serde(default)]
    pub problems: Vec<Problem>,
    /// The number of requests in flight.
    pub in_flight: u64,
    /// The number of requests that a crossing between layers refused: out of range, not offered, or
    /// contradictory.
    pub refused: u64,
    /// The time during which a queue had requests in flight, summed over the queues, in
    /// nanoseconds.
    pub busy_ns: u64,
    /// The integral of the requests in flight over time, in nanoseconds. Its growth divided by the
    /// elapsed time is the mean queue depth.
    pub depth_ns: u64,
    /// The operations that occurred, in the order of `fathom_block::Operation`.
    pub operations: Vec<OperationStatistics>,
    /// The figures of the disk's layers, from the front end down; layers without figures are
    /// omitted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerFigures>,
}

/// The statistics of one operation on one disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OperationStatistics {
    /// `read`, `write`, `flush`, `discard`, `write-zeroes`, `get-id` or `extents`.
    pub operation: String,
    /// The number of requests that succeeded.
    pub count: u64,
    /// The sum of the lengths of the successful requests, in bytes.
    pub bytes: u64,
    /// The number of requests that failed.
    pub errors: u64,
    /// The failed requests by kind of error, for example `out of range`. Only kinds that occurred
    /// are listed.
    pub errors_by_kind: BTreeMap<String, u64>,
    /// The sum of the latencies of the successful requests, in nanoseconds.
    pub latency_sum_ns: u64,
    /// The distribution of the latencies of the successful requests, in nanoseconds.
    pub latency: Histogram,
    /// The successful requests by length, in ascending order. Only lengths that occurred are
    /// listed.
    pub sizes: Vec<SizeStatistics>,
}

/// The requests of one operation whose lengths lie in one range.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SizeStatistics {
    /// The longest length in this entry, in bytes: 512 times a power of two. The entry of 1 MiB has
    /// all longer requests too.
    pub length_max_bytes: u64,
    /// The number of requests that succeeded.
    pub count: u64,
    /// The sum of their lengths, in bytes.
    pub bytes: u64,
    /// The distribution of their latencies, in nanoseconds.
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

    /// The difference to the sample `before`: the counts of the interval, and the requests in
    /// flight now. If `before` is of another instance, all counts are returned.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        if self.instance != before.instance || self.name != before.name {
            return self.clone();
        }
        let mut difference = self.clone();
        difference.refused = self.refused.saturating_sub(before.refused);
        difference.busy_ns = self.busy_ns.saturating_sub(before.busy_ns);
        difference.depth_ns = self.depth_ns.saturating_sub(before.depth_ns);
        difference.layers = self.layers.iter().map(|layer| layer.since(&before.layers)).collect();
        for operation in &mut difference.operations {
            if let Some(earlier) = before.operation(&operation.operation) {
                *operation = operation.since(earlier);
            }
        }
        difference
    }

    /// The sum of all operations, under the name `all`.
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
    /// The difference to the sample `before` of the same operation.
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

/// The growth of the counts that have grown.
fn grown(now: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    now.iter()
        .map(|(kind, count)| {
            (kind.clone(), count.saturating_sub(before.get(kind).copied().unwrap_or(0)))
        })
        .filter(|(_, count)| *count > 0)
        .collect()
}

impl Client {
    /// A sample of the statistics of all disks.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn statistics(&self) -> Result<Statistics, ClientError> {
        self.ask(&STATISTICS, &(), &(), &())
    }
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
