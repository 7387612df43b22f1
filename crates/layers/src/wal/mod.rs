//! A write-ahead log before a slow disk.
//!
//! Every change is durable in a log volume before it is acknowledged, and goes home later, many of
//! them together and in the order of the disk. So a flush has nothing left to wait for, and a sync
//! takes as long as the log volume's. The log itself is `fathom_wal`; `docs/wal.md` has its format.
//!
//! - [`LogVolume`]: where logs lie; the disks on it share their flushes.
//! - `open`: makes a log, or recovers one, before the first queue is opened.
//! - `queue`: a queue's part: changes into records, reads from the log and from home.
//! - `home`: brings home what the log holds, in whichever queue is open.
//!
//! What queues share is a [`Shared`]: the log, which gives all changes one order, and the flushes
//! of the volume. A record that is missing, because its queue ended before it was written, is
//! filled by another queue, so that no queue waits for one that is gone.
//!
//! When the log volume fails, the disk takes no more changes: nothing is acknowledged that is not
//! durable. What is in the log stays there. When the disk beneath fails, changes go on until the
//! log is full, and then fail with the disk's error; bringing home is tried again each second.

mod home;
mod open;
mod queue;
mod volume;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fathom_block::{
    Backend, Capabilities, Clock, Disk, ErrorKind, Figure, Geometry, Layer, LayerPart,
    LayerProblem, LayerReport, OpenContext, Shared, Stack, Waker,
};
use fathom_reactor::Reactor;
use fathom_wal::{Checkpoint, Log, Superblock};

pub use fathom_wal::MAGIC;
pub use open::{WalError, WalOptions};
use queue::WalQueue;
use volume::Claim;
pub use volume::LogVolume;

/// How often whoever has all brought home looks how far it is.
const DRAIN_INTERVAL: Duration = Duration::from_millis(1);
/// How many rounds home a log that is to leave makes while the disk still serves. The last one takes
/// what was written in the one before, while the disk stands still.
const RETIRE_ROUNDS: u64 = 3;
/// How long what is under way may take to end at least.
const FINISH_TIME_MIN: Duration = Duration::from_secs(2);

/// What the queues of one disk share.
struct State {
    log: Log,
    /// The log volume has failed: no more changes.
    failed: Option<ErrorKind>,
    /// Records that nobody writes: their queue is gone.
    orphans: Vec<u64>,
    /// The queues that are open, and how many ever were.
    queues: Vec<(u64, Waker)>,
    opened: u64,
    /// Whether a queue brings home.
    is_moving: bool,
    /// The checkpoint that is to be written.
    checkpoint: Option<Checkpoint>,
    /// The checkpoint was written, and this flush makes it durable.
    checkpoint_flush: Option<u64>,
    /// Why the last round home failed, and when the next one is due, in nanoseconds.
    home_failed: Option<ErrorKind>,
    retry_ns: u64,
    /// Since when something is in the log only, in nanoseconds.
    since_ns: u64,
    /// Somebody waits for space.
    is_pressed: bool,
    /// All is to go home at once.
    is_draining: bool,
}

struct Inner {
    volume: Arc<LogVolume>,
    /// Where the region begins in the volume, in bytes.
    base: u64,
    /// What of it does not change while the log is open.
    superblock: Superblock,
    age_ns: AtomicU64,
    shared: Shared<State>,
    rounds: AtomicU64,
    _claim: Claim,
}

impl Inner {
    /// Where a position of the ring is in the volume, in bytes.
    fn place(&self, position: u64) -> u64 {
        self.base + fathom_wal::RING_OFFSET + position % self.superblock.ring_length
    }
}

/// How a log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalStatus {
    /// The bytes of the ring that are in use.
    pub used: u64,
    /// The bytes of the ring.
    pub size: u64,
    /// Why the log takes no more changes.
    pub log_failed: Option<ErrorKind>,
    /// Why the last attempt to bring home failed.
    pub home_failed: Option<ErrorKind>,
    /// How often something was brought home.
    pub rounds: u64,
    /// The flushes of the log volume since it was opened, for all disks on it.
    pub volume_flushes: u64,
}

/// See the module.
#[derive(Clone)]
pub struct Wal {
    inner: Arc<Inner>,
}

impl Wal {
    /// How the log is now.
    pub fn status(&self) -> WalStatus {
        self.inner.shared.look(|state| WalStatus {
            used: state.log.used(),
            size: self.inner.superblock.ring_length,
            log_failed: state.failed,
            home_failed: state.home_failed,
            rounds: self.inner.rounds.load(Ordering::Relaxed),
            volume_flushes: self.inner.volume.flush_count(),
        })
    }

    /// Brings all home that the log holds, through a queue of its own, within `limit`. `disk` is
    /// the one with this layer, which takes no more changes. Not to be called by a queue's thread.
    ///
    /// # Errors
    /// When the disk or the log volume fails, or the time is over. What is not at home stays in
    /// the log.
    pub fn drain(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        self.bring_home_until(|state| state.log.is_empty(), disk, limit)
    }

