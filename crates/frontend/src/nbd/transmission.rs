//! The transmission phase: requests in, replies out, on a thread that serves one or more
//! connections of a disk.
//!
//! Each round receives the available bytes of the socket, submits every complete request, and sends
//! every ready reply in one system call. Replies are sent in the order of completion. The requests
//! that a client may have in flight are bounded in number and bytes (see `budget`). At the limit
//! its socket is not read, so the client waits as it would for a slow disk.
//!
//! A thread that serves one connection reads its socket repeatedly while there is work, and leaves
//! the wait for more to the kernel, together with the last replies (see `exchange`). A thread that
//! serves several has the kernel watch the sockets that had no more bytes.

mod exchange;
mod intake;
mod leaving;
mod outcome;
mod status;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{Clock, REQUEST_LENGTH_MAX, Request, RequestSource, Stack};
use fathom_reactor::{Event, OperationOwner, OwnerGroup, Reactor};

use super::budget::{ALLOWANCE, RequestBudget};
use super::channel::{Channel, is_blocked};
use super::connection::Presence;
use super::control::Control;
use super::exports::Export;
use super::negotiation::Agreement;
use super::reply::{Answered, Replies};
use super::threads::Seat;
use super::wire::{Mode, RequestHeader, command};
use exchange::Exchange;
use status::BlockStatus;

/// The length of the buffer that small requests are received into, in bytes.
const INPUT_LENGTH: usize = 128 << 10;
/// How long a connection that is being closed waits for a client that reads no replies.
const LINGER_NS: u64 = 5_000_000_000;
/// How long a closed connection waits for the client to disconnect, so that a reset does not
/// destroy its last replies.
const HANG_UP_NS: u64 = 1_000_000_000;

/// How long a client may keep memory that others wait for while it reads nothing of a reply, or
/// sends nothing of an announced payload.
const WITHHOLDING_NS: u64 = 4_000_000_000;
/// The additional time for each MiB of the reply or payload: a client is in time at 8 MiB a second.
const WITHHOLDING_NS_PER_MIB: u64 = 125_000_000;
/// The interval between checks whether other clients wait.
const WITHHOLDING_CHECK_NS: u64 = 1_000_000_000;

/// The longest time that a thread polls for work before it sleeps, in nanoseconds: one or two round
/// trips of a client on the same host.
pub(super) const SPIN_NS: u64 = 30_000;
/// The number of polls for work for each read of the client's socket.
const POLLS_PER_READ: u32 = 16;

const SOCKET_READABLE: u64 = 1;
const SOCKET_WRITABLE: u64 = 2;
const WOKEN: u64 = 3;
const HUNG_UP: u64 = 4;
const RECEIVED: u64 = 5;
const SENT: u64 = 6;

/// How a connection ended.
#[derive(Debug)]
pub enum Ending {
    /// The client disconnected, or the connection was stopped.
    Orderly,
    /// The connection broke, or the socket failed.
    Lost(io::Error),
    /// The client violated the protocol.
    Violation(&'static str),
    /// The thread has failed: there is no ring or no queue.
    Unable(io::Error),
}

/// The state of a request in flight.
#[derive(Clone, Copy, Debug)]
struct Slot {
    header: RequestHeader,
    charged: u64,
    /// Whether the request itself has completed and its flush is in flight.
    flushing: bool,
}

/// A write whose payload is still arriving.
struct Partial {
    slot: u32,
    request: Box<Request>,
    filled: usize,
}

/// A refused request whose payload has yet to be dropped.
struct Refused {
    left: u64,
    header: RequestHeader,
    error: u32,
    text: &'static str,
}

/// The phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Requests are read.
    Open,
    /// No more requests are read; those in flight are completed and answered.
    Closing { since_ns: u64 },
    /// Everything is answered; the client has time to disconnect.
    Parting { since_ns: u64 },
    /// The connection is lost; requests in flight are completed without replies.
    Lost,
}

