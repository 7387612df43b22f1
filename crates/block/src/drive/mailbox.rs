//! Communication of other threads with a drive's thread.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

/// Wakes a thread that sleeps in its reactor.
#[derive(Debug)]
pub struct Wake(File);

impl Wake {
    /// A new wake, for a reactor to watch.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(File::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Wakes the thread. Never blocks.
    pub fn wake(&self) {
        // The only possible error is a full counter, which also wakes the thread.
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    /// Resets the wake after the thread has woken.
    pub(crate) fn take(&self) {
        let _ = (&self.0).read(&mut [0; 8]);
    }

    /// The descriptor that becomes readable.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Mail from any thread to a part of a drive's thread, which reads it between two rounds.
#[derive(Debug)]
pub struct Mailbox<T> {
    mail: Mutex<VecDeque<T>>,
    /// Whether there may be mail. The thread loads it once in each round.
    pending: AtomicBool,
    wake: Arc<Wake>,
}

/// The result of reading a mailbox.
pub enum Mail<T> {
    /// The mailbox is empty.
    None,
    /// The oldest mail.
    Due(T),
    /// The oldest mail is not due yet. All later mail waits too.
    Waiting,
}

impl<T> Mailbox<T> {
    /// An empty mailbox, whose mail wakes a thread through `wake`.
    pub fn new(wake: Arc<Wake>) -> Self {
        Self { mail: Mutex::default(), pending: AtomicBool::new(false), wake }
    }

    /// Whether there may be mail. One load.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// The oldest mail, if it `is_due`.
    pub fn next(&self, is_due: impl FnOnce(&T) -> bool) -> Mail<T> {
        let mut mail = self.mail();
        if mail.front().is_some_and(|oldest| !is_due(oldest)) {
            return Mail::Waiting;
        }
        let Some(oldest) = mail.pop_front() else {
            self.pending.store(false, Ordering::Release);
            return Mail::None;
        };
        Mail::Due(oldest)
    }

    /// Sends `mail`, and wakes the thread. Never blocks.
    pub fn send(&self, mail: T) {
        self.mail().push_back(mail);
        self.pending.store(true, Ordering::Release);
        self.wake.wake();
    }

    /// The wake of the thread.
    pub fn wake(&self) -> &Arc<Wake> {
        &self.wake
    }

    /// Drops all mail, which will never be read.
    pub(super) fn clear(&self) {
        let mail = std::mem::take(&mut *self.mail());
        // The contents of the mail are dropped without the lock.
        drop(mail);
    }

    fn mail(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.mail.lock()
    }
}
