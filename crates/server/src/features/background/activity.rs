//! The layer that reports guests' requests at a device with background work.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use fathom_block::{
    Capabilities, Clock, Layer, LayerPart, Observer, ObserverPosition, OpenContext, Operation,
    Outcome, Request,
};

use super::Scheduled;
use super::probe::{Probe, ProbeQueue};

/// The layer that reports guests' requests at a device with background work.
#[derive(Clone)]
pub(crate) struct Activity {
    device: Arc<Scheduled>,
    probe: Arc<Probe>,
}

impl Activity {
    /// The layer of the disk `disk`.
    pub(crate) fn new(device: Arc<Scheduled>, disk: &str) -> Self {
        let probe = device.probes().open(disk);
        Self { device, probe }
    }
}

impl Layer for Activity {
    fn name(&self) -> &'static str {
        "activity"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let probe = ProbeQueue::new(Arc::clone(&self.probe));
        Ok(LayerPart::observer(ActivityQueue::new(Arc::clone(&self.device), probe)))
    }
}

pub(super) struct ActivityQueue {
    device: Arc<Scheduled>,
    /// The neighbours of `device`, of the same generation.
    neighbours: Vec<Weak<Scheduled>>,
    generation: u64,
    /// The requests of this queue in flight.
    pub(super) in_flight: u64,
    probe: ProbeQueue,
}

impl ActivityQueue {
    pub(super) fn new(device: Arc<Scheduled>, probe: ProbeQueue) -> Self {
        let mut queue = Self { device, neighbours: Vec::new(), generation: 0, in_flight: 0, probe };
        queue.refresh(0);
        queue
    }

    /// Reports the requests in flight to neighbours that are new.
    pub(super) fn refresh(&mut self, now_ns: u64) {
        let generation = self.device.generation.load(Ordering::Acquire);
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        let neighbours = self.device.neighbours.lock().clone();
        for neighbour in &neighbours {
            let is_known = self.neighbours.iter().any(|known| known.ptr_eq(neighbour));
            if let (false, Some(neighbour)) = (is_known, neighbour.upgrade()) {
                neighbour.begin(self.in_flight, now_ns);
            }
        }
        self.neighbours = neighbours;
    }

    /// Reports to the scheduler of the disk's devices and to its neighbours.
    pub(super) fn report(&self, report: impl Fn(&Scheduled)) {
        report(&self.device);
        for neighbour in self.neighbours.iter().filter_map(Weak::upgrade) {
            report(&neighbour);
        }
    }
}

/// Whether a request occupies the device, and a process may wait for it.
fn counts(request: &Request) -> bool {
    let is_io = !matches!(request.operation, Operation::GetId | Operation::Extents);
    is_io && !request.flags.background
}

/// Whether a request is part of the guests' load.
fn is_load(request: &Request) -> bool {
    counts(request) && !request.flags.write_back
}

impl Observer for ActivityQueue {
    fn down(&mut self, requests: &mut [Box<Request>], place: ObserverPosition<'_>) {
        let count = requests.iter().filter(|request| counts(request)).count() as u64;
        if count > 0 {
            self.refresh(place.round_ns());
            if self.device.probes().are_on() {
                let requests = requests.iter_mut().filter(|request| is_load(request));
                self.probe.arrive(requests, self.device.in_flight(), place);
            }
            self.in_flight += count;
            self.report(|device| device.begin(count, place.round_ns()));
        }
    }

    fn up(&mut self, requests: &mut [(Box<Request>, Outcome)], place: ObserverPosition<'_>) {
        let count = requests.iter().filter(|(request, _)| counts(request)).count() as u64;
        let count = count.min(self.in_flight);
        if count > 0 {
            self.in_flight -= count;
            if self.device.probes().are_on() {
                let requests = requests.iter().filter(|(request, _)| is_load(request));
                self.probe.complete(requests, self.in_flight == 0, place);
            }
            self.report(|device| device.end_requests(count, place.round_ns()));
        }
    }
}

impl Drop for ActivityQueue {
    /// The requests of a queue that ends early are in flight no more.
    fn drop(&mut self) {
        if self.in_flight > 0 {
            let now_ns = Clock::System.now_ns();
            self.report(|device| device.end_requests(self.in_flight, now_ns));
        }
    }
}
