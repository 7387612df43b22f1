//! The mark of a disk's store that could not be written when the disk got its cache, because the
//! store's file system is full.
//!
//! The disk is served with the cache all the same. The next start uses the blocks only if the mark
//! that the store had before fits, else it begins empty. The mark is tried again until it is
//! written: as long as the cache serves the disk, its blocks belong to the state that the mark
//! names.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fathom_block::{Crossing, LayerCause, LayerProblem};
use fathom_persistence::Stamp;
use parking_lot::{Mutex, MutexGuard};

use super::Inner;
use super::queue::CacheQueue;

/// The time between two attempts to write the mark, in nanoseconds.
const RETRY_NS: u64 = 5_000_000_000;

/// Whether a file system, or its user, has no space left.
pub(super) fn is_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// What to do if the mark of an image cannot be changed.
pub(super) fn remedy(error: &io::Error) -> &'static str {
    if is_space(error) {
        "make space on the image's file system"
    } else {
        "make the image's folder writable"
    }
}

/// A mark that is still to be written.
#[derive(Default)]
pub(super) struct Marking {
    /// Held while the mark is changed, never by a thread that serves a queue. `None` if nothing is
    /// to be written.
    pub(super) state: Mutex<Option<Stamp>>,
    /// Why it could not be written.
    error: Mutex<Option<String>>,
    /// Whether there is something to write, and whether a thread writes it.
    is_pending: AtomicBool,
    is_writing: AtomicBool,
}

impl Marking {
    /// The mark with `state` could not be written.
    pub(super) fn failed(&self, state: Stamp, error: &io::Error) {
        *self.state.lock() = Some(state);
        *self.error.lock() = Some(error.to_string());
        self.is_pending.store(true, Ordering::Release);
    }

    /// The state, if no thread changes the mark now.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Option<Stamp>>> {
        self.state.try_lock()
    }

    /// There is something to write.
    pub(super) fn begin(&self) {
        self.is_pending.store(true, Ordering::Release);
    }

    /// Nothing is to be written any more.
    pub(super) fn end(&self) {
        *self.error.lock() = None;
        self.is_pending.store(false, Ordering::Release);
    }

    pub(super) fn problem(&self) -> Option<LayerProblem> {
        let error = self.error.lock().clone()?;
        Some(LayerProblem {
            cause: LayerCause::MarkNotWritten,
            message: format!(
                "its image cannot be marked as having blocks in the cache: {error}. The disk uses the cache, \
                 which the next start may find empty"
            ),
            remedy: "make space on the image's file system: the mark is written then".into(),
        })
    }
}

impl Inner {
    /// Tries again to write a mark that could not be written. Blocks.
    pub(super) fn write_mark(&self) -> io::Result<()> {
        let mut state = self.marking.state.lock();
        let Some(wanted) = &*state else { return Ok(()) };
        if let Err(error) = self.mark.write(wanted) {
            *self.marking.error.lock() = Some(error.to_string());
            return Err(error);
        }
        *state = None;
        self.marking.end();
        self.confirm();
        Ok(())
    }
}

impl CacheQueue {
    /// Has a mark written that could not be written before.
    pub(super) fn tend_mark(&mut self, next: &mut Crossing<'_>) {
        let marking = &self.inner.marking;
        while self.marking.answer().is_some() {
            marking.is_writing.store(false, Ordering::Release);
        }
        if !marking.is_pending.load(Ordering::Acquire)
            || self.is_closed
            || self.inner.volume.has_failed()
        {
            return;
        }
        let now_ns = next.round_ns();
        if now_ns >= self.mark_ns {
            self.mark_ns = now_ns + RETRY_NS;
            if !marking.is_writing.swap(true, Ordering::AcqRel) {
                let inner = Arc::clone(&self.inner);
                let begun = self.marking.begin(0, move || {
                    // It is tried again later.
                    _ = inner.write_mark();
                });
                if !begun {
                    self.inner.marking.is_writing.store(false, Ordering::Release);
                }
            }
        }
        next.wake_at(self.mark_ns);
    }

    /// The queue ends: another one may write the mark.
    pub(super) fn abandon_mark(&self) {
        if self.marking.in_flight() > 0 {
            self.inner.marking.is_writing.store(false, Ordering::Release);
        }
    }
}
