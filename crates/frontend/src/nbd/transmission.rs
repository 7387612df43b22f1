//! The transmission phase: requests in, replies out, by one thread that sleeps in its reactor.
//!
//! Each round takes what the socket has, submits every complete request, and sends every reply
//! that is ready in one system call. Replies leave in the order of completion. What a client may
//! have in flight is bounded in number and bytes; beyond the bound its socket is not read, so it
//! waits as it would for a slow disk.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fathom_block::{Clock, ErrorKind, Operation, Outcome, REQUEST_LENGTH_MAX, Request, Stack};
use fathom_reactor::{Event, Owner, Reactor};

use super::channel::{Channel, is_blocked};
use super::control::Control;
use super::exports::Export;
use super::reply::{Answered, Replies};
use super::spin::Spin;
use super::wire::{Mode, RequestHeader, command, error, flag};

/// The memory that small requests are received into, in bytes.
const INPUT_LENGTH: usize = 128 << 10;
/// The bytes that one connection may have in flight.
const IN_FLIGHT_BYTES_MAX: u64 = 64 << 20;
/// The requests that one connection may have in flight.
const IN_FLIGHT_MAX: usize = 1024;
/// A payload that is refused is read and dropped up to this length; a longer one is taken for an
/// attack, in bytes.
const REFUSED_PAYLOAD_MAX: u64 = 64 << 20;
/// The requests that are begun before replies are looked after: small, so that a client takes up
/// the first replies while the server works on the rest of what it sent.
const BATCH: usize = 4;
/// The entries of the thread's ring.
const RING_ENTRIES: u32 = 128;
/// How long a connection that is being closed waits for a client that takes no replies.
const LINGER_NS: u64 = 5_000_000_000;
/// How long a closed connection waits for the client to hang up, so that its last replies are not
/// lost to a reset.
const HANG_UP_NS: u64 = 1_000_000_000;

const SOCKET_READABLE: u64 = 1;
const SOCKET_WRITABLE: u64 = 2;
const WOKEN: u64 = 3;

/// How a connection came to its end.
#[derive(Debug)]
pub enum Ending {
    /// The client left, or was asked to.
    Orderly,
    /// The client vanished, or the socket failed.
    Lost(io::Error),
    /// The client broke the protocol.
    Violation(&'static str),
    /// The thread itself cannot go on: no ring, no queue.
    Unable(io::Error),
}

/// What is remembered of a request in flight.
#[derive(Clone, Copy, Debug)]
struct Slot {
    header: RequestHeader,
    charged: u64,
    /// The request itself is done, and its flush is under way.
    flushing: bool,
}

/// A write whose payload is still arriving.
struct Partial {
    slot: u32,
    request: Box<Request>,
    filled: usize,
}

/// A payload that is dropped before its request is refused.
struct Refused {
    left: u64,
    header: RequestHeader,
    error: u32,
    text: &'static str,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Requests are read.
    Open,
    /// No more requests are read; what is in flight is answered.
    Closing { since_ns: u64 },
    /// Nobody is there to be answered; what is in flight is waited for.
    Gone,
}

/// One connection in its transmission phase.
pub struct Transmission {
    channel: Channel,
    control: Arc<Control>,
    export: Arc<Export>,
    base_allocation: bool,
    mode: Mode,
    reactor: Reactor,
    owner: Owner,
    stack: Stack,
    events: Vec<Event>,
    input: Box<[u8]>,
    begin: usize,
    end: usize,
    partial: Option<Partial>,
    refused: Option<Refused>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    replies: Replies,
    in_flight: usize,
    in_flight_bytes: u64,
    answered: u64,
    bytes_read: u64,
    bytes_written: u64,
    phase: Phase,
    ending: Option<Ending>,
    restack: bool,
    /// The client asked to leave, so nothing of it can still be on its way.
    bidden: bool,
    readable_watched: bool,
    writable_watched: bool,
    blocked: bool,
    /// The input may hold a request that can be begun now.
    unparsed: bool,
    /// The socket had no more to give when it was last read: it is read again once it is watched
    /// or looked at.
    drained: bool,
    spin: Spin,
}

impl Transmission {
    /// Opens the export's disk for this thread. `left_over` is what arrived behind the handshake.
    ///
    /// # Errors
    /// When there is no ring or no queue to be had.
    pub fn new(
        channel: Channel,
        control: Arc<Control>,
        export: Arc<Export>,
        mode: Mode,
        base_allocation: bool,
        left_over: &[u8],
    ) -> io::Result<Self> {
        let mut reactor = Reactor::new(RING_ENTRIES)?;
        let owner = reactor.register();
        let stack = export.disk().open_queue(&mut reactor, Clock::System)?;
        reactor.watch_always(owner, WOKEN, control.borrow());
        let mut input = vec![0; INPUT_LENGTH.max(left_over.len())].into_boxed_slice();
        input[..left_over.len()].copy_from_slice(left_over);
        Ok(Self {
            channel,
            control,
            export,
            base_allocation,
            mode,
            reactor,
            owner,
            stack,
            events: Vec::with_capacity(64),
            input,
            begin: 0,
            end: left_over.len(),
            partial: None,
            refused: None,
            slots: Vec::with_capacity(64),
            free: Vec::with_capacity(64),
            replies: Replies::new(mode),
            in_flight: 0,
            in_flight_bytes: 0,
            answered: 0,
            bytes_read: 0,
            bytes_written: 0,
            phase: Phase::Open,
            ending: None,
            restack: false,
            bidden: false,
            readable_watched: false,
            writable_watched: false,
            blocked: false,
            unparsed: true,
            drained: false,
            spin: Spin::default(),
        })
    }

