//! A log volume: the store of one or several logs, and the flushes that these logs share.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::{Backend, Outcome, Shared, Waker};
use parking_lot::Mutex;

use super::Region;
use super::recovery::VolumeRecovery;

/// The time after which another queue begins a flush of its own, in nanoseconds. The thread of the
/// earlier flush may hang with its own disk, which must not delay other disks.
const FLUSH_TIME_MAX_NS: u64 = 1_000_000_000;
/// How long the opening of a log waits for an earlier log in its place to close.
const CLAIM_TIME_MAX: Duration = Duration::from_secs(3);
const CLAIM_INTERVAL: Duration = Duration::from_millis(10);

/// The flushes of a log volume, numbered as they begin. Usually one is in flight at a time: writes
/// of all disks meanwhile wait for the next flush together. A flush covers all writes that
/// completed before it began, so a completed flush also covers an earlier one that has not
/// completed.
#[derive(Default)]
struct Flushes {
    started: u64,
    finished: u64,
    /// The number of the latest flush while it is in flight, and its start time in nanoseconds.
    in_flight: Option<(u64, u64)>,
    /// The records written since the latest flush began, and whether that flush was for several of
    /// them.
    records: u64,
    is_shared: bool,
    /// Whether a record is being written that is durable without a flush.
    is_forced: bool,
    is_failed: bool,
}

/// The answer to a request for a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlushAnswer {
    /// The flush has completed already.
    Completed,
    /// The caller has to begin the flush with this number.
    Begin(u64),
    /// Another queue has a flush in flight. The caller is woken when that flush has completed, and
    /// asks again at this time, in nanoseconds, at the latest.
    Wait(u64),
}

/// Whether the volume lost writes before it was opened. No log may trust what it reads then, not
/// only the first one that is opened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// It lost none.
    None,
    /// It accepts no writes yet.
    Present,
    /// It accepts writes again.
    Recovered,
}

/// A store with the logs of one or several disks, each in a region of its own.
pub struct LogVolume {
    backend: Arc<dyn Backend>,
    flushes: Shared<Flushes>,
    /// The regions of the open logs.
    claims: Mutex<Vec<Region>>,
    /// Held while a disk chooses the place of its log.
    pub(super) choice: Mutex<()>,
    loss: Mutex<Loss>,
    pub(super) recovery: VolumeRecovery,
}

/// A region claimed by one log until the claim is dropped.
pub(crate) struct Claim {
    volume: Arc<LogVolume>,
    region: Region,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claims = self.volume.claims.lock();
        if let Some(at) = claims.iter().position(|claim| *claim == self.region) {
            claims.swap_remove(at);
        }
    }
}

/// Repeats `attempt` until it has a result, because a removed disk may still use its log for a
/// moment; `None` if that takes more than 3 s.
pub(super) fn wait_until_closed<T>(mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + CLAIM_TIME_MAX;
    loop {
        let result = attempt();
        if result.is_some() || Instant::now() > end {
            return result;
        }
        std::thread::sleep(CLAIM_INTERVAL);
    }
}

/// Whether `region` overlaps one of `claims`.
fn meets_any(claims: &[Region], region: &Region) -> bool {
    claims.iter().any(|other| other.start < region.end && region.start < other.end)
}

