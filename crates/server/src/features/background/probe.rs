//! What each disk asks of its devices, for the model of their contention.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use fathom_block::{ObserverPosition, Operation, Outcome, Request};
use fathom_devices::contention::Batch;
use parking_lot::Mutex;

/// A queue passes its counts on at least this often while requests come and go, in nanoseconds.
const PASS_NS: u64 = 10_000_000;
/// The bit of a request's word that says that the request found the device idle.
const ALONE: u64 = 1;

/// The disks on a set of devices.
#[derive(Default)]
pub(crate) struct Probes {
    /// Whether the requests are measured.
    is_on: AtomicBool,
    disks: Mutex<BTreeMap<String, Weak<Probe>>>,
}

impl Probes {
    /// Whether the requests are measured.
    pub(crate) fn are_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Begins or ends to measure requests.
    pub(crate) fn set_on(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    /// The probe of a disk.
    pub(super) fn open(&self, disk: &str) -> Arc<Probe> {
        let probe = Arc::new(Probe::default());
        self.disks.lock().insert(disk.to_owned(), Arc::downgrade(&probe));
        probe
    }

    /// The disks with their probes.
    pub(crate) fn list(&self) -> Vec<(String, Arc<Probe>)> {
        let mut disks = self.disks.lock();
        disks.retain(|_, probe| probe.strong_count() > 0);
        disks.iter().filter_map(|(disk, probe)| Some((disk.clone(), probe.upgrade()?))).collect()
    }
}

/// The counts of a disk that its queues have passed on.
#[derive(Default)]
pub(crate) struct Probe {
    batch: Mutex<Batch>,
}

impl Probe {
    /// The counts since the last call.
    pub(crate) fn take(&self) -> Batch {
        std::mem::take(&mut *self.batch.lock())
    }
}

/// The counts of one queue.
pub(super) struct ProbeQueue {
    probe: Arc<Probe>,
    batch: Batch,
    passed_ns: u64,
}

impl ProbeQueue {
    pub(super) fn new(probe: Arc<Probe>) -> Self {
        Self { probe, batch: Batch::default(), passed_ns: 0 }
    }

    /// Requests arrive at the devices, and find `queue` requests in flight.
    pub(super) fn arrive<'r>(
        &mut self,
        requests: impl Iterator<Item = &'r mut Box<Request>>,
        queue: u64,
        place: ObserverPosition<'_>,
    ) {
        let now_ns = place.round_ns();
        for (before, request) in (0..).zip(requests) {
            let queue = queue.saturating_add(before);
            self.batch.arrive(request.operation == Operation::Read, queue);
            let alone = if queue == 0 { ALONE } else { 0 };
            *place.observe(request).word() = now_ns << 1 | alone;
        }
        self.pass(false, now_ns);
    }

    /// Requests have completed. `is_last` is whether no other request of the queue is in flight.
    pub(super) fn complete<'r>(
        &mut self,
        requests: impl Iterator<Item = &'r (Box<Request>, Outcome)>,
        is_last: bool,
        place: ObserverPosition<'_>,
    ) {
        let now_ns = place.round_ns();
        for (request, outcome) in requests {
            let word = place.word(request);
            // A request that came before the devices were observed has no word.
            if word > 0 && outcome.is_ok() {
                let queue = u64::from(word & ALONE == 0);
                self.batch.complete(now_ns.saturating_sub(word >> 1), queue);
            }
        }
        self.pass(is_last, now_ns);
    }

    /// Passes the counts on, if it is time or `is_last`, and if nobody reads there now.
    fn pass(&mut self, is_last: bool, now_ns: u64) {
        if !is_last && now_ns.saturating_sub(self.passed_ns) < PASS_NS {
            return;
        }
        let Some(mut all) = self.probe.batch.try_lock() else { return };
        all.merge(&self.batch);
        drop(all);
        self.batch = Batch::default();
        self.passed_ns = now_ns;
    }
}
