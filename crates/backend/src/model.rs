//! A disk with the timing of another kind of disk.
//!
//! [`Model`] is a layer: it passes each request to the back end immediately and holds the outcome
//! until the modelled disk would complete it. So the data is real, over any back end. The timing is
//! that of a hard disk or a solid-state disk, unless the back end itself is slower. The same
//! parameters, seed and times of arrival always result in the same timing.
//!
//! All queues of a disk, and all disks on a modelled device, share one mechanism, behind a lock
//! that is held for some hundred nanoseconds. `docs/model.md` has the formulas and the sources of
//! the parameters.

mod hdd;
mod meter;
mod ssd;
mod store;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use fathom_block::{
    Capabilities, Crossing, Figure, Layer, LayerPart, LayerQueue, LayerReport, OpenContext,
    Operation, Outcome, Request,
};
use parking_lot::{Mutex, MutexGuard};

pub use hdd::HddParameters;
pub use meter::Meter;
pub use ssd::SsdParameters;
pub use store::Modelled;

use hdd::Hdd;
use ssd::Ssd;

/// An operation of a modelled disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    Read,
    /// Whether the write must be durable at its completion.
    Write(bool),
    Flush,
    /// A range is freed or zeroed without moving data.
    Deallocate,
}

/// The completion time of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    /// At this time, in nanoseconds.
    At(u64),
    /// Not decided yet; check again at this time, in nanoseconds.
    Undecided(u64),
}

enum Mechanism {
    Hdd(Box<Hdd>),
    Ssd(Box<Ssd>),
}

struct State {
    mechanism: Mechanism,
    arrivals: u64,
    /// The decided completion times of requests, by number, in nanoseconds.
    done_ns: HashMap<u64, u64>,
}

impl State {
    fn new(mechanism: Mechanism) -> Self {
        Self { mechanism, arrivals: 0, done_ns: HashMap::new() }
    }

    fn arrive(&mut self, task: Task, offset: u64, length: u64, now_ns: u64) -> u64 {
        self.arrivals += 1;
        let number = self.arrivals;
        match &mut self.mechanism {
            Mechanism::Hdd(disk) => {
                disk.arrive(number, task, offset, length, now_ns, &mut self.done_ns);
            }
            Mechanism::Ssd(disk) => {
                let done_ns = disk.arrive(task, offset, length, now_ns);
                self.done_ns.insert(number, done_ns);
            }
        }
        number
    }

    fn due(&mut self, number: u64, now_ns: u64) -> Due {
        if let Mechanism::Hdd(disk) = &mut self.mechanism {
            disk.advance(now_ns, &mut self.done_ns);
            if !self.done_ns.contains_key(&number) {
                return Due::Undecided(disk.free_ns().max(now_ns + 1));
            }
        }
        Due::At(self.done_ns.get(&number).copied().unwrap_or(now_ns))
    }

    /// The number of requests that have arrived and are not forgotten.
    fn queued(&self) -> u64 {
        let undecided = match &self.mechanism {
            Mechanism::Hdd(disk) => disk.undecided(),
            Mechanism::Ssd(_) => 0,
        };
        (self.done_ns.len() + undecided) as u64
    }

    fn forget(&mut self, number: u64) {
        self.done_ns.remove(&number);
        if let Mechanism::Hdd(disk) = &mut self.mechanism {
            disk.cancel(number);
        }
    }
}

/// A layer that gives a disk the timing of another kind of disk.
///
/// Several disks can share one modelled device ([`at`](Self::at)). Their requests then wait for
/// each other, and a flush of one disk waits for the device's cached writes of all.
#[derive(Clone)]
pub struct Model {
    state: Arc<Mutex<State>>,
    name: &'static str,
    rotational: bool,
    /// The offset of the disk on the modelled device, in bytes.
    offset: u64,
}

impl Model {
    /// A hard disk.
    pub fn hdd(parameters: HddParameters, seed: u64) -> Self {
        Self::new("hdd", true, Mechanism::Hdd(Box::new(Hdd::new(parameters, seed))))
    }

    /// A solid-state disk.
    pub fn ssd(parameters: SsdParameters, seed: u64) -> Self {
        Self::new("ssd", false, Mechanism::Ssd(Box::new(Ssd::new(parameters, seed))))
    }

    fn new(name: &'static str, rotational: bool, mechanism: Mechanism) -> Self {
        let state = State::new(mechanism);
        Self { state: Arc::new(Mutex::new(state)), name, rotational, offset: 0 }
    }

    /// A disk that lies at `offset` on the same modelled device, in bytes.
    #[must_use]
    pub fn at(&self, offset: u64) -> Self {
        Self { offset, ..self.clone() }
    }

    /// Whether `other` is on the same modelled device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Whether another disk, or a queue of a disk, uses the same modelled device.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.state) > 1
    }
}

impl Layer for Model {
    fn name(&self) -> &'static str {
        self.name
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        Capabilities { rotational: self.rotational, ..below }
    }

    fn status(&self) -> LayerReport {
        let queued = self.state.lock().queued();
        let meaning = "Requests that the simulated disk has not completed.";
        let figures = vec![Figure::gauge("queued_requests", meaning, queued)];
        LayerReport { figures, problems: Vec::new() }
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let state = Arc::clone(&self.state);
        Ok(LayerPart::queue(ModelQueue { state, offset: self.offset }))
    }
}

struct ModelQueue {
    state: Arc<Mutex<State>>,
    offset: u64,
}

impl ModelQueue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Passes the outcome on if the modelled disk has completed the request, and otherwise holds it
    /// until then.
    fn pass_or_hold(
        &mut self,
        mut request: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) {
        let number = *next.word(&mut request);
        let now_ns = next.now_ns();
        let mut state = self.state();
        let due = if outcome.is_ok() { state.due(number, now_ns) } else { Due::At(now_ns) };
        match due {
            Due::At(done_ns) if done_ns <= now_ns => {
                state.forget(number);
                drop(state);
                next.complete(request, outcome);
            }
            Due::At(deadline_ns) | Due::Undecided(deadline_ns) => {
                drop(state);
                next.hold(request, Some(outcome), deadline_ns);
            }
        }
    }
}

impl LayerQueue for ModelQueue {
    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        if let Some(task) = task(&request) {
            let now_ns = next.now_ns();
            let offset = self.offset.saturating_add(request.offset);
            let number = self.state().arrive(task, offset, request.length, now_ns);
            *next.word(&mut request) = number;
        }
        next.submit(request);
    }

    fn complete(&mut self, mut request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        if *next.word(&mut request) == 0 {
            next.complete(request, outcome);
        } else {
            self.pass_or_hold(request, outcome, next);
        }
    }

    fn resume(&mut self, request: Box<Request>, outcome: Option<Outcome>, next: &mut Crossing<'_>) {
        match outcome {
            Some(outcome) => self.pass_or_hold(request, outcome, next),
            None => next.submit(request),
        }
    }
}

/// The modelled disk's operation for `request`, if it has one.
fn task(request: &Request) -> Option<Task> {
    match request.operation {
        Operation::Read => Some(Task::Read),
        Operation::Write => Some(Task::Write(request.flags.force_unit_access)),
        Operation::Flush => Some(Task::Flush),
        Operation::Discard | Operation::WriteZeroes => Some(Task::Deallocate),
        Operation::GetId | Operation::Extents => None,
    }
}

/// The time for `length` bytes at `rate` bytes a second, in nanoseconds.
fn transfer_ns(length: u64, rate: f64) -> u64 {
    (length as f64 / rate * 1e9) as u64
}
