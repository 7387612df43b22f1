//! The exchange with a client that waits for each reply: the reply and the wait for the next bytes
//! are one system call.
//!
//! A thread that serves one connection without TLS, and has nothing else to do, queues its last
//! replies and the receipt of the next bytes in its ring. Both reach the kernel when the thread
//! begins to poll or to sleep. While it polls, it finds the bytes without system calls.
//!
//! - The **reply** is carried out within the call that submits it, and has an event only if not all
//!   of its bytes were sent. Until it [is settled](Reactor::is_settled), nobody touches the queue
//!   of replies.
//! - The **receipt** waits in the kernel for bytes. It fills the empty input. The connection does
//!   not end before it has.

#![expect(unsafe_code, reason = "operations of the ring")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use fathom_block::RequestSource as _;
use fathom_reactor::{Event, OperationOwner, Reactor};
use io_uring::{opcode, squeue, types};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, sockopt};

use super::super::channel::Channel;
use super::super::reply::Replies;
use super::{Ending, Phase, RECEIVED, SENT, Transmission};

/// The most replies that are sent this way. More mean a client that does not wait for each.
const REPLIES_MAX: usize = 4;
/// Their longest total length, in bytes. It fits the buffer of a socket.
const LENGTH_MAX: usize = 64 << 10;
/// The most rounds for which ready replies are held: that in which they become ready, and the next,
/// after which the thread rests.
const ROUNDS_MAX: u8 = 2;
/// A reply never waits: bytes that do not fit are an error, which has their number.
const SEND_FLAGS: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_WAITALL;

/// What the ring has of a connection.
#[derive(Debug)]
pub(super) struct Exchange {
    is_possible: bool,
    /// The number of the replies' entry in the ring, if they are there.
    sending: Option<u64>,
    /// Whether the receipt of the next bytes is in the ring.
    receiving: bool,
    /// Whether the receipt is cancelled.
    cancelled: bool,
    /// The number of rounds for which replies have been held.
    rounds: u8,
}

impl Exchange {
    /// Nothing is in the ring. Encrypted channels have no exchanges.
    pub(super) fn new(channel: &Channel, reactor: &Reactor) -> Self {
        let is_plain = channel.plain().is_some();
        let is_possible = is_plain && reactor.defers_completions() && is_known_kernel();
        Self { is_possible, sending: None, receiving: false, cancelled: false, rounds: 0 }
    }

    /// Whether replies are in the ring: the queue of replies must not be touched.
    pub(super) fn is_sending(&self) -> bool {
        self.sending.is_some()
    }

    /// Whether the next bytes arrive through the ring: the input must not be touched.
    pub(super) fn is_receiving(&self) -> bool {
        self.receiving
    }
}

impl Transmission {
    /// Whether the thread has nothing to do but to wait for the client's next bytes.
    fn awaits_bytes(&self) -> bool {
        self.exchange.is_possible
            && self.seat.is_alone()
            && self.accepts_input()
            && self.drained
            && !self.unparsed
            && self.begin == self.end
            && self.partial.is_none()
            && self.refused.is_none()
            && self.deferred.is_empty()
    }

    /// Whether the ready replies are sent when the thread rests, which is at once.
    pub(super) fn holds_replies(&mut self) -> bool {
        let holds = !self.replies.is_empty()
            && self.exchange.rounds < ROUNDS_MAX
            && self.stack.in_flight() == 0
            && self.borrowed == 0
            && self.awaits_bytes()
            && self.replies.is_within(REPLIES_MAX, LENGTH_MAX);
        self.exchange.rounds = if holds { self.exchange.rounds + 1 } else { 0 };
        holds
    }

