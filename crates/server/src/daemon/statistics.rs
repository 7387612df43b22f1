//! The counts of the disks' requests.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use fathom_block::{Clock, ErrorKind, Operation};
use fathom_control::{DiskStatistics, Histogram, OperationStatistics, SizeStatistics, Statistics};
use fathom_layers::Tap;
use fathom_layers::tap::{OperationSnapshot, SIZE_CLASSES, size_class_length_max};

use super::{Daemon, Served};

/// The number of a tap: another one counts from zero.
#[derive(Clone, Copy)]
pub(crate) struct TapNumber(pub u64);

impl Daemon {
    /// The statistics of all disks now.
    pub(crate) fn statistics(&self) -> Statistics {
        let time_ns = Clock::System.now_ns();
        Statistics {
            time_ns,
            unix_time_ns: super::status::unix_time_ns(),
            disks: self
                .served()
                .iter()
                .map(|served| {
                    let problems = self.problems_of(served.disk.name());
                    DiskStatistics { problems, ..of_disk(served, time_ns) }
                })
                .collect(),
        }
    }
}

fn of_disk(served: &Served, time_ns: u64) -> DiskStatistics {
    let disk = &served.disk;
    let (tap, number, layers) = {
        let live = served.live();
        (live.parts.get::<Tap>(), live.parts.get::<TapNumber>(), live.layers.clone())
    };
    let mut statistics = DiskStatistics {
        name: disk.name().into(),
        vm: disk.vm().into(),
        capacity_bytes: disk.capacity(),
        instance: number.map_or(0, |TapNumber(number)| number),
        counted: tap.is_some(),
        refused: disk.counters().refused.load(Ordering::Relaxed),
        layers: super::status::figures(&layers),
        ..DiskStatistics::default()
    };
    let Some(tap) = tap else { return statistics };
    let snapshot = tap.snapshot(time_ns);
    statistics.in_flight = snapshot.in_flight;
    statistics.busy_ns = snapshot.busy_ns;
    statistics.depth_ns = snapshot.depth_ns;
    statistics.operations = Operation::ALL
        .into_iter()
        .map(|operation| of_operation(operation, snapshot.operation(operation)))
        .filter(|operation| operation.count > 0 || operation.errors > 0)
        .collect();
    statistics
}

fn of_operation(operation: Operation, snapshot: &OperationSnapshot) -> OperationStatistics {
    let mut latency = Histogram::default();
    let mut latency_sum_ns = 0_u64;
    let mut sizes = Vec::new();
    for class in 0..SIZE_CLASSES {
        let size = &snapshot.sizes[class];
        if size.count == 0 {
            continue;
        }
        latency_sum_ns = latency_sum_ns.saturating_add(size.latency_sum_ns);
        latency.merge(&size.latency_ns);
        sizes.push(SizeStatistics {
            length_max_bytes: size_class_length_max(class),
            count: size.count,
            bytes: size.bytes,
            latency: size.latency_ns.clone(),
        });
    }
    let errors_by_kind: BTreeMap<String, u64> = ErrorKind::ALL
        .into_iter()
        .map(|kind| (kind.name().to_owned(), snapshot.failed_with(kind)))
        .filter(|(_, count)| *count > 0)
        .collect();
    OperationStatistics {
        operation: operation.name().into(),
        count: snapshot.count(),
        bytes: snapshot.bytes(),
        errors: snapshot.failed(),
        errors_by_kind,
        latency_sum_ns,
        latency,
        sizes,
    }
}
