//! A change of a disk's layers, and perhaps of its back end, in two phases over all its queues.
//!
//! ```text
//!  serving ─▶ Prepare: each queue drains, takes no more requests, and opens the new layers
//!          ─▶ each removed layer leaves: it may write, and it may fail
//!          ─▶ Close: each queue's old layers finish the work that they have started
//!          ─▶ another back end: it is made equal to the former one, and that is committed
//!          ─▶ Done: the new layers take over in all queues, or the old ones continue
//! ```
//! A queue enters a phase when it notices it, so the thread that makes the change waits for all
//! queues before the next phase. No queue serves through the new layers while another queue may
//! still use the old ones. If a phase fails, the old layers continue to serve.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::backend::Backend;
use crate::disk::{Disk, DiskChange};
use crate::layer::{LAYERS_MAX, Layer};

/// The longest time for a phase, and for a layer to leave.
pub const CHANGE_TIME_MAX: Duration = Duration::from_secs(20);
/// The longest wait for the queues to continue after a change.
const SETTLE_TIME_MAX: Duration = Duration::from_secs(2);

/// Why a disk keeps its layers.
#[derive(Debug)]
pub enum RestackError {
    /// There are more than [`LAYERS_MAX`].
    TooMany,
    /// The disk would have another geometry, but its clients read the geometry only once.
    Geometry,
    /// Another change is in progress.
    Busy,
    /// Requests in flight, or work that the layers have started, did not complete in time.
    Hangs,
    /// A queue could not open the new layers.
    Open(String),
    /// The named layer could not leave.
    Leave(&'static str, io::Error),
    /// The other back end lacks the named property of the current one, on which clients rely.
    Lacks(&'static str),
    /// The other back end was not committed.
    Commit(io::Error),
}

impl fmt::Display for RestackError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany => write!(formatter, "a disk has at most {LAYERS_MAX} layers"),
            Self::Geometry => formatter.write_str("the disk would have other block sizes"),
            Self::Busy => formatter.write_str("another change of its layers is in progress"),
            Self::Hangs => formatter.write_str("its requests in flight do not complete"),
            Self::Open(error) => write!(formatter, "the new layers cannot be opened: {error}"),
            Self::Leave(layer, error) => {
                write!(formatter, "the layer `{layer}` cannot be removed: {error}")
            }
            Self::Lacks(what) => write!(formatter, "the other store has no {what}"),
            Self::Commit(error) => write!(formatter, "the other store is not complete: {error}"),
        }
    }
}

impl std::error::Error for RestackError {}

/// The phases, in the low bits of the value that queues read. The high bits are the number of the
/// change.
pub(crate) const PREPARE: u64 = 1;
pub(crate) const CLOSE: u64 = 2;
pub(crate) const DONE: u64 = 3;
const PHASE_BITS: u32 = 2;

/// The phase of `value`.
pub(crate) fn phase(value: u64) -> u64 {
    value & ((1 << PHASE_BITS) - 1)
}

/// What a disk consists of.
#[derive(Clone)]
pub(crate) struct Composition {
    /// The layers, the one nearest the front end first.
    pub(crate) layers: Vec<Arc<dyn Layer>>,
    /// The back end.
    pub(crate) home: Arc<dyn Backend>,
}

impl Composition {
    /// Whether both have the same layers in the same order, and the same back end.
    pub(crate) fn is_same(&self, layers: &[Arc<dyn Layer>], home: &Arc<dyn Backend>) -> bool {
        Arc::ptr_eq(&self.home, home) && are_same(&self.layers, layers)
    }
}

struct State {
    /// The open queues, each with the last change and phase that it has reported.
    queues: BTreeMap<u64, u64>,
    /// What the disk consists of after the change; `None` if there is no change.
    next: Option<Composition>,
    failure: Option<String>,
    is_changing: bool,
}

