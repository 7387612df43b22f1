//! A connection's negotiation, on a thread of its own. The thread ends when one of the export's
//! threads begins to serve the connection.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use rustix::event::{PollFd, PollFlags};

use super::budget::RequestBudget;
use super::channel::{Channel, Socket, is_blocked};
use super::control::Control;
use super::exports::{Export, Exports};
use super::listener::Entered;
use super::negotiation::{Agreement, Negotiation, OPTION_LENGTH_MAX, Security, Step};
use super::transmission::{Ending, Transmission};
use crate::socket::wait_for;
use fathom_tls::Tls;

/// The most bytes read in one call during the negotiation.
const PIECE_LENGTH: usize = 4096;
/// The output length from which the output is sent before the next option is parsed, in bytes.
const OUTPUT_LENGTH_MAX: usize = 64 << 10;

/// The state that all connections of a listener share.
pub struct ListenerState {
    pub(super) exports: Arc<Exports>,
    pub(super) tls: RwLock<Option<Tls>>,
    pub(super) security: Security,
    pub(super) negotiation_time_max: Duration,
    pub(super) authentication_time_max: Duration,
    pub(super) budget: Arc<RequestBudget>,
    pub(super) counters: Counters,
}

/// The counters of a listener.
#[derive(Debug, Default)]
pub struct Counters {
    pub(super) accepted: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) protocol_errors: AtomicU64,
    pub(super) requests: AtomicU64,
}

/// Why a negotiation ended without a transmission.
enum Failure {
    /// The client has disconnected, or the connection was stopped.
    Left,
    /// The client violated the protocol or was not admitted.
    Refused(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Refused(error.to_string())
    }
}

/// Negotiates with a client, and passes its connection to a thread of the export.
pub(super) fn serve(socket: OwnedFd, entered: Entered) {
    let shared = entered.shared();
    let control = entered.control();
    let end = Instant::now() + shared.negotiation_time_max;
    // Who may be anybody has less time than who has authenticated.
    let deadline = if shared.security == Security::Required {
        end.min(Instant::now() + shared.authentication_time_max)
    } else {
        end
    };
    let mut handshake = Handshake {
        channel: Channel::Plain(Socket::new(socket)),
        control,
        deadline,
        end,
        input: Vec::new(),
        output: Vec::new(),
    };
    let agreement = match handshake.run(shared) {
        Ok(agreement) => agreement,
        Err(Failure::Left) => return,
        Err(Failure::Refused(reason)) => {
            shared.counters.protocol_errors.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = control.peer(), reason, "NBD client refused");
            return;
        }
    };
    let Handshake { channel, input, .. } = handshake;
    let export = Arc::clone(&agreement.export);
    control.set_export(export.name(), agreement.mode.name());
    // Added before the disk is opened, so that the connection misses no change of the disk.
    if !export.enter(control) {
        return;
    }
    let presence = Presence { entered, export: Arc::clone(&export), ending: None };
    let control = presence.control();
    match channel.duplicate() {
        Ok(socket) => control.set_socket(Some(socket)),
        Err(error) => {
            let export = export.name();
            tracing::error!(export, %error, "an NBD connection cannot be served");
            return;
        }
    }
    if !export.await_abandoned(control) {
        if !control.is_abandoned() && !control.is_stopping() {
            tracing::warn!(
                peer = control.peer(),
                export = export.name(),
                "NBD client rejected: an earlier client has gone, and the thread of its connection hangs \
                 with the storage; a later connection is served when it continues"
            );
        }
        return;
    }
    tracing::debug!(peer = control.peer(), export = export.name(), "NBD client connected");
    let added = export.threads().add(export.name(), move |seat, reactor| {
        Transmission::new(channel, &agreement, presence, &input, seat, reactor)
    });
    if let Err(error) = added {
        let export = export.name();
        tracing::error!(export, %error, "an NBD connection cannot be served");
    }
}

/// The entries of a connection in the lists of its export and its listener, during the transmission
/// phase. Dropping it removes them.
pub(super) struct Presence {
    entered: Entered,
    export: Arc<Export>,
    ending: Option<Ending>,
}

impl Presence {
    pub(super) fn control(&self) -> &Arc<Control> {
        self.entered.control()
    }

    pub(super) fn shared(&self) -> &ListenerState {
        self.entered.shared()
    }

    /// Records why the connection ends; only the first reason is kept.
    pub(super) fn end(&mut self, ending: Ending) {
        self.ending.get_or_insert(ending);
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        let control = self.entered.control();
        // Otherwise the connection would stay open as long as the list of connections.
        control.set_socket(None);
        self.export.leave(control);
        let counters = &self.shared().counters;
        counters.requests.fetch_add(control.requests.load(Ordering::Relaxed), Ordering::Relaxed);
        let (peer, export) = (control.peer(), self.export.name());
        match &self.ending {
            Some(Ending::Orderly) => tracing::debug!(peer, export, "NBD client left"),
            Some(Ending::Lost(error)) => {
                tracing::debug!(peer, export, %error, "NBD client lost");
            }
            Some(Ending::Violation(reason)) => {
                counters.protocol_errors.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(peer, export, reason, "NBD client cut off");
            }
            Some(Ending::Unable(error)) => {
                tracing::error!(peer, export, %error, "an NBD connection cannot be served");
            }
            // The cause has already been logged by the code that failed.
            None => tracing::debug!(peer, export, "NBD client cut off"),
        }
    }
}

