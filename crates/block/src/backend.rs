//! The contract of a back end.

use std::io;

use fathom_reactor::{Event, Reactor};

use crate::clock::Clock;
use crate::geometry::{Capabilities, Geometry};
use crate::problem::BackendProblem;
use crate::request::{ErrorKind, Outcome, Request};

/// Where a disk's bytes are kept: what all queues of the disk share.
///
/// The do-nothing version is `fathom_backend::Null`.
pub trait Backend: Send + Sync {
    /// One word for status and logs, for example `file`.
    fn name(&self) -> &'static str;

    /// The size of the disk, in bytes.
    fn capacity(&self) -> u64;

    /// The sizes that hold as long as the back end is open.
    fn geometry(&self) -> Geometry;

    /// What the queues of this back end can do.
    fn capabilities(&self) -> Capabilities;

    /// A queue, for the thread that owns `reactor`.
    ///
    /// # Errors
    /// When the queue cannot be had: no descriptor, no memory.
    fn open_queue(&self, reactor: &mut Reactor) -> io::Result<Box<dyn BackendQueue>>;

    /// Makes the disk `capacity` bytes large. Requests may be in flight; those behind a new, nearer
    /// end may fail. Waits for them, so that no queue's thread may call it.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the size is given by something else.
    /// [`capacity`](Self::capacity) says afterwards which size holds: it may be the new one, where
    /// it could not be made durable.
    fn resize(&self, capacity: u64) -> Result<(), ErrorKind>;

    /// What is wrong with the store now; empty for a sound one. Never blocks: it says what
    /// requests and the last [`inspect`](Self::inspect) have found.
    fn problems(&self) -> Vec<BackendProblem>;

    /// Looks for what changes a store from outside: a file deleted, or cut short. May block for
    /// as long as the file system does; nothing on a request's path calls it.
    fn inspect(&self);

    /// Takes writes again after [`BackendProblem::WritesLost`], because the operator says that the
    /// store has been mended and that the loss is known. May block for as long as a sync takes.
    ///
    /// # Errors
    /// When the store still fails. Nothing has changed then.
    fn recover(&self) -> io::Result<()>;
}

/// One thread's way into a back end.
///
/// **Callers** guarantee that a request lies within the capacity, is aligned, has buffers that add
/// up, and asks for nothing beyond the capabilities. **Implementors** give every box back exactly
/// once through [`BackendContext::complete`], at once or later; they do not block for longer than
/// a memory copy takes, except where the operating system leaves no other way.
pub trait BackendQueue {
    /// Carries out `request`, or begins to.
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>);

    /// Something that this queue submitted to the reactor has come back. Events of other owners
    /// may be seen too and are left alone.
    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>);

    /// Called whenever the thread has made its round, before it sleeps.
    fn advance(&mut self, context: &mut BackendContext<'_>);
}

/// What a back end's queue can reach while it is called.
pub struct BackendContext<'a> {
    pub(crate) reactor: &'a mut Reactor,
    pub(crate) clock: &'a Clock,
    pub(crate) completed: &'a mut Vec<(Box<Request>, Outcome)>,
}

impl BackendContext<'_> {
    /// Gives `request` back with its outcome.
    pub fn complete(&mut self, request: Box<Request>, outcome: Outcome) {
        self.completed.push((request, outcome));
    }

    /// The same for a back end beneath this one: what it is done with goes to `completed`.
    pub fn nested<'b>(
        &'b mut self,
        completed: &'b mut Vec<(Box<Request>, Outcome)>,
    ) -> BackendContext<'b> {
        BackendContext { reactor: self.reactor, clock: self.clock, completed }
    }

    /// The ring of this thread.
    pub fn reactor(&mut self) -> &mut Reactor {
        self.reactor
    }

    /// The time, in nanoseconds of the stack's clock.
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }
}
