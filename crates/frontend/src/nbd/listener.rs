//! A listener: a socket, the thread that accepts on it, and the threads that negotiate.

#![expect(unsafe_code, reason = "the peer of a socket")]

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SocketFlags, accept_with, sockopt};

use super::budget::RequestBudget;
use super::connection::{self, Counters, ListenerState};
use super::control::{ConnectionStatus, Control, Peer};
use super::exports::Exports;
use super::negotiation::Security;
use crate::socket::{wait, yielding};
use fathom_tls::Tls;

/// The requested size of the socket's send buffer, in bytes; the host may grant less.
const SOCKET_BUFFER: usize = 1 << 20;
/// The most clients that have not authenticated, or, without TLS, not agreed on an export yet.
const STRANGERS_MAX: usize = 64;
/// The shortest time between two lines of the journal about such clients that were dropped.
const DROPPED_INTERVAL: Duration = Duration::from_secs(60);
/// How long the accepting thread pauses when the host has no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// The address on which a listener listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket at this path, for its owner only (mode 0600).
    Unix(PathBuf),
    /// A TCP port.
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
            Self::Tcp(address) => write!(formatter, "tcp:{address}"),
        }
    }
}

/// The options of a listener.
#[derive(Clone)]
pub struct ListenerOptions {
    /// The address.
    pub address: Address,
    /// The keys for encrypted connections; `None` for no TLS.
    pub tls: Option<Tls>,
    /// Whether clients may connect without TLS over TCP, or although `tls` is given. A Unix socket
    /// without `tls` is always plain.
    pub plain_allowed: bool,
    /// The most simultaneous connections. A further one takes the place of the oldest client that
    /// has not authenticated yet, or is closed immediately if there is none.
    pub connections_max: usize,
    /// The limit on the memory of requests; several listeners may share it.
    pub budget: Arc<RequestBudget>,
    /// How long a client may take to negotiate.
    pub negotiation_time_max: Duration,
    /// How long a client may take until TLS has begun, if the listener requires it.
    pub authentication_time_max: Duration,
}

impl ListenerOptions {
    /// The default options at `address`: everything optional is disabled.
    pub fn new(address: Address) -> Self {
        Self {
            address,
            tls: None,
            plain_allowed: false,
            connections_max: 1024,
            budget: Arc::default(),
            negotiation_time_max: Duration::from_secs(30),
            authentication_time_max: Duration::from_secs(10),
        }
    }

    fn security(&self) -> io::Result<Security> {
        match (&self.tls, &self.address) {
            (Some(_), _) if self.plain_allowed => Ok(Security::Optional),
            (Some(_), _) => Ok(Security::Required),
            (None, Address::Tcp(_)) if !self.plain_allowed => {
                let text = "NBD over TCP without TLS gives anyone on the network access to the \
                            disks: give certificates or shared keys, or allow plain connections";
                Err(io::Error::new(io::ErrorKind::InvalidInput, text))
            }
            (None, _) => Ok(Security::Plain),
        }
    }
}

/// The counters of a listener since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenerCounters {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections closed because there were too many: immediately, or before the client had
    /// authenticated.
    pub refused: u64,
    /// Clients that violated the protocol, were too slow, or were not admitted.
    pub protocol_errors: u64,
    /// Requests answered on connections that have ended.
    pub requests: u64,
}

/// A socket on which NBD clients are served until it is shut down or dropped.
pub struct Listener {
    address: Address,
    inner: Arc<Inner>,
    acceptor: Option<JoinHandle<()>>,
    /// The socket file's device and inode, so that no other file is removed at its path.
    file: Mutex<Option<(u64, u64)>>,
}

struct Inner {
    shared: ListenerState,
    /// The socket; another one after [`Listener::listen_again`].
    socket: Mutex<Arc<OwnedFd>>,
    tcp: bool,
    connections_max: usize,
    stop: AtomicBool,
    wake: File,
    /// The current connections.
    controls: Mutex<Vec<Arc<Control>>>,
    /// Signalled when a connection has ended.
    left: Condvar,
    /// When the journal had the last line about clients that were dropped.
    reported: Mutex<Option<Instant>>,
}

