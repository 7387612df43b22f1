//! One queue of a volume: it divides requests at groups, and the volume's thread carries the parts
//! out.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{
    BackendContext, BackendQueue, ErrorKind, Operation, PartAnswer, PartAnswers, PartedRequests,
    Request, faults,
};
use fathom_reactor::{Event, Reactor};

use crate::cluster_volume::{Job, Jobs};
use crate::format::BLOCK;
use crate::layout::{GROUP, parts};
use crate::volume::{GroupOperation, Volume};

/// The groups that a discard is divided into at a time.
const ZERO_GROUPS: u64 = 16;

/// One queue.
pub(crate) struct ClusterQueue {
    requests: PartedRequests,
    sender: Sender,
}

/// The way to the volume's thread.
struct Sender {
    volume: Arc<Volume>,
    jobs: Jobs,
}

impl ClusterQueue {
    pub(crate) fn open(volume: Arc<Volume>, jobs: Jobs, reactor: &mut Reactor) -> io::Result<Self> {
        let requests = PartedRequests::open(reactor)?;
        Ok(Self { requests, sender: Sender { volume, jobs } })
    }
}

impl Sender {
    fn send(&self, answer: PartAnswer, work: GroupOperation) {
        if let Err(job) = self.jobs.send(Job { work, answer }) {
            // The volume's thread has ended.
            job.answer.finish(Err(ErrorKind::ShuttingDown));
        }
    }

    /// Sends a request with a range. Returns where the zeroes begin that are still to be written.
    fn begin(&self, request: &Request, answers: &PartAnswers<'_>) -> Result<u64, ErrorKind> {
        let (begin, end) = (request.offset, request.offset + request.length);
        match request.operation {
            Operation::Read => {
                for part in parts(begin..end) {
                    self.send(answers.at(part.start - begin), GroupOperation::Read(part));
                }
                Ok(end)
            }
            Operation::Write => self.write(request, answers).map(|()| end),
            Operation::Discard | Operation::WriteZeroes => Ok(self.zero(begin, end, answers)),
            Operation::Flush | Operation::GetId | Operation::Extents => Err(ErrorKind::Unsupported),
        }
    }

    /// Sends the parts of a write.
    fn write(&self, request: &Request, answers: &PartAnswers<'_>) -> Result<(), ErrorKind> {
        let before = faults();
        let end = request.offset + request.length;
        let (mut works, mut bytes) = (Vec::new(), vec![0; BLOCK as usize]);
        for part in parts(request.offset..end) {
            let (mut values, mut at) = (Vec::new(), part.start);
            while at < part.end {
                let block = at / BLOCK;
                let to = ((block + 1) * BLOCK).min(part.end);
                let bytes = &mut bytes[..(to - at) as usize];
                request.buffers.copy_to(at - request.offset, bytes);
                if to - at == BLOCK {
                    values.push(self.volume.value(block, bytes));
                } else {
                    works.push(GroupOperation::Merge(at, bytes.to_vec()));
                }
                at = to;
            }
            if !values.is_empty() {
                works.push(GroupOperation::Write(values));
            }
        }
        if faults() != before {
            return Err(ErrorKind::Memory);
        }
        for work in works {
            self.send(answers.at(0), work);
        }
        Ok(())
    }

    /// Sends the next parts of zeroes from `from` on. Returns where the rest begins.
    fn zero(&self, from: u64, end: u64, answers: &PartAnswers<'_>) -> u64 {
        let to = (from / GROUP + ZERO_GROUPS).saturating_mul(GROUP).min(end);
        for part in parts(from..to) {
            let (mut values, mut at) = (Vec::new(), part.start);
            while at < part.end {
                let block = at / BLOCK;
                let to = ((block + 1) * BLOCK).min(part.end);
                if to - at == BLOCK {
                    values.push(self.volume.value(block, &[]));
                } else {
                    self.send(
                        answers.at(0),
                        GroupOperation::Merge(at, vec![0; (to - at) as usize]),
                    );
                }
                at = to;
            }
            if !values.is_empty() {
                self.send(answers.at(0), GroupOperation::Write(values));
            }
        }
        to
    }
}

impl BackendQueue for ClusterQueue {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        let Self { requests, sender } = self;
        let end = request.offset.saturating_add(request.length);
        let has_range = request.operation.has_range();
        if has_range && end > sender.volume.capacity.load(Ordering::Relaxed) {
            return context.complete(request, Err(ErrorKind::OutOfRange));
        }
        if !has_range || request.length == 0 {
            // Completed writes are durable.
            return context.complete(request, Ok(()));
        }
        requests.begin(request, |request, answers| sender.begin(request, answers), context);
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        let Self { requests, sender } = self;
        let send = |request: &Request, rest, answers: &PartAnswers<'_>| {
            Ok(sender.zero(rest, request.offset + request.length, answers))
        };
        requests.event(event, send, context);
    }

    fn advance(&mut self, _context: &mut BackendContext<'_>) {}
}
