//! The handle of a drive's thread.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use fathom_reactor::Reactor;

use super::{Change, Drive, Mailbox, RequestSource, Wake};

/// The interval at which a sender checks that the thread that it waits for still runs.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Interrupts any wait of a thread.
type Disturb = Box<dyn Fn(&JoinHandle<()>) + Send + Sync>;

/// A thread that serves queues. It ends when this handle is dropped, so the handle must outlive the
/// sources of the thread.
pub struct DriveThread<S: RequestSource + 'static> {
    mailbox: Arc<Mailbox<Change<S>>>,
    thread: Option<JoinHandle<()>>,
    disturb: Disturb,
}

impl<S: RequestSource + 'static> DriveThread<S> {
    /// Starts a thread with a ring of `entries` submissions. It polls for work for at most
    /// `spin_ns` nanoseconds before it sleeps. `failed` is called if the thread panics; all its
    /// sources have then stopped. `disturb` is called repeatedly while another thread waits for
    /// this one: it has to end any wait of the thread.
    ///
    /// # Errors
    /// When the host cannot provide a thread, a descriptor or a ring.
    pub fn start(
        name: String,
        entries: u32,
        spin_ns: u64,
        failed: impl FnOnce() + Send + 'static,
        disturb: impl Fn(&JoinHandle<()>) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox::new(Arc::new(Wake::new()?)));
        let for_thread = Arc::clone(&mailbox);
        let (sender, receiver) = sync_channel(1);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let result =
                catch_unwind(AssertUnwindSafe(|| match Drive::new(entries, spin_ns, for_thread) {
                    Ok(mut drive) => {
                        let _ = sender.send(Ok(()));
                        drive.run();
                    }
                    Err(error) => drop(sender.send(Err(error))),
                }));
            if result.is_err() {
                failed();
            }
        })?;
        match receiver.recv() {
            Ok(Ok(())) => Ok(Self { mailbox, thread: Some(thread), disturb: Box::new(disturb) }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::Error::other("a queue's thread failed at its start")),
        }
    }

    /// Adds the source that `open` makes, on the thread. `open` registers its owners with the
    /// reactor's current group.
    ///
    /// # Errors
    /// The error of `open`, or an error if the thread has failed.
    pub fn add(
        &self,
        open: impl FnOnce(&mut Reactor) -> io::Result<S> + Send + 'static,
    ) -> io::Result<()> {
        self.call(move |drive| drive.add(open))
            .unwrap_or_else(|| Err(io::Error::other("the queue's thread has failed")))
    }

    /// Waits until the thread has removed the sources that have ended by now.
    pub fn await_ended(&self) {
        self.call(|_| ());
    }

    /// The wake of the thread.
    pub fn wake(&self) -> Arc<Wake> {
        Arc::clone(self.mailbox.wake())
    }

    /// Whether the thread has ended. It ends before this handle is dropped only if it fails.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Interrupts a wait of the thread.
    fn disturb(&self) {
        if let Some(thread) = &self.thread {
            (self.disturb)(thread);
        }
    }

    /// Runs `change` on the thread and returns its result; `None` if the thread has ended.
    fn call<R: Send + 'static>(
        &self,
        change: impl FnOnce(&mut Drive<S>) -> R + Send + 'static,
    ) -> Option<R> {
        self.ask(&self.mailbox, |sender| {
            Box::new(move |drive: &mut Drive<S>| drop(sender.send(change(drive))))
        })
    }

    /// Sends the result of `mail` to `mailbox`, which a part of the thread reads, and waits for the
    /// answer. Returns `None` if the mail is dropped without an answer, as all mail is when the
    /// thread has ended.
    pub fn ask<T, R>(
        &self,
        mailbox: &Mailbox<T>,
        mail: impl FnOnce(SyncSender<R>) -> T,
    ) -> Option<R> {
        let (sender, receiver) = sync_channel(1);
        mailbox.send(mail(sender));
        loop {
            // A thread that has ended reads no mail: dropping the mail drops the sender.
            if self.is_finished() {
                mailbox.clear();
            }
            match receiver.recv_timeout(CHECK_INTERVAL) {
                Ok(result) => return Some(result),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => self.disturb(),
            }
        }
    }
}

impl<S: RequestSource + 'static> Drop for DriveThread<S> {
    fn drop(&mut self) {
        let current = std::thread::current().id();
        if self.thread.as_ref().is_some_and(|thread| thread.thread().id() == current) {
            // One of the thread's own sources drops the handle. The thread cannot wait for its own
            // end; it ends after this round.
            self.mailbox.send(Box::new(|drive| drive.ended = true));
            return;
        }
        self.call(|drive| drive.ended = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
