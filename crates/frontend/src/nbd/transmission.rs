//! The transmission phase: requests in, replies out, by a thread that serves one or more
//! connections of a disk.
//!
//! Each round takes what the socket has, submits every complete request, and sends every reply
//! that is ready in one system call. Replies leave in the order of completion. What a client may
//! have in flight is bounded in number and bytes (see `budget`); beyond the bound its socket is not
//! read, so it waits as it would for a slow disk.
//!
//! A thread that serves one connection reads its socket again and again while there is work; one
//! that serves several has the kernel watch those sockets that had no more to give.

mod intake;
mod outcome;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{Clock, REQUEST_LENGTH_MAX, Request, Source, Stack};
use fathom_reactor::{Event, Group, Owner, Reactor};

use super::budget::{ALLOWANCE, Budget};
use super::channel::{Channel, is_blocked};
use super::connection::Presence;
use super::control::Control;
use super::exports::Export;
use super::negotiation::Agreement;
use super::reply::{Answered, Replies};
use super::threads::Seat;
use super::wire::{Mode, RequestHeader, command};

/// The memory that small requests are received into, in bytes.
const INPUT_LENGTH: usize = 128 << 10;
/// How long a connection that is being closed waits for a client that takes no replies.
const LINGER_NS: u64 = 5_000_000_000;
/// How long a closed connection waits for the client to hang up, so that its last replies are not
/// lost to a reset.
const HANG_UP_NS: u64 = 1_000_000_000;

/// How long a client may keep memory that others wait for while it takes nothing of a reply, or
/// sends nothing of a payload that it has announced.
const WITHHOLDING_NS: u64 = 4_000_000_000;
/// How much longer for each MiB of the reply or payload: at 8 MiB a second it is in time.
const WITHHOLDING_NS_PER_MIB: u64 = 125_000_000;
/// How often it is looked whether others have begun to wait.
const WITHHOLDING_LOOK_NS: u64 = 1_000_000_000;

/// The longest look for work before sleeping, in nanoseconds: a round trip or two of a client on the
/// same host.
pub(super) const SPIN_NS: u64 = 30_000;
/// A thread that looks for work reads its client's socket in one of so many looks.
const LOOKS: u32 = 16;

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
    /// Everything is answered; the client is given time to hang up.
    Parting { since_ns: u64 },
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
    group: Group,
    owner: Owner,
    stack: Stack,
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
    budget: Arc<Budget>,
    /// What of the bytes in flight was taken from the budget.
    borrowed: u64,
    /// The budget was spent when the next request wanted to begin.
    hungry: bool,
    /// Since when the same reply or payload is under way on the socket.
    moved_ns: u64,
    /// The last attempt to send left something.
    blocked_before: bool,
    answered: u64,
    bytes_read: u64,
    bytes_written: u64,
    phase: Phase,
    /// The layers of the disk change; requests wait for it.
    closing: bool,
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
    /// Requests were taken in this round.
    took: bool,
    looks: u32,
    ended: bool,
    // Behind the stack: the disk is let go of before others learn that the connection is gone.
    presence: Presence,
    seat: Seat,
}

