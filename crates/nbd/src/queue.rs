//! One queue of an export: it divides requests at the server's limit, and the export's thread carries the parts out.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{BackendContext, BackendQueue, ErrorKind, Operation, Outcome, Request, faults};
use fathom_reactor::{Event, Inbox, Owner, Reactor};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use crate::handshake::Export;
use crate::job::{Answer, Asked, Finished, Job};
use crate::wire::transmission;

/// The token of the watch of finished parts.
const TOKEN: u64 = 0;
/// The most bytes of a part without data: a multiple of all alignments that fits into 32 bits.
const ZEROES_MAX: u64 = 1 << 30;

/// A request with parts at the server.
struct Pending {
    request: Box<Request>,
    parts: usize,
    outcome: Outcome,
    /// Where the part begins that is sent next; the request's end if there is none.
    rest: u64,
}

/// One queue.
pub(crate) struct RemoteQueue {
    export: Export,
    jobs: UnboundedSender<Job>,
    timeout: Duration,
    inbox: Arc<Inbox<Finished>>,
    owner: Owner,
    pending: HashMap<u64, Pending>,
    next: u64,
}

impl RemoteQueue {
    pub(crate) fn open(
        export: Export,
        jobs: UnboundedSender<Job>,
        timeout: Duration,
        reactor: &mut Reactor,
    ) -> io::Result<Self> {
        let inbox = Arc::new(Inbox::new()?);
        let owner = reactor.register();
        inbox.watch(reactor, owner, TOKEN);
        Ok(Self { export, jobs, timeout, inbox, owner, pending: HashMap::new(), next: 0 })
    }

    fn send(&self, number: u64, at: u64, asked: Asked) {
        let answer = Some(Answer { number, at, inbox: Arc::clone(&self.inbox) });
        let job = Job { asked, answer, deadline: Instant::now() + self.timeout };
        if let Err(error) = self.jobs.send(job) {
            // The export's thread has ended.
            error.0.finish(Err(ErrorKind::ShuttingDown));
        }
    }

    /// Sends the parts of a request from `rest` on: all of those with data, and one of the others. Returns their number,
    /// and where the next one begins.
    fn send_parts(
        &self,
        number: u64,
        request: &Request,
        rest: u64,
    ) -> Result<(usize, u64), ErrorKind> {
        let Request { operation, flags, offset, .. } = *request;
        let end = offset + request.length;
        if !operation.carries_data() {
            let length = (end - rest).min(ZEROES_MAX);
            let asked = Asked { operation, offset: rest, length, flags, data: Arc::from([]) };
            self.send(number, 0, asked);
            return Ok((1, rest + length));
        }
        let (before, mut asked) = (faults(), Vec::new());
        for at in (offset..end).step_by(self.export.length_max as usize) {
            let length = (end - at).min(u64::from(self.export.length_max));
            let mut data = Vec::new();
            if operation == Operation::Write {
                data.resize(length as usize, 0);
                request.buffers.copy_to(at - offset, &mut data);
            }
            asked.push(Asked { operation, offset: at, length, flags, data: data.into() });
        }
        if faults() != before {
            return Err(ErrorKind::Memory);
        }
        let count = asked.len();
        for part in asked {
            self.send(number, part.offset - offset, part);
        }
        Ok((count, end))
    }

    /// A part of a request has finished.
    fn finish(&mut self, (number, at, found): Finished, context: &mut BackendContext<'_>) {
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
        let Some(mut pending) = self.pending.remove(&number) else { return };
        let end = pending.request.offset + pending.request.length;
        if pending.rest < end && pending.outcome.is_ok() {
            if let Ok((parts, rest)) = self.send_parts(number, &pending.request, pending.rest) {
                (pending.parts, pending.rest) = (parts, rest);
                self.pending.insert(number, pending);
                return;
            }
        }
        context.complete(pending.request, pending.outcome);
    }
}

impl BackendQueue for RemoteQueue {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        let number = self.next;
        self.next += 1;
        let (begin, end) = (request.offset, request.offset.saturating_add(request.length));
        let parts = match request.operation {
            Operation::GetId | Operation::Extents => Err(ErrorKind::Unsupported),
            Operation::Flush => {
                self.send(number, 0, Asked::flush());
                Ok((1, end))
            }
            _ if end > self.export.capacity => Err(ErrorKind::OutOfRange),
            Operation::WriteZeroes
                if request.flags.only_if_fast && !self.export.has(transmission::SEND_FAST_ZERO) =>
            {
                Err(ErrorKind::Unsupported)
            }
            _ if begin == end => return context.complete(request, Ok(())),
            _ => self.send_parts(number, &request, begin),
        };
        match parts {
            Ok((parts, rest)) => {
                self.pending.insert(number, Pending { request, parts, outcome: Ok(()), rest });
            }
            Err(kind) => context.complete(request, Err(kind)),
        }
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        if event.owner != self.owner {
            return;
        }
        for finished in self.inbox.take() {
            self.finish(finished, context);
        }
        if !event.more {
            self.inbox.watch(context.reactor(), self.owner, TOKEN);
        }
    }

    fn advance(&mut self, _context: &mut BackendContext<'_>) {}
}
