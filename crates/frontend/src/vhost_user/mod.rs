//! The vhost-user-blk front end: disks for VMMs.
//!
//! ```text
//!  Server      one thread for each disk accepts VMMs, and one for each VMM reads its messages
//!   └ Session  the state that the messages have set up: memory, features, rings
//!      └ Worker  a ring, on a thread that serves one or more: Ring ▶ Chain ▶ request ▶ Stack ▶ Ring
//! ```
//!
//! Guest memory is untrusted: each field is read once, then checked. An invalid request fails with
//! an error, is counted, and is logged once for each connection. A ring whose indexes are invalid
//! is stopped; the other rings and disks continue.

mod bits;
mod chain;
mod config;
mod event;
mod fuzz;
mod inflight;
mod live;
mod mailbox;
mod memory;
mod memory_file;
mod observer;
mod peek;
mod private_memory;
mod refusal;
mod request;
mod ring;
mod ring_right;
mod session;
mod status;
mod worker;

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use fathom_block::Disk;
use fathom_guest_memory::{
    GuestAddress, GuestLeases, GuestMemory, LossCause, MappingBudget, MemoryFile, MemoryOwner,
};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};
use vhost::vhost_user::{BackendReqHandler, Error};

#[doc(hidden)]
pub use bits::{protocol_features, virtio_features};
pub use fuzz::fuzz_requests;
pub use observer::GuestObserver;
pub use refusal::Refusal;
pub use status::VhostUserStatus;

use live::Live;
use ring_right::RingRight;
use session::{Session, SessionStart};
use status::Counters;

/// The default limit on the time that a ring is polled before its thread sleeps, in nanoseconds:
/// the value of QEMU's own back ends.
const SPIN_NS: u64 = 32_768;

/// How a disk is offered to a VMM.
#[derive(Clone, Debug)]
pub struct VhostUserOptions {
    /// The socket to which the VMM connects.
    pub socket: PathBuf,
    /// The most queues that the VMM can use; at least 1.
    pub queues: u16,
    /// The number of threads that serve the queues; `None` for one for each available processor.
    pub threads: Option<u16>,
    /// The longest time that a ring is polled before its thread sleeps, in nanoseconds; 0 disables
    /// polling. The thread polls only while polling pays.
    pub spin_ns: u64,
}

impl VhostUserOptions {
    /// The default options at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), queues: 4, threads: None, spin_ns: SPIN_NS }
    }

    /// The number of threads that serve the queues, at most one for each queue. The default is one
    /// for each available processor, because more threads would compete for processors.
    pub fn threads_or_default(&self) -> u16 {
        let processors = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads.unwrap_or_else(|| processors().try_into().unwrap_or(u16::MAX));
        threads.clamp(1, self.queues.max(1))
    }
}

/// The most VMMs that may be connected to one disk: the source and the destination of a migration,
/// and dead ones whose connections have not yet been closed.
const CONNECTIONS_MAX: usize = 16;

/// The pause of the accepting thread when the host has no descriptors or threads left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// The most memory tables, each of the largest size, that are mapped for one disk: two VMMs during
/// a migration, each with a table that replaces another.
const TABLES_MAX: u64 = 4;

/// A disk's server for VMMs.
///
/// A second VMM may connect while the first one's guest runs, as the destination of a live
/// migration does. Its rings start after the rings of the first have stopped.
pub struct Server {
    socket: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    disk: Arc<Disk>,
    /// The socket; another one after [`Server::listen_again`].
    listener: Mutex<Arc<UnixListener>>,
    options: VhostUserOptions,
    observer: Arc<dyn GuestObserver>,
    counters: Arc<Counters>,
    connections: Mutex<Connections>,
    right: Arc<RingRight>,
    /// The limit on the memory that all VMMs of the disk may have mapped.
    budget: Arc<MappingBudget>,
    /// Why the last VMM was disconnected; `None` once a VMM is served.
    refusal: Mutex<Option<Refusal>>,
    ended: AtomicBool,
    /// Wakes the thread that accepts. A connection to the server's own socket could not: the path
    /// may name another socket by then, and a full queue of clients would block the connection.
    wake: File,
}

#[derive(Default)]
struct Connections {
    list: Vec<Connection>,
    accepted: u64,
}

/// The `vhost` crate serves a session only in this lock.
#[expect(clippy::disallowed_types, reason = "the `vhost` crate asks for it")]
type SessionLock = std::sync::Mutex<Session>;

