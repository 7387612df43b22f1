//! Measures what a request costs in the layer `schedule` by the number of disks and queues on one
//! device: nanoseconds of the processor, less those without the layer.
//!
//! ```text
//! cargo run --release --workspace --example schedule_scale
//! ```
//!
//! All queues run in one thread, in simulated time, so that no lock is contended. Each queue keeps
//! some reads in flight. HELD: each disk has background requests besides, which the layer holds
//! back because the reads never end. WAITING: the device may have only half of the reads in flight,
//! so that the others wait for their shares, and the queues wake each other.

#[path = "support/calls.rs"]
mod calls;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use fathom_backend::Null;
use fathom_block::{Clock, Disk, DiskOptions, Kind, Layer, Operation, Stack};
use fathom_layers::{Delay, DelayTime, Schedule, ScheduleDevices, ScheduleOptions};
use fathom_options::Nanoseconds;
use fathom_reactor::Reactor;

const CAPACITY: u64 = 1 << 30;
/// The time that the device takes for a request, and the step of the simulated time, in
/// nanoseconds.
const SERVICE_NS: u64 = 1_000_000;
const STEP_NS: u64 = 100_000;
/// The reads in flight of each queue, and the background requests that each disk holds.
const DEPTH: usize = 4;
const HELD: u64 = 8;
/// The number of measured requests, and the number of measurements, of which the least counts.
const REQUESTS: u64 = 40_000;
const ROUNDS: usize = 5;

struct Queue {
    stack: Stack,
    reactor: Reactor,
    reads: usize,
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    Without,
    Reads,
    Held,
    Waiting,
}

impl Queue {
    fn submit(&mut self, operation: Operation, offset: u64) {
        let mut request = self.stack.request();
        (request.operation, request.offset, request.length) = (operation, offset, 4096);
        request.buffers.allocate(4096);
        request.insight.facts.kind = Kind::Data;
        request.insight.facts.inode = 1;
        self.stack.submit(request, &mut self.reactor);
    }
}

/// The time for a request, in nanoseconds.
fn measure(disks: usize, queues: usize, case: Case) -> f64 {
    let time = Rc::new(Cell::new(1_000_000_000_u64));
    let devices = Arc::new(ScheduleDevices::default());
    let options = ScheduleOptions {
        depth: if case == Case::Waiting { (disks * queues * DEPTH / 2) as u32 } else { u32::MAX },
        hold_max: Nanoseconds(3_600_000_000_000),
        ..ScheduleOptions::default()
    };
    let names = Arc::default();
    let delay = Arc::new(Delay::new(1));
    for operation in Operation::ALL {
        delay.set(operation, DelayTime::fixed(SERVICE_NS));
    }
    let opened: Vec<Arc<Disk>> = (0..disks)
        .map(|_| {
            let mut layers: Vec<Arc<dyn Layer>> = Vec::new();
            if case != Case::Without {
                layers.push(Arc::new(Schedule::new(&options, "shared", &devices, &names, None)));
            }
            layers.push(Arc::<Delay>::clone(&delay));
            let backend = Arc::new(Null::new(CAPACITY));
            Disk::new(DiskOptions::default(), layers, backend).expect("a disk")
        })
        .collect();
    let mut all: Vec<Queue> = Vec::new();
    for disk in &opened {
        for _ in 0..queues {
            let clock = Clock::Simulated(Rc::clone(&time));
            let mut reactor = Reactor::new(8).expect("an io_uring");
            let stack = disk.open_queue(&mut reactor, clock).expect("a queue");
            all.push(Queue { stack, reactor, reads: 0 });
        }
    }
    let (mut count, mut written, mut begun) = (0, 0, None);
    loop {
        for (index, queue) in all.iter_mut().enumerate() {
            queue.stack.advance(&mut queue.reactor);
            calls::take(&mut queue.stack, &mut queue.reactor);
            while let Some((request, outcome)) = queue.stack.completed() {
                outcome.expect("a request without an error");
                if request.operation == Operation::Read {
                    queue.reads -= 1;
                    count += 1;
                } else {
                    written += 1;
                }
                queue.stack.recycle(request);
            }
            while queue.reads < DEPTH {
                queue.reads += 1;
                queue.submit(Operation::Read, 0);
            }
            // The first rounds have only reads, so that the device is known to be in use.
            let is_late = time.get() > 1_000_000_000 + 2 * SERVICE_NS;
            let needs_held = queue.stack.in_flight() < DEPTH + HELD as usize;
            if case == Case::Held && is_late && index % queues == 0 && needs_held {
                let offset = (queue.stack.in_flight() as u64 + 1) << 22;
                queue.submit(Operation::Write, offset);
            }
        }
        time.set(time.get() + STEP_NS);
        // Warm-up: each queue has its background requests by then.
        if begun.is_none() && time.get() > 1_000_000_000 + 20 * SERVICE_NS {
            begun = Some(Instant::now());
            (count, written) = (0, 0);
        }
        if let (Some(begun), true) = (begun, count >= REQUESTS) {
            assert!(written * 100 < count, "the background requests are held: {written}");
            return begun.elapsed().as_nanos() as f64 / count as f64;
        }
    }
}

fn main() {
    println!(
        "{:>6}{:>8}{:>13}{:>12}{:>12}{:>14}",
        "disks", "queues", "without, ns", "reads, +ns", "held, +ns", "waiting, +ns"
    );
    for disks in [2, 10, 100] {
        for queues in [1, 4] {
            let least = |case: Case| {
                let runs = (0..ROUNDS).map(|_| measure(disks, queues, case));
                runs.fold(f64::INFINITY, f64::min)
            };
            let without = least(Case::Without);
            let more = [Case::Reads, Case::Held, Case::Waiting].map(|case| least(case) - without);
            let [reads, held, waiting] = more;
            println!(
                "{disks:>6}{queues:>8}{without:>13.0}{reads:>+12.0}{held:>+12.0}{waiting:>+14.0}"
            );
        }
    }
}
