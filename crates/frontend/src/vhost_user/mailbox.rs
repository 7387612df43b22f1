//! How other threads reach a ring's thread: by mail, which it reads between two rounds.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use super::event;
use super::worker::{Worker, WorkerStart};

/// How often a sender looks whether the thread that it waits for is still there.
const LOOK: Duration = Duration::from_millis(100);

type Change = Box<dyn FnOnce(&mut Worker) + Send>;

/// A change to be made by a ring's thread.
pub(super) struct Command {
    /// Whether nothing may be in flight when the change is made.
    pub drained: bool,
    pub change: Change,
}

/// How the session's thread reaches a worker.
pub(super) struct WorkerHandle {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

/// Commands on their way to a ring's thread.
pub(super) struct Mailbox {
    commands: Mutex<VecDeque<Command>>,
    /// Whether there may be commands: one load a round.
    pending: AtomicBool,
    /// Wakes the thread.
    pub wake: EventFd,
    /// The thread is writing to a descriptor that the VMM holds too.
    pub writing: AtomicBool,
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

    fn commands(&self) -> MutexGuard<'_, VecDeque<Command>> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, command: Command) {
        self.commands().push_back(command);
        self.pending.store(true, Ordering::Release);
        // The counter cannot overflow: the worker reads it whenever it is not zero.
        let _ = self.wake.write(1);
    }
}

/// Asks a worker, from any thread, to open its disk anew.
pub(super) struct Restacker(Arc<Mailbox>);

impl Restacker {
    pub(super) fn restack(&self) {
        self.0.send(Command { drained: true, change: Box::new(Worker::restack) });
    }
}

impl WorkerHandle {
    /// Starts the thread. Fails where the disk cannot be opened for it.
    pub(super) fn start(start: WorkerStart) -> io::Result<Self> {
        let wake = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        event::allow_interrupts();
        let mailbox = Arc::new(Mailbox {
            commands: Mutex::default(),
            pending: AtomicBool::new(false),
            wake,
            writing: AtomicBool::new(false),
        });
        let (sender, receiver) = sync_channel(1);
        let for_thread = Arc::clone(&mailbox);
        let name = format!("q{}-{}", start.index, start.disk.name());
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let counters = Arc::clone(&start.counters);
            let disk = start.disk.name().to_owned();
            let result =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    match Worker::new(start, for_thread) {
                        Ok(mut worker) => {
                            let _ = sender.send(Ok(()));
                            worker.run();
                        }
                        Err(error) => drop(sender.send(Err(error))),
                    }
                }));
            if result.is_err() {
                counters.panics.fetch_add(1, Ordering::Relaxed);
                tracing::error!(disk, "a queue's thread failed; its ring has stopped");
            }
        })?;
        match receiver.recv() {
            Ok(Ok(())) => Ok(Self { mailbox, thread: Some(thread) }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::Error::other("a queue's thread failed at its start")),
        }
    }

    /// Runs `change` on the worker's thread and returns what it returns; `None` where the thread
    /// has ended. With `drained`, no request is in flight by then, and no new ones were taken.
    pub(super) fn update<R: Send + 'static>(
        &self,
        drained: bool,
        change: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Option<R> {
        let (sender, receiver) = sync_channel(1);
        let change: Change = Box::new(move |worker| drop(sender.send(change(worker))));
        self.mailbox.send(Command { drained, change });
        // A thread that has ended reads no mail: drop the command, and with it the sender.
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            self.clear();
        }
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(result) => return Some(result),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => match &self.thread {
                    Some(thread) if !thread.is_finished() => {
                        if self.mailbox.writing.load(Ordering::Relaxed) {
                            // For a whole look: the VMM does not let it go on.
                            event::interrupt(thread);
                        }
                    }
                    _ => self.clear(),
                },
            }
        }
    }

    fn clear(&self) {
        self.mailbox.commands().clear();
    }

    /// Lets another thread ask for a restack.
    pub(super) fn restacker(&self) -> Restacker {
        Restacker(Arc::clone(&self.mailbox))
    }

    /// Completes what is in flight, ends the thread, and returns how far it had come in the ring.
    pub(super) fn stop(mut self) -> Option<u16> {
        let base = self.update(true, |worker| {
            worker.end();
            worker.ring.next_available()
        });
        self.join();
        base
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.update(true, Worker::end);
            self.join();
        }
    }
}
