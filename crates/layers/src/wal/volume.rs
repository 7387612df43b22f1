//! A log volume: the store on which logs lie, and the flushes that they share.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fathom_block::{Backend, Outcome, Shared, Waker};

use super::Region;

/// How long a flush may take before another queue begins one of its own, in nanoseconds: the thread
/// that has the first may hang with its own disk, and holds up no other.
const FLUSH_TIME_MAX_NS: u64 = 1_000_000_000;
/// How long a log that is opened waits for an earlier one in its place to end.
const CLAIM_TIME_MAX: Duration = Duration::from_secs(3);
const CLAIM_INTERVAL: Duration = Duration::from_millis(10);

/// The flushes of a log volume, which are numbered as they begin. One is under way at a time: what
/// is written meanwhile, by whichever disk, waits for the next one, together. Each covers what was
/// written before it began, so a later one that has come back covers an earlier one that has not.
#[derive(Default)]
struct Flushes {
    started: u64,
    finished: u64,
    /// The latest one, while it is under way, and since when, in nanoseconds.
    flying: Option<(u64, u64)>,
    is_failed: bool,
}

/// What comes of asking for a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// It has come back already.
    Over,
    /// The flush with this number is the caller's to begin.
    Begin(u64),
    /// Another queue has one under way: the caller is woken when it has come back, and asks again at
    /// this time, in nanoseconds, at the latest.
    Wait(u64),
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

    /// Claims `region`; `None` where another log that is open has a part of it. Waits for a moment:
    /// a disk that was removed may still be held by whoever looks at it.
    pub(super) fn claim(self: &Arc<Self>, region: &Region) -> Option<Claim> {
        let end = Instant::now() + CLAIM_TIME_MAX;
        let meets = |other: &Region| other.start < region.end && region.start < other.end;
        loop {
            let mut claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
            if !claims.iter().any(meets) {
                claims.push(region.clone());
                return Some(Claim { volume: Arc::clone(self), region: region.clone() });
            }
            drop(claims);
            if Instant::now() > end {
                return None;
            }
            std::thread::sleep(CLAIM_INTERVAL);
        }
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

    /// Asks for flush `number`, or a later one, at `now_ns`. `waker` is used when one that is under
    /// way has come back.
    pub(super) fn want(&self, waker: &Waker, number: u64, now_ns: u64) -> Turn {
        let mut again_ns = u64::MAX;
        let turn = self.flushes.attempt(waker, |flushes| {
            if flushes.finished >= number {
                return Some(Turn::Over);
            }
            if flushes.is_failed {
                return None;
            }
            if let Some((_, since_ns)) = flushes.flying {
                again_ns = since_ns.saturating_add(FLUSH_TIME_MAX_NS);
                if now_ns < again_ns {
                    return None;
                }
            }
            flushes.started += 1;
            flushes.flying = Some((flushes.started, now_ns));
            Some(Turn::Begin(flushes.started))
        });
        turn.unwrap_or(Turn::Wait(again_ns))
    }

    /// Flush `number` has come back. Once one has failed, the store has forgotten what was lost:
    /// nothing on it is believed durable any more that was not before.
    pub(super) fn end(&self, number: u64, outcome: Outcome) {
        self.flushes.look(|flushes| {
            flushes.flying = flushes.flying.filter(|(flying, _)| *flying != number);
            match outcome {
                Ok(()) if !flushes.is_failed => flushes.finished = flushes.finished.max(number),
                Ok(()) => {}
                Err(_) => flushes.is_failed = true,
            }
        });
        self.flushes.wake();
    }

    /// Nobody knows what becomes of flush `number`: its queue is gone.
    pub(super) fn abandon(&self, number: u64) {
        self.flushes.look(|flushes| {
            flushes.flying = flushes.flying.filter(|(flying, _)| *flying != number);
        });
        self.flushes.wake();
    }
}
