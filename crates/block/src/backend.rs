//! The contract of a back end.

use std::io;
use std::time::Duration;

use fathom_guest_memory::Buffers;
use fathom_reactor::{Event, Reactor};

use crate::aside::Aside;
use crate::background::Background;
use crate::clock::Clock;
use crate::disk::Disk;
use crate::geometry::{Capabilities, Geometry};
use crate::layer::LAYERS_MAX;
use crate::problem::BackendProblem;
use crate::report::Figure;
use crate::request::{ErrorKind, Outcome, Request};
use crate::waker::Waker;
use crate::work::{Urgency, Work};

/// The level of the wakers of back ends: it is no layer's.
pub(crate) const BACKENDS: usize = u32::BITS as usize - 1;
const _: () = assert!(BACKENDS > LAYERS_MAX);

/// The storage of a disk's bytes, shared by all queues of the disk.
///
/// The do-nothing version is `fathom_backend::Null`.
pub trait Backend: Send + Sync {
    /// One word for status and logs, for example `file`.
    fn name(&self) -> &'static str;

    /// The size of the disk, in bytes.
    fn capacity(&self) -> u64;

    /// The sizes that hold as long as the back end is open.
    fn geometry(&self) -> Geometry;

    /// The capabilities of this back end's queues.
    fn capabilities(&self) -> Capabilities;

    /// Opens a queue, in its thread. `context` provides what the queue needs besides the requests:
    /// the thread's ring, wakers, background work.
    ///
    /// # Errors
    /// When the queue cannot be opened: no descriptor, no memory.
    fn open_queue(&self, context: &mut BackendOpenContext<'_>)
    -> io::Result<Box<dyn BackendQueue>>;

    /// Sets the capacity of the disk, in bytes. Requests may be in flight; those beyond a lower
    /// capacity may fail. The call waits for them, so a queue's thread must not make it.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the back end does not determine its size. After any error
    /// [`capacity`](Self::capacity) returns the valid size: this may be the new size, if it could
    /// not be made durable.
    fn resize(&self, capacity: u64) -> Result<(), ErrorKind>;

    /// The current problems of the store, as found by requests and by the last
    /// [`inspect`](Self::inspect). Never blocks.
    fn problems(&self) -> Vec<BackendProblem>;

    /// The store's own figures: always the same figures in the same order. Never blocks.
    fn figures(&self) -> Vec<Figure> {
        Vec::new()
    }

    /// Whether the store has [lost writes](BackendProblem::WritesLost). Never blocks.
    fn has_lost_writes(&self) -> bool {
        let is_loss =
            |problem: &BackendProblem| matches!(problem, BackendProblem::WritesLost { .. });
        self.problems().iter().any(is_loss)
    }

    /// A number that increases whenever the store loses writes, and whenever it accepts writes
    /// again ([`recover`](Self::recover)). A write that had completed before it increased, and was
    /// not durable, may be lost even if a later flush succeeds. Never blocks.
    fn losses(&self) -> u64;

    /// Whether zeroes take little of the store's space, so that it is worth overwriting what is not
    /// needed any more. No request of such a store takes effect after a later one of the same
    /// place, even one that has failed.
    fn frees_zeroes(&self) -> bool {
        false
    }

    /// Whether a change that has failed may still take effect from now on, because the store is
    /// elsewhere and the change was given up.
    fn may_act_late(&self) -> bool {
        false
    }

    /// Checks the store for changes from outside: a deleted or truncated file. May block for as
    /// long as the file system does; nothing on a request's path calls it.
    fn inspect(&self);

    /// Accepts writes again after [`BackendProblem::WritesLost`], because the operator has
    /// confirmed that the store is repaired and that the loss is known. May block for as long as a
    /// sync takes.
    ///
    /// # Errors
    /// When the store still fails. Nothing has changed then.
    fn recover(&self) -> io::Result<()>;

    /// Called when a disk with this store is not served any more: its layers have
    /// [saved their states](crate::Layer::save_state), and no queue has a request in flight. A
    /// store with a state that outlives the daemon makes it durable here. Blocks for about `limit`
    /// at most.
    ///
    /// # Errors
    /// When the state is not complete. That costs time later, but no data.
    fn save_state(&self, limit: Duration) -> io::Result<()> {
        let _ = limit;
        Ok(())
    }
}

/// A back end's queue, used by one thread.
///
/// **Callers** guarantee that a request lies within the capacity, is aligned, has buffers whose
/// lengths add up to its own, and needs nothing beyond the capabilities. **Implementors** give
/// every box back exactly once through [`BackendContext::complete`], immediately or later. They do
/// not block for longer than a memory copy takes, except where the operating system has no
/// non-blocking call.
pub trait BackendQueue {
    /// Carries out `request`, or starts to.
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>);

