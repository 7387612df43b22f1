//! The replacement of a block cache: which blocks are let in, and which one leaves. The crate does
//! no I/O and has neither a clock nor randomness, so that the layer `cache` and `fathom replay` run
//! the same code.
//!
//! - [`Replacement`]: the queues of one shard, or of one disk's part of a cache.
//! - [`Curve`]: the miss ratio of each size of a cache, from a sample of the requests.
//! - [`Access`]: what is known of a request for a block.

#![forbid(unsafe_code)]

mod access;
mod curve;
mod ghost;
mod queues;
mod replacement;
mod slots;

pub use access::{Access, CLASSES};
pub use curve::Curve;
pub use replacement::{Policy, Replacement, ReplacementOptions, SLOTS_MAX};

/// A hash of a key: all its bits depend on all bits of the key.
pub(crate) fn hash(key: u64) -> u64 {
    // The finalizer of SplitMix64.
    let mut word = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}