impl Listener {
    /// Listens, and serves `exports` to the clients that connect.
    ///
    /// # Errors
    /// When the address is in use or unavailable, or when the options select plain TCP without
    /// allowing it.
    pub fn new(options: ListenerOptions, exports: Arc<Exports>) -> io::Result<Self> {
        let security = options.security()?;
        let (socket, address, file) = match &options.address {
            Address::Unix(path) => {
                let listener = crate::socket::listen(path)?;
                let (socket, file) = bound(listener, path)?;
                (socket, options.address.clone(), Some(file))
            }
            Address::Tcp(wanted) => {
                let listener = TcpListener::bind(wanted)?;
                listener.set_nonblocking(true)?;
                let address = Address::Tcp(listener.local_addr()?);
                (OwnedFd::from(listener), address, None)
            }
        };
        let inner = Arc::new(Inner {
            shared: ListenerState {
                exports,
                tls: RwLock::new(options.tls),
                security,
                negotiation_time_max: options.negotiation_time_max,
                authentication_time_max: options.authentication_time_max,
                budget: options.budget,
                counters: Counters::default(),
            },
            socket: Mutex::new(Arc::new(socket)),
            tcp: matches!(options.address, Address::Tcp(_)),
            connections_max: options.connections_max,
            stop: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?.into(),
            controls: Mutex::default(),
            left: Condvar::new(),
            reported: Mutex::default(),
        });
        let acceptor = std::thread::Builder::new().name("nbd-accept".into()).spawn({
            let inner = Arc::clone(&inner);
            move || inner.accept_all()
        })?;
        Ok(Self { address, inner, acceptor: Some(acceptor), file: Mutex::new(file) })
    }

    /// The address on which it listens. For TCP, port 0 is replaced by the allocated port.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Uses other keys from now on. Connections that have been made keep theirs. Does nothing if
    /// the listener has no TLS.
    pub fn set_tls(&self, tls: Tls) {
        let mut place = self.inner.shared.tls.write();
        if place.is_some() {
            *place = Some(tls);
        }
    }

    /// Makes the Unix socket again if its path has been deleted. Returns whether it was made.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn listen_again(&self) -> io::Result<bool> {
        let Address::Unix(path) = &self.address else { return Ok(false) };
        let Some(listener) = crate::socket::listen_again(path)? else { return Ok(false) };
        let (socket, file) = bound(listener, path)?;
        *self.inner.socket.lock() = Arc::new(socket);
        *self.file.lock() = Some(file);
        // Fails only when the counter is full, and then a wake-up is already pending.
        let _ = (&self.inner.wake).write(&1_u64.to_ne_bytes());
        Ok(true)
    }

    /// The current counters.
    pub fn counters(&self) -> ListenerCounters {
        let counters = &self.inner.shared.counters;
        ListenerCounters {
            accepted: counters.accepted.load(Ordering::Relaxed),
            refused: counters.refused.load(Ordering::Relaxed),
            protocol_errors: counters.protocol_errors.load(Ordering::Relaxed),
            requests: counters.requests.load(Ordering::Relaxed),
        }
    }

    /// The current connections.
    pub fn connections(&self) -> Vec<ConnectionStatus> {
        let controls = self.inner.controls.lock();
        controls.iter().map(|control| control.status()).collect()
    }

    /// Stops accepting, lets every connection finish its requests in flight, and returns when the
    /// last connection has ended.
    pub fn shutdown(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(acceptor) = self.acceptor.take() else { return };
        self.inner.stop.store(true, Ordering::Release);
        // Fails only when the counter is full, and then a wake-up is already pending.
        let _ = (&self.inner.wake).write(&1_u64.to_ne_bytes());
        // Before the wait for connections, which may hang with the disk: so the path is free for
        // the next daemon.
        let file = *self.file.lock();
        if let (Address::Unix(path), Some(file)) = (&self.address, file) {
            let ours =
                fs::symlink_metadata(path).is_ok_and(|data| (data.dev(), data.ino()) == file);
            if ours {
                // If it cannot be removed, the next listener there removes it.
                let _ = fs::remove_file(path);
            }
        }
        if acceptor.join().is_err() {
            tracing::error!(address = %self.address, "the thread accepting NBD clients panicked");
        }
    }
}

/// The socket of a Unix listener, and the device and inode of its file.
fn bound(listener: UnixListener, path: &Path) -> io::Result<(OwnedFd, (u64, u64))> {
    listener.set_nonblocking(true)?;
    let data = fs::symlink_metadata(path)?;
    Ok((OwnedFd::from(listener), (data.dev(), data.ino())))
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.end();
    }
}

