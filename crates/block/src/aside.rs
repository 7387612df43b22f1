//! The resources of a queue's layers besides the way down: further stores, splits, times and
//! wakers.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use fathom_reactor::Reactor;

use crate::backend::{Backend, BackendContext, BackendQueue};
use crate::clock::Clock;
use crate::layer::LAYERS_MAX;
use crate::request::{ErrorKind, Operation, Outcome, Request};
use crate::split::Splits;
use crate::waker::{Alarm, Waker};

/// A further store of a layer's part in one queue, opened by
/// [`OpenContext::open_store`](crate::OpenContext::open_store).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreId(u16);

/// A further store, opened for one queue.
struct Store {
    /// The layer that it belongs to.
    level: usize,
    backend: Arc<dyn Backend>,
    queue: Box<dyn BackendQueue>,
    /// The bits of a place that its alignment leaves out.
    unaligned: u64,
}

/// The times at which layers and back ends asked for a round.
#[expect(clippy::struct_field_names, reason = "each name ends with its unit")]
pub(crate) struct Wakes {
    times_ns: [u64; LAYERS_MAX],
    next_ns: u64,
    /// The time at which a back end asked for a round. All get each round.
    pub(crate) backends_ns: u64,
}

impl Default for Wakes {
    fn default() -> Self {
        Self { times_ns: [u64::MAX; LAYERS_MAX], next_ns: u64::MAX, backends_ns: u64::MAX }
    }
}

impl Wakes {
    pub(crate) fn set(&mut self, level: usize, deadline_ns: u64) {
        self.times_ns[level] = self.times_ns[level].min(deadline_ns);
        self.next_ns = self.next_ns.min(deadline_ns);
    }

    /// The earliest time of a layer, in nanoseconds; `u64::MAX` is never.
    pub(crate) fn next_ns(&self) -> u64 {
        self.next_ns
    }

    /// Takes the levels that are due, as bits, and clears their times.
    pub(crate) fn take_due(&mut self, now_ns: u64) -> u32 {
        let mut due = 0;
        self.next_ns = u64::MAX;
        for (level, time_ns) in self.times_ns.iter_mut().enumerate() {
            if *time_ns <= now_ns {
                *time_ns = u64::MAX;
                due |= 1 << level;
            }
            self.next_ns = self.next_ns.min(*time_ns);
        }
        due
    }
}

/// See the module. Most queues use none of these resources; their cost is a check of three lengths.
#[derive(Default)]
pub(crate) struct Aside {
    stores: Vec<Store>,
    /// Requests that layers submitted to their stores and that no store has seen yet.
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    pub(crate) sending: Vec<Box<Request>>,
    /// Requests that stores have completed and that no layer has seen yet.
    finished: Vec<(Box<Request>, Outcome)>,
    pub(crate) splits: Splits,
    pub(crate) wakes: Wakes,
    pub(crate) alarm: Option<Alarm>,
    /// The number of computations of the queue's parts whose answers have not been fetched.
    pub(crate) computing: Arc<AtomicUsize>,
}

impl Aside {
    /// A waker of the part at `level`.
    pub(crate) fn waker(&mut self, level: usize, reactor: &mut Reactor) -> io::Result<Waker> {
        let alarm = match self.alarm.take() {
            Some(alarm) => alarm,
            None => Alarm::open(reactor)?,
        };
        Ok(self.alarm.insert(alarm).waker(level))
    }

    /// Adds `backend` as a further store of the layer at `level`.
    pub(crate) fn add(
        &mut self,
        level: usize,
        backend: &Arc<dyn Backend>,
        queue: Box<dyn BackendQueue>,
    ) -> io::Result<StoreId> {
        let id = u16::try_from(self.stores.len()).map_err(io::Error::other)?;
        let unaligned = u64::from(backend.geometry().alignment) - 1;
        self.stores.push(Store { level, backend: Arc::clone(backend), queue, unaligned });
        Ok(StoreId(id))
    }

