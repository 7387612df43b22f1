//! The failures of a disk's requests, for whoever watches over the disk.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::request::ErrorKind;

/// What is called at a failure.
type Watcher = Box<dyn Fn() + Send + Sync>;

/// Failures that speak of the storage rather than of what a guest asked for. Requests that succeed
/// never touch this.
#[derive(Default)]
pub struct Failures {
    no_space: AtomicU64,
    io: AtomicU64,
    /// The watcher has been called and has not looked yet.
    called: AtomicBool,
    watcher: OnceLock<Watcher>,
}

/// Failures so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailureCounts {
    /// For want of room.
    pub no_space: u64,
    /// I/O errors.
    pub io: u64,
}

impl Failures {
    /// Has `watcher` called, on the thread of a queue, at the next failure after each
    /// [`look`](Self::look). It must not block. Only the first watcher is kept.
    pub fn watch(&self, watcher: impl Fn() + Send + Sync + 'static) {
        let _ = self.watcher.set(Box::new(watcher));
    }

    /// The failures so far. The next one calls the watcher again.
    pub fn look(&self) -> FailureCounts {
        self.called.store(false, Ordering::Release);
        FailureCounts {
            no_space: self.no_space.load(Ordering::Relaxed),
            io: self.io.load(Ordering::Relaxed),
        }
    }

    /// A request has failed, or waits, because of `kind`.
    pub fn note(&self, kind: ErrorKind) {
        match kind {
            ErrorKind::NoSpace => self.no_space.fetch_add(1, Ordering::Relaxed),
            ErrorKind::Io => self.io.fetch_add(1, Ordering::Relaxed),
            _ => return,
        };
        self.call();
    }

    /// Has the watcher look.
    pub fn call(&self) {
        if self.called.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(watcher) = self.watcher.get() {
            watcher();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_watcher_is_called_once_until_it_looks() {
        let failures = Failures::default();
        let calls = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&calls);
        failures.watch(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        failures.note(ErrorKind::Malformed);
        assert_eq!(calls.load(Ordering::Relaxed), 0, "a guest's mistake says nothing of storage");
        for _ in 0..3 {
            failures.note(ErrorKind::NoSpace);
            failures.note(ErrorKind::Io);
        }
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert_eq!(failures.look(), FailureCounts { no_space: 3, io: 3 });
        failures.note(ErrorKind::Io);
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }
}
