//! One queue of a volume: it divides requests at groups, and the volume's thread carries the parts out.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use fathom_block::{BackendContext, BackendQueue, ErrorKind, Operation, Outcome, Request, faults};
use fathom_reactor::{Event, Inbox, Owner, Reactor};

use crate::cluster_volume::{Job, Jobs};
use crate::format::BLOCK;
use crate::layout::{GROUP, parts};
use crate::volume::{Volume, Work};

/// The token of the watch of finished parts.
const TOKEN: u64 = 0;
/// The groups that a discard is divided into at a time.
const ZERO_GROUPS: u64 = 16;

/// A finished part of a request: the request's number, where the part begins in the request, and the bytes read.
pub(crate) type Finished = (u64, u64, Result<Vec<u8>, ErrorKind>);

/// A request with parts at the cluster.
struct Pending {
    request: Box<Request>,
    parts: usize,
    outcome: Outcome,
    /// Where the zeroes that are still to be written begin; the request's end if there are none.
    rest: u64,
}

/// One queue.
pub(crate) struct ClusterQueue {
    volume: Arc<Volume>,
    jobs: Jobs,
    inbox: Arc<Inbox<Finished>>,
    owner: Owner,
    pending: HashMap<u64, Pending>,
    next: u64,
}

impl ClusterQueue {
    pub(crate) fn open(volume: Arc<Volume>, jobs: Jobs, reactor: &mut Reactor) -> io::Result<Self> {
        let inbox = Arc::new(Inbox::new()?);
        let owner = reactor.register();
        inbox.watch(reactor, owner, TOKEN);
        Ok(Self { volume, jobs, inbox, owner, pending: HashMap::new(), next: 0 })
    }

    fn send(&self, number: u64, at: u64, work: Work) {
        let job = Job { work, number, at, inbox: Arc::clone(&self.inbox) };
        if let Err(job) = self.jobs.send(job) {
            // The volume's thread has ended.
            job.inbox.put((number, at, Err(ErrorKind::ShuttingDown)));
        }
    }

    /// Sends the parts of a write. Returns their number.
    fn write(&self, number: u64, request: &Request) -> Result<usize, ErrorKind> {
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
                    works.push(Work::Merge(at, bytes.to_vec()));
                }
                at = to;
            }
            if !values.is_empty() {
                works.push(Work::Write(values));
            }
        }
        if faults() != before {
            return Err(ErrorKind::Memory);
        }
        let count = works.len();
        for work in works {
            self.send(number, 0, work);
        }
        Ok(count)
    }

    /// Sends the next parts of zeroes from `from` on. Returns their number, and where the rest begins.
    fn zero(&self, number: u64, from: u64, end: u64) -> (usize, u64) {
        let to = (from / GROUP + ZERO_GROUPS).saturating_mul(GROUP).min(end);
        let mut count = 0;
        for part in parts(from..to) {
            let (mut values, mut at) = (Vec::new(), part.start);
            while at < part.end {
                let block = at / BLOCK;
                let to = ((block + 1) * BLOCK).min(part.end);
                if to - at == BLOCK {
                    values.push(self.volume.value(block, &[]));
                } else {
                    self.send(number, 0, Work::Merge(at, vec![0; (to - at) as usize]));
                    count += 1;
                }
                at = to;
            }
            if !values.is_empty() {
                self.send(number, 0, Work::Write(values));
                count += 1;
            }
        }
        (count, to)
    }

    /// A part of a request has finished.
    fn finish(&mut self, (number, at, found): Finished, context: &mut BackendContext<'_>) {
        let Some(pending) = self.pending.get_mut(&number) else { return };
        pending.parts -= 1;
        match found {
            Ok(bytes) => {
                let before = faults();
                pending.request.buffers.copy_from(at, &bytes);
                if faults() != before {
                    pending.outcome = Err(ErrorKind::Memory);
                }
            }
            Err(kind) => pending.outcome = Err(kind),
        }
        if pending.parts > 0 {
            return;
        }
        let (rest, end) = (pending.rest, pending.request.offset + pending.request.length);
        if rest < end && pending.outcome.is_ok() {
            let (parts, rest) = self.zero(number, rest, end);
            if let Some(pending) = self.pending.get_mut(&number) {
                (pending.parts, pending.rest) = (parts, rest);
            }
            return;
        }
        if let Some(Pending { request, outcome, .. }) = self.pending.remove(&number) {
            context.complete(request, outcome);
        }
    }
}

impl BackendQueue for ClusterQueue {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        let number = self.next;
        self.next += 1;
        let (begin, end) = (request.offset, request.offset.saturating_add(request.length));
        let capacity = self.volume.capacity.load(std::sync::atomic::Ordering::Relaxed);
        let has_range = request.operation.has_range();
        if has_range && end > capacity {
            return context.complete(request, Err(ErrorKind::OutOfRange));
        }
        if !has_range || begin == end {
            // Completed writes are durable.
            return context.complete(request, Ok(()));
        }
        let mut rest = end;
        let parts = match request.operation {
            Operation::Read => {
                let mut count = 0;
                for part in parts(begin..end) {
                    self.send(number, part.start - begin, Work::Read(part));
                    count += 1;
                }
                Ok(count)
            }
            Operation::Write => self.write(number, &request),
            Operation::Discard | Operation::WriteZeroes => {
                let (count, next) = self.zero(number, begin, end);
                rest = next;
                Ok(count)
            }
            Operation::Flush | Operation::GetId | Operation::Extents => Err(ErrorKind::Unsupported),
        };
        match parts {
            Ok(parts) => {
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
