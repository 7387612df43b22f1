//! The vhost-user-blk front end: disks for VMMs.
//!
//! ```text
//!  Server      one thread a disk: accepts a VMM, reads its messages
//!   └ Session  what the messages have set up: memory, features, rings
//!      └ Worker  one thread a ring: Ring ▶ Chain ▶ request ▶ Stack ▶ back
//! ```
//!
//! Guest memory is read with suspicion: each field once, then checked. What makes no sense is
//! answered with an error, counted and logged once; a ring that contradicts itself is stopped; the
//! other rings and disks go on.

mod chain;
mod config;
mod dirty_log;
mod fuzz;
mod inflight;
mod memory;
mod peek;
mod request;
mod ring;
mod session;
mod shared_file;
mod spin;
mod status;
mod worker;

use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use fathom_block::Disk;
use vhost::vhost_user::{BackendReqHandler, Error};

#[doc(hidden)]
pub use fuzz::fuzz_requests;
pub use memory::Memory;
pub use status::VhostUserStatus;

use session::{Live, Session};
use status::Counters;

/// The longest that a ring is watched before its thread sleeps, in nanoseconds, by default: what
/// QEMU's own back ends use.
const SPIN_NS: u64 = 32_768;

/// How a disk is offered to a VMM.
#[derive(Clone, Debug)]
pub struct VhostUserOptions {
    /// Where the VMM connects.
    pub socket: PathBuf,
    /// The most queues that it can use; at least 1.
    pub queues: u16,
    /// The longest that a ring is watched before its thread sleeps, in nanoseconds; 0 never
    /// watches. The thread watches only while that pays.
    pub spin_ns: u64,
}

impl VhostUserOptions {
    /// The default options at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), queues: 4, spin_ns: SPIN_NS }
    }
}

/// A disk that waits for, or serves, a VMM. One VMM at a time: a further one waits until the first
/// has gone.
pub struct Server {
    socket: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    disk: Arc<Disk>,
    options: VhostUserOptions,
    counters: Arc<Counters>,
    live: Arc<Mutex<Live>>,
    connection: Mutex<Option<UnixStream>>,
    ended: AtomicBool,
}

impl Server {
    /// Listens on the socket, mode 0600, and serves `disk` to whoever connects, one after another.
    ///
    /// # Errors
    /// When the socket cannot be had (see [`crate::socket::listen`]), or the options make no sense.
    pub fn start(options: VhostUserOptions, disk: Arc<Disk>) -> io::Result<Self> {
        if options.queues == 0 || options.queues > 256 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a disk has 1 to 256 queues"));
        }
        let listener = crate::socket::listen(&options.socket)?;
        let shared = Arc::new(Shared {
            disk: Arc::clone(&disk),
            counters: Arc::default(),
            live: Arc::default(),
            connection: Mutex::default(),
            ended: AtomicBool::new(false),
            options: options.clone(),
        });
        let live: Weak<Mutex<Live>> = Arc::downgrade(&shared.live);
        disk.listen(Box::new(move |change| {
            let Some(live) = live.upgrade() else { return false };
            live.lock().unwrap_or_else(PoisonError::into_inner).tell(change);
            true
        }));
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(format!("vm-{}", disk.name()))
            .spawn(move || for_thread.accept(&listener))?;
        Ok(Self { socket: options.socket, shared, thread: Some(thread) })
    }

    /// The path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The state at this moment.
    pub fn status(&self) -> VhostUserStatus {
        let counters = &self.shared.counters;
        let live = self.shared.live();
        VhostUserStatus {
            connected: live.connected,
            running_queues: live.running_queues,
            features: live.features,
            protocol_features: live.protocol_features,
            memory: live.memory.length(),
            inflight: live.inflight,
            logging: live.logging,
            connections: counters.connections.load(Ordering::Relaxed),
            refused: counters.refused.load(Ordering::Relaxed),
            broken_rings: counters.broken_rings.load(Ordering::Relaxed),
            protocol_errors: counters.protocol_errors.load(Ordering::Relaxed),
            recovered: counters.recovered.load(Ordering::Relaxed),
            panics: counters.panics.load(Ordering::Relaxed),
        }
    }

    /// The memory of the guest that is connected now; empty where none is.
    pub fn guest_memory(&self) -> Arc<Memory> {
        Arc::clone(&self.shared.live().memory)
    }

    /// Completes the requests in flight, lets go of the VMM and removes the socket. A VMM that
    /// reconnects finds the next daemon there and goes on where it was.
    pub fn shutdown(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.ended.store(true, Ordering::Release);
        if let Some(connection) = &*self.shared.connection() {
            let _ = connection.shutdown(Shutdown::Both);
        }
        // Wakes an accept that waits; an error means that it does not.
        let _ = UnixStream::connect(&self.socket);
        let _ = thread.join();
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connection(&self) -> MutexGuard<'_, Option<UnixStream>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn accept(&self, listener: &UnixListener) {
        while !self.ended() {
            match listener.accept() {
                Ok((connection, _)) if !self.ended() => self.serve(connection),
                Ok(_) => {}
                Err(error) => {
                    tracing::error!(disk = self.disk.name(), %error, "cannot accept a VMM");
                    // Out of descriptors, most likely: it may pass.
                    std::thread::sleep(std::time::Duration::from_millis(200));
                }
            }
        }
    }

    fn serve(&self, connection: UnixStream) {
        let name = self.disk.name();
        match connection.try_clone() {
            Ok(clone) => *self.connection() = Some(clone),
            Err(error) => {
                tracing::error!(disk = name, %error, "cannot keep the connection of a VMM");
                return;
            }
        }
        let session = Session::new(
            Arc::clone(&self.disk),
            self.options.clone(),
            Arc::clone(&self.counters),
            Arc::clone(&self.live),
        );
        session.begin();
        tracing::info!(disk = name, vm = self.disk.vm(), "a VMM has connected");
        let session = Arc::new(Mutex::new(session));
        let descriptor = connection.as_raw_fd();
        let mut handler = BackendReqHandler::from_stream(connection, Arc::clone(&session));
        while !self.ended() {
            // The protocol library keeps the channel for the daemon's own messages to itself, and
            // has none that says "the configuration changed".
            match peek::channel(descriptor) {
                Ok(Some(channel)) => {
                    session.lock().unwrap_or_else(PoisonError::into_inner).set_channel(channel)
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(disk = name, %error, "cannot look at a message of the VMM");
                }
            }
            match handler.handle_request() {
                Ok(()) => {}
                Err(Error::Disconnected) => break,
                Err(_) if self.ended() => break,
                Err(error) => {
                    self.counters.protocol_errors.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(
                        disk = name,
                        vm = self.disk.vm(),
                        %error,
                        "the VMM is let go: it broke the vhost-user protocol"
                    );
                    break;
                }
            }
        }
        // Completes what is in flight before the connection closes, so that the VMM finds all of
        // it done.
        session.lock().unwrap_or_else(PoisonError::into_inner).stop_all();
        drop(handler);
        *self.connection() = None;
        tracing::info!(disk = name, vm = self.disk.vm(), "the VMM has gone");
    }
}