    /// Brings home until `is_done`. The disk may take changes meanwhile.
    fn bring_home_until(
        &self,
        is_done: impl Fn(&State) -> bool,
        disk: &Arc<Disk>,
        limit: Duration,
    ) -> io::Result<()> {
        let end = Instant::now() + limit;
        let shared = &self.inner.shared;
        if shared.look(|state| is_done(state)) {
            return Ok(());
        }
        let mut reactor = Reactor::new(64)?;
        let mut stack = disk.open_aside(&mut reactor, Clock::System)?;
        // An earlier failure says nothing of now.
        shared.look(|state| {
            (state.is_draining, state.home_failed, state.retry_ns) = (true, None, 0);
        });
        let drained = self.bring_home(is_done, &mut stack, &mut reactor, end);
        shared.look(|state| state.is_draining = false);
        // What is under way ends before the queue does.
        let left = end.saturating_duration_since(Instant::now()).max(FINISH_TIME_MIN);
        stack.finish(&mut reactor, left)?;
        drained
    }

    /// How long a change may be in the log only, in nanoseconds, from now on.
    pub fn set_age(&self, age_ns: u64) {
        self.inner.age_ns.store(age_ns, Ordering::Relaxed);
    }

    /// The identity of the log.
    pub fn identity(&self) -> [u8; 16] {
        self.inner.superblock.log
    }

    fn bring_home(
        &self,
        is_done: impl Fn(&State) -> bool,
        stack: &mut Stack,
        reactor: &mut Reactor,
        end: Instant,
    ) -> io::Result<()> {
        loop {
            stack.wait(reactor, Some(DRAIN_INTERVAL))?;
            let (is_done, failure) = self
                .inner
                .shared
                .look(|state| (is_done(state), state.failed.or(state.home_failed)));
            if is_done {
                return Ok(());
            }
            if let Some(failure) = failure {
                return Err(io::Error::other(failure));
            }
            if Instant::now() >= end {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

impl Layer for Wal {
    fn name(&self) -> &'static str {
        "wal"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        // A change is durable in the log before it completes.
        Capabilities { flush: true, force_unit_access: below.write, ..below }
    }

    fn geometry(&self, below: Geometry) -> Geometry {
        // What is in the log is read from there.
        let alignment = below.alignment.max(self.inner.volume.backend().geometry().alignment);
        let block_size = below.block_size.max(alignment);
        let physical_block_size = below.physical_block_size.max(block_size);
        Geometry { alignment, block_size, physical_block_size, ..below }
    }

    fn resizing(&self, from: u64, to: u64) -> Result<(), ErrorKind> {
        // What the log holds of the part that is cut off would come back after a later growth.
        if to < from { Err(ErrorKind::Unsupported) } else { Ok(()) }
    }

    fn status(&self) -> LayerReport {
        let status = Wal::status(self);
        let mut problems = Vec::new();
        if status.log_failed.is_some() {
            problems.push(LayerProblem {
                message: "its log volume fails: no change is taken any more".into(),
                remedy:
                    "mend the log volume, then serve all disks with a log there anew: nothing is \
                         lost"
                        .into(),
            });
        } else if let Some(kind) = status.home_failed {
            let share = status.used * 100 / status.size.max(1);
            problems.push(LayerProblem {
                message: format!("nothing goes home from its log, which is {share} % full: {kind}"),
                remedy: "mend what is beneath: it goes on by itself".into(),
            });
        }
        let figures = vec![
            Figure::gauge("used_bytes", "Bytes of the log in use.", status.used),
            Figure::gauge("size_bytes", "Bytes of the log.", status.size),
            Figure::counter("rounds_total", "Rounds in which changes went home.", status.rounds),
            Figure::counter(
                "volume_flushes_total",
                "Flushes of the log volume, for all disks with a log there.",
                status.volume_flushes,
            ),
        ];
        LayerReport { figures, problems }
    }

    fn stores(&self) -> Vec<Arc<dyn Backend>> {
        vec![Arc::clone(self.inner.volume.backend())]
    }

    fn retire(&self, disk: &Arc<Disk>, limit: Duration) {
        let begun = self.inner.rounds.load(Ordering::Relaxed);
        let is_done = |state: &State| {
            let rounds = self.inner.rounds.load(Ordering::Relaxed) - begun;
            state.log.is_empty() || rounds >= RETIRE_ROUNDS
        };
        // What fails is said when it leaves.
        let _ = self.bring_home_until(is_done, disk, limit);
    }

    fn leave(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        self.drain(disk, limit)
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let below = context.below();
        if below.capabilities.write && !below.capabilities.flush {
            return Err(io::Error::other("a log needs a disk that can be flushed"));
        }
        let store = context.open_store(self.inner.volume.backend())?;
        let waker = context.waker()?;
        let pending = context.pending();
        let queue =
            WalQueue::new(Arc::clone(&self.inner), store, waker, pending, below.capabilities);
        Ok(LayerPart::queue(queue))
    }
}

/// A part of the log volume, in bytes.
type Region = Range<u64>;