    /// Serves the client until it leaves, vanishes, breaks the protocol, or is asked to leave.
    pub fn run(mut self) -> Ending {
        let result = self.serve();
        // Whatever happened: the memory of requests in flight is the disk's until they are back.
        while self.stack.in_flight() > 0 {
            if self.await_stack().is_err() {
                // The ring is broken. Leaving the memory to it is the only safe way out.
                std::mem::forget(self);
                return Ending::Unable(io::Error::other("the ring failed with requests in flight"));
            }
        }
        match result {
            Ok(()) => self.ending.unwrap_or(Ending::Orderly),
            Err(error) => Ending::Unable(error),
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            let mut progress = self.unparsed || !self.drained && self.receive();
            if self.unparsed {
                self.parse();
            }
            progress |= self.turn_stack()?;
            if self.reactor.is_ready() {
                progress |= self.collect()?;
            }
            progress |= self.reap();
            if !self.blocked {
                progress |= self.send();
            }
            if progress {
                continue;
            }
            if self.restack && self.stack.in_flight() == 0 {
                self.restack = false;
                let disk = Arc::clone(self.export.disk());
                self.stack = disk.open_queue(&mut self.reactor, Clock::System)?;
                self.unparsed = true;
                continue;
            }
            self.publish();
            if self.is_over() {
                return self.hang_up();
            }
            self.idle()?;
        }
    }

    /// Lets the disk make its round and hands over what it queued.
    fn turn_stack(&mut self) -> io::Result<bool> {
        self.stack.advance(&mut self.reactor);
        if self.reactor.has_unsubmitted() {
            self.reactor.submit()?;
        }
        Ok(self.stack.has_completed())
    }

    /// Whether nothing is left to be done.
    fn is_over(&self) -> bool {
        match self.phase {
            Phase::Open => false,
            Phase::Gone => self.stack.in_flight() == 0,
            Phase::Closing { since_ns } => {
                let unanswered = self.stack.in_flight() > 0
                    || !self.replies.is_empty()
                    || self.channel.has_staged();
                !unanswered
                    || self.stack.in_flight() == 0
                        && self.stack.now_ns().saturating_sub(since_ns) > LINGER_NS
            }
        }
    }

