//! The part of a connection that other threads use: commands to its thread, and its status.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// The status of a connection.
#[derive(Clone, Debug)]
pub struct ConnectionStatus {
    /// Counts up from 0 for each connection of the listener.
    pub id: u64,
    /// The client: an address, or `pid N uid N` for a Unix socket.
    pub peer: String,
    /// The export's name; `None` during the negotiation.
    pub export: Option<String>,
    /// The version of TLS, such as `TLSv1.3`; `None` if the connection is not encrypted.
    pub tls: Option<String>,
    /// The form of requests and replies: `simple`, `structured`, `extended`.
    pub mode: &'static str,
    /// The time since the connection was accepted, in seconds.
    pub age_s: u64,
    /// Requests answered.
    pub requests: u64,
    /// Bytes received in writes.
    pub bytes_written: u64,
    /// Bytes sent for reads.
    pub bytes_read: u64,
    /// Requests that are not yet answered.
    pub in_flight: u64,
}

/// The client of a connection.
#[derive(Debug)]
pub(super) struct Peer {
    /// An address, or `pid N uid N` for a Unix socket.
    pub(super) text: String,
    /// The address of a client over TCP.
    pub(super) address: Option<IpAddr>,
}

/// The part of a connection that other threads can reach.
#[derive(Debug)]
pub struct Control {
    wake: File,
    stop: AtomicBool,
    begun: Instant,
    id: u64,
    peer: String,
    /// The address of a client over TCP.
    address: Option<IpAddr>,
    /// Whether the client has authenticated, or has agreed on an export.
    is_admitted: AtomicBool,
    facts: Mutex<Facts>,
    /// A descriptor of the connection's socket, during the transmission phase.
    socket: Mutex<Option<OwnedFd>>,
    /// Whether the connection's thread takes no more requests, and what it has in flight is among
    /// the disk's leftovers.
    is_leaving: AtomicBool,
    /// Requests answered.
    pub(super) requests: AtomicU64,
    /// Bytes received in writes.
    pub(super) bytes_written: AtomicU64,
    /// Bytes sent for reads.
    pub(super) bytes_read: AtomicU64,
    /// Requests that are not yet answered.
    pub(super) in_flight: AtomicU64,
}

/// The properties that the negotiation determines.
#[derive(Debug, Default)]
struct Facts {
    export: Option<String>,
    tls: Option<String>,
    mode: &'static str,
}

impl Control {
    pub(super) fn new(id: u64, peer: Peer) -> io::Result<Self> {
        Ok(Self {
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?.into(),
            stop: AtomicBool::new(false),
            begun: Instant::now(),
            id,
            peer: peer.text,
            address: peer.address,
            is_admitted: AtomicBool::new(false),
            facts: Mutex::default(),
            socket: Mutex::default(),
            is_leaving: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            bytes_written: AtomicU64::new(0),
            bytes_read: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
        })
    }

    /// Ends the connection after its requests in flight.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    /// Wakes the connection's thread.
    pub(super) fn wake(&self) {
        // Fails only when the counter is full, and then a wake-up is already pending.
        let _ = (&self.wake).write(&1_u64.to_ne_bytes());
    }

    /// Clears the wake-ups so far.
    pub(super) fn awake(&self) {
        let _ = (&self.wake).read(&mut [0; 8]);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Lets other threads see whether the client of this socket has gone.
    pub(super) fn set_socket(&self, socket: Option<OwnedFd>) {
        *self.socket.lock() = socket;
    }

    /// The connection takes no more requests, and its changes in flight are among the disk's
    /// leftovers.
    pub(super) fn set_leaving(&self) {
        self.is_leaving.store(true, Ordering::Release);
    }

    /// Whether the client has gone and the connection's thread has not noticed it yet.
    pub(super) fn is_abandoned(&self) -> bool {
        if self.is_leaving.load(Ordering::Acquire) {
            return false;
        }
        let socket = self.socket.lock();
        let Some(socket) = &*socket else { return false };
        let mut polls = [PollFd::new(socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polls, Some(&now)).is_ok_and(|count| count > 0)
    }

    pub(super) fn borrow(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    pub(super) fn address(&self) -> Option<IpAddr> {
        self.address
    }

    /// The client has authenticated, or has agreed on an export: it gives its place to no other.
    pub(super) fn admit(&self) {
        self.is_admitted.store(true, Ordering::Release);
    }

    /// Whether the client may still have to give its place to another one.
    pub(super) fn is_stranger(&self) -> bool {
        !self.is_admitted.load(Ordering::Acquire) && !self.is_stopping()
    }

    pub(super) fn set_tls(&self, version: &str) {
        self.facts.lock().tls = Some(version.to_owned());
    }

    pub(super) fn set_export(&self, name: &str, mode: &'static str) {
        let mut facts = self.facts.lock();
        facts.export = Some(name.to_owned());
        facts.mode = mode;
    }

    pub(super) fn status(&self) -> ConnectionStatus {
        let facts = self.facts.lock();
        ConnectionStatus {
            id: self.id,
            peer: self.peer.clone(),
            export: facts.export.clone(),
            tls: facts.tls.clone(),
            mode: facts.mode,
            age_s: self.begun.elapsed().as_secs(),
            requests: self.requests.load(Ordering::Relaxed),
            bytes_written: self.bytes_written.load(Ordering::Relaxed),
            bytes_read: self.bytes_read.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Relaxed),
        }
    }
}
