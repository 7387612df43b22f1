//! What the watch, the copier and the owner of a move share.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fathom_block::{ErrorKind, Operation, Waker};
use parking_lot::{Condvar, Mutex};

use super::regions::Regions;

/// How a store is copied.
#[derive(Clone, Copy, Debug, Default)]
pub struct MoveOptions {
    /// The most bytes per second; `None` for no limit.
    pub speed: Option<u64>,
    /// Whether the copier does not wait for idle time of the devices.
    pub urgent: bool,
    /// Whether the target reads as zeroes everywhere.
    pub is_blank: bool,
}

/// The side of a move that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MovePart {
    /// The store that the disk has.
    Source,
    /// The store that the disk is to have.
    Target,
}

/// Why a copier gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveFailure {
    /// The side.
    pub part: MovePart,
    /// What it has not carried out.
    pub operation: Operation,
    /// Where, in bytes from the start of the disk.
    pub offset: u64,
    /// Why.
    pub error: ErrorKind,
}

impl fmt::Display for MoveFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { part, operation, offset, error } = self;
        let part = match part {
            MovePart::Source => "the disk's store",
            MovePart::Target => "the target",
        };
        write!(formatter, "{part} failed ({operation} at byte {offset}): {error}")
    }
}

/// What a copier does.
///
/// | stage | becomes | when |
/// |---|---|---|
/// | copying | level | few regions are left, and what was copied is durable |
/// | level | copying | guests change more than that |
/// | copying, level | finishing | the disk serves no requests |
/// | finishing | equal | nothing is left, and the target is durable |
/// | finishing, equal | copying | the disk serves requests again |
/// | any | failed, stopped | a side fails; the owner ends the move |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveStage {
    /// It copies.
    Copying,
    /// Little is left to copy.
    Level,
    /// It copies the rest, while no request can change the store.
    Finishing,
    /// The target is equal, and durable.
    Equal,
    /// A side has failed.
    Failed(MoveFailure),
    /// It has ended.
    Stopped,
}

/// How far a move has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveProgress {
    /// The bytes of the disk.
    pub total_bytes: u64,
    /// The bytes in regions that are still to be copied.
    pub left_bytes: u64,
    /// The bytes of data that were written to the target.
    pub copied_bytes: u64,
    /// The passes over the disk that have ended.
    pub passes: u64,
    /// For how long writes are held, in nanoseconds.
    pub brake_ns: u64,
    /// What the copier does.
    pub stage: MoveStage,
}

struct Inner {
    stage: MoveStage,
    waker: Option<Waker>,
}

/// What the queues of a disk, the copier and the owner of the move share.
pub struct MoveState {
    pub(super) regions: Regions,
    pub(super) options: MoveOptions,
    pub(super) copied_bytes: AtomicU64,
    pub(super) passes: AtomicU64,
    pub(super) brake_ns: AtomicU64,
    is_stopping: AtomicBool,
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl MoveState {
    /// The state of a move of a disk of `capacity` bytes, before the first byte is copied.
    pub fn new(capacity: u64, options: MoveOptions) -> Arc<Self> {
        Arc::new(Self {
            regions: Regions::all(capacity),
            options,
            copied_bytes: AtomicU64::new(0),
            passes: AtomicU64::new(0),
            brake_ns: AtomicU64::new(0),
            is_stopping: AtomicBool::new(false),
            inner: Mutex::new(Inner { stage: MoveStage::Copying, waker: None }),
            changed: Condvar::new(),
        })
    }

    /// How far it has come.
    pub fn progress(&self) -> MoveProgress {
        MoveProgress {
            total_bytes: self.regions.capacity(),
            left_bytes: self.regions.marked_bytes(),
            copied_bytes: self.copied_bytes.load(Ordering::Relaxed),
            passes: self.passes.load(Ordering::Relaxed),
            brake_ns: self.brake_ns.load(Ordering::Relaxed),
            stage: self.stage(),
        }
    }

    /// What the copier does.
    pub fn stage(&self) -> MoveStage {
        self.inner.lock().stage
    }

    /// Ends the copier: it begins nothing any more.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        self.brake_ns.store(0, Ordering::Release);
        self.wake();
    }

    /// Whether the copier is to end.
    pub fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Waits until the stage is none of `while_in`, or for `limit`. Returns the stage.
    pub fn wait_while(&self, while_in: &[MoveStage], limit: Duration) -> MoveStage {
        let mut inner = self.inner.lock();
        self.changed.wait_while_for(&mut inner, |it| while_in.contains(&it.stage), limit);
        inner.stage
    }

    /// The disk serves no requests: the copier copies the rest and enters the stage
    /// [`MoveStage::Equal`].
    pub fn begin_finish(&self) {
        self.turn(MoveStage::Finishing);
        self.wake();
    }

    /// Makes the target equal and durable, while the disk serves no requests.
    ///
    /// # Errors
    /// When that takes longer than `limit`, or a side fails. Then the owner calls
    /// [`resume`](Self::resume).
    pub fn finish(&self, limit: Duration) -> io::Result<()> {
        self.begin_finish();
        match self.wait_while(&[MoveStage::Finishing], limit) {
            MoveStage::Equal => Ok(()),
            MoveStage::Failed(failure) => Err(io::Error::other(failure.to_string())),
            MoveStage::Stopped => Err(io::Error::other("the move has ended")),
            MoveStage::Copying | MoveStage::Level | MoveStage::Finishing => {
                Err(io::ErrorKind::TimedOut.into())
            }
        }
    }

    /// The disk serves requests again, although [`finish`](Self::finish) was called: the copier
    /// goes on.
    pub fn resume(&self) {
        self.brake_ns.store(0, Ordering::Release);
        self.turn(MoveStage::Copying);
        self.wake();
    }

    /// The copier enters a stage, unless the move has ended.
    pub(super) fn turn(&self, stage: MoveStage) {
        let mut inner = self.inner.lock();
        if matches!(inner.stage, MoveStage::Failed(_) | MoveStage::Stopped) {
            return;
        }
        inner.stage = stage;
        drop(inner);
        self.changed.notify_all();
    }

    /// The copier has reached `to`, if it is still in `from`.
    pub(super) fn advance(&self, from: MoveStage, to: MoveStage) {
        let mut inner = self.inner.lock();
        if inner.stage == from {
            inner.stage = to;
            drop(inner);
            self.changed.notify_all();
        }
    }

    /// Wakes the copier.
    fn wake(&self) {
        let waker = self.inner.lock().waker.clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(super) fn set_waker(&self, waker: Waker) {
        self.inner.lock().waker = Some(waker);
        self.wake();
    }
}