    fn close(&mut self, ending: Ending) {
        if self.ending.is_none() {
            self.ending = Some(ending);
        }
        if self.phase == Phase::Open {
            self.phase = Phase::Closing { since_ns: self.stack.now_ns() };
        }
        // A request that has not arrived in full was never begun.
        if let Some(Partial { slot, request, .. }) = self.partial.take() {
            self.stack.recycle(request);
            self.release(slot);
        }
        self.refused = None;
    }

    fn lose(&mut self, ending: Ending) {
        self.close(ending);
        self.phase = Phase::Gone;
    }

    /// Whether more may be read from the client now.
    fn wants_input(&self) -> bool {
        self.phase == Phase::Open
            && !self.restack
            && self.has_room(0)
            && self.end - self.begin < self.input.len()
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.in_flight < IN_FLIGHT_MAX
            && (self.in_flight == 0 || self.in_flight_bytes + bytes <= IN_FLIGHT_BYTES_MAX)
    }

    /// Takes what the socket has. True when there was something.
    fn receive(&mut self) -> bool {
        if self.readable_watched || !self.wants_input() {
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
                // Bytes of a request that never came in full are nothing to be answered.
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
                    self.stack.submit(request, &mut self.reactor);
                }
            }
        } else {
            self.end += count;
        }
        self.unparsed = true;
        true
    }

    /// Submits the requests that have arrived, a batch at most.
    fn parse(&mut self) {
        self.unparsed = false;
        let mut submitted = 0;
        while self.partial.is_none() && self.phase == Phase::Open && !self.restack {
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
            if !self.has_room(charge(&header)) {
                break;
            }
            if submitted == BATCH {
                self.unparsed = true;
                break;
            }
            submitted += 1;
            self.begin += self.mode.request_length();
            self.begin_request(&header);
        }
        if self.begin == self.end {
            self.begin = 0;
            self.end = 0;
        }
    }

    fn begin_request(&mut self, header: &RequestHeader) {
        if header.command == command::DISCONNECT {
            self.bidden = true;
            self.close(Ending::Orderly);
            return;
        }
        if let Err((error, text)) = self.check(header) {
            self.refuse(header, error, text);
            return;
        }
        let mut request = self.stack.request();
        request.offset = header.offset;
        request.length = header.length;
        let flags = header.flags;
        // Whether a stack without this offer gets a flush behind the request is decided later.
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
            command::BLOCK_STATUS => {
                request.operation = Operation::Extents;
                request.flags.force_unit_access = false;
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
            self.stack.submit(request, &mut self.reactor);
            return;
        }
        self.bytes_written += header.length;
        let payload = request.buffers.owned_mut().unwrap_or_default();
        let count = payload.len().min(self.end - self.begin);
        payload[..count].copy_from_slice(&self.input[self.begin..self.begin + count]);
        self.begin += count;
        if count == payload.len() {
            self.stack.submit(request, &mut self.reactor);
        } else {
            self.partial = Some(Partial { slot, request, filled: count });
        }
    }

    /// What can be said against a request before any part of the disk sees it.
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
        if header.command == command::BLOCK_STATUS && !self.base_allocation {
            return invalid("no metadata context was chosen");
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

    /// Refuses a request, once its payload has been dropped.
    fn refuse(&mut self, header: &RequestHeader, error: u32, text: &'static str) {
        let announced = self.mode == Mode::Extended && header.flags & flag::PAYLOAD_LENGTH != 0;
        let left = if header.command == command::WRITE || announced { header.length } else { 0 };
        if left > REFUSED_PAYLOAD_MAX {
            self.close(Ending::Violation("a payload far longer than allowed"));
            return;
        }
        self.refused = Some(Refused { left, header: *header, error, text });
    }

    fn slot(&mut self, header: &RequestHeader) -> u32 {
        let slot = Slot { header: *header, charged: charge(header), flushing: false };
        self.in_flight += 1;
        self.in_flight_bytes += slot.charged;
        if let Some(index) = self.free.pop() {
            self.slots[index as usize] = slot;
            return index;
        }
        self.slots.push(slot);
        self.slots.len() as u32 - 1
    }

    /// Frees the slot of a request that will never be answered.
    fn release(&mut self, index: u32) {
        self.free.push(index);
        self.in_flight -= 1;
        self.in_flight_bytes -= self.slots[index as usize].charged;
    }

    /// Turns what the disk has completed into replies.
    fn reap(&mut self) -> bool {
        let mut progress = false;
        while let Some((request, outcome)) = self.stack.completed() {
            progress = true;
            self.finish(request, outcome);
        }
        progress
    }

    fn finish(&mut self, request: Box<Request>, outcome: Outcome) {
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
            self.stack.submit(flush, &mut self.reactor);
            return;
        }
        self.free.push(index);
        let answered = answered(&header);
        if self.phase == Phase::Gone {
            self.in_flight -= 1;
            self.in_flight_bytes -= charged;
            self.stack.recycle(request);
            return;
        }
        match outcome {
            Ok(()) if header.command == command::READ => {
                if request.buffers.length() == header.length {
                    self.bytes_read += header.length;
                    self.replies.data(&answered, request, charged);
                    return;
                }
                debug_assert!(false, "a request comes back with its buffers whole");
                self.replies.failure(&answered, error::IO, "incomplete", charged);
            }
            Ok(()) if header.command == command::BLOCK_STATUS => {
                if request.extents.is_empty() {
                    debug_assert!(false, "extents are never empty on success");
                    self.replies.failure(&answered, error::IO, "incomplete", charged);
                } else {
                    let one = header.flags & flag::REQUEST_ONE != 0;
                    self.replies.extents(&answered, &request.extents, one, charged);
                }
            }
            Ok(()) => self.replies.success(&answered, charged),
            Err(kind) => {
                let number = error_number(kind, &header);
                self.replies.failure(&answered, number, kind.name(), charged);
            }
        }
        self.stack.recycle(request);
    }

    /// Sends replies. True when some have left.
    fn send(&mut self) -> bool {
        if self.replies.is_empty() && !self.channel.has_staged() {
            return false;
        }
        let before = self.answered;
        let Self { replies, channel, stack, in_flight, in_flight_bytes, answered, .. } = self;
        let result = replies.send(channel, |request, charged| {
            if let Some(request) = request {
                stack.recycle(request);
            }
            *in_flight -= 1;
            *in_flight_bytes -= charged;
            *answered += 1;
        });
        match result {
            Ok(everything) => self.blocked = !everything,
            Err(error) => self.lose(Ending::Lost(error)),
        }
        let progress = self.answered > before;
        if progress && self.begin < self.end {
            // There may be room now for what had to wait.
            self.unparsed = true;
        }
        progress
    }

    /// Takes the reactor's events.
    fn collect(&mut self) -> io::Result<bool> {
        let mut events = std::mem::take(&mut self.events);
        self.reactor.collect(&mut events)?;
        let progress = !events.is_empty();
        for event in events.drain(..) {
            if event.owner != self.owner {
                self.stack.event(&event, &mut self.reactor);
                continue;
            }
            match event.token {
                SOCKET_READABLE => {
                    self.readable_watched = false;
                    self.drained = false;
                }
                SOCKET_WRITABLE => {
                    self.writable_watched = false;
                    self.blocked = false;
                }
                WOKEN => {
                    self.control.awake();
                    if !event.more {
                        self.reactor.watch_always(self.owner, WOKEN, self.control.borrow());
                    }
                    if self.control.is_stopping() && self.phase == Phase::Open {
                        self.close(Ending::Orderly);
                    }
                    self.restack |= self.control.take_restack();
                }
                _ => {}
            }
        }
        self.events = events;
        Ok(progress)
    }

    /// Looks for work a little longer, then sleeps.
    fn idle(&mut self) -> io::Result<()> {
        let limit_ns = self.spin.limit_ns();
        let start_ns = self.stack.now_ns();
        if limit_ns > 0 && !self.readable_watched {
            let mut now_ns = start_ns;
            while now_ns - start_ns < limit_ns {
                for _ in 0..8 {
                    std::hint::spin_loop();
                }
                if self.reactor.is_ready() || self.receive() {
                    return Ok(());
                }
                now_ns = self.stack.now_ns();
            }
        }
        if self.wants_input() && !self.readable_watched {
            self.readable_watched = true;
            self.reactor.watch(self.owner, SOCKET_READABLE, self.channel.descriptor()?);
        }
        if self.blocked && self.phase != Phase::Gone && !self.writable_watched {
            self.writable_watched = true;
            self.reactor.watch_writable(self.owner, SOCKET_WRITABLE, self.channel.descriptor()?);
        }
        let mut deadline_ns = self.stack.deadline_ns();
        if let Phase::Closing { since_ns } = self.phase {
            let end_ns = since_ns + LINGER_NS + 1;
            deadline_ns = Some(deadline_ns.map_or(end_ns, |deadline| deadline.min(end_ns)));
        }
        let limit = deadline_ns
            .map(|deadline_ns| Duration::from_nanos(deadline_ns.saturating_sub(start_ns)));
        self.reactor.wait(limit)?;
        self.collect()?;
        self.spin.slept(self.stack.now_ns().saturating_sub(start_ns));
        Ok(())
    }

    /// Waits for the disk alone.
    fn await_stack(&mut self) -> io::Result<()> {
        self.stack.advance(&mut self.reactor);
        while let Some((request, _)) = self.stack.completed() {
            self.stack.recycle(request);
        }
        if self.stack.in_flight() > 0 {
            let limit = self.stack.deadline_ns().map(|deadline_ns| {
                Duration::from_nanos(deadline_ns.saturating_sub(self.stack.now_ns()))
            });
            self.reactor.wait(limit)?;
            self.collect()?;
        }
        Ok(())
    }

    /// Says good-bye, and waits a little for the client to have heard it.
    fn hang_up(&mut self) -> io::Result<()> {
        if self.phase == Phase::Gone {
            return Ok(());
        }
        self.channel.shut();
        if self.bidden {
            return Ok(());
        }
        let start_ns = self.stack.now_ns();
        loop {
            match self.channel.receive(&mut [], &mut self.input) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if is_blocked(&error) => {
                    if !self.readable_watched {
                        self.readable_watched = true;
                        self.reactor.watch(self.owner, SOCKET_READABLE, self.channel.descriptor()?);
                    }
                    self.reactor.wait(Some(Duration::from_millis(100)))?;
                    self.collect()?;
                }
                Err(_) => return Ok(()),
            }
            if self.stack.now_ns().saturating_sub(start_ns) > HANG_UP_NS {
                return Ok(());
            }
        }
    }

    /// Shows others what was done.
    fn publish(&self) {
        self.control.requests.store(self.answered, Ordering::Relaxed);
        self.control.bytes_read.store(self.bytes_read, Ordering::Relaxed);
        self.control.bytes_written.store(self.bytes_written, Ordering::Relaxed);
        self.control.in_flight.store(self.in_flight as u64, Ordering::Relaxed);
    }
}

/// The bytes that a request takes of the connection's budget.
fn charge(header: &RequestHeader) -> u64 {
    match header.command {
        command::READ | command::WRITE | command::CACHE => header.length.min(REQUEST_LENGTH_MAX),
        _ => 0,
    }
}

fn answered(header: &RequestHeader) -> Answered {
    Answered {
        cookie: header.cookie,
        offset: header.offset,
        structured: matches!(header.command, command::READ | command::BLOCK_STATUS),
    }
}

/// The protocol's number for what became of a request.
fn error_number(kind: ErrorKind, header: &RequestHeader) -> u32 {
    match kind {
        ErrorKind::Io => error::IO,
        ErrorKind::NoSpace => error::NO_SPACE,
        ErrorKind::ReadOnly => error::PERMISSION,
        ErrorKind::ShuttingDown => error::SHUTDOWN,
        // The protocol allows this number for nothing else.
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