/// State that the queues of a disk share with the thread that changes its layers.
pub(crate) struct Life {
    value: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

impl Default for Life {
    fn default() -> Self {
        let state =
            State { queues: BTreeMap::new(), next: None, failure: None, is_changing: false };
        Self { value: AtomicU64::new(DONE), state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl Life {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The current change and phase. Costs a serving queue one load.
    pub(crate) fn value(&self) -> u64 {
        self.value.load(Ordering::Acquire)
    }

    /// What the disk consists of after the current change; `None` if that has ended.
    pub(crate) fn next(&self) -> Option<Composition> {
        self.state().next.clone()
    }

    /// Records that queue `queue` has reached `value`.
    pub(crate) fn report(&self, queue: u64, value: u64) {
        self.state().queues.insert(queue, value);
        self.changed.notify_all();
    }

    /// Records that a queue cannot open the new layers in the phase of `value`.
    pub(crate) fn fail(&self, value: u64, error: &io::Error) {
        let mut state = self.state();
        // The change may have been abandoned meanwhile.
        if self.value() == value {
            state.failure.get_or_insert_with(|| error.to_string());
            self.changed.notify_all();
        }
    }

    fn remove(&self, queue: u64) {
        self.state().queues.remove(&queue);
        self.changed.notify_all();
    }

    /// Waits until all queues have reached `value`, at the latest until `end`.
    fn wait(&self, value: u64, end: Instant) -> Result<(), RestackError> {
        let mut state = self.state();
        loop {
            if let Some(failure) = &state.failure {
                return Err(RestackError::Open(failure.clone()));
            }
            if state.queues.values().all(|seen| *seen >= value) {
                return Ok(());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(RestackError::Hangs);
            }
            self.changed.wait_for(&mut state, left);
        }
    }
}

/// A queue's participation in changes; ends when this is dropped.
pub(crate) struct Registration {
    disk: Arc<Disk>,
    pub(crate) queue: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.disk.life().remove(self.queue);
    }
}

impl Disk {
    /// Makes queue `queue` take part in changes from now on. Returns also its phase, which precedes
    /// the current change, if there is one.
    pub(crate) fn register(self: &Arc<Self>, queue: u64) -> (Registration, u64) {
        let life = self.life();
        let mut state = life.state();
        let value = life.value();
        let seen = if phase(value) == DONE { value } else { value >> PHASE_BITS << PHASE_BITS };
        state.queues.insert(queue, seen);
        (Registration { disk: Arc::clone(self), queue }, seen)
    }

    /// Replaces the layers of the disk in all its queues together: the queues drain, removed layers
    /// [leave](Layer::leave), the new layers open, and the queues continue. Blocks for at most
    /// `limit` in each phase. A queue's thread must not call it.
    ///
    /// # Errors
    /// See [`RestackError`]. The disk's old layers continue to serve.
    pub fn restack(
        self: &Arc<Self>,
        layers: Vec<Arc<dyn Layer>>,
        limit: Duration,
    ) -> Result<(), RestackError> {
        self.recompose(Composition { layers, home: self.backend() }, limit, || Ok(()))
    }

    /// Gives the disk another back end in all its queues together, and other layers as
    /// [`restack`](Self::restack) does. `commit` is called while no queue has a request in flight
    /// or takes one. It makes the content of `home` equal to that of the current back end, and
    /// durable. Clients see the geometry of the first back end further on, and a larger capacity
    /// at once.
    ///
    /// # Errors
    /// See [`RestackError`]. The disk's old layers continue to serve over the current back end. If
    /// `commit` has succeeded, so does this function.
    pub fn rehome(
        self: &Arc<Self>,
        layers: Vec<Arc<dyn Layer>>,
        home: Arc<dyn Backend>,
        limit: Duration,
        commit: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), RestackError> {
        self.check_home(&*home)?;
        self.recompose(Composition { layers, home }, limit, commit)
    }

    /// Checks that clients of the disk can use another back end without noticing it.
    ///
    /// # Errors
    /// What it lacks.
    pub fn check_home(&self, home: &dyn Backend) -> Result<(), RestackError> {
        if !self.store_geometry().admits(home.geometry()) {
            return Err(RestackError::Geometry);
        }
        if home.capacity() < self.store_capacity() {
            return Err(RestackError::Lacks("room for the whole disk"));
        }
        let lacking = self.backend().capabilities().lacking_in(home.capabilities());
        lacking.map_or(Ok(()), |what| Err(RestackError::Lacks(what)))
    }

    fn recompose(
        self: &Arc<Self>,
        next: Composition,
        limit: Duration,
        commit: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), RestackError> {
        if next.layers.len() > LAYERS_MAX {
            return Err(RestackError::TooMany);
        }
        if self.ladder(&next.layers, &*next.home)[0].geometry != self.geometry() {
            return Err(RestackError::Geometry);
        }
        let life = self.life();
        {
            let mut state = life.state();
            let value = life.value();
            if state.is_changing || state.queues.values().any(|seen| *seen < value) {
                return Err(RestackError::Busy);
            }
            if next.is_same(&self.layers(), &self.backend()) {
                return Ok(());
            }
            state.is_changing = true;
            state.failure = None;
            state.next = Some(next.clone());
        }
        let is_kept = |old: &Arc<dyn Layer>| next.layers.iter().any(|new| Arc::ptr_eq(old, new));
        let leaving: Vec<_> = self.layers().into_iter().filter(|old| !is_kept(old)).collect();
        for layer in &leaving {
            layer.retire(self, limit);
        }
        let change = (life.value() >> PHASE_BITS) + 1;
        let is_rehomed = !Arc::ptr_eq(&next.home, &self.backend());
        let closed = self.carry_out(change, &leaving, limit);
        let carried_out = closed.and_then(|()| {
            if is_rehomed && !self.leftovers().is_empty() {
                return Err(RestackError::Hangs);
            }
            commit().map_err(RestackError::Commit)
        });
        let home = Arc::clone(&next.home);
        {
            let mut state = life.state();
            if carried_out.is_ok() {
                self.set_composition(next);
            }
            state.is_changing = false;
            state.failure = None;
            state.next = None;
            life.value.store(change << PHASE_BITS | DONE, Ordering::Release);
        }
        if carried_out.is_ok() {
            let capacity = if is_rehomed { home.capacity() } else { self.store_capacity() };
            self.remeasure(capacity);
        }
        self.announce(DiskChange::Restacked);
        // Slower queues continue without this thread.
        let _ = life.wait(change << PHASE_BITS | DONE, Instant::now() + SETTLE_TIME_MAX);
        carried_out
    }

    fn carry_out(
        self: &Arc<Self>,
        change: u64,
        leaving: &[Arc<dyn Layer>],
        limit: Duration,
    ) -> Result<(), RestackError> {
        self.enter(change << PHASE_BITS | PREPARE, limit)?;
        for layer in leaving {
            let left = layer.leave(self, limit);
            left.map_err(|error| RestackError::Leave(layer.name(), error))?;
        }
        self.enter(change << PHASE_BITS | CLOSE, limit)
    }

    /// Begins a phase and waits until all queues have reached it.
    fn enter(&self, value: u64, limit: Duration) -> Result<(), RestackError> {
        let life = self.life();
        {
            let _state = life.state();
            life.value.store(value, Ordering::Release);
        }
        self.announce(DiskChange::Restacked);
        life.wait(value, Instant::now() + limit)
    }
}

/// Whether two lists have the same layers in the same order.
fn are_same(one: &[Arc<dyn Layer>], other: &[Arc<dyn Layer>]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| Arc::ptr_eq(one, other))
}