impl LogVolume {
    /// The log volume in `backend`. All disks with a log on it must share the volume.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        let loss = if backend.has_lost_writes() { Loss::Present } else { Loss::None };
        Self {
            backend,
            loss: Mutex::new(loss),
            flushes: Shared::new(Flushes::default()),
            claims: Mutex::default(),
            choice: Mutex::default(),
            recovery: VolumeRecovery::default(),
        }
    }

    /// Makes a volume that lost writes before it was opened accept writes again, if nothing but
    /// logs uses it. Returns whether a log must write again what it reads. Blocks.
    ///
    /// # Errors
    /// If the store still fails, or has lost writes since it was opened: open logs may have them.
    pub(super) fn restore(&self, is_alone: bool) -> io::Result<bool> {
        let mut loss = self.loss.lock();
        if self.backend.has_lost_writes() {
            if *loss != Loss::Present || !is_alone {
                return Err(io::Error::other(
                    "it has lost writes: stop serving all disks with a cache or a log on it, then serve \
                     them again",
                ));
            }
            self.backend.recover()?;
            *loss = Loss::Recovered;
        }
        Ok(*loss != Loss::None)
    }

    /// Whether an open log overlaps `region`.
    pub(super) fn is_claimed(&self, region: &Region) -> bool {
        meets_any(&self.claims.lock(), region)
    }

    /// Claims `region`; `None` if it overlaps the region of another open log. Waits up to 3 s,
    /// because a removed disk may still be in use for a moment.
    pub(crate) fn claim(self: &Arc<Self>, region: &Region) -> Option<Claim> {
        wait_until_closed(|| {
            let mut claims = self.claims.lock();
            (!meets_any(&claims, region)).then(|| {
                claims.push(region.clone());
                Claim { volume: Arc::clone(self), region: region.clone() }
            })
        })
    }

    /// The store.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The number of flushes begun so far.
    pub fn flush_count(&self) -> u64 {
        self.flushes.access(|flushes| flushes.started)
    }

    /// The number of the next flush to begin.
    pub(super) fn next(&self) -> u64 {
        self.flushes.access(|flushes| flushes.started + 1)
    }

    /// A record has been written. Returns the number of the first flush that makes it durable.
    pub(super) fn written(&self) -> u64 {
        self.flushes.access(|flushes| {
            flushes.records += 1;
            flushes.started + 1
        })
    }

    /// The number of the last completed flush, and whether a flush has failed.
    pub(crate) fn finished(&self) -> (u64, bool) {
        self.flushes.access(|flushes| (flushes.finished, flushes.is_failed))
    }

    /// What a failed flush may have lost is written again.
    pub(super) fn forget_failure(&self) {
        self.flushes.access(|flushes| flushes.is_failed = false);
        self.flushes.wake();
    }

    /// Requests flush `number`, or a later one, at `now_ns`. `waker` wakes the caller when the
    /// flush in flight has completed.
    pub(super) fn request_flush(&self, waker: &Waker, number: u64, now_ns: u64) -> FlushAnswer {
        let mut again_ns = u64::MAX;
        let answer = self.flushes.attempt(waker, |flushes| {
            if flushes.finished >= number {
                return Some(FlushAnswer::Completed);
            }
            if flushes.is_failed {
                return None;
            }
            if let Some((_, since_ns)) = flushes.in_flight {
                again_ns = since_ns.saturating_add(FLUSH_TIME_MAX_NS);
                if now_ns < again_ns {
                    return None;
                }
            }
            flushes.is_shared = std::mem::take(&mut flushes.records) > 1;
            flushes.started += 1;
            flushes.in_flight = Some((flushes.started, now_ns));
            Some(FlushAnswer::Begin(flushes.started))
        });
        answer.unwrap_or(FlushAnswer::Wait(again_ns))
    }

    /// Flush `number` has completed. After a failed flush the kernel does not report the lost
    /// writes again, so later flushes make nothing durable.
    pub(super) fn end(&self, number: u64, outcome: Outcome) {
        self.flushes.access(|flushes| {
            flushes.in_flight = flushes.in_flight.filter(|(in_flight, _)| *in_flight != number);
            match outcome {
                Ok(()) if !flushes.is_failed => flushes.finished = flushes.finished.max(number),
                Ok(()) => {}
                Err(_) => flushes.is_failed = true,
            }
        });
        self.flushes.wake();
    }

    /// Whether a record may be written that is durable at once: nothing else becomes durable now,
    /// and the latest flush was for one record, so that one more would cover only this one. Then it
    /// ends with [`end_forced`](Self::end_forced).
    pub(super) fn begin_forced(&self) -> bool {
        self.backend.capabilities().force_unit_access
            && self.flushes.access(|flushes| {
                let is_quiet =
                    flushes.in_flight.is_none() && !flushes.is_shared && !flushes.is_failed;
                is_quiet && !std::mem::replace(&mut flushes.is_forced, true)
            })
    }

    /// The record has been written, or its queue has closed (`None`). Like that of a flush, an
    /// error may concern the records of other logs.
    pub(super) fn end_forced(&self, outcome: Option<Outcome>) {
        let has_failed = outcome.is_some_and(|outcome| outcome.is_err());
        self.flushes.access(|flushes| {
            flushes.is_forced = false;
            flushes.is_failed |= has_failed;
        });
        if has_failed {
            self.flushes.wake();
        }
    }

    /// The result of flush `number` is unknown, because its queue has closed.
    pub(super) fn abandon(&self, number: u64) {
        self.flushes.access(|flushes| {
            flushes.in_flight = flushes.in_flight.filter(|(in_flight, _)| *in_flight != number);
        });
        self.flushes.wake();
    }
}