/// One connection in its transmission phase.
pub struct Transmission {
    channel: Channel,
    control: Arc<Control>,
    export: Arc<Export>,
    mode: Mode,
    group: OwnerGroup,
    owner: OperationOwner,
    stack: Stack,
    status: BlockStatus,
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
    budget: Arc<RequestBudget>,
    /// The part of the bytes in flight that was taken from the budget.
    borrowed: u64,
    /// Whether the next request waits for memory of the budget.
    awaits_budget: bool,
    /// Since when the socket has been transferring the current reply or payload, in nanoseconds.
    progress_ns: u64,
    /// Whether the last attempt to send was incomplete.
    blocked_before: bool,
    answered: u64,
    /// The number of answered requests that other threads know of.
    published: u64,
    bytes_read: u64,
    bytes_written: u64,
    phase: Phase,
    /// Whether the layers of the disk are changing, so that requests wait.
    closing: bool,
    /// Whether the client has sent a disconnect request, so that no more bytes of it can arrive.
    disconnect_received: bool,
    readable_watched: bool,
    writable_watched: bool,
    blocked: bool,
    exchange: Exchange,
    /// Requests that were taken back from the disk's layers, because these change.
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    deferred: Vec<Box<Request>>,
    /// Whether the client has closed its side of the socket.
    hung_up: bool,
    /// The client's number among those of the disk.
    client: u64,
    /// Whether the input may hold a request that can be begun now.
    unparsed: bool,
    /// Whether the last read of the socket received all available bytes: the socket is read again
    /// once it is watched or polled.
    drained: bool,
    /// Whether requests were taken in this round.
    took: bool,
    polls: u32,
    ended: bool,
    /// Whether the thread's ring has failed.
    failed: bool,
    // After the stack: the disk is released before the export and the listener see the end.
    presence: Presence,
    seat: Seat,
}

impl Transmission {
    /// Opens the export's disk on the thread of `seat`. `left_over` is the input that arrived after
    /// the handshake.
    ///
    /// # Errors
    /// When the disk cannot be opened.
    pub(super) fn new(
        channel: Channel,
        agreement: &Agreement<Arc<Export>>,
        presence: Presence,
        left_over: &[u8],
        seat: Seat,
        reactor: &mut Reactor,
    ) -> io::Result<Self> {
        let export = Arc::clone(&agreement.export);
        let control = Arc::clone(presence.control());
        let budget = Arc::clone(&presence.shared().budget);
        let group = reactor.group();
        let owner = reactor.register();
        let stack = export.disk().open_queue(reactor, Clock::System)?;
        let status = BlockStatus::open(&export, &agreement.contexts, reactor)?;
        reactor.watch_always(owner, WOKEN, control.borrow());
        reactor.watch_hang_up(owner, HUNG_UP, channel.descriptor()?);
        let client = export.disk().leftovers().client();
        let exchange = Exchange::new(&channel, reactor);
        let mut input = vec![0; INPUT_LENGTH.max(left_over.len())].into_boxed_slice();
        input[..left_over.len()].copy_from_slice(left_over);
        Ok(Self {
            channel,
            control,
            export,
            mode: agreement.mode,
            group,
            owner,
            stack,
            status,
            input,
            begin: 0,
            end: left_over.len(),
            partial: None,
            refused: None,
            slots: Vec::with_capacity(64),
            free: Vec::with_capacity(64),
            replies: Replies::new(agreement.mode),
            in_flight: 0,
            in_flight_bytes: 0,
            budget,
            borrowed: 0,
            awaits_budget: false,
            progress_ns: 0,
            blocked_before: false,
            answered: 0,
            published: 0,
            bytes_read: 0,
            bytes_written: 0,
            phase: Phase::Open,
            closing: false,
            disconnect_received: false,
            hung_up: false,
            deferred: Vec::new(),
            client,
            readable_watched: false,
            writable_watched: false,
            blocked: false,
            exchange,
            unparsed: true,
            drained: false,
            took: false,
            polls: 0,
            ended: false,
            failed: false,
            presence,
            seat,
        })
    }

    /// Whether the connection has no more work.
    fn is_finished(&self) -> bool {
        match self.phase {
            Phase::Open | Phase::Parting { .. } => false,
            Phase::Lost => self.is_idle() && self.deferred.is_empty(),
            Phase::Closing { since_ns } => {
                let unanswered = !self.is_idle()
                    || !self.deferred.is_empty()
                    || !self.replies.is_empty()
                    || self.channel.has_staged();
                !unanswered
                    || self.is_idle() && self.stack.now_ns().saturating_sub(since_ns) > LINGER_NS
            }
        }
    }

    /// Whether no request is in flight.
    fn is_idle(&self) -> bool {
        self.stack.in_flight() == 0 && self.status.in_flight() == 0
    }

    /// The number of bytes of the connection's budget that a request takes.
    fn charge(&self, header: &RequestHeader) -> u64 {
        match header.command {
            command::READ | command::WRITE | command::CACHE => {
                header.length.min(REQUEST_LENGTH_MAX)
            }
            command::BLOCK_STATUS => self.status.charge(),
            _ => 0,
        }
    }

