//! How other threads reach a ring: by mail, which its thread reads between two rounds.

use std::collections::VecDeque;
use std::io;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use fathom_block::{Disk, DriveThread, Wake};
use fathom_reactor::Reactor;

use super::event;
use super::status::Counters;
use super::worker::{Worker, WorkerStart};

/// The entries of a thread's `io_uring`.
const REACTOR_ENTRIES: u32 = 256;
/// How often a sender looks whether the thread that it waits for is still there.
const LOOK: Duration = Duration::from_millis(100);

type Change = Box<dyn FnOnce(&mut Worker, &mut Reactor) + Send>;

/// A change to be made by a ring's thread.
pub(super) struct Command {
    /// Whether nothing may be in flight when the change is made.
    pub drained: bool,
    pub change: Change,
}

/// How the session's thread reaches a worker.
pub(super) struct WorkerHandle {
    mailbox: Arc<Mailbox>,
    thread: Arc<RingThread>,
    stopped: bool,
}

/// A thread that serves rings of one connection.
pub(super) struct RingThread {
    thread: DriveThread<Worker>,
    /// It is writing to a descriptor that the VMM holds too.
    writing: Arc<AtomicBool>,
}

impl RingThread {
    /// Starts the `index`th thread for rings of `disk`, which watches them for `spin_ns` at the
    /// longest before it sleeps.
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
                    // For a whole look: the VMM does not let it go on.
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

/// Commands on their way to a ring.
pub(super) struct Mailbox {
    commands: Mutex<VecDeque<Command>>,
    /// Whether there may be commands: one load a round.
    pending: AtomicBool,
    wake: Arc<Wake>,
    /// The thread is writing to a descriptor that the VMM holds too.
    pub writing: Arc<AtomicBool>,
}

/// What the thread finds in its mailbox.
pub(super) enum Mail {
    /// Nothing.
    None,
    /// A change to be made now.
    Change(Change),
    /// A change that waits until nothing is in flight.
    Waiting,
}

impl Mailbox {
    /// Whether there may be mail. One load.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// The next command that can be carried out with `in_flight` requests in flight.
    pub(super) fn next(&self, in_flight: usize) -> Mail {
        let mut commands = self.commands();
        if commands.front().is_some_and(|command| command.drained && in_flight > 0) {
            return Mail::Waiting;
        }
        let Some(command) = commands.pop_front() else {
            self.pending.store(false, Ordering::Release);
            return Mail::None;
        };
        Mail::Change(command.change)
    }

    fn clear(&self) {
        let commands = std::mem::take(&mut *self.commands());
        // What a command holds is dropped without the lock.
        drop(commands);
    }

    fn commands(&self) -> MutexGuard<'_, VecDeque<Command>> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, command: Command) {
        self.commands().push_back(command);
        self.pending.store(true, Ordering::Release);
        self.wake.wake();
    }
}

/// Has a ring's thread, from any thread, take part in a change of its disk's layers.
pub(super) struct Restacker(Arc<Mailbox>);

impl Restacker {
    pub(super) fn restack(&self) {
        self.0.wake.wake();
    }
}

impl WorkerHandle {
    /// Has `thread` serve the ring. Fails where the disk cannot be opened for it.
    pub(super) fn start(start: WorkerStart, thread: Arc<RingThread>) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox {
            commands: Mutex::default(),
            pending: AtomicBool::new(false),
            wake: thread.wake(),
            writing: Arc::clone(&thread.writing),
        });
        let for_worker = Arc::clone(&mailbox);
        thread.add(move |reactor| Worker::new(start, for_worker, reactor))?;
        Ok(Self { mailbox, thread, stopped: false })
    }

    /// Runs `change` on the worker's thread and returns what it returns; `None` where the thread
    /// has ended. With `drained`, no request is in flight by then, and no new ones were taken.
    pub(super) fn update<R: Send + 'static>(
        &self,
        drained: bool,
        change: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Option<R> {
        let (sender, receiver) = sync_channel(1);
        let change: Change = Box::new(move |worker, _| drop(sender.send(change(worker))));
        self.mailbox.send(Command { drained, change });
        loop {
            // A thread that has ended reads no mail: drop the command, and with it the sender.
            if self.thread.is_finished() {
                self.mailbox.clear();
            }
            match receiver.recv_timeout(LOOK) {
                Ok(result) => return Some(result),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => self.thread.disturb(),
            }
        }
    }

    /// Lets another thread tell of a change of layers.
    pub(super) fn restacker(&self) -> Restacker {
        Restacker(Arc::clone(&self.mailbox))
    }

    /// Completes what is in flight, ends the ring, and returns how far it had come.
    pub(super) fn stop(mut self) -> Option<u16> {
        let base = self.update(true, |worker| {
            worker.end();
            worker.ring.next_available()
        });
        self.stopped = true;
        self.thread.settle();
        base
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        if !self.stopped {
            self.update(true, Worker::end);
            self.thread.settle();
        }
    }
}
