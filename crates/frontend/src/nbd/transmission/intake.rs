//! The intake of requests: from the socket to the disk.

use std::io;

use fathom_block::{Operation, REQUEST_LENGTH_MAX};
use fathom_reactor::Reactor;

use super::super::budget::ALLOWANCE;
use super::super::channel::is_blocked;
use super::super::wire::{Mode, RequestHeader, command, error, flag};
use super::{Ending, Partial, Phase, Refused, Slot, Transmission, answered};

/// The most requests that one connection may have in flight.
const IN_FLIGHT_MAX: usize = 1024;
/// The longest refused payload that is read and dropped, in bytes. A longer one counts as an
/// attack.
const REFUSED_PAYLOAD_MAX: u64 = 64 << 20;
/// The fewest requests that are begun before replies are processed, if as many have arrived: few,
/// so that a client receives the first replies while the server works on the other requests.
const BATCH_MIN: usize = 4;
/// The most if the thread also serves other connections: a flood of small requests must not delay
/// them.
const BATCH_SHARED_MAX: usize = 64;

impl Transmission {
    /// Whether more bytes may be read from the client now.
    pub(super) fn accepts_input(&self) -> bool {
        self.phase == Phase::Open
            && !self.stack.is_closing()
            && self.has_room(0)
            && self.end - self.begin < self.input.len()
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.in_flight < IN_FLIGHT_MAX
            && (self.in_flight == 0 || self.in_flight_bytes + bytes <= self.budget.client())
    }

    /// Takes the memory for `bytes` more in flight from the budget. Returns false if the budget is
    /// spent; the thread is then woken when memory may be available.
    fn borrow(&mut self, bytes: u64) -> bool {
        let needed = (self.in_flight_bytes + bytes).saturating_sub(ALLOWANCE);
        let missing = needed.saturating_sub(self.borrowed);
        if missing > 0 && !self.budget.take(missing, self.export.borrowed(), &self.control) {
            self.awaits_budget = true;
            return false;
        }
        self.borrowed += missing;
        true
    }

    /// Receives the available bytes of the socket. Returns whether there were any.
    pub(super) fn receive(&mut self, reactor: &mut Reactor) -> bool {
        if self.readable_watched || self.exchange.is_receiving() || !self.accepts_input() {
            return false;
        }
        if self.begin > 0 && self.input.len() - self.end < self.input.len() / 2 {
            self.input.copy_within(self.begin..self.end, 0);
            self.end -= self.begin;
            self.begin = 0;
        }
        let payload = match &mut self.partial {
            Some(Partial { request, filled, .. }) => {
                &mut request.buffers.owned_mut().unwrap_or_default()[*filled..]
            }
            None => &mut [],
        };
        let wanted = payload.len();
        let room = wanted + self.input.len() - self.end;
        let count = match self.channel.receive(payload, &mut self.input[self.end..]) {
            Ok(0) => {
                // An incomplete request needs no reply.
                self.lose(Ending::Lost(io::ErrorKind::UnexpectedEof.into()));
                return true;
            }
            Ok(count) => count,
            Err(error) if is_blocked(&error) => {
                self.drained = true;
                return false;
            }
            Err(error) => {
                self.lose(Ending::Lost(error));
                return true;
            }
        };
        self.drained = count < room;
        if let Some(partial) = &mut self.partial {
            partial.filled += count.min(wanted);
            if count >= wanted {
                let partial = self.partial.take();
                self.end += count - wanted;
                if let Some(Partial { request, .. }) = partial {
                    self.stack.submit(request, reactor);
                }
            }
        } else {
            self.end += count;
        }
        self.unparsed = true;
        true
    }

    /// Submits the requests that have arrived, at most a batch.
    pub(super) fn parse(&mut self, reactor: &mut Reactor) {
        self.unparsed = false;
        let mut submitted = 0;
        let batch = self.batch();
        while self.partial.is_none() && self.phase == Phase::Open && !self.stack.is_closing() {
            if let Some(refused) = &mut self.refused {
                let count = refused.left.min((self.end - self.begin) as u64);
                refused.left -= count;
                self.begin += count as usize;
                if refused.left > 0 {
                    break;
                }
                if let Some(Refused { header, error, text, .. }) = self.refused.take() {
                    self.in_flight += 1;
                    self.replies.failure(&answered(&header), error, text, 0);
                }
                continue;
            }
            let bytes = &self.input[self.begin..self.end];
            if bytes.len() < self.mode.request_length() {
                break;
            }
            let Some(header) = RequestHeader::parse(bytes, self.mode) else {
                self.close(Ending::Violation("a request without its magic"));
                break;
            };
            if !self.has_room(self.charge(&header)) {
                break;
            }
            if submitted == batch {
                self.unparsed = true;
                break;
            }
            if !self.borrow(self.charge(&header)) {
                break;
            }
            submitted += 1;
            self.begin += self.mode.request_length();
            self.begin_request(&header, reactor);
            // A refused request needs no memory.
            self.repay();
        }
        // The other requests are begun after the layers have changed.
        self.closing |= self.stack.is_closing();
        if self.begin == self.end {
            self.begin = 0;
            self.end = 0;
        }
    }

    /// The number of requests to begin before replies are processed: half of those that wait.
    ///
    /// If many wait, the server is slower than its client, which sleeps until there is a reply. A
    /// wake-up of the client costs as much as several requests, so few replies at a time would keep
    /// the server slower.
    fn batch(&self) -> usize {
        let bytes = &self.input[self.begin..self.end];
        let Some(first) = RequestHeader::parse(bytes, self.mode) else { return BATCH_MIN };
        let payload = if first.command == command::WRITE { first.length } else { 0 };
        let length = payload.saturating_add(self.mode.request_length() as u64);
        let batch_max = if self.seat.is_alone() { usize::MAX } else { BATCH_SHARED_MAX };
        (bytes.len() as u64 / length / 2).clamp(BATCH_MIN as u64, batch_max as u64) as usize
    }

