//! The path of a request from the ring to the stack.

#![expect(unsafe_code, reason = "the ring keeps the memory of its requests")]

use std::sync::atomic::Ordering;

use fathom_block::{ErrorKind, Operation, Request};
use fathom_guest_memory::{Purpose, absences};
use fathom_reactor::Reactor;

use super::{Taken, Worker};
use crate::vhost_user::request::{self, Parsed};

/// The most data of a request whose pages are asked for at a time, beside the first piece that is
/// away, in bytes.
const WANTED_BYTES_MAX: u64 = 16 << 20;

impl Worker {
    /// Begins one request: passes it from its head to the stack, or completes it immediately.
    pub(super) fn begin(&mut self, head: u16, reactor: &Reactor) {
        let before = absences();
        if let Err(error) = self.chain.read(&self.ring, head) {
            return self.refuse_unless_absent(head, before, error.name());
        }
        let parsed = match request::parse(self.ring.memory(), &mut self.chain) {
            Ok(parsed) => parsed,
            Err(error) => return self.refuse_unless_absent(head, before, error.name()),
        };
        let Some(status_lease) = self.ring.memory().lease(parsed.status, 1, Purpose::Write) else {
            let error = request::RequestError::NoStatus;
            return self.refuse_unless_absent(head, before, error.name());
        };
        self.taken[usize::from(head)] =
            Taken { left: 1, status: parsed.status, status_lease, ..Taken::FREE };
        match parsed.operation {
            Some(Operation::Read | Operation::Write | Operation::GetId) => {
                self.transfer(head, &parsed, reactor);
            }
            Some(Operation::Flush) => {
                let mut request = self.stack.request();
                request.operation = Operation::Flush;
                self.submit(head, request, &parsed, reactor);
            }
            Some(operation @ (Operation::Discard | Operation::WriteZeroes)) => {
                self.submit_segments(head, operation, &parsed, reactor);
            }
            Some(Operation::Extents) | None => self.finish(head, Err(ErrorKind::Unsupported)),
        }
    }

    /// Submits a request whose data is in the chain.
    fn transfer(&mut self, head: u16, parsed: &Parsed, reactor: &Reactor) {
        let operation = parsed.operation.unwrap_or_default();
        let mut request = self.stack.request();
        request.operation = operation;
        if operation != Operation::GetId {
            request.offset = parsed.offset;
            request.length = parsed.data_length;
        }
        request.flags.force_unit_access = operation == Operation::Write && !self.write_back;
        let fills = operation != Operation::Write;
        let (pieces, purpose) = match operation {
            // What the pages of a read contained is not needed, however the read ends: the driver
            // must not assume anything of what the device may write (virtio 1.2, 2.7.8.3).
            Operation::Read => (&self.chain.writable, Purpose::Overwrite),
            _ if fills => (&self.chain.writable, Purpose::Write),
            _ => (&self.chain.readable, Purpose::Read),
        };
        let memory = self.ring.memory();
        let before = absences();
        for (at, piece) in pieces.iter().enumerate() {
            let length = u64::from(piece.length);
            // SAFETY: the ring holds the memory; only a command that waits until no request is in
            // flight replaces it; and a thread that fails leaks it if the kernel may still use it.
            let is_memory =
                unsafe { memory.lend(&mut request.buffers, piece.address, length, purpose) };
            if !is_memory {
                self.stack.recycle(request);
                if absences() != before {
                    // Those of the other pieces come at the same time.
                    // A guest may name any memory, and any number of times.
                    let mut left = WANTED_BYTES_MAX;
                    for piece in &pieces[at + 1..] {
                        let length = u64::from(piece.length).min(left);
                        memory.want(piece.address, length, purpose);
                        left -= length;
                        if left == 0 {
                            break;
                        }
                    }
                }
                if self.wait_for_pages(head, before) {
                    return;
                }
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                self.warn(request::RequestError::Data.name());
                return self.finish(head, Err(ErrorKind::Malformed));
            }
        }
        if fills {
            self.taken[usize::from(head)].written = parsed.data_length as u32;
        }
        self.submit(head, request, parsed, reactor);
    }

    /// Submits a discard or write-zeroes request: one stack request for each segment.
    fn submit_segments(
        &mut self,
        head: u16,
        operation: Operation,
        parsed: &Parsed,
        reactor: &Reactor,
    ) {
        let mut segments = std::mem::take(&mut self.segments);
        let memory = self.ring.memory();
        let before = absences();
        if let Err(error) = request::segments(memory, &mut self.chain, operation, &mut segments) {
            if self.wait_for_pages(head, before) {
                self.segments = segments;
                return;
            }
            if error != ErrorKind::Unsupported {
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                self.warn(request::RequestError::Payload.name());
            }
            self.finish(head, Err(error));
        } else {
            let zeroes = operation == Operation::WriteZeroes;
            self.taken[usize::from(head)].left = segments.len() as u16;
            for segment in &segments {
                let mut request = self.stack.request();
                request.operation = operation;
                request.offset = segment.offset;
                request.length = segment.length;
                request.flags.keep_allocated = zeroes && !segment.unmap;
                request.flags.force_unit_access = zeroes && !self.write_back;
                self.submit(head, request, parsed, reactor);
            }
        }
        self.segments = segments;
    }

    fn submit(&mut self, head: u16, mut request: Box<Request>, parsed: &Parsed, reactor: &Reactor) {
        if self.memory_owner.is_lost() {
            // The parsed bytes may be zeroes that the guest never wrote. The request stays recorded
            // as in flight, so that it is repeated.
            self.stack.recycle(request);
            self.taken[usize::from(head)].left -= 1;
            return;
        }
        request.header = Some(parsed.header);
        request.insight.io_priority = parsed.io_priority;
        request.token = u64::from(head);
        self.stack.begin(request, reactor);
    }

    /// Puts a request aside if a page was away since there were `before` absences; refuses it
    /// otherwise.
    fn refuse_unless_absent(&mut self, head: u16, before: u64, what: &str) {
        if !self.wait_for_pages(head, before) {
            self.refuse(head, what);
        }
    }

    /// Gives back a request that cannot be parsed.
    fn refuse(&mut self, head: u16, what: &str) {
        if self.memory_owner.is_lost() {
            return;
        }
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        self.warn(what);
        self.return_head(head, 0);
        self.publish();
    }
}
