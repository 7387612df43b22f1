//! A drive's thread, as others see it.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use fathom_reactor::Reactor;

use super::{Change, Drive, Mailbox, Source, Wake};

/// How often a sender looks whether the thread that it waits for is still there.
const LOOK: Duration = Duration::from_millis(100);

/// Ends what a thread may wait for.
type Disturb = Box<dyn Fn(&JoinHandle<()>) + Send + Sync>;

/// A thread that serves queues. It ends when this is dropped: whoever added a source keeps it at
/// least until the source has ended.
pub struct DriveThread<S: Source + 'static> {
    mailbox: Arc<Mailbox<Change<S>>>,
    thread: Option<JoinHandle<()>>,
    disturb: Disturb,
}

impl<S: Source + 'static> DriveThread<S> {
    /// Starts a thread with a ring of `entries` submissions. It looks for work for `spin_ns` at the
    /// longest before it sleeps. `failed` is called where it panics; all its sources have then
    /// stopped. `disturb` is called again and again while somebody waits for the thread: it is to
    /// end what the thread may wait for itself.
    ///
    /// # Errors
    /// When the host has no thread, no descriptor or no ring left.
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

    /// Adds the source that `open` makes, on the thread. `open` registers its own owners with the
    /// group that it finds.
    ///
    /// # Errors
    /// What `open` says, or that the thread has failed.
    pub fn add(
        &self,
        open: impl FnOnce(&mut Reactor) -> io::Result<S> + Send + 'static,
    ) -> io::Result<()> {
        self.call(move |drive| drive.add(open))
            .unwrap_or_else(|| Err(io::Error::other("the queue's thread has failed")))
    }

    /// Waits until the thread has parted with the sources that have ended by now.
    pub fn settle(&self) {
        self.call(|_| ());
    }

    /// What wakes the thread.
    pub fn wake(&self) -> Arc<Wake> {
        Arc::clone(self.mailbox.wake())
    }

    /// Whether the thread has ended, which it does by itself only where it fails.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends what the thread may wait for.
    fn disturb(&self) {
        if let Some(thread) = &self.thread {
            (self.disturb)(thread);
        }
    }

    /// Runs `change` on the thread and returns what it returns; `None` where the thread has ended.
    fn call<R: Send + 'static>(
        &self,
        change: impl FnOnce(&mut Drive<S>) -> R + Send + 'static,
    ) -> Option<R> {
        self.ask(&self.mailbox, |sender| {
            Box::new(move |drive: &mut Drive<S>| drop(sender.send(change(drive))))
        })
    }

    /// Sends what `mail` makes to `mailbox`, which a part of the thread looks at, and waits for what
    /// is sent in answer; `None` where the mail is dropped without one, as all is where the thread
    /// has ended.
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
            match receiver.recv_timeout(LOOK) {
                Ok(result) => return Some(result),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => self.disturb(),
            }
        }
    }
}

impl<S: Source + 'static> Drop for DriveThread<S> {
    fn drop(&mut self) {
        let current = std::thread::current().id();
        if self.thread.as_ref().is_some_and(|thread| thread.thread().id() == current) {
            // Dropped by what it serves: it cannot wait for its own end, and ends next.
            self.mailbox.send(Box::new(|drive| drive.ended = true));
            return;
        }
        self.call(|drive| drive.ended = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