    /// Queues the held replies and the receipt of the next bytes. Returns whether the thread must
    /// not rest.
    pub(super) fn exchange(&mut self, reactor: &mut Reactor) -> bool {
        let is_held = std::mem::take(&mut self.exchange.rounds) > 0;
        // Replies do not wait for what the kernel would carry out before them.
        let may_wait = !(is_held && reactor.has_unsubmitted());
        let socket = self.channel.plain().filter(|_| may_wait && self.awaits_bytes());
        let Some(socket) = socket.map(|socket| types::Fd(socket.as_raw_fd())) else {
            if is_held {
                self.send();
                self.publish(0);
            }
            return is_held;
        };
        if is_held {
            let entry = opcode::SendMsg::new(socket, self.replies.message());
            let entry = entry.flags(SEND_FLAGS as u32).build();
            // SAFETY: until the entry is settled, nobody touches the replies, and the connection
            // keeps its socket; if the thread fails before, both are never freed.
            let number = unsafe { reactor.push_silent(self.owner, SENT, entry) };
            self.exchange.sending = Some(number);
            self.publish(self.replies.count());
        }
        if !self.exchange.receiving && !self.readable_watched {
            (self.begin, self.end) = (0, 0);
            // SAFETY: until the event, nobody touches the input, and the connection does not end;
            // if the thread fails before, input and socket are never freed.
            unsafe { reactor.push(self.owner, RECEIVED, receipt(socket, &mut self.input)) };
            self.exchange.receiving = true;
        }
        false
    }

    /// The replies in the ring were not sent completely: `result` is the number of bytes, or an
    /// error that sending the rest will find.
    pub(super) fn sent(&mut self, result: i32) {
        if self.exchange.sending.take().is_some() {
            self.complete_replies(usize::try_from(result).unwrap_or(0));
            // The rest is not held: the socket is full, or broken.
            self.exchange.rounds = ROUNDS_MAX;
            self.publish(0);
        }
    }

    /// Completes the replies in the ring if it is known that they were sent. Returns whether the
    /// ring has no replies.
    pub(super) fn settle(&mut self, reactor: &mut Reactor) -> bool {
        let Some(number) = self.exchange.sending else { return true };
        if reactor.is_settled(number) {
            self.exchange.sending = None;
            self.complete_replies(usize::MAX);
            return true;
        }
        if reactor.has_unsubmitted() {
            if let Err(error) = reactor.submit() {
                self.fail(&error);
            }
        }
        false
    }

    /// Removes the replies among the next `count` bytes.
    fn complete_replies(&mut self, count: usize) {
        // If the rest has to wait, it waits since then.
        self.blocked_before = false;
        let (replies, _, sent) = self.sending();
        replies.advance(count, sent);
    }