    fn close(&mut self, ending: Ending) {
        self.presence.end(ending);
        // An incomplete write was never submitted.
        if let Some(Partial { slot, request, .. }) = self.partial.take() {
            self.stack.recycle(request);
            self.release(slot);
        }
        self.refused = None;
        if self.phase == Phase::Open {
            self.phase = Phase::Closing { since_ns: self.stack.now_ns() };
            self.leave_behind();
        }
    }

    fn lose(&mut self, ending: Ending) {
        self.close(ending);
        self.phase = Phase::Lost;
    }

    /// Gives back the memory of the budget that is no longer needed.
    fn repay(&mut self) {
        let needed = self.in_flight_bytes.saturating_sub(ALLOWANCE);
        if self.borrowed > needed {
            self.budget.give(self.borrowed - needed, self.export.borrowed());
            self.borrowed = needed;
        }
    }

    /// The time by which a client that holds memory of the budget must complete the current reply
    /// or payload, in nanoseconds of the stack's clock. `None` if it holds none, or if
    /// the server does not wait for it.
    fn withholding_limit_ns(&self) -> Option<u64> {
        if self.borrowed == 0 || self.phase == Phase::Lost {
            return None;
        }
        let length = match &self.partial {
            Some(partial) => partial.request.length,
            None if self.blocked => self.replies.first_length(),
            None => return None,
        };
        let time_ns = WITHHOLDING_NS + length.saturating_mul(WITHHOLDING_NS_PER_MIB) / (1 << 20);
        Some(self.progress_ns.saturating_add(time_ns))
    }

    /// Shuts the channel down, and leaves the client some time to disconnect.
    fn part(&mut self) {
        if self.phase == Phase::Lost {
            self.ended = true;
            return;
        }
        self.channel.shut();
        self.ended = self.disconnect_received;
        self.phase = Phase::Parting { since_ns: self.stack.now_ns() };
        self.drained = false;
    }

    /// Drops the bytes that the client still sends, until it disconnects. Returns whether there
    /// were any.
    fn discard(&mut self, since_ns: u64) -> bool {
        self.ended |= self.stack.now_ns().saturating_sub(since_ns) > HANG_UP_NS;
        if self.ended || self.drained || self.readable_watched || self.exchange.is_receiving() {
            return false;
        }
        match self.channel.receive(&mut [], &mut self.input) {
            Err(error) if is_blocked(&error) => self.drained = true,
            Ok(0) | Err(_) => self.ended = true,
            Ok(_) => return true,
        }
        false
    }

    /// Has the kernel watch the socket for the events that the connection waits for.
    fn watch(&mut self, reactor: &mut Reactor) {
        let parting = matches!(self.phase, Phase::Parting { .. });
        let readable = (parting || self.accepts_input())
            && !self.readable_watched
            && !self.exchange.is_receiving();
        let writable = self.blocked
            && matches!(self.phase, Phase::Open | Phase::Closing { .. })
            && !self.writable_watched;
        if !readable && !writable {
            return;
        }
        let descriptor = match self.channel.descriptor() {
            Ok(descriptor) => descriptor,
            Err(error) => return self.lose(Ending::Lost(error)),
        };
        if readable {
            self.readable_watched = true;
            reactor.watch(self.owner, SOCKET_READABLE, descriptor);
        }
        if writable {
            self.writable_watched = true;
            reactor.watch_writable(self.owner, SOCKET_WRITABLE, descriptor);
        }
    }

    /// Resumes parsing once the layers of the disk have changed. Returns whether that is so.
    fn change_layers(&mut self) -> bool {
        let was_closing = std::mem::replace(&mut self.closing, self.stack.is_closing());
        let resumes = was_closing && !self.closing;
        self.unparsed |= resumes;
        resumes
    }

    /// Publishes the counters for other threads, as if the next `sending` replies had been sent.
    fn publish(&mut self, sending: usize) {
        // A counter never falls.
        self.published = self.published.max(self.answered + sending as u64);
        self.control.requests.store(self.published, Ordering::Relaxed);
        self.control.bytes_read.store(self.bytes_read, Ordering::Relaxed);
        self.control.bytes_written.store(self.bytes_written, Ordering::Relaxed);
        let in_flight = self.in_flight.saturating_sub(sending);
        self.control.in_flight.store(in_flight as u64, Ordering::Relaxed);
    }
}

impl RequestSource for Transmission {
    fn stack(&mut self) -> &mut Stack {
        &mut self.stack
    }

    fn further_stacks(&mut self) -> &mut [Stack] {
        &mut self.status.stacks
    }

    fn group(&self) -> OwnerGroup {
        self.group
    }

