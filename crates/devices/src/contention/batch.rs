//! What the requests of a disk did at the device.

use fathom_histogram::Histogram;

/// The requests of a disk at its device since its last batch. A queue fills one and passes it on
/// when it suits the queue.
///
/// Arrivals are counted when they happen, and not when they complete: a saturated device completes
/// no more requests than before, however many arrive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Reads that have arrived.
    pub reads: u64,
    /// Other requests that have arrived.
    pub writes: u64,
    /// Requests that were carried elsewhere and would otherwise have arrived. They are not at the
    /// device, but count for what its load would be.
    pub carried: u64,
    /// The sum, over the arrivals, of the requests of all disks that were in flight at the device
    /// before.
    pub queue_sum: u64,
    /// The times at the device of the requests that have completed, in nanoseconds.
    pub times_ns: Histogram,
    /// The sum of these.
    pub time_sum_ns: u64,
    /// The completed requests that had arrived at an idle device.
    pub alone: u64,
    /// The sum of their times at the device, in nanoseconds.
    pub alone_sum_ns: u64,
}

impl Batch {
    /// A request arrives, and finds `queue` requests of all disks in flight.
    pub fn arrive(&mut self, is_read: bool, queue: u64) {
        let count = if is_read { &mut self.reads } else { &mut self.writes };
        *count = count.saturating_add(1);
        self.queue_sum = self.queue_sum.saturating_add(queue);
    }

    /// A request that had found `queue` requests in flight completes after `service_ns` at the
    /// device.
    pub fn complete(&mut self, service_ns: u64, queue: u64) {
        self.times_ns.record(service_ns, 1);
        self.time_sum_ns = self.time_sum_ns.saturating_add(service_ns);
        if queue == 0 {
            self.alone = self.alone.saturating_add(1);
            self.alone_sum_ns = self.alone_sum_ns.saturating_add(service_ns);
        }
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        let sums = [
            (&mut self.reads, other.reads),
            (&mut self.writes, other.writes),
            (&mut self.carried, other.carried),
            (&mut self.queue_sum, other.queue_sum),
            (&mut self.time_sum_ns, other.time_sum_ns),
            (&mut self.alone, other.alone),
            (&mut self.alone_sum_ns, other.alone_sum_ns),
        ];
        for (sum, count) in sums {
            *sum = sum.saturating_add(count);
        }
        self.times_ns.merge(&other.times_ns);
    }

    /// The requests that have arrived.
    pub fn arrivals(&self) -> u64 {
        self.reads.saturating_add(self.writes)
    }
}
