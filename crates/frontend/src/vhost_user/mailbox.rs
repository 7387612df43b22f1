//! How other threads reach a ring: through a mailbox, which the ring's thread reads between two
//! rounds.

use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use fathom_block::{Disk, DriveThread, Mailbox, Wake};

use super::event;
use super::status::Counters;
use super::worker::{Worker, WorkerStart};

/// The entries of a thread's `io_uring`.
const REACTOR_ENTRIES: u32 = 256;

type Change = Box<dyn FnOnce(&mut Worker) + Send>;

/// When a change is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// In the next round.
    AtOnce,
    /// When nothing is in flight: what the disk's layers hold is taken back, and carried out again
    /// after the change.
    Idle,
    /// The same for a change that stops the ring. With a VMM that lives, requests that cannot be
    /// given back to it otherwise are carried out before.
    Stopped { is_gone: bool },
}

/// A change for a ring's thread to make.
pub(super) struct Command {
    pub due: Due,
    pub change: Change,
}

/// The session thread's handle of a worker.
pub(super) struct WorkerHandle {
    mailbox: Arc<Mailbox<Command>>,
    thread: Arc<RingThread>,
    stopped: bool,
}

/// A thread that serves rings of one connection.
pub(super) struct RingThread {
    thread: DriveThread<Worker>,
    /// Whether the thread is writing to a descriptor that the VMM also holds.
    writing: Arc<AtomicBool>,
}

impl RingThread {
    /// Starts the `index`th thread for rings of `disk`. It polls them for at most `spin_ns` before
    /// it sleeps.
    pub(super) fn start(
        disk: &Arc<Disk>,
        index: usize,
        spin_ns: u64,
        counters: &Arc<Counters>,
    ) -> io::Result<Self> {
        event::allow_interrupts();
        let (counters, name) = (Arc::clone(counters), disk.name().to_owned());
        let failed = move || {
            counters.panics.fetch_add(1, Ordering::Relaxed);
            tracing::error!(disk = name, "a queue's thread failed; its rings have stopped");
        };
        let writing = Arc::new(AtomicBool::new(false));
        let disturb = {
            let writing = Arc::clone(&writing);
            move |thread: &JoinHandle<()>| {
                if writing.load(Ordering::Relaxed) {
                    // The write is taking unusually long: the VMM blocks it.
                    event::interrupt(thread);
                }
            }
        };
        let name = format!("q{index}-{}", disk.name());
        let thread = DriveThread::start(name, REACTOR_ENTRIES, spin_ns, failed, disturb)?;
        Ok(Self { thread, writing })
    }
}

impl Deref for RingThread {
    type Target = DriveThread<Worker>;

    fn deref(&self) -> &Self::Target {
        &self.thread
    }
}

impl WorkerHandle {
    /// Adds the ring to `thread`. Fails if the disk cannot be opened for it.
    pub(super) fn start(start: WorkerStart, thread: Arc<RingThread>) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox::new(thread.wake()));
        let (for_worker, writing) = (Arc::clone(&mailbox), Arc::clone(&thread.writing));
        thread.add(move |reactor| Worker::new(start, for_worker, writing, reactor))?;
        Ok(Self { mailbox, thread, stopped: false })
    }

    /// Runs `change` on the worker's thread and returns its result; `None` if the thread has ended.
    /// No new requests are taken while the change waits until it is due.
    pub(super) fn update<R: Send + 'static>(
        &self,
        due: Due,
        change: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Option<R> {
        self.thread.ask(&self.mailbox, |sender| Command {
            due,
            change: Box::new(move |worker: &mut Worker| drop(sender.send(change(worker)))),
        })
    }

    /// The wake-up of the ring's thread, for changes of its disk's layers.
    pub(super) fn wake(&self) -> Arc<Wake> {
        Arc::clone(self.mailbox.wake())
    }

    /// Completes the requests in flight, gives held ones back untouched, ends the ring, and returns
    /// the count of requests taken from it. `is_gone` is whether its VMM has gone.
    pub(super) fn stop(mut self, is_gone: bool) -> Option<u16> {
        let base = self.update(Due::Stopped { is_gone }, Worker::stop);
        self.stopped = true;
        self.thread.await_ended();
        base
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        if !self.stopped {
            self.update(Due::Stopped { is_gone: true }, Worker::stop);
            self.thread.await_ended();
        }
    }
}
