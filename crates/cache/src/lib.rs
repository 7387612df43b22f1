//! The replacement of a block cache: which blocks are let in, and which one leaves. The crate does
//! no I/O and has neither a clock nor randomness, so that the layer `cache` and `fathom replay` run
//! the same code.
//!
//! Read [`Replacement`] first. The crate must not know layers, disks, I/O and time.
//!
//! - [`Replacement`]: the queues of one shard, or of one disk's part of a cache.
//! - [`Hits`]: one queue's hits that change nothing in a replacement.
//! - [`Curve`]: the miss ratio of each size of a cache, from a sample of the requests;
//!   [`RecentCurve`]: that of the last hours.
//! - [`BlockAccess`]: what is known of a request for a block; [`MissCost`]: what its miss costs.
//! - [`Simulation`]: a cache without data.
//! - [`CacheCounts`], [`BlockCounts`]: what a cache counts, with the names of the metrics.
//! - [`format`](mod@format): the bytes of a cache on a volume that outlives the daemon.
//! - [`Inspection`]: an examination of these bytes, for a command.

#![forbid(unsafe_code)]

mod access;
mod cost;
mod counts;
mod curve;
mod engine;
pub mod format;
mod fuzz;
mod ghost;
mod hits;
mod inspect;
mod learner;
mod queues;
mod ranks;
mod recent;
mod replacement;
mod seams;
mod simulation;
mod slots;
mod trials;
mod worth;

pub use access::{
    BlockAccess, CLASS_INDEX, CLASS_JOURNAL, CLASS_LOG, CLASS_NAMED, CLASS_SWAP, CLASS_TABLE,
    CLASS_UNKNOWN, CLASSES,
};
pub use cost::MissCost;
pub use counts::{BlockCounts, CacheCells, CacheCounts};
pub use curve::{Curve, MissRatios, Touch};
pub use fuzz::fuzz_volume;
pub use hits::Hits;
pub use inspect::{CachedBlock, DiskSummary, Inspection};
pub use recent::RecentCurve;
pub use replacement::{
    DISK_SHIFT, Kept, Policy, Replacement, ReplacementOptions, SHARES_MAX, SLOTS_MAX,
};
pub use seams::{Continued, Seams};
pub use simulation::{
    Action, ClassCounts, SimulatedRequest, Simulation, SimulationCounts, SlowDisk, WriteMode, key,
};
pub use slots::SlotStates;

/// A hash of a key: all its bits depend on all bits of the key.
pub(crate) fn hash(key: u64) -> u64 {
    // The finalizer of SplitMix64.
    let mut word = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}
