//! The counts of a disk, as plain values.

use std::sync::atomic::Ordering;

use fathom_block::{ErrorKind, Operation};
use fathom_histogram::Histogram;

use super::counters::{Cell, Counters, ERRORS, OPERATIONS, SIZE_CLASSES};

/// Counts of one operation and one size class.
#[derive(Clone, Debug, Default)]
pub struct SizeSnapshot {
    /// Requests that succeeded.
    pub count: u64,
    /// The sum of their lengths, in bytes.
    pub bytes: u64,
    /// The sum of their latencies, in nanoseconds.
    pub latency_sum_ns: u64,
    /// The distribution of their latencies, in nanoseconds.
    pub latency_ns: Histogram,
}

/// Counts of one operation.
#[derive(Clone, Debug, Default)]
pub struct OperationSnapshot {
    /// By size class: see [`size_class_length_max`](super::size_class_length_max).
    pub sizes: [SizeSnapshot; SIZE_CLASSES],
    /// Requests that failed, by [`ErrorKind`] in the order of its declaration.
    pub errors: [u64; ERRORS],
}

impl OperationSnapshot {
    /// Requests that succeeded.
    pub fn count(&self) -> u64 {
        self.sizes.iter().map(|size| size.count).sum()
    }

    /// The bytes of the requests that succeeded.
    pub fn bytes(&self) -> u64 {
        self.sizes.iter().map(|size| size.bytes).sum()
    }

    /// Requests that failed.
    pub fn failed(&self) -> u64 {
        self.errors.iter().sum()
    }

    /// Requests that failed with `error`.
    pub fn failed_with(&self, error: ErrorKind) -> u64 {
        self.errors[error as usize]
    }

    /// The latencies of requests of all sizes, in nanoseconds; empty if there were none.
    pub fn latency_ns(&self) -> Histogram {
        let mut all = Histogram::default();
        for size in &self.sizes {
            all.merge(&size.latency_ns);
        }
        all
    }
}

/// The counts of all queues of a disk, including closed ones.
#[derive(Clone, Debug, Default)]
pub struct TapSnapshot {
    /// When the snapshot was taken, in nanoseconds of the stacks' clock.
    pub at_ns: u64,
    /// The interval of the counts, in nanoseconds; 0 for all counts since the tap was made. See
    /// [`since`](Self::since).
    pub interval_ns: u64,
    /// Open queues.
    pub queues: usize,
    /// Requests in flight at that time.
    pub in_flight: u64,
    /// The time with requests in flight, in nanoseconds, summed over the queues.
    pub busy_ns: u64,
    /// The integral of the number of requests in flight over time, in nanoseconds.
    pub depth_ns: u64,
    /// The counts by [`Operation`], in the order of its declaration.
    pub operations: [OperationSnapshot; OPERATIONS],
}

impl TapSnapshot {
    /// The counts of one operation.
    pub fn operation(&self, operation: Operation) -> &OperationSnapshot {
        &self.operations[operation as usize]
    }

    /// Requests of all operations that succeeded.
    pub fn count(&self) -> u64 {
        self.operations.iter().map(OperationSnapshot::count).sum()
    }

    /// Requests of all operations that failed.
    pub fn failed(&self) -> u64 {
        self.operations.iter().map(OperationSnapshot::failed).sum()
    }

    /// The mean number of requests in flight during `interval_ns`; 0 if the interval is unknown.
    pub fn depth_mean(&self) -> f64 {
        if self.interval_ns == 0 { 0.0 } else { self.depth_ns as f64 / self.interval_ns as f64 }
    }

    /// Requests that succeeded per second of `interval_ns`; 0 if the interval is unknown.
    pub fn requests_per_second(&self) -> f64 {
        if self.interval_ns == 0 {
            0.0
        } else {
            self.count() as f64 * 1e9 / self.interval_ns as f64
        }
    }

    /// The counts between `earlier` and this snapshot of the same tap.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut interval = self.clone();
        interval.interval_ns = self.at_ns.saturating_sub(earlier.at_ns);
        interval.busy_ns = self.busy_ns.saturating_sub(earlier.busy_ns);
        interval.depth_ns = self.depth_ns.saturating_sub(earlier.depth_ns);
        for (now, before) in interval.operations.iter_mut().zip(&earlier.operations) {
            for (now, before) in now.sizes.iter_mut().zip(&before.sizes) {
                now.count = now.count.saturating_sub(before.count);
                now.bytes = now.bytes.saturating_sub(before.bytes);
                now.latency_sum_ns = now.latency_sum_ns.saturating_sub(before.latency_sum_ns);
                now.latency_ns = now.latency_ns.since(&before.latency_ns);
            }
            for (now, before) in now.errors.iter_mut().zip(&before.errors) {
                *now = now.saturating_sub(*before);
            }
        }
        interval
    }

    /// Adds one queue's counts. Requests in flight are accounted up to `at_ns`.
    pub(super) fn add(&mut self, counters: &Counters) {
        let in_flight = counters.in_flight.load(Ordering::Relaxed);
        self.in_flight += in_flight;
        self.busy_ns += counters.busy_ns.load(Ordering::Relaxed);
        self.depth_ns += counters.depth_ns.load(Ordering::Relaxed);
        if in_flight > 0 {
            let changed_ns = counters.changed_ns.load(Ordering::Relaxed);
            let passed_ns = self.at_ns.saturating_sub(changed_ns);
            self.busy_ns += passed_ns;
            self.depth_ns += passed_ns * in_flight;
        }
        for (index, operation) in self.operations.iter_mut().enumerate() {
            for (size, cell) in operation.sizes.iter_mut().zip(&counters.cells[index]) {
                add_cell(size, cell);
            }
            for (count, cell) in operation.errors.iter_mut().zip(&counters.errors[index]) {
                *count += cell.load(Ordering::Relaxed);
            }
        }
    }
}

fn add_cell(size: &mut SizeSnapshot, cell: &Cell) {
    size.count += cell.count.load(Ordering::Relaxed);
    size.bytes += cell.bytes.load(Ordering::Relaxed);
    size.latency_sum_ns += cell.latency_sum_ns.load(Ordering::Relaxed);
    if let Some(latency) = cell.latency.get() {
        latency.add_to(&mut size.latency_ns);
    }
}