    /// Reads `length` bytes from `offset` on into the memory of `buffers`, from its byte `from` on,
    /// if this takes no longer than a copy of memory. Otherwise, and if the store does not have
    /// this range, returns `None` and does nothing: the caller then submits a request. Callers
    /// guarantee that the memory exists.
    fn read_now(
        &mut self,
        offset: u64,
        length: u64,
        buffers: &mut Buffers,
        from: u64,
    ) -> Option<Outcome> {
        let _ = (offset, length, buffers, from);
        None
    }

    /// Writes `bytes` from `offset` on, if this takes no longer than a copy of memory. Otherwise,
    /// and if the store does not have this range, returns `None` and does nothing: the caller then
    /// submits a request.
    fn write_now(&mut self, offset: u64, bytes: &[u8]) -> Option<Outcome> {
        let _ = (offset, bytes);
        None
    }

    /// Fetches the first bytes from `offset` on into the processor's caches, if they are in memory:
    /// a read of them follows soon. The offset may be beyond the capacity.
    fn expect(&mut self, offset: u64) {
        let _ = offset;
    }

    /// Handles the completion of an operation that this queue submitted to the reactor. The queue
    /// ignores events of other owners.
    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>);

    /// Called once in each round of the thread, before it sleeps, and when a
    /// [`Waker`](crate::Waker) of the queue was used.
    fn advance(&mut self, context: &mut BackendContext<'_>);

    /// Called before the queue is closed, when no request is in flight. From now on the queue only
    /// finishes background work already started. It is closed when it [is idle](Self::is_idle);
    /// after the end of its front end, at the latest after 10 s.
    fn close(&mut self, context: &mut BackendContext<'_>) {
        let _ = context;
    }

    /// The queue serves requests again, although it was [closed](Self::close): the change of layers
    /// for which it was has failed.
    fn reopen(&mut self, context: &mut BackendContext<'_>) {
        let _ = context;
    }

    /// Whether the queue has no background work in flight. Computations
    /// ([`BackendOpenContext::work`]) are awaited in any case.
    fn is_idle(&self) -> bool {
        true
    }
}

/// The context in which a back end's queue is opened.
pub struct BackendOpenContext<'a> {
    pub(crate) disk: &'a Disk,
    pub(crate) queue: u64,
    pub(crate) clock: &'a Clock,
    pub(crate) reactor: &'a mut Reactor,
    pub(crate) aside: &'a mut Aside,
}

impl BackendOpenContext<'_> {
    /// The ring of this thread.
    pub fn reactor(&mut self) -> &mut Reactor {
        self.reactor
    }

    /// The number of the queue. It counts from 0 all queues of the disk opened while the daemon
    /// runs.
    pub fn queue(&self) -> u64 {
        self.queue
    }

    /// The time, in nanoseconds of the queue's clock.
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// A waker for this queue, which other threads may use.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn waker(&mut self) -> io::Result<Waker> {
        self.aside.waker(BACKENDS, self.reactor)
    }

    /// The background work of this queue of the back end `name`: the scheduler of the disk, if it
    /// has one, decides when a step begins.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn background(&mut self, name: &'static str) -> io::Result<Background> {
        let waker = self.waker()?;
        Ok(Background::new(self.disk.scheduler(), self.disk.name(), name, waker))
    }

    /// A handle to run computations of this queue on other threads. A queue is drained only when
    /// the answers to all of them have been fetched.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn work<T: Send + 'static>(&mut self, urgency: Urgency) -> io::Result<Work<T>> {
        let waker = self.waker()?;
        Ok(Work::new(urgency, waker, &self.aside.computing, self.clock.is_simulated()))
    }
}

/// The context of a call of a back end's queue.
pub struct BackendContext<'a> {
    pub(crate) reactor: &'a mut Reactor,
    pub(crate) clock: &'a Clock,
    pub(crate) completed: &'a mut Vec<(Box<Request>, Outcome)>,
    /// The time of the next round.
    pub(crate) wake_ns: &'a mut u64,
}

impl BackendContext<'_> {
    /// Gives `request` back with its outcome.
    pub fn complete(&mut self, request: Box<Request>, outcome: Outcome) {
        self.completed.push((request, outcome));
    }

    /// The context for a back end below this one. Its completed requests go to `completed`.
    pub fn nested<'b>(
        &'b mut self,
        completed: &'b mut Vec<(Box<Request>, Outcome)>,
    ) -> BackendContext<'b> {
        BackendContext {
            reactor: self.reactor,
            clock: self.clock,
            completed,
            wake_ns: self.wake_ns,
        }
    }

    /// The ring of this thread.
    pub fn reactor(&mut self) -> &mut Reactor {
        self.reactor
    }

    /// Requests a call of [`advance`](BackendQueue::advance) at `deadline_ns` of the stack's clock.
    /// It may come earlier. The next call of `advance`, for whatever reason, ends the request.
    pub fn wake_at(&mut self, deadline_ns: u64) {
        *self.wake_ns = (*self.wake_ns).min(deadline_ns);
    }

    /// The time, in nanoseconds of the stack's clock.
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }
}