    /// Whether requests wait to be sent to a store, or to be returned to their layer.
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        !self.sending.is_empty() || !self.finished.is_empty()
    }

    /// Passes the submitted requests to their stores. Returns the number of refused requests.
    pub(crate) fn send(&mut self, reactor: &mut Reactor, clock: &Clock) -> u64 {
        let mut refused = 0;
        let mut sending = std::mem::take(&mut self.sending);
        for request in sending.drain(..) {
            let id = request.store.map_or(usize::MAX, |store| usize::from(store.0));
            let checked = self.stores.get(id).ok_or(ErrorKind::Unsupported).and_then(|store| {
                let (backend, capabilities) = (&store.backend, store.backend.capabilities());
                match request.operation {
                    // The way down answers this operation itself; here no component does.
                    Operation::GetId => return Err(ErrorKind::Unsupported),
                    Operation::Extents if !capabilities.extents => {
                        return Err(ErrorKind::Unsupported);
                    }
                    Operation::Read
                    | Operation::Write
                    | Operation::Flush
                    | Operation::Discard
                    | Operation::WriteZeroes
                    | Operation::Extents => {}
                }
                request.check(&capabilities, backend.capacity(), store.unaligned)
            });
            if let Err(error) = checked {
                refused += 1;
                self.finished.push((request, Err(error)));
                continue;
            }
            let mut context = BackendContext {
                reactor,
                clock,
                completed: &mut self.finished,
                wake_ns: &mut self.wakes.backends_ns,
            };
            self.stores[id].queue.submit(request, &mut context);
        }
        self.sending = sending;
        refused
    }

    /// Reads from a store at once, if it can; see
    /// [`Crossing::read_now`](crate::Crossing::read_now).
    #[inline]
    pub(crate) fn read_now(
        &mut self,
        id: StoreId,
        offset: u64,
        request: &mut Request,
        range: Range<u64>,
    ) -> Option<Outcome> {
        let store = self.stores.get_mut(usize::from(id.0))?;
        let length = range.end.checked_sub(range.start)?;
        let is_within = range.end <= request.buffers.length();
        if !is_within || length == 0 || (offset | length) & store.unaligned != 0 {
            return None;
        }
        store.queue.read_now(offset, length, &mut request.buffers, range.start)
    }

    /// Writes to a store at once, if it can; see
    /// [`Crossing::write_now`](crate::Crossing::write_now).
    #[inline]
    pub(crate) fn write_now(&mut self, id: StoreId, offset: u64, bytes: &[u8]) -> Option<Outcome> {
        let store = self.stores.get_mut(usize::from(id.0))?;
        if bytes.is_empty() || (offset | bytes.len() as u64) & store.unaligned != 0 {
            return None;
        }
        store.queue.write_now(offset, bytes)
    }

    /// See [`Crossing::expect`](crate::Crossing::expect).
    #[inline]
    pub(crate) fn expect(&mut self, id: StoreId, offset: u64) {
        if let Some(store) = self.stores.get_mut(usize::from(id.0)) {
            store.queue.expect(offset);
        }
    }

    /// Whether no store has background work in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.stores.iter().all(|store| store.queue.is_idle())
    }

    /// Calls `call` with the queue of each store.
    #[inline]
    pub(crate) fn each_store(
        &mut self,
        reactor: &mut Reactor,
        clock: &Clock,
        mut call: impl FnMut(&mut dyn BackendQueue, &mut BackendContext<'_>),
    ) {
        for store in &mut self.stores {
            let mut context = BackendContext {
                reactor,
                clock,
                completed: &mut self.finished,
                wake_ns: &mut self.wakes.backends_ns,
            };
            call(&mut *store.queue, &mut context);
        }
    }

    /// Takes the requests that the stores have completed.
    pub(crate) fn finished(&mut self) -> Vec<(Box<Request>, Outcome)> {
        std::mem::take(&mut self.finished)
    }

    /// Takes back the memory of [`finished`](Self::finished).
    pub(crate) fn reuse(&mut self, mut empty: Vec<(Box<Request>, Outcome)>) {
        if self.finished.is_empty() {
            empty.clear();
            self.finished = empty;
        }
    }

    /// The level of the layer whose store completed `request`.
    pub(crate) fn level(&self, request: &Request) -> Option<usize> {
        Some(self.stores.get(usize::from(request.store?.0))?.level)
    }
}
