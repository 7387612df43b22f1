//! A log volume: the store on which logs lie, and the flushes that they share.

use std::sync::{Arc, Mutex, PoisonError};

use fathom_block::{Backend, Outcome, Shared, Waker};

use super::Region;

/// The flushes of a log volume, which are numbered as they begin. One is under way at a time: what
/// is written meanwhile, by whichever disk, waits for the next one, together.
#[derive(Default)]
struct Flushes {
    started: u64,
    finished: u64,
    is_flying: bool,
    is_failed: bool,
}

/// What comes of asking for a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// It has come back already.
    Over,
    /// It is the caller's to begin.
    Begin,
}

/// A store on which the logs of one or several disks lie, each in a region of its own.
pub struct LogVolume {
    backend: Arc<dyn Backend>,
    flushes: Shared<Flushes>,
    /// The regions of the logs that are open.
    claims: Mutex<Vec<Region>>,
}

/// A region that is one log's, until this is dropped.
pub(super) struct Claim {
    volume: Arc<LogVolume>,
    region: Region,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claims = self.volume.claims.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = claims.iter().position(|claim| *claim == self.region) {
            claims.swap_remove(at);
        }
    }
}

impl LogVolume {
    /// The log volume in `backend`. All disks that have a log there must share it.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self { backend, flushes: Shared::new(Flushes::default()), claims: Mutex::default() }
    }

    /// Claims `region`; `None` where another log that is open has a part of it.
    pub(super) fn claim(self: &Arc<Self>, region: &Region) -> Option<Claim> {
        let mut claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        let meets = |other: &Region| other.start < region.end && region.start < other.end;
        if claims.iter().any(meets) {
            return None;
        }
        claims.push(region.clone());
        Some(Claim { volume: Arc::clone(self), region: region.clone() })
    }

    /// The store.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// How many flushes have been asked of the store.
    pub fn flush_count(&self) -> u64 {
        self.flushes.look(|flushes| flushes.started)
    }

    /// The number of the next flush to begin.
    pub(super) fn next(&self) -> u64 {
        self.flushes.look(|flushes| flushes.started + 1)
    }

    /// The number of the last flush that came back, and whether one has failed.
    pub(super) fn finished(&self) -> (u64, bool) {
        self.flushes.look(|flushes| (flushes.finished, flushes.is_failed))
    }

    /// Asks for flush `number`, or a later one. `None`: another is under way or one has failed;
    /// `waker` is used when that changes.
    pub(super) fn want(&self, waker: &Waker, number: u64) -> Option<Turn> {
        self.flushes.attempt(waker, |flushes| {
            if flushes.finished >= number {
                return Some(Turn::Over);
            }
            if flushes.is_flying || flushes.is_failed {
                return None;
            }
            flushes.started += 1;
            flushes.is_flying = true;
            Some(Turn::Begin)
        })
    }

    /// The flush that was under way has come back. Once one has failed, the store has forgotten what
    /// was lost: nothing on it is believed durable any more that was not before.
    pub(super) fn end(&self, outcome: Outcome) {
        self.flushes.look(|flushes| {
            flushes.is_flying = false;
            match outcome {
                Ok(()) if !flushes.is_failed => flushes.finished = flushes.started,
                _ => flushes.is_failed = true,
            }
        });
        self.flushes.wake();
    }

    /// Nobody knows what becomes of the flush that was under way: its queue is gone.
    pub(super) fn abandon(&self) {
        self.flushes.look(|flushes| flushes.is_flying = false);
        self.flushes.wake();
    }
}
