//! One queue of an export: it divides requests at the server's limit, and the export's thread
//! carries the parts out.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{
    BackendContext, BackendQueue, ErrorKind, Operation, PartAnswer, PartAnswers, PartedRequests,
    Request, faults,
};
use fathom_reactor::{Event, Reactor};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use crate::handshake::Export;
use crate::job::{Asked, Job, ThreadReport};
use crate::wire::transmission;

/// The most bytes of a part without data: a multiple of all alignments that fits into 32 bits.
const ZEROES_MAX: u64 = 1 << 30;

/// One queue.
pub(crate) struct RemoteQueue {
    requests: PartedRequests,
    sender: Sender,
}

/// The way to the export's thread.
struct Sender {
    export: Export,
    shared: Arc<ThreadReport>,
    jobs: UnboundedSender<Job>,
    timeout: Duration,
}

impl RemoteQueue {
    pub(crate) fn open(
        (export, shared): (Export, Arc<ThreadReport>),
        jobs: UnboundedSender<Job>,
        timeout: Duration,
        reactor: &mut Reactor,
    ) -> io::Result<Self> {
        let requests = PartedRequests::open(reactor)?;
        Ok(Self { requests, sender: Sender { export, shared, jobs, timeout } })
    }
}

impl Sender {
    fn send(&self, answer: PartAnswer, asked: Asked) {
        let deadline = Instant::now() + self.timeout;
        let job = Job { asked, answer: Some(answer), deadline };
        if let Err(error) = self.jobs.send(job) {
            // The export's thread has ended.
            error.0.finish(Err(ErrorKind::ShuttingDown));
        }
    }

    /// Why a request cannot be sent.
    fn refusal(&self, request: &Request) -> Option<ErrorKind> {
        let end = request.offset.saturating_add(request.length);
        let is_fast = self.export.has(transmission::SEND_FAST_ZERO);
        match request.operation {
            Operation::GetId | Operation::Extents => Some(ErrorKind::Unsupported),
            Operation::Flush => None,
            Operation::Read | Operation::Write | Operation::Discard | Operation::WriteZeroes
                if end > self.shared.capacity() =>
            {
                Some(ErrorKind::OutOfRange)
            }
            Operation::WriteZeroes if request.flags.only_if_fast && !is_fast => {
                Some(ErrorKind::Unsupported)
            }
            Operation::Read | Operation::Write | Operation::Discard | Operation::WriteZeroes => {
                None
            }
        }
    }

    /// Sends a request. Returns where the next part begins.
    fn begin(&self, request: &Request, answers: &PartAnswers<'_>) -> Result<u64, ErrorKind> {
        if request.operation == Operation::Flush {
            self.send(answers.at(0), Asked::flush());
            return Ok(request.offset.saturating_add(request.length));
        }
        self.send_parts(request, request.offset, answers)
    }

    /// Sends the parts of a request from `rest` on: all of those with data, and one of the others.
    /// Returns where the next one begins.
    fn send_parts(
        &self,
        request: &Request,
        rest: u64,
        answers: &PartAnswers<'_>,
    ) -> Result<u64, ErrorKind> {
        let Request { operation, flags, offset, .. } = *request;
        let end = offset + request.length;
        if !operation.carries_data() {
            let length = (end - rest).min(ZEROES_MAX);
            let asked = Asked { operation, offset: rest, length, flags, data: Arc::from([]) };
            self.send(answers.at(0), asked);
            return Ok(rest + length);
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
        for part in asked {
            self.send(answers.at(part.offset - offset), part);
        }
        Ok(end)
    }
}

impl BackendQueue for RemoteQueue {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        let Self { requests, sender } = self;
        if let Some(kind) = sender.refusal(&request) {
            return context.complete(request, Err(kind));
        }
        let is_empty = request.operation.has_range() && request.length == 0;
        // Nothing was written to an export without flushes.
        let has_flush = sender.export.has(transmission::SEND_FLUSH);
        if is_empty || request.operation == Operation::Flush && !has_flush {
            return context.complete(request, Ok(()));
        }
        requests.begin(request, |request, answers| sender.begin(request, answers), context);
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        let Self { requests, sender } = self;
        let send = |request: &Request, rest, answers: &PartAnswers<'_>| {
            sender.send_parts(request, rest, answers)
        };
        requests.event(event, send, context);
    }

    fn advance(&mut self, _context: &mut BackendContext<'_>) {}
}