    /// The receipt has ended: `result` is the number of bytes, or a negated `errno`.
    pub(super) fn received(&mut self, result: i32) {
        self.exchange.receiving = false;
        self.exchange.cancelled = false;
        let is_transient = matches!(-result, libc::EAGAIN | libc::EINTR | libc::ECANCELED);
        match self.phase {
            Phase::Open => {}
            Phase::Parting { .. } => {
                self.drained = false;
                self.ended |= result <= 0 && !is_transient;
                return;
            }
            // No more requests are read.
            Phase::Closing { .. } | Phase::Lost => return,
        }
        match usize::try_from(result) {
            // An incomplete request needs no reply.
            Ok(0) => self.lose(Ending::Lost(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => {
                self.end = count.min(self.input.len());
                self.drained = self.end < self.input.len();
                self.unparsed = true;
            }
            Err(_) if is_transient => self.drained = false,
            Err(_) => self.lose(Ending::Lost(io::Error::from_raw_os_error(-result))),
        }
    }

    /// Cancels the receipt, because the connection has ended.
    pub(super) fn stop_receiving(&mut self, reactor: &mut Reactor) {
        if self.exchange.receiving && !std::mem::replace(&mut self.exchange.cancelled, true) {
            reactor.cancel(self.owner, RECEIVED);
        }
    }

    /// Never frees what the ring of a failed thread may still use.
    pub(super) fn leave_exchange(&mut self) {
        if !self.exchange.is_sending() && !self.exchange.receiving {
            return;
        }
        if let Ok(socket) = self.channel.descriptor() {
            let _ = rustix::net::shutdown(socket, Shutdown::Both);
        }
        std::mem::forget(std::mem::replace(&mut self.channel, Channel::Closed));
        std::mem::forget(std::mem::take(&mut self.input));
        std::mem::forget(std::mem::replace(&mut self.replies, Replies::new(self.mode)));
    }
}

/// The operation that waits for bytes and receives what fits the input.
fn receipt(socket: types::Fd, input: &mut [u8]) -> squeue::Entry {
    let length = u32::try_from(input.len()).unwrap_or(u32::MAX);
    opcode::Recv::new(socket, input.as_mut_ptr(), length).build()
}

/// Whether this kernel carries out sends and receipts as exchanges need it. It is tried once.
fn is_known_kernel() -> bool {
    static IS_KNOWN: OnceLock<bool> = OnceLock::new();
    *IS_KNOWN.get_or_init(|| Trial::new().and_then(|mut trial| trial.run()).unwrap_or(false))
}

/// Operations on a pair of sockets.
struct Trial {
    // Dropped first: it waits for the operations.
    reactor: Reactor,
    owner: OperationOwner,
    socket: OwnedFd,
    peer: OwnedFd,
    bytes: Vec<u8>,
    segment: Box<libc::iovec>,
    message: Box<libc::msghdr>,
    events: Vec<Event>,
}

impl Trial {
    fn new() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, peer) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // Whatever the host's default is, it does not take all bytes.
        sockopt::set_socket_send_buffer_size(&socket, LENGTH_MAX)?;
        let mut bytes = vec![1; 1 << 20];
        let mut segment =
            Box::new(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() });
        let message = Box::new(super::super::channel::message(std::slice::from_mut(&mut *segment)));
        let mut reactor = Reactor::new(4)?;
        let owner = reactor.register();
        Ok(Self { reactor, owner, socket, peer, bytes, segment, message, events: Vec::new() })
    }

    /// Whether the kernel does what it has to.
    fn run(&mut self) -> io::Result<bool> {
        // A receipt waits although the socket does not block, and has the bytes that arrive.
        let socket = types::Fd(self.socket.as_raw_fd());
        // SAFETY: the trial keeps bytes and sockets until the reactor has been dropped.
        unsafe { self.reactor.push(self.owner, RECEIVED, receipt(socket, &mut self.bytes)) };
        if self.result()?.is_some() {
            return Ok(false);
        }
        rustix::io::write(&self.peer, &[1; 3])?;
        self.reactor.wait(Some(Duration::from_secs(1)))?;
        if self.result()? != Some(3) {
            return Ok(false);
        }
        // A reply that is sent has no event, one that is not has the number of its bytes.
        let small = 5;
        let has_sent = self.send(small)?.is_none() && self.arrived()? == small;
        let sent = self.send(self.bytes.len())?.unwrap_or(0);
        let is_refused = self.send(small)? == Some(-libc::EAGAIN);
        let arrived = i32::try_from(self.arrived()?).unwrap_or(0);
        Ok(has_sent && is_refused && sent > 0 && sent == arrived)
    }

    /// Sends bytes as a reply. Returns the result if there is an event.
    fn send(&mut self, length: usize) -> io::Result<Option<i32>> {
        self.segment.iov_len = length;
        let message: *const libc::msghdr = &raw const *self.message;
        let entry = opcode::SendMsg::new(types::Fd(self.socket.as_raw_fd()), message);
        let entry = entry.flags(SEND_FLAGS as u32).build();
        // SAFETY: the trial keeps bytes, message and sockets until the reactor has been dropped.
        let number = unsafe { self.reactor.push_silent(self.owner, SENT, entry) };
        self.reactor.submit()?;
        // An event does not come later.
        if self.reactor.is_settled(number) { Ok(None) } else { self.result() }
    }

    /// Submits what is queued, and returns the result of an event if there is one.
    fn result(&mut self) -> io::Result<Option<i32>> {
        self.reactor.submit()?;
        self.reactor.collect(&mut self.events)?;
        Ok(self.events.pop().map(|event| event.result))
    }

    /// The number of bytes that have arrived at the peer.
    fn arrived(&mut self) -> io::Result<usize> {
        let (mut buffer, mut count) = ([0; 4096], 0);
        loop {
            match rustix::io::read(&self.peer, &mut buffer) {
                Ok(0) | Err(rustix::io::Errno::AGAIN) => return Ok(count),
                Ok(more) => count += more,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_that_are_supported_pass_the_trial() {
        let reactor = Reactor::new(4).unwrap();
        assert!(!reactor.defers_completions() || is_known_kernel());
    }
}