fn lock(session: &SessionLock) -> std::sync::MutexGuard<'_, Session> {
    session.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The server's record of a connection.
struct Connection {
    number: u64,
    stream: Arc<UnixStream>,
    live: Arc<Mutex<Live>>,
    session: Arc<SessionLock>,
    thread: JoinHandle<()>,
}

impl Connection {
    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock()
    }
}

impl Server {
    /// Listens on the socket, mode 0600, and serves `disk` to the VMMs that connect.
    ///
    /// # Errors
    /// When the socket cannot be created (see [`crate::socket::listen`]), or an option is invalid.
    pub fn start(options: VhostUserOptions, disk: Arc<Disk>) -> io::Result<Self> {
        Self::start_observed(options, disk, Arc::new(observer::NoObserver))
    }

    /// The same, with an observer of the guests' memory.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    #[expect(clippy::needless_pass_by_value, reason = "the server keeps the disk")]
    pub fn start_observed(
        options: VhostUserOptions,
        disk: Arc<Disk>,
        observer: Arc<dyn GuestObserver>,
    ) -> io::Result<Self> {
        if options.queues == 0 || options.queues > 256 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a disk has 1 to 256 queues"));
        }
        let listener = crate::socket::listen(&options.socket)?;
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            disk: Arc::clone(&disk),
            listener: Mutex::new(Arc::new(listener)),
            observer,
            counters: Arc::default(),
            connections: Mutex::default(),
            right: Arc::default(),
            budget: Arc::new(MappingBudget::new(TABLES_MAX * *memory::ANNOUNCED)),
            refusal: Mutex::default(),
            ended: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?.into(),
            options: options.clone(),
        });
        let listening: Weak<Shared> = Arc::downgrade(&shared);
        disk.listen(Box::new(move |change| {
            let Some(shared) = listening.upgrade() else { return false };
            for connection in &shared.connections().list {
                connection.live().announce(change);
            }
            true
        }));
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(format!("vm-{}", disk.name()))
            .spawn(move || for_thread.accept())?;
        Ok(Self { socket: options.socket, shared, thread: Some(thread) })
    }

    /// Makes the socket again if its path has been deleted. Returns whether it was made.
    /// Connections stay.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn listen_again(&self) -> io::Result<bool> {
        let Some(listener) = crate::socket::listen_again(&self.socket)? else { return Ok(false) };
        listener.set_nonblocking(true)?;
        *self.shared.listener.lock() = Arc::new(listener);
        // Fails only when the counter is full, and then a wake-up is already pending.
        let _ = (&self.shared.wake).write(&1_u64.to_ne_bytes());
        Ok(true)
    }

    /// The path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The current state: of the VMM whose guest runs, or else of the last to connect.
    pub fn status(&self) -> VhostUserStatus {
        let counters = &self.shared.counters;
        let connections = self.shared.connections();
        let mut status = VhostUserStatus {
            connected: !connections.list.is_empty(),
            connections: counters.connections.load(Ordering::Relaxed),
            refused: counters.refused.load(Ordering::Relaxed),
            broken_rings: counters.broken_rings.load(Ordering::Relaxed),
            broken_now: counters.broken_now.load(Ordering::Relaxed),
            protocol_errors: counters.protocol_errors.load(Ordering::Relaxed),
            recovered: counters.recovered.load(Ordering::Relaxed),
            panics: counters.panics.load(Ordering::Relaxed),
            lost: counters.lost.load(Ordering::Relaxed),
            ..VhostUserStatus::default()
        };
        if let Some(connection) = self.shared.foremost(&connections) {
            let live = connection.live();
            status.running_queues = live.running_queues;
            status.features = live.features;
            status.protocol_features = live.protocol_features;
            status.memory = live.memory.length();
            status.inflight = live.inflight;
            status.announces_sizes = live.channel.is_some();
            status.logging = live.logging;
            status.blind = live.private_memory.is_detected();
        }
        let mut refusal = self.shared.refusal();
        if status.running_queues > 0 {
            *refusal = None;
        }
        status.refusal.clone_from(&refusal);
        status
    }

    /// Whether a guest is being migrated: its VMM has a log of the pages that are written.
    pub fn is_logging(&self) -> bool {
        self.shared.connections().list.iter().any(|connection| connection.live().logging)
    }

    /// Marks guest-physical memory in the logs of guests that are being migrated, because another
    /// part of the daemon has written to it.
    pub fn mark_written(&self, address: u64, length: u64) {
        for connection in &self.shared.connections().list {
            let log = connection.live().log.clone();
            if let Some(log) = log {
                log.mark(GuestAddress(address), length);
            }
        }
    }

    /// The memory of the running guest; empty if none runs.
    pub fn guest_memory(&self) -> GuestMemory {
        let connections = self.shared.connections();
        let foremost = self.shared.foremost(&connections);
        foremost.map(|connection| connection.live().memory.clone()).unwrap_or_default()
    }

    /// What begins to take leases on the memory of the disk's guests for their pagers, or ends it
    /// where there is none any more. It waits for the requests in flight, which a disk that does
    /// not answer may keep for ever.
    pub fn lease_renewal(&self) -> LeaseRenewal {
        let connections = self.shared.connections();
        let sessions = connections.list.iter().map(|connection| Arc::clone(&connection.session));
        LeaseRenewal { sessions: sessions.collect() }
    }

    /// Completes the requests in flight, disconnects the VMM and removes the socket. A VMM that
    /// reconnects continues with the next daemon.
    pub fn shutdown(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.ended.store(true, Ordering::Release);
        // A session that waits for the rings of another to stop holds its own lock.
        self.shared.right.close();
        // Fails only when the counter is full, and then a wake-up is already pending.
        let _ = (&self.shared.wake).write(&1_u64.to_ne_bytes());
        let _ = thread.join();
        // Before the wait for guests, whose disk may hang: so the path is free for the next daemon.
        let _ = std::fs::remove_file(&self.socket);
        let connections = std::mem::take(&mut self.shared.connections().list);
        for connection in &connections {
            // First the requests, then the connection: a VMM whose connection has closed ignores
            // interrupts.
            lock(&connection.session).close(false);
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
        for connection in connections {
            let _ = connection.thread.join();
        }
    }
}