impl Transmission {
    /// Opens the export's disk on the thread of `seat`. `left_over` is what arrived behind the
    /// handshake.
    ///
    /// # Errors
    /// When there is no queue to be had.
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
        reactor.watch_always(owner, WOKEN, control.borrow());
        let mut input = vec![0; INPUT_LENGTH.max(left_over.len())].into_boxed_slice();
        input[..left_over.len()].copy_from_slice(left_over);
        Ok(Self {
            channel,
            control,
            export,
            base_allocation: agreement.base_allocation,
            mode: agreement.mode,
            group,
            owner,
            stack,
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
            hungry: false,
            moved_ns: 0,
            blocked_before: false,
            answered: 0,
            bytes_read: 0,
            bytes_written: 0,
            phase: Phase::Open,
            closing: false,
            bidden: false,
            readable_watched: false,
            writable_watched: false,
            blocked: false,
            unparsed: true,
            drained: false,
            took: false,
            looks: 0,
            ended: false,
            presence,
            seat,
        })
    }

    /// Whether nothing is left to be done.
    fn is_over(&self) -> bool {
        match self.phase {
            Phase::Open | Phase::Parting { .. } => false,
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
        self.presence.end(ending);
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

    /// Gives back what was taken from the budget and is not needed any more.
    fn repay(&mut self) {
        let needed = self.in_flight_bytes.saturating_sub(ALLOWANCE);
        if self.borrowed > needed {
            self.budget.give(self.borrowed - needed, self.export.borrowed());
            self.borrowed = needed;
        }
    }

    /// Until when a client that holds memory of the budget may keep a reply or a payload under way,
    /// by the stack's clock. `None` where it holds none, or is not what is waited for.
    fn withholding_limit_ns(&self) -> Option<u64> {
        if self.borrowed == 0 || self.phase == Phase::Gone {
            return None;
        }
        let length = match &self.partial {
            Some(partial) => partial.request.length,
            None if self.blocked => self.replies.first_length(),
            None => return None,
        };
        let time_ns = WITHHOLDING_NS + length.saturating_mul(WITHHOLDING_NS_PER_MIB) / (1 << 20);
        Some(self.moved_ns.saturating_add(time_ns))
    }

    /// Says good-bye. The client is given a little time to have heard it.
    fn part(&mut self) {
        if self.phase == Phase::Gone {
            self.ended = true;
            return;
        }
        self.channel.shut();
        self.ended = self.bidden;
        self.phase = Phase::Parting { since_ns: self.stack.now_ns() };
        self.drained = false;
    }

    /// Drops what the client still sends, until it hangs up. Returns whether there was something.
    fn discard(&mut self, since_ns: u64) -> bool {
        self.ended |= self.stack.now_ns().saturating_sub(since_ns) > HANG_UP_NS;
        if self.ended || self.drained || self.readable_watched {
            return false;
        }
        match self.channel.receive(&mut [], &mut self.input) {
            Err(error) if is_blocked(&error) => self.drained = true,
            Ok(0) | Err(_) => self.ended = true,
            Ok(_) => return true,
        }
        false
    }

    /// Has the kernel watch the socket for what the connection waits for.
    fn watch(&mut self, reactor: &mut Reactor) {
        let parting = matches!(self.phase, Phase::Parting { .. });
        let readable = (parting || self.wants_input()) && !self.readable_watched;
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

    /// Goes on with what has arrived once the layers of the disk have changed. Returns whether that
    /// is so.
    fn change_layers(&mut self) -> bool {
        let was_closing = std::mem::replace(&mut self.closing, self.stack.is_closing());
        let goes_on = was_closing && !self.closing;
        self.unparsed |= goes_on;
        goes_on
    }

    /// Shows others what was done.
    fn publish(&self) {
        self.control.requests.store(self.answered, Ordering::Relaxed);
        self.control.bytes_read.store(self.bytes_read, Ordering::Relaxed);
        self.control.bytes_written.store(self.bytes_written, Ordering::Relaxed);
        self.control.in_flight.store(self.in_flight as u64, Ordering::Relaxed);
    }
}

impl Source for Transmission {
    fn stack(&mut self) -> &mut Stack {
        &mut self.stack
    }

    fn group(&self) -> Group {
        self.group
    }

    fn take(&mut self, reactor: &mut Reactor) -> bool {
        if let Phase::Parting { since_ns } = self.phase {
            return self.discard(since_ns);
        }
        if !self.unparsed && (self.drained || !self.receive(reactor)) {
            return false;
        }
        if self.unparsed {
            self.parse(reactor);
        }
        self.took = true;
        if let Err(error) = self.stack.settle(reactor) {
            self.fail(&error);
        }
        true
    }

    fn give(&mut self, reactor: &mut Reactor) -> bool {
        let mut busy = self.reap(reactor);
        if busy {
            // There may be flushes behind writes.
            if let Err(error) = self.stack.settle(reactor) {
                self.fail(&error);
            }
        }
        if !self.blocked {
            busy |= self.send();
        }
        let took = std::mem::take(&mut self.took);
        if busy || took {
            self.publish();
        }
        if !self.seat.is_alone() {
            if self.drained || self.blocked {
                self.watch(reactor);
            }
        } else if self.stack.in_flight() > 0 && (busy || took) {
            // While the disk works, its completions must not keep new requests waiting.
            self.drained = false;
        }
        if !busy {
            busy = self.change_layers();
        }
        if !busy && self.is_over() {
            self.part();
            busy = true;
        }
        busy
    }

    fn signal(&mut self, event: &Event, reactor: &mut Reactor) {
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
                    reactor.watch_always(self.owner, WOKEN, self.control.borrow());
                }
                if self.control.is_stopping() && self.phase == Phase::Open {
                    self.close(Ending::Orderly);
                }
                // There may be memory now.
                self.unparsed |= std::mem::take(&mut self.hungry);
            }
            _ => {}
        }
    }

    fn is_ready(&mut self, reactor: &mut Reactor) -> bool {
        self.looks = self.looks.wrapping_add(1);
        self.looks % LOOKS == 0 && self.seat.is_alone() && self.receive(reactor)
    }

    fn rest(&mut self, now_ns: u64, reactor: &mut Reactor) -> u64 {
        let mut deadline_ns = match self.phase {
            Phase::Open | Phase::Gone => u64::MAX,
            Phase::Closing { since_ns } => since_ns + LINGER_NS + 1,
            Phase::Parting { since_ns } => since_ns + HANG_UP_NS + 1,
        };
        if let Some(limit_ns) = self.withholding_limit_ns() {
            if limit_ns <= now_ns && self.budget.is_wanted() {
                self.lose(Ending::Violation("it held memory that others waited for"));
                return now_ns;
            }
            deadline_ns = deadline_ns.min(limit_ns.max(now_ns + WITHHOLDING_LOOK_NS));
        }
        if !self.seat.is_alone() {
            self.watch(reactor);
        }
        if self.change_layers() {
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
    }

    fn is_ended(&self) -> bool {
        self.ended
    }
}

impl Drop for Transmission {
    fn drop(&mut self) {
        self.publish();
        self.budget.give(self.borrowed, self.export.borrowed());
        self.budget.leave(&self.control);
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
