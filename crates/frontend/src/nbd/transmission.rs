//! The transmission phase: requests in, replies out, by one thread that sleeps in its reactor.
//!
//! Each round takes what the socket has, submits every complete request, and sends every reply
//! that is ready in one system call. Replies leave in the order of completion. What a client may
//! have in flight is bounded in number and bytes (see `budget`); beyond the bound its socket is not
//! read, so it waits as it would for a slow disk.

mod intake;
mod outcome;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fathom_block::{Clock, REQUEST_LENGTH_MAX, Request, Stack};
use fathom_reactor::{Event, Owner, Reactor};

use super::budget::{ALLOWANCE, Budget};
use super::channel::{Channel, is_blocked};
use super::control::Control;
use super::exports::Export;
use super::reply::{Answered, Replies};
use super::wire::{Mode, RequestHeader, command};
use fathom_block::{Spin, preemptions};

/// The memory that small requests are received into, in bytes.
const INPUT_LENGTH: usize = 128 << 10;
/// The entries of the thread's ring.
const RING_ENTRIES: u32 = 128;
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
const SPIN_NS: u64 = 30_000;

/// How long the layers of a connection that has ended may take to finish what they have begun.
const FINISH_LIMIT: Duration = Duration::from_secs(10);

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
    ending: Option<Ending>,
    restack: bool,
    /// Another stack is about to take the place of this one; requests wait for it.
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
        budget: Arc<Budget>,
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
            budget,
            borrowed: 0,
            hungry: false,
            moved_ns: 0,
            blocked_before: false,
            answered: 0,
            bytes_read: 0,
            bytes_written: 0,
            phase: Phase::Open,
            ending: None,
            restack: false,
            closing: false,
            bidden: false,
            readable_watched: false,
            writable_watched: false,
            blocked: false,
            unparsed: true,
            drained: false,
            spin: Spin::new(SPIN_NS),
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
        // The layers finish what they have begun. What they cannot is as after a crash.
        if result.is_ok() {
            let _ = self.stack.finish(&mut self.reactor, FINISH_LIMIT);
        }
        match result {
            Ok(()) => self.ending.take().unwrap_or(Ending::Orderly),
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
                // While the disk works, its completions must not keep new requests waiting.
                self.drained &= self.stack.in_flight() == 0;
                continue;
            }
            if self.restack && self.stack.in_flight() == 0 {
                self.restack = false;
                let disk = Arc::clone(self.export.disk());
                let stack = disk.open_queue(&mut self.reactor, Clock::System)?;
                self.stack.replace(stack, &mut self.reactor);
                self.closing = true;
            }
            if self.closing && !self.stack.is_closing() {
                self.closing = false;
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
                    // There may be memory now.
                    self.unparsed |= std::mem::take(&mut self.hungry);
                }
                _ => {}
            }
        }
        self.events = events;
        Ok(progress)
    }

    /// Looks for work a little longer, then sleeps.
    fn idle(&mut self) -> io::Result<()> {
        let start_ns = self.stack.now_ns();
        let limit_ns = self.spin.limit_ns(start_ns);
        if limit_ns > 0 && !self.readable_watched {
            let mut now_ns = start_ns;
            while now_ns - start_ns < limit_ns {
                for _ in 0..16 {
                    std::hint::spin_loop();
                }
                if self.receive() || self.reactor.is_ready() {
                    self.spin.found();
                    return Ok(());
                }
                let before_ns = now_ns;
                now_ns = self.stack.now_ns();
                if !self.spin.step(before_ns, now_ns, preemptions) {
                    break;
                }
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
        if let Some(limit_ns) = self.withholding_limit_ns() {
            if limit_ns <= start_ns && self.budget.is_wanted() {
                self.lose(Ending::Violation("it held memory that others waited for"));
                return Ok(());
            }
            let look_ns = limit_ns.max(start_ns + WITHHOLDING_LOOK_NS);
            deadline_ns = Some(deadline_ns.map_or(look_ns, |deadline| deadline.min(look_ns)));
        }
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

impl Drop for Transmission {
    fn drop(&mut self) {
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