/// A connection some of whose accesses take no leases, although its guest may have a pager.
#[derive(Debug)]
pub struct NotLeased {
    /// The files of the guest's memory.
    pub files: Vec<MemoryFile>,
    /// Why there are none.
    pub reason: String,
}

/// The connections of a disk, whose leases are to be renewed.
pub struct LeaseRenewal {
    sessions: Vec<Arc<SessionLock>>,
}

impl LeaseRenewal {
    /// Renews them. Returns the leases that are taken from now on, and the connections that take
    /// none although their guest may have a pager.
    pub fn run(self) -> Vec<std::result::Result<Arc<GuestLeases>, NotLeased>> {
        let renew = |session: &Arc<SessionLock>| lock(session).renew_leases().transpose();
        self.sessions.iter().filter_map(renew).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock()
    }

    fn refusal(&self) -> MutexGuard<'_, Option<Refusal>> {
        self.refusal.lock()
    }

    /// Records why a VMM is disconnected. Logs the reason only if it differs from the last one: a
    /// VMM reconnects each second.
    fn refuse(&self, reason: Refusal) {
        if reason.is_protocol_error {
            self.counters.protocol_errors.fetch_add(1, Ordering::Relaxed);
        }
        let mut refusal = self.refusal();
        if refusal.as_ref() != Some(&reason) {
            tracing::warn!(
                disk = self.disk.name(),
                vm = self.disk.vm(),
                "the VMM is disconnected: {}",
                reason.message
            );
            *refusal = Some(reason);
            // The component that watches the disk reports the refusal.
            self.disk.failures().call();
        }
    }

    /// The connection whose guest runs, or else the last one.
    fn foremost<'c>(&self, connections: &'c Connections) -> Option<&'c Connection> {
        let holder = self.right.holder();
        let list = &connections.list;
        list.iter().find(|connection| Some(connection.number) == holder).or(list.last())
    }

    fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn accept(self: &Arc<Self>) {
        let wake = self.wake.as_fd();
        loop {
            let listener = Arc::clone(&self.listener.lock());
            crate::socket::wait(Some(listener.as_fd()), wake, None);
            // Woken for its end, which is looked at afterwards, or for another socket.
            let _ = (&self.wake).read(&mut [0; 8]);
            if self.ended() {
                return;
            }
            let begun = match listener.accept() {
                Ok((stream, _)) => stream.set_nonblocking(false).and_then(|()| self.begin(stream)),
                // The client has already disconnected.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = begun {
                tracing::error!(disk = self.disk.name(), %error, "cannot accept a VMM");
                // The host has probably run out of descriptors or threads, which may be temporary.
                crate::socket::wait(None, wake, Some(ACCEPT_PAUSE));
            }
        }
    }

    /// Starts a thread that serves a VMM.
    fn begin(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        let mut connections = self.connections();
        connections.list.retain(|connection| !connection.thread.is_finished());
        if connections.list.len() >= CONNECTIONS_MAX {
            tracing::warn!(disk = self.disk.name(), "a VMM is rejected: too many are connected");
            return Ok(());
        }
        let number = connections.accepted;
        let live: Arc<Mutex<Live>> = Arc::default();
        let alarm = OwnedFd::from(stream.try_clone()?);
        let memory_owner = Arc::new(MemoryOwner::new(Some(alarm), Some(Arc::clone(&self.budget))));
        let session = Session::new(SessionStart {
            number,
            disk: Arc::clone(&self.disk),
            options: self.options.clone(),
            observer: Arc::clone(&self.observer),
            counters: Arc::clone(&self.counters),
            live: Arc::clone(&live),
            right: Arc::clone(&self.right),
            memory_owner,
        });
        let session = Arc::new(SessionLock::new(session));
        let ours = Arc::new(stream.try_clone()?);
        let (shared, ending) = (Arc::clone(self), Arc::clone(&ours));
        let served = Arc::clone(&session);
        let thread = std::thread::Builder::new().name(format!("vm-{}", self.disk.name())).spawn(
            move || {
                if catch_unwind(AssertUnwindSafe(|| shared.serve(stream, &ending, &served)))
                    .is_err()
                {
                    shared.counters.panics.fetch_add(1, Ordering::Relaxed);
                    tracing::error!(disk = shared.disk.name(), "a connection's thread failed");
                    lock(&served).close(true);
                }
                // Other copies of the descriptor may keep the socket open for a while.
                let _ = ending.shutdown(Shutdown::Both);
                // The server's own end first takes the list, then joins the threads in it.
                shared.connections().list.retain(|connection| connection.number != number);
            },
        )?;
        connections.accepted += 1;
        connections.list.push(Connection { number, stream: ours, live, session, thread });
        Ok(())
    }

    /// Logs that a VMM has connected, and returns true. A refused VMM reconnects each second, so
    /// after a refusal a connection is logged only once it is served: when one of its rings runs.
    fn log_connection(&self, served: bool) -> bool {
        let mut refusal = self.refusal();
        if served {
            *refusal = None;
        }
        let logs = refusal.is_none();
        drop(refusal);
        if logs {
            let (disk, vm) = (self.disk.name(), self.disk.vm());
            tracing::info!(disk, vm, "a VMM has connected");
        }
        logs
    }

    /// Serves `connection`; `again` is a second descriptor of the same socket.
    fn serve(&self, connection: UnixStream, again: &UnixStream, session: &Arc<SessionLock>) {
        let (name, vm) = (self.disk.name(), self.disk.vm());
        let mut is_logged = self.log_connection(false);
        let memory_owner = Arc::clone(lock(session).memory_owner());
        let mut handler = BackendReqHandler::from_stream(connection, Arc::clone(session));
        while !memory_owner.is_lost() {
            // The protocol library does not give access to the channel for the daemon's own
            // messages, and has no message for a changed configuration.
            match peek::channel(again) {
                Ok(Some(channel)) => {
                    lock(session).set_channel(channel);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(disk = name, %error, "cannot peek at a message of the VMM");
                }
            }
            match handler.handle_request() {
                Ok(()) if is_logged => {}
                Ok(()) => is_logged = lock(session).is_running() && self.log_connection(true),
                Err(Error::Disconnected) => break,
                Err(_) if self.ended() || memory_owner.is_lost() => break,
                Err(error) => {
                    self.refuse(refusal::refusal(&error));
                    break;
                }
            }
        }
        // Completes the requests in flight before the connection closes, so that the VMM finds all
        // of them completed.
        lock(session).close(!self.ended());
        drop(handler);
        if let Some(cause) = memory_owner.cause() {
            self.counters.lost.fetch_add(1, Ordering::Relaxed);
            let cause = match cause {
                LossCause::Hardware => "the hardware has lost a page of it",
                LossCause::Absent if lock(session).memory().is_truncated() => {
                    "its file was truncated"
                }
                LossCause::Absent => {
                    "a page of it is not available: its file system is full, there is no huge \
                     page left, or its file was truncated"
                }
            };
            tracing::error!(
                disk = name,
                vm,
                "the VMM is disconnected: memory that it shares cannot be accessed any more \
                 ({cause})"
            );
        }
        if is_logged {
            tracing::info!(disk = name, vm, "the VMM has disconnected");
        }
    }
}
