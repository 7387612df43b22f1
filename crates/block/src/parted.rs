//! Requests of a back end's queue whose parts another thread carries out.

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use fathom_guest_memory::faults;
use fathom_reactor::{Event, Inbox, OperationOwner, Reactor};

use crate::backend::BackendContext;
use crate::request::{ErrorKind, Operation, Outcome, Request};

/// The token of the watch of finished parts.
const TOKEN: u64 = 0;

/// A finished part: the request's number, where the part begins in the request, and the bytes of a
/// read.
type Finished = (u64, u64, Result<Vec<u8>, ErrorKind>);

/// Where the outcome of a part goes. Each has to be finished.
pub struct PartAnswer {
    number: u64,
    at: u64,
    inbox: Arc<Inbox<Finished>>,
}

impl PartAnswer {
    /// The part is finished; a read has found these bytes. Any thread may call this.
    pub fn finish(self, found: Result<Vec<u8>, ErrorKind>) {
        self.inbox.put((self.number, self.at, found));
    }
}

/// Makes the answers of a request's parts.
pub struct PartAnswers<'a> {
    number: u64,
    count: Cell<usize>,
    inbox: &'a Arc<Inbox<Finished>>,
}

impl PartAnswers<'_> {
    /// The answer of the part that begins at `at` in the request, in bytes.
    pub fn at(&self, at: u64) -> PartAnswer {
        self.count.set(self.count.get() + 1);
        PartAnswer { number: self.number, at, inbox: Arc::clone(self.inbox) }
    }
}

/// A request with parts elsewhere.
struct Pending {
    request: Box<Request>,
    parts: usize,
    outcome: Outcome,
    /// Where the part begins that is sent next; the request's end if there is none.
    rest: u64,
}

/// The requests of one queue.
pub struct PartedRequests {
    inbox: Arc<Inbox<Finished>>,
    owner: OperationOwner,
    pending: HashMap<u64, Pending>,
    next: u64,
}

impl PartedRequests {
    /// For the queue of the thread that owns `reactor`.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn open(reactor: &mut Reactor) -> io::Result<Self> {
        let inbox = Arc::new(Inbox::new()?);
        let owner = reactor.register();
        inbox.watch(reactor, owner, TOKEN);
        Ok(Self { inbox, owner, pending: HashMap::new(), next: 0 })
    }

    /// Begins a request: `send` sends at least one part, and returns where the part begins that
    /// [`event`](Self::event) sends next, or the request's end. If it fails, it has sent none.
    pub fn begin(
        &mut self,
        request: Box<Request>,
        send: impl FnOnce(&Request, &PartAnswers<'_>) -> Result<u64, ErrorKind>,
        context: &mut BackendContext<'_>,
    ) {
        let number = self.next;
        self.next += 1;
        let answers = PartAnswers { number, count: Cell::new(0), inbox: &self.inbox };
        match send(&request, &answers) {
            Ok(rest) => {
                let parts = answers.count.get();
                self.pending.insert(number, Pending { request, parts, outcome: Ok(()), rest });
            }
            Err(kind) => context.complete(request, Err(kind)),
        }
    }

    /// Handles an event of the reactor. When the parts of a request are finished and it has a rest,
    /// `send` sends more of it.
    pub fn event(
        &mut self,
        event: &Event,
        send: impl Fn(&Request, u64, &PartAnswers<'_>) -> Result<u64, ErrorKind>,
        context: &mut BackendContext<'_>,
    ) {
        if event.owner != self.owner {
            return;
        }
        for finished in self.inbox.take() {
            self.finish(finished, &send, context);
        }
        if !event.more {
            self.inbox.watch(context.reactor(), self.owner, TOKEN);
        }
    }

    fn finish(
        &mut self,
        (number, at, found): Finished,
        send: impl Fn(&Request, u64, &PartAnswers<'_>) -> Result<u64, ErrorKind>,
        context: &mut BackendContext<'_>,
    ) {
        let Some(pending) = self.pending.get_mut(&number) else { return };
        pending.parts -= 1;
        match found {
            Ok(bytes) if pending.request.operation == Operation::Read => {
                let before = faults();
                pending.request.buffers.copy_from(at, &bytes);
                if faults() != before {
                    pending.outcome = Err(ErrorKind::Memory);
                }
            }
            Ok(_) => {}
            Err(kind) => pending.outcome = Err(kind),
        }
        if pending.parts > 0 {
            return;
        }
        let end = pending.request.offset + pending.request.length;
        if pending.rest < end && pending.outcome.is_ok() {
            let answers = PartAnswers { number, count: Cell::new(0), inbox: &self.inbox };
            match send(&pending.request, pending.rest, &answers) {
                Ok(rest) => {
                    (pending.parts, pending.rest) = (answers.count.get(), rest);
                    return;
                }
                Err(kind) => pending.outcome = Err(kind),
            }
        }
        if let Some(Pending { request, outcome, .. }) = self.pending.remove(&number) {
            context.complete(request, outcome);
        }
    }
}
