//! What a cache does for a disk: counts by class and by control group, and the miss-ratio curves of
//! the disk and of its most active control groups.
//!
//! Each queue counts in cells that only its thread writes (`cells`). For a curve, a queue only
//! compares the hash of a block with a threshold; the few blocks below it wait in a short list,
//! which the queue's thread moves into the curves unless another thread has them locked. A reader
//! moves all lists first. So no queue waits, and a reader sees everything that has been counted.
//!
//! - `queue`: one queue's side.
//! - `groups`: the control groups that have a place, at most [`GROUPS`].

mod cells;
mod groups;
mod queue;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_cache::{CLASS_JOURNAL, CLASS_SWAP, CLASS_UNKNOWN, MissRatios, RecentCurve, Touch};
use fathom_insight::Names;
use parking_lot::Mutex;

use cells::{Cells, Counted};
pub use fathom_cache::{CLASSES, CacheCounts};
use groups::{Groups, Heads};
pub(crate) use queue::{Account, Looked};

/// The most control groups of a disk that have counts and a curve of their own.
pub const GROUPS: usize = 16;
/// The time of a generation of a curve: it shows the requests of the last one to two.
const GENERATION_NS: u64 = 3_600_000_000_000;
/// The blocks that the curve of a disk follows in each generation: at most 84 KiB.
const DISK_SAMPLES: usize = 2048;
/// The blocks that the curve of a control group follows in each generation: at most 48 KiB.
const GROUP_SAMPLES: usize = 1024;
/// The blocks of a cache that a new curve follows at most, so that few requests cost more than a
/// comparison: half of the samples.
const SHARE: f64 = 1.0 / 2.0;

/// The name of a class in reports and metrics.
pub fn class_name(class: usize) -> String {
    match u8::try_from(class) {
        Ok(CLASS_JOURNAL) => "journal".into(),
        Ok(CLASS_UNKNOWN) => "unknown".into(),
        Ok(CLASS_SWAP) => "swap".into(),
        _ => class.to_string(),
    }
}

/// The counts and curves of one disk.
pub struct Ledger {
    names: Option<Arc<Names>>,
    /// Blocks with hashes below are of interest to the curve of the disk.
    threshold: AtomicU64,
    heads: Heads,
    queues: Mutex<Queues>,
    curves: Mutex<Curves>,
}

#[derive(Default)]
struct Queues {
    open: Vec<Arc<Cells>>,
    /// The counts of closed queues, by class.
    past: [CacheCounts; CLASSES],
    dropped_past: u64,
}

/// What a thread changes under the lock of the curves.
struct Curves {
    disk: RecentCurve,
    groups: Groups,
}

/// A curve as a reader gets it.
#[derive(Clone, Debug)]
pub struct CurveSnapshot {
    /// The miss ratios, by blocks of the cache.
    pub ratios: MissRatios,
    /// When its requests began, in nanoseconds of the stack's clock.
    pub begin_ns: u64,
    /// The share of the blocks that is followed.
    pub share: f64,
}

impl CurveSnapshot {
    fn of(curve: &RecentCurve) -> Self {
        Self { ratios: curve.ratios().clone(), begin_ns: curve.begin_ns(), share: curve.share() }
    }
}

/// The counts of a control group.
#[derive(Clone, Debug)]
pub struct GroupCounts {
    /// The group's path.
    pub cgroup: Arc<str>,
    /// The counts since the group has its place.
    pub counts: CacheCounts,
    /// Its curve.
    pub curve: CurveSnapshot,
}

/// The counts and curves of a disk at one time.
#[derive(Clone, Debug)]
pub struct LedgerSnapshot {
    /// The counts since the layer was made, by class.
    pub classes: [CacheCounts; CLASSES],
    /// The curve of the disk.
    pub curve: CurveSnapshot,
    /// The control groups that have a place.
    pub groups: Vec<GroupCounts>,
    /// Blocks that are missing in curves, because they were locked for too long.
    pub dropped: u64,
    /// The memory of the curves, in bytes.
    pub memory_bytes: u64,
}

impl LedgerSnapshot {
    /// The counts of all classes.
    pub fn total(&self) -> CacheCounts {
        let mut total = CacheCounts::default();
        self.classes.iter().for_each(|counts| total.merge(counts));
        total
    }
}

impl Ledger {
    /// The ledger of a disk whose cache has at most `blocks` blocks. `names` has the texts of the
    /// insights of its requests; without it no control group gets a place.
    pub fn new(blocks: u64, names: Option<Arc<Names>>) -> Self {
        let share = |samples: usize| (samples as f64 * SHARE / blocks.max(1) as f64).min(1.0);
        let disk = RecentCurve::new(DISK_SAMPLES, share(DISK_SAMPLES), GENERATION_NS, 0);
        let groups = Groups::new(GROUP_SAMPLES, share(GROUP_SAMPLES), GENERATION_NS);
        Self {
            names,
            threshold: AtomicU64::new(disk.threshold()),
            heads: Heads::default(),
            queues: Mutex::default(),
            curves: Mutex::new(Curves { disk, groups }),
        }
    }

    /// The counts of all classes. They are cheap to read.
    pub fn counts(&self) -> [CacheCounts; CLASSES] {
        Self::counts_of(&self.queues.lock())
    }

    fn counts_of(queues: &Queues) -> [CacheCounts; CLASSES] {
        let mut counts = queues.past;
        for cells in &queues.open {
            for (count, cell) in counts.iter_mut().zip(&cells.classes) {
                count.merge(&cell.read());
            }
        }
        counts
    }

    /// The counts and curves at `now_ns`.
    pub fn snapshot(&self, now_ns: u64) -> LedgerSnapshot {
        let queues = self.queues.lock();
        let mut curves = self.curves.lock();
        let mut dropped = queues.dropped_past;
        for cells in &queues.open {
            // The queue's thread finds its list locked only for this time.
            self.collect(cells, &mut cells.counted.lock(), &mut curves, now_ns);
            dropped += cells.dropped.load(Ordering::Relaxed);
        }
        LedgerSnapshot {
            classes: Self::counts_of(&queues),
            curve: CurveSnapshot::of(&curves.disk),
            groups: curves.groups.snapshot(&queues.open),
            dropped,
            memory_bytes: (curves.disk.memory_bytes() + curves.groups.memory_bytes()) as u64,
        }
    }

    /// Moves what a queue has counted into the curves.
    fn collect(&self, cells: &Cells, counted: &mut Counted, curves: &mut Curves, now_ns: u64) {
        let blocks = cells.blocks.load(Ordering::Relaxed);
        curves.disk.count(blocks - counted.blocks);
        counted.blocks = blocks;
        curves.groups.count(cells, &mut counted.groups);
        for sample in counted.samples.drain(..) {
            curves.disk.sample(sample.hash, sample.touch);
            if sample.touch == Touch::Removal {
                curves.groups.remove(sample.hash);
            } else {
                curves.groups.sample(&sample);
            }
        }
        curves.disk.advance(now_ns);
        curves.groups.advance(now_ns);
        self.threshold.store(curves.disk.threshold(), Ordering::Relaxed);
        curves.groups.publish(&self.heads);
    }
}
