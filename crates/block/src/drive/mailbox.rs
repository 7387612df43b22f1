//! How other threads reach a drive's thread.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::{Drive, Source};

/// A change that the thread is to make.
pub(super) type Change<S> = Box<dyn FnOnce(&mut Drive<S>) + Send>;

/// Wakes a thread that sleeps in its reactor.
#[derive(Debug)]
pub struct Wake(File);

impl Wake {
    /// A new one, to be watched by a reactor.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(File::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Wakes the thread. Never blocks.
    pub fn wake(&self) {
        // The one error is a full counter, which wakes as well.
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    /// The thread is awake.
    pub(crate) fn take(&self) {
        let _ = (&self.0).read(&mut [0; 8]);
    }

    /// What becomes readable.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Changes on their way to a drive's thread.
pub(super) struct Mailbox<S: Source> {
    changes: Mutex<VecDeque<Change<S>>>,
    /// Whether there may be changes: one load a round.
    pending: AtomicBool,
    pub wake: Arc<Wake>,
}

impl<S: Source> Mailbox<S> {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            changes: Mutex::default(),
            pending: AtomicBool::new(false),
            wake: Arc::new(Wake::new()?),
        })
    }

    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    pub(super) fn next(&self) -> Option<Change<S>> {
        let mut changes = self.changes();
        let change = changes.pop_front();
        if change.is_none() {
            self.pending.store(false, Ordering::Release);
        }
        change
    }

    pub(super) fn send(&self, change: Change<S>) {
        self.changes().push_back(change);
        self.pending.store(true, Ordering::Release);
        self.wake.wake();
    }

    pub(super) fn clear(&self) {
        let changes = std::mem::take(&mut *self.changes());
        // What a change holds may be dropped only without the lock.
        drop(changes);
    }

    fn changes(&self) -> MutexGuard<'_, VecDeque<Change<S>>> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