    fn take(&mut self, reactor: &mut Reactor) -> bool {
        if let Phase::Parting { since_ns } = self.phase {
            return self.discard(since_ns);
        }
        if self.exchange.is_sending() {
            return false;
        }
        if !self.unparsed && (self.drained || !self.receive(reactor)) {
            return false;
        }
        if self.unparsed {
            self.parse(reactor);
        }
        self.took = true;
        if let Err(error) = self.stack.run_round(reactor) {
            self.fail(&error);
        }
        true
    }

    fn give(&mut self, reactor: &mut Reactor) -> bool {
        if !self.settle(reactor) {
            return true;
        }
        self.take_back(reactor);
        let mut busy = self.reap(reactor);
        if busy {
            // Completed writes may have queued flushes.
            if let Err(error) = self.stack.run_round(reactor) {
                self.fail(&error);
            }
        }
        if !self.blocked && !self.holds_replies() {
            busy |= self.send();
        }
        let took = std::mem::take(&mut self.took);
        if busy || took {
            self.publish(0);
        }
        if !self.seat.is_alone() {
            if self.drained || self.blocked {
                self.watch(reactor);
            }
        } else if !self.is_idle() && (busy || took) {
            // While the disk works, new requests must not wait for its completions.
            self.drained = false;
        }
        if !busy {
            busy = self.change_layers();
        }
        if !self.deferred.is_empty() {
            busy |= self.repeat_deferred(reactor);
        }
        if !busy && !self.ended && self.is_finished() {
            self.part();
            busy = true;
        }
        if self.ended {
            self.stop_receiving(reactor);
        }
        busy
    }

    fn signal(&mut self, event: &Event, reactor: &mut Reactor) {
        match event.token {
            SOCKET_READABLE => {
                self.readable_watched = false;
                self.drained = false;
            }
            RECEIVED => self.received(event.result),
            SENT => self.sent(event.result),
            HUNG_UP => self.hung_up = true,
            SOCKET_WRITABLE => {
                self.writable_watched = false;
                self.blocked = false;
            }
            WOKEN => {
                self.control.awake();
                if !event.more {
                    reactor.watch_always(self.owner, WOKEN, self.control.borrow());
                }
                if self.control.is_stopping() && self.phase == Phase::Open {
                    self.close(Ending::Orderly);
                }
                // Memory may be available now.
                self.unparsed |= std::mem::take(&mut self.awaits_budget);
            }
            _ => {}
        }
    }

    fn is_ready(&mut self, reactor: &mut Reactor) -> bool {
        self.polls = self.polls.wrapping_add(1);
        self.polls % POLLS_PER_READ == 0 && self.seat.is_alone() && self.receive(reactor)
    }

    fn rest(&mut self, now_ns: u64, reactor: &mut Reactor) -> u64 {
        if self.exchange(reactor) {
            return now_ns;
        }
        let mut deadline_ns = match self.phase {
            Phase::Open | Phase::Lost => u64::MAX,
            // After that, only requests in flight are waited for.
            Phase::Closing { since_ns } if now_ns > since_ns + LINGER_NS => u64::MAX,
            Phase::Closing { since_ns } => since_ns + LINGER_NS + 1,
            Phase::Parting { since_ns } => since_ns + HANG_UP_NS + 1,
        };
        if let Some(limit_ns) = self.withholding_limit_ns() {
            if limit_ns <= now_ns && self.budget.has_waiters() {
                self.lose(Ending::Violation("it held memory that other clients waited for"));
                return now_ns;
            }
            deadline_ns = deadline_ns.min(limit_ns.max(now_ns + WITHHOLDING_CHECK_NS));
        }
        if !self.seat.is_alone() {
            self.watch(reactor);
        }
        if self.change_layers() || self.defer(reactor) {
            return now_ns;
        }
        deadline_ns
    }

    fn arm(&mut self, reactor: &mut Reactor) -> bool {
        self.watch(reactor);
        false
    }

    fn disarm(&mut self) {}

    fn fail(&mut self, error: &io::Error) {
        self.lose(Ending::Unable(io::Error::new(error.kind(), error.to_string())));
        self.ended = true;
        self.failed = true;
    }

    fn is_ended(&self) -> bool {
        self.ended && (self.failed || !self.exchange.is_receiving())
    }
}

impl Drop for Transmission {
    fn drop(&mut self) {
        self.publish(0);
        self.leave_exchange();
        self.end_leftovers();
        self.budget.give(self.borrowed, self.export.borrowed());
        self.budget.leave(&self.control);
    }
}

fn answered(header: &RequestHeader) -> Answered {
    Answered {
        cookie: header.cookie,
        offset: header.offset,
        structured: matches!(header.command, command::READ | command::BLOCK_STATUS),
    }
}
