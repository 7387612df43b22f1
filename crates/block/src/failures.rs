//! The failures of a disk's requests, for the component that monitors the disk.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::request::ErrorKind;

/// Called at a failure.
type Watcher = Box<dyn Fn() + Send + Sync>;

/// Failures caused by the storage, not by a guest's invalid request. Requests that succeed never
/// touch this structure.
#[derive(Default)]
pub struct Failures {
    no_space: AtomicU64,
    io: AtomicU64,
    /// Whether the watcher has been called and has not read the counts since.
    called: AtomicBool,
    watcher: OnceLock<Watcher>,
}

/// Numbers of failures so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailureCounts {
    /// Failures for lack of space.
    pub no_space: u64,
    /// I/O errors.
    pub io: u64,
}

impl Failures {
    /// Sets the watcher. It is called on a queue's thread at the first failure after each
    /// [`counts`](Self::counts), and must not block. Only the first watcher is kept.
    pub fn watch(&self, watcher: impl Fn() + Send + Sync + 'static) {
        let _ = self.watcher.set(Box::new(watcher));
    }

    /// Returns the failures so far. The next failure calls the watcher again.
    pub fn counts(&self) -> FailureCounts {
        self.called.store(false, Ordering::Release);
        FailureCounts {
            no_space: self.no_space.load(Ordering::Relaxed),
            io: self.io.load(Ordering::Relaxed),
        }
    }

    /// Counts a request that has failed, or waits, because of `kind`.
    pub fn note(&self, kind: ErrorKind) {
        if kind == ErrorKind::NoSpace {
            self.no_space.fetch_add(1, Ordering::Relaxed);
        } else if kind == ErrorKind::Io {
            self.io.fetch_add(1, Ordering::Relaxed);
        } else {
            return;
        }
        self.call();
    }

    /// Calls the watcher, unless it has been called since the last [`counts`](Self::counts).
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
    fn the_watcher_is_called_once_until_the_counts_are_read() {
        let failures = Failures::default();
        let calls = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&calls);
        failures.watch(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        failures.note(ErrorKind::Malformed);
        assert_eq!(
            calls.load(Ordering::Relaxed),
            0,
            "a guest's mistake is no failure of the storage"
        );
        for _ in 0..3 {
            failures.note(ErrorKind::NoSpace);
            failures.note(ErrorKind::Io);
        }
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert_eq!(failures.counts(), FailureCounts { no_space: 3, io: 3 });
        failures.note(ErrorKind::Io);
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }
}