/// A negotiation's use of the socket: it blocks, but never past the deadline.
struct Handshake<'a> {
    channel: Channel,
    control: &'a Arc<Control>,
    /// When the client has to have authenticated, or, after that, negotiated.
    deadline: Instant,
    /// When it has to have negotiated.
    end: Instant,
    input: Vec<u8>,
    output: Vec<u8>,
}

impl Handshake<'_> {
    /// Negotiates. Bytes after the last option stay in `input`.
    fn run(&mut self, shared: &ListenerState) -> Result<Agreement<Arc<Export>>, Failure> {
        let mut negotiation = Negotiation::new(shared.security);
        self.output.extend(Negotiation::GREETING);
        self.send()?;
        let mut used = 0;
        loop {
            let (count, step) =
                negotiation.feed(&self.input[used..], &mut self.output, &*shared.exports);
            used += count;
            if self.output.len() > OUTPUT_LENGTH_MAX {
                self.send()?;
            }
            match step {
                Step::Again => {}
                Step::Incomplete => {
                    self.input.drain(..used);
                    used = 0;
                    self.send()?;
                    self.receive()?;
                }
                Step::StartTls => {
                    self.send()?;
                    if used < self.input.len() {
                        // An attacker may have inserted plain options before the encrypted ones.
                        return Err(Failure::Refused("options after STARTTLS".into()));
                    }
                    self.input.clear();
                    used = 0;
                    self.start_tls(shared)?;
                    negotiation.secured();
                }
                Step::Transmit(agreement) => {
                    // As soon as the client knows, its place is its own.
                    self.control.admit();
                    self.send()?;
                    self.input.drain(..used);
                    return Ok(agreement);
                }
                Step::Leave => {
                    // The client may have disconnected without waiting for the reply.
                    let _ = self.send();
                    self.channel.shut();
                    return Err(Failure::Left);
                }
                Step::Refuse(reason) => return Err(Failure::Refused(reason.into())),
            }
        }
    }

    fn start_tls(&mut self, shared: &ListenerState) -> Result<(), Failure> {
        let tls = shared.tls.read().clone();
        let Some(tls) = tls else { return Err(Failure::Left) };
        self.channel = std::mem::replace(&mut self.channel, Channel::Closed).secure(&tls)?;
        let mut writable = false;
        loop {
            match self.channel.shake_hands(&mut writable) {
                Ok(()) => break,
                Err(error) if is_blocked(&error) => {
                    self.wait(if writable { PollFlags::OUT } else { PollFlags::IN })?;
                }
                Err(error) => return Err(Failure::Refused(format!("TLS: {error}"))),
            }
        }
        self.control.set_tls(self.channel.tls_version().unwrap_or_default());
        self.control.admit();
        self.deadline = self.end;
        Ok(())
    }

    fn receive(&mut self) -> Result<(), Failure> {
        debug_assert!(self.input.len() <= OPTION_LENGTH_MAX + 2 * PIECE_LENGTH);
        let length = self.input.len();
        self.input.resize(length + PIECE_LENGTH, 0);
        loop {
            match self.channel.receive(&mut [], &mut self.input[length..]) {
                Ok(0) if length == 0 => return Err(Failure::Left),
                Ok(0) => return Err(Failure::Refused("the connection ended in an option".into())),
                Ok(count) => {
                    self.input.truncate(length + count);
                    return Ok(());
                }
                Err(error) if is_blocked(&error) => self.wait(PollFlags::IN)?,
                // The client has only checked whether the socket is served.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset && length == 0 => {
                    return Err(Failure::Left);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn send(&mut self) -> Result<(), Failure> {
        let mut sent = 0;
        while sent < self.output.len() || self.channel.has_staged() {
            let bytes = &self.output[sent..];
            let result = if bytes.is_empty() {
                self.channel.flush()
            } else {
                self.channel.send_bytes(bytes).map(|count| sent += count)
            };
            match result {
                Ok(()) => {}
                Err(error) if is_blocked(&error) => self.wait(PollFlags::OUT)?,
                Err(_) => return Err(Failure::Left),
            }
        }
        self.output.clear();
        Ok(())
    }

    /// Sleeps until the socket is ready; fails if the connection is stopped or its time has
    /// expired.
    fn wait(&self, events: PollFlags) -> Result<(), Failure> {
        let mut polls = [
            PollFd::from_borrowed_fd(self.channel.descriptor()?, events),
            PollFd::from_borrowed_fd(self.control.borrow(), PollFlags::IN),
        ];
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::Refused("the negotiation took too long".into()));
            }
            let count = wait_for(&mut polls, Some(left));
            if self.control.is_stopping() {
                return Err(Failure::Left);
            }
            if count > 0 {
                return Ok(());
            }
        }
    }
}