impl Inner {
    /// Accepts clients until stopped, then ends all connections.
    fn accept_all(self: &Arc<Self>) {
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        let mut next = 0;
        while self.wait(None) {
            threads.retain(|thread| !thread.is_finished());
            match self.accept() {
                Ok((socket, peer)) => {
                    if let Some(thread) = self.begin(socket, peer, next) {
                        threads.push(thread);
                    }
                    next += 1;
                }
                Err(error) if is_shortage(&error) => {
                    tracing::warn!(%error, "no NBD client can be accepted for now");
                    if !self.pause() {
                        break;
                    }
                }
                // The client has already disconnected, or there was none.
                Err(_) => {}
            }
        }
        for control in self.controls.lock().iter() {
            control.stop();
        }
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("the thread of an NBD connection panicked");
            }
        }
        self.left.wait_while(&mut self.controls.lock(), |controls| !controls.is_empty());
    }

    /// Sleeps until a client connects. Returns false when the listener has to end.
    fn wait(&self, limit: Option<Duration>) -> bool {
        wait(Some(self.socket().as_fd()), self.wake.as_fd(), limit);
        // Woken for its end, which is looked at afterwards, or for another socket.
        let _ = (&self.wake).read(&mut [0; 8]);
        !self.stop.load(Ordering::Acquire)
    }

    fn socket(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.socket.lock())
    }

    /// Sleeps for [`PAUSE`] without polling the socket. Returns false when the listener has to end.
    fn pause(&self) -> bool {
        wait(None, self.wake.as_fd(), Some(PAUSE));
        !self.stop.load(Ordering::Acquire)
    }

    fn accept(&self) -> io::Result<(OwnedFd, Peer)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = accept_with(&*self.socket(), flags)?;
        // These options improve performance if the host grants them, and are not required.
        let _ = sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER);
        if !self.tcp {
            let peer = Peer { text: unix_peer(&socket), address: None };
            return Ok((socket, peer));
        }
        let _ = sockopt::set_tcp_nodelay(&socket, true);
        let _ = sockopt::set_socket_keepalive(&socket, true);
        let stream = TcpStream::from(socket);
        let address = stream.peer_addr().ok();
        let text = address.map_or_else(|| "unknown".into(), |address| address.to_string());
        let peer = Peer { text, address: address.map(|address| address.ip()) };
        Ok((OwnedFd::from(stream), peer))
    }

    /// Makes room for a client. Returns false if all places are taken by others that have
    /// authenticated.
    fn make_room(&self, controls: &[Arc<Control>]) -> bool {
        let strangers: Vec<&Arc<Control>> =
            controls.iter().filter(|control| control.is_stranger()).collect();
        let is_full = controls.len() >= self.connections_max;
        if !is_full && strangers.len() < STRANGERS_MAX {
            return true;
        }
        // The threads of those that were dropped before may be about to end.
        if controls.len() >= self.connections_max + STRANGERS_MAX {
            return false;
        }
        let Some(oldest) = yielding(strangers.iter().map(|control| control.address())) else {
            return !is_full;
        };
        let oldest = strangers[oldest];
        oldest.stop();
        self.shared.counters.refused.fetch_add(1, Ordering::Relaxed);
        let mut reported = self.reported.lock();
        if reported.is_none_or(|reported| reported.elapsed() >= DROPPED_INTERVAL) {
            *reported = Some(Instant::now());
            tracing::warn!(
                peer = oldest.peer(),
                "NBD clients that have not authenticated are dropped: there are too many of them"
            );
        }
        true
    }

    fn begin(self: &Arc<Self>, socket: OwnedFd, peer: Peer, id: u64) -> Option<JoinHandle<()>> {
        let refuse = |reason: &str, peer: &str| {
            self.shared.counters.refused.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer, reason, "NBD client rejected");
        };
        let control = match Control::new(id, peer) {
            Ok(control) => Arc::new(control),
            Err(error) => {
                refuse(&error.to_string(), "unknown");
                return None;
            }
        };
        {
            let mut controls = self.controls.lock();
            if !self.make_room(&controls) {
                drop(controls);
                refuse("too many connections", control.peer());
                return None;
            }
            controls.push(Arc::clone(&control));
        }
        self.shared.counters.accepted.fetch_add(1, Ordering::Relaxed);
        let entered = Entered { inner: Arc::clone(self), control: Arc::clone(&control) };
        let spawned = std::thread::Builder::new().name(format!("nbd-{id}")).spawn(move || {
            connection::serve(socket, entered);
        });
        match spawned {
            Ok(thread) => Some(thread),
            Err(error) => {
                refuse(&error.to_string(), control.peer());
                None
            }
        }
    }
}

/// A connection's entry in the listener's list, which is removed when the connection ends.
pub(super) struct Entered {
    inner: Arc<Inner>,
    control: Arc<Control>,
}

impl Entered {
    pub(super) fn shared(&self) -> &ListenerState {
        &self.inner.shared
    }

    pub(super) fn control(&self) -> &Arc<Control> {
        &self.control
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut controls = self.inner.controls.lock();
        controls.retain(|other| other.id() != self.control.id());
        drop(controls);
        self.inner.left.notify_all();
    }
}

/// Whether an accept failed because of a shortage that may be temporary.
fn is_shortage(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    matches!(code, Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS))
}

fn unix_peer(socket: &OwnedFd) -> String {
    // Not by `rustix`, whose process ids are never 0: the id of a client in another namespace is 0.
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = std::mem::size_of_val(&credentials) as libc::socklen_t;
    // SAFETY: the structure has the given length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return "unknown".into();
    }
    format!("pid {} uid {}", credentials.pid, credentials.uid)
}
