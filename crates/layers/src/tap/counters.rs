//! The counters of a queue, which are always on.
//!
//! Only the queue's thread writes a cell, with a plain load and store; other threads only read. So
//! there are no locks and no contended cache lines, and a slow reader never delays the queue. A
//! reader may see one cell of a request before another cell of it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::{ErrorKind, Operation, Outcome};
use fathom_histogram::Cells;

/// The number of classes of request sizes: class n has lengths up to 512 · 2ⁿ bytes, and the last
/// class has all greater lengths as well.
pub const SIZE_CLASSES: usize = 12;

/// The number of [`Operation`]s.
pub(super) const OPERATIONS: usize = Operation::ALL.len();
/// The number of kinds of error.
pub(super) const ERRORS: usize = ErrorKind::ALL.len();

/// The class of a request of `length` bytes. Operations without a range are in the first class.
pub fn size_class(length: u64) -> usize {
    let units_but_one = length.saturating_sub(1) >> 9;
    ((u64::BITS - units_but_one.leading_zeros()) as usize).min(SIZE_CLASSES - 1)
}

/// The greatest length of a size class, in bytes; the last class has no limit.
pub fn size_class_length_max(class: usize) -> u64 {
    512 << class
}

/// Adds to a cell that only this thread writes.
fn add(cell: &AtomicU64, value: u64) {
    cell.store(cell.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

/// The counts of one operation and one size class.
#[derive(Debug, Default)]
pub(super) struct Cell {
    pub(super) count: AtomicU64,
    pub(super) bytes: AtomicU64,
    /// The sum of the latencies, in nanoseconds.
    pub(super) latency_sum_ns: AtomicU64,
    /// Made when the first request of this operation and class succeeds.
    pub(super) latency: OnceLock<Cells>,
}

/// The counts of one queue.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Counters {
    /// Requests in flight now.
    pub(super) in_flight: AtomicU64,
    /// When `in_flight` last changed, in nanoseconds.
    pub(super) changed_ns: AtomicU64,
    /// The time with requests in flight, up to `changed_ns`.
    pub(super) busy_ns: AtomicU64,
    /// The integral of `in_flight` over time, up to `changed_ns`.
    pub(super) depth_ns: AtomicU64,
    pub(super) cells: [[Cell; SIZE_CLASSES]; OPERATIONS],
    pub(super) errors: [[AtomicU64; ERRORS]; OPERATIONS],
}

impl Counters {
    /// Counts requests that have arrived.
    pub(super) fn begin(&self, requests: u64, now_ns: u64) {
        let in_flight = self.pass(now_ns);
        self.in_flight.store(in_flight + requests, Ordering::Relaxed);
    }

    /// Counts requests that arrived at `start_ns` and completed at `now_ns`, all with the same
    /// operation, length and outcome.
    pub(super) fn end(
        &self,
        requests: u64,
        operation: Operation,
        length: u64,
        outcome: Outcome,
        start_ns: u64,
        now_ns: u64,
    ) {
        let in_flight = self.pass(now_ns);
        self.in_flight.store(in_flight.saturating_sub(requests), Ordering::Relaxed);
        match outcome {
            Ok(()) => {
                let cell = &self.cells[operation as usize][size_class(length)];
                add(&cell.count, requests);
                add(&cell.bytes, length * requests);
                let latency_ns = now_ns.saturating_sub(start_ns);
                add(&cell.latency_sum_ns, latency_ns.saturating_mul(requests));
                cell.latency.get_or_init(Cells::default).record(latency_ns, requests);
            }
            Err(error) => add(&self.errors[operation as usize][error as usize], requests),
        }
    }

    /// Accounts for the time up to `now_ns`. Returns the number of requests in flight during it.
    fn pass(&self, now_ns: u64) -> u64 {
        let in_flight = self.in_flight.load(Ordering::Relaxed);
        if in_flight > 0 {
            let changed_ns = self.changed_ns.load(Ordering::Relaxed);
            let passed_ns = now_ns.saturating_sub(changed_ns);
            if passed_ns == 0 {
                // One of several requests that arrive or complete together.
                return in_flight;
            }
            add(&self.busy_ns, passed_ns);
            add(&self.depth_ns, passed_ns * in_flight);
        }
        self.changed_ns.store(now_ns, Ordering::Relaxed);
        in_flight
    }

    /// Adds the counts of a closed queue. The caller is the only writer of this object.
    pub(super) fn merge(&self, other: &Self) {
        let each = |target: &AtomicU64, source: &AtomicU64| {
            add(target, source.load(Ordering::Relaxed));
        };
        each(&self.busy_ns, &other.busy_ns);
        each(&self.depth_ns, &other.depth_ns);
        for (target, source) in self.cells.iter().flatten().zip(other.cells.iter().flatten()) {
            each(&target.count, &source.count);
            each(&target.bytes, &source.bytes);
            each(&target.latency_sum_ns, &source.latency_sum_ns);
            if let Some(latency) = source.latency.get() {
                target.latency.get_or_init(Cells::default).merge(latency);
            }
        }
        for (target, source) in self.errors.iter().flatten().zip(other.errors.iter().flatten()) {
            each(target, source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fall_into_the_class_that_holds_them() {
        for (length, class) in
            [(0, 0), (1, 0), (512, 0), (513, 1), (4096, 3), (4097, 4), (1 << 20, 11), (1 << 30, 11)]
        {
            assert_eq!(size_class(length), class, "{length}");
            assert!(class == SIZE_CLASSES - 1 || length <= size_class_length_max(class));
        }
    }
}
