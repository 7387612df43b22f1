//! The delivery of outcomes: from the disk to the socket.

use fathom_block::{ErrorKind, Operation, Outcome, Request};
use fathom_reactor::Reactor;

use super::super::channel::Channel;
use super::super::reply::Replies;
use super::super::wire::{RequestHeader, command, error, flag};
use super::{Ending, Phase, Slot, Transmission, answered};

impl Transmission {
    /// Makes replies of the completed requests. Returns whether there were any.
    pub(super) fn reap(&mut self, reactor: &mut Reactor) -> bool {
        let mut progress = false;
        while let Some((request, outcome)) = self.stack.completed() {
            progress = true;
            self.finish(request, outcome, reactor);
        }
        progress |= self.reap_bitmaps();
        progress
    }

    pub(super) fn finish(
        &mut self,
        request: Box<Request>,
        outcome: Outcome,
        reactor: &mut Reactor,
    ) {
        let index = request.token as u32;
        let Slot { header, charged, flushing } = self.slots[index as usize];
        let durable = header.flags & flag::FUA != 0
            && request.operation.modifies()
            && !request.flags.force_unit_access;
        if outcome.is_ok() && durable && !flushing {
            self.stack.recycle(request);
            let mut flush = self.stack.request();
            flush.operation = Operation::Flush;
            flush.token = u64::from(index);
            self.slots[index as usize].flushing = true;
            self.stack.submit(flush, reactor);
            return;
        }
        if outcome == Err(ErrorKind::Withdrawn) && self.phase == Phase::Open {
            return self.deferred.push(request);
        }
        if header.command == command::BLOCK_STATUS {
            return self.gather_allocation(request, outcome);
        }
        self.free.push(index);
        if self.phase != Phase::Open && (request.operation.modifies() || flushing) {
            self.export.disk().leftovers().end(self.client, u64::from(index));
        }
        let answered = answered(&header);
        if self.phase == Phase::Lost {
            self.in_flight -= 1;
            self.in_flight_bytes -= charged;
            self.stack.recycle(request);
            self.repay();
            return;
        }
        match outcome {
            Ok(()) if header.command == command::READ => {
                if request.buffers.length() == header.length {
                    self.bytes_read += header.length;
                    self.replies.data(&answered, request, charged);
                    return;
                }
                debug_assert!(false, "a completed request has all of its buffers");
                self.replies.failure(&answered, error::IO, "incomplete", charged);
            }
            Ok(()) => self.replies.success(&answered, charged),
            Err(kind) => {
                let number = error_number(kind, &header);
                self.replies.failure(&answered, number, kind.name(), charged);
            }
        }
        self.stack.recycle(request);
    }

    /// The replies, the channel, and what is done for each reply that has been sent: it is counted,
    /// and its request recycled.
    pub(super) fn sending(
        &mut self,
    ) -> (&mut Replies, &mut Channel, impl FnMut(Option<Box<Request>>, u64)) {
        let Self { replies, channel, stack, in_flight, in_flight_bytes, answered, .. } = self;
        let sent = |request, charged| {
            if let Some(request) = request {
                stack.recycle(request);
            }
            *in_flight -= 1;
            *in_flight_bytes -= charged;
            *answered += 1;
        };
        (replies, channel, sent)
    }

    /// Sends replies. Returns whether any were sent completely.
    pub(super) fn send(&mut self) -> bool {
        if self.replies.is_empty() && !self.channel.has_staged() {
            return false;
        }
        let before = self.answered;
        let (replies, channel, sent) = self.sending();
        let result = replies.send(channel, sent);
        self.repay();
        match result {
            Ok(everything) => {
                if !everything && (!self.blocked_before || self.answered > before) {
                    // Sending has begun the next reply.
                    self.progress_ns = self.stack.now_ns();
                }
                self.blocked_before = !everything;
                self.blocked = !everything;
            }
            Err(error) => self.lose(Ending::Lost(error)),
        }
        let progress = self.answered > before;
        if progress && self.begin < self.end {
            // Requests that waited may fit now.
            self.unparsed = true;
        }
        progress
    }
}

/// The protocol's error number for a failed request.
pub(super) fn error_number(kind: ErrorKind, header: &RequestHeader) -> u32 {
    match kind {
        // Only a guest's memory can be lost; an NBD client has none.
        ErrorKind::Io | ErrorKind::Memory => error::IO,
        ErrorKind::NoSpace => error::NO_SPACE,
        ErrorKind::ReadOnly => error::PERMISSION,
        ErrorKind::ShuttingDown | ErrorKind::Withdrawn => error::SHUTDOWN,
        // The protocol allows this number only for this flag.
        ErrorKind::Unsupported if header.flags & flag::FAST_ZERO != 0 => error::NOT_SUPPORTED,
        ErrorKind::OutOfRange
            if matches!(header.command, command::WRITE | command::WRITE_ZEROES) =>
        {
            error::NO_SPACE
        }
        ErrorKind::OutOfRange
        | ErrorKind::Misaligned
        | ErrorKind::Unsupported
        | ErrorKind::TooLong
        | ErrorKind::Malformed => error::INVALID,
    }
}
