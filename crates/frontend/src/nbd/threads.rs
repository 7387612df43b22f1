//! The threads that serve an export's connections.
//!
//! Connections of one disk share threads; connections of different disks do not. A disk whose
//! storage hangs occupies the kernel's workers of a thread, and so would block other disks on the
//! thread. An export has at most as many threads as there are processors, and none while no client
//! is connected.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fathom_block::DriveThread;
use fathom_reactor::Reactor;
use parking_lot::{Mutex, MutexGuard};

use super::transmission::{SPIN_NS, Transmission};

/// The number of entries of a thread's `io_uring`.
const RING_ENTRIES: u32 = 128;

/// An export's threads.
pub(super) struct Threads {
    running: Mutex<Vec<Running>>,
    threads_max: usize,
}

struct Running {
    thread: Arc<DriveThread<Transmission>>,
    connections: Arc<AtomicUsize>,
}

impl Threads {
    /// Creates a pool of at most `threads_max` threads, and at least one.
    pub(super) fn new(threads_max: usize) -> Arc<Self> {
        Arc::new(Self { running: Mutex::default(), threads_max: threads_max.max(1) })
    }

    /// Serves the connection that `open` creates on a new thread or, if there are already as many
    /// as allowed, on the one with the fewest connections.
    ///
    /// # Errors
    /// When the host has no thread or no `io_uring` left, or the error of `open`.
    pub(super) fn add(
        self: &Arc<Self>,
        name: &str,
        open: impl FnOnce(Seat, &mut Reactor) -> io::Result<Transmission> + Send + 'static,
    ) -> io::Result<()> {
        let (thread, seat) = self.choose(name)?;
        thread.add(move |reactor| open(seat, reactor))
    }

    fn choose(self: &Arc<Self>, name: &str) -> io::Result<(Arc<DriveThread<Transmission>>, Seat)> {
        let mut running = self.running();
        let fewest = running.iter().min_by_key(|thread| thread.connections.load(Ordering::Relaxed));
        let chosen = match fewest {
            Some(fewest) if running.len() >= self.threads_max => fewest,
            _ => {
                let thread = start(name)?;
                running.push(Running { thread: Arc::new(thread), connections: Arc::default() });
                &running[running.len() - 1]
            }
        };
        chosen.connections.fetch_add(1, Ordering::Relaxed);
        let seat = Seat { threads: Arc::clone(self), connections: Arc::clone(&chosen.connections) };
        Ok((Arc::clone(&chosen.thread), seat))
    }

    fn running(&self) -> MutexGuard<'_, Vec<Running>> {
        self.running.lock()
    }
}

/// A connection's place on a thread. The thread ends when its last seat is dropped.
pub(super) struct Seat {
    threads: Arc<Threads>,
    connections: Arc<AtomicUsize>,
}

impl Seat {
    /// Whether the thread serves no other connection.
    pub(super) fn is_alone(&self) -> bool {
        self.connections.load(Ordering::Relaxed) == 1
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut running = self.threads.running();
        if self.connections.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        let ours = |thread: &Running| Arc::ptr_eq(&thread.connections, &self.connections);
        let Some(index) = running.iter().position(ours) else { return };
        let ended = running.swap_remove(index);
        drop(running);
        drop(ended);
    }
}

fn start(name: &str) -> io::Result<DriveThread<Transmission>> {
    let export = name.to_owned();
    let failed = move || {
        tracing::error!(export, "a thread of NBD connections failed; its clients are cut off");
    };
    DriveThread::start(format!("nbd-{name}"), RING_ENTRIES, SPIN_NS, failed, |_| {})
}