    fn begin_request(&mut self, header: &RequestHeader, reactor: &mut Reactor) {
        if header.command == command::DISCONNECT {
            self.disconnect_received = true;
            self.close(Ending::Orderly);
            return;
        }
        if let Err((error, text)) = self.check(header) {
            self.refuse(header, error, text);
            return;
        }
        if header.command == command::BLOCK_STATUS {
            return self.begin_status(header, reactor);
        }
        let mut request = self.stack.request();
        request.offset = header.offset;
        request.length = header.length;
        let flags = header.flags;
        // If the stack does not support forced unit access, `finish` sends a flush after the
        // request.
        request.flags.force_unit_access =
            flags & flag::FUA != 0 && self.stack.capabilities().force_unit_access;
        match header.command {
            command::READ | command::CACHE => {
                request.operation = Operation::Read;
                request.flags.force_unit_access = false;
                request.buffers.allocate(header.length as usize);
            }
            command::WRITE => {
                request.operation = Operation::Write;
                request.buffers.allocate(header.length as usize);
            }
            command::TRIM => request.operation = Operation::Discard,
            command::WRITE_ZEROES => {
                request.operation = Operation::WriteZeroes;
                request.flags.keep_allocated = flags & flag::NO_HOLE != 0;
                request.flags.only_if_fast = flags & flag::FAST_ZERO != 0;
            }
            _ => {
                request.operation = Operation::Flush;
                request.flags.force_unit_access = false;
                request.offset = 0;
                request.length = 0;
            }
        }
        let slot = self.slot(header);
        request.token = u64::from(slot);
        if header.command != command::WRITE {
            self.stack.submit(request, reactor);
            return;
        }
        self.bytes_written += header.length;
        let payload = request.buffers.owned_mut().unwrap_or_default();
        let count = payload.len().min(self.end - self.begin);
        payload[..count].copy_from_slice(&self.input[self.begin..self.begin + count]);
        self.begin += count;
        if count == payload.len() {
            self.stack.submit(request, reactor);
        } else {
            self.partial = Some(Partial { slot, request, filled: count });
            self.progress_ns = self.stack.now_ns();
        }
    }

    /// Checks a request before any part of the disk receives it. Returns the error number and its
    /// text.
    fn check(&self, header: &RequestHeader) -> Result<(), (u32, &'static str)> {
        let invalid = |text| Err((error::INVALID, text));
        let (known, data) = match header.command {
            command::READ => (flag::FUA | flag::DF, true),
            command::WRITE | command::CACHE => (flag::FUA, true),
            command::FLUSH => return self.check_flush(header),
            command::TRIM => (flag::FUA, false),
            command::WRITE_ZEROES => (flag::FUA | flag::NO_HOLE | flag::FAST_ZERO, false),
            command::BLOCK_STATUS => (flag::FUA | flag::REQUEST_ONE, false),
            _ => return invalid("unknown command"),
        };
        let payload = self.mode == Mode::Extended && header.command == command::WRITE;
        let known = if payload { known | flag::PAYLOAD_LENGTH } else { known };
        if header.flags & !known != 0 {
            return invalid("unknown flags");
        }
        if header.command == command::BLOCK_STATUS {
            self.status.check()?;
        }
        if header.length == 0 {
            return invalid("empty range");
        }
        if data && header.length > REQUEST_LENGTH_MAX {
            return invalid("too long");
        }
        let capacity = self.export.disk().capacity();
        if header.offset.checked_add(header.length).is_none_or(|end| end > capacity) {
            let writes = matches!(header.command, command::WRITE | command::WRITE_ZEROES);
            let number = if writes { error::NO_SPACE } else { error::INVALID };
            return Err((number, "out of range"));
        }
        Ok(())
    }

    fn check_flush(&self, header: &RequestHeader) -> Result<(), (u32, &'static str)> {
        if header.flags & !flag::FUA != 0 {
            return Err((error::INVALID, "unknown flags"));
        }
        if !self.stack.capabilities().flush {
            return Err((error::INVALID, "unsupported"));
        }
        Ok(())
    }

    /// Refuses a request after its payload has been dropped.
    fn refuse(&mut self, header: &RequestHeader, error: u32, text: &'static str) {
        let announced = self.mode == Mode::Extended && header.flags & flag::PAYLOAD_LENGTH != 0;
        let left = if header.command == command::WRITE || announced { header.length } else { 0 };
        if left > REFUSED_PAYLOAD_MAX {
            self.close(Ending::Violation("a payload far longer than allowed"));
            return;
        }
        self.refused = Some(Refused { left, header: *header, error, text });
    }

    pub(super) fn slot(&mut self, header: &RequestHeader) -> u32 {
        let slot = Slot { header: *header, charged: self.charge(header), flushing: false };
        self.in_flight += 1;
        self.in_flight_bytes += slot.charged;
        if let Some(index) = self.free.pop() {
            self.slots[index as usize] = slot;
            return index;
        }
        self.slots.push(slot);
        self.slots.len() as u32 - 1
    }

    /// Frees the slot of a request that will not be answered.
    pub(super) fn release(&mut self, index: u32) {
        self.free.push(index);
        self.in_flight -= 1;
        self.in_flight_bytes -= self.slots[index as usize].charged;
        self.repay();
    }
}
