//! The size and the faults of a store.

#[cfg(doc)]
use super::SimBackend;
#[cfg(doc)]
use fathom_block::{Backend, ErrorKind};

use crate::SECTOR;

/// The size and the faults of a store.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// The size of the disk, in bytes; whole sectors. A store can be made smaller, and up to this
    /// size larger.
    pub capacity: u64,
    /// The alignment of offsets and lengths, in bytes; at least a sector.
    pub alignment: u32,
    /// The most rounds that a request takes; with 0 requests complete immediately.
    pub rounds_max: u32,
    /// The share of reads that fail, from 0 to 1.
    pub read_error_rate: f64,
    /// The share of writes, discards and zeroes that fail, torn: any of their sectors may have
    /// changed.
    pub write_error_rate: f64,
    /// Only changes that begin before this offset fail, in bytes.
    pub write_error_end: u64,
    /// The share of flushes that fail. A failed flush makes nothing durable.
    pub flush_error_rate: f64,
    /// Whether a failed flush loses what it should have made durable, as with the kernel's files.
    /// It stays visible, and no later flush makes it durable. All writes and flushes fail until
    /// [`Backend::recover`].
    pub loses_writes: bool,
    /// A change that has failed may take effect later, instead of when it fails: after this many
    /// further effects at most. 0 if none does.
    pub late_max: u32,
    /// The most bytes in sectors that hold data; writes that need more fail with
    /// [`ErrorKind::NoSpace`].
    pub room: u64,
    /// What [`Backend::frees_zeroes`] returns.
    pub frees_zeroes: bool,
    /// Whether every effect is recorded, for [`SimBackend::image_after`].
    pub journal: bool,
}

impl SimOptions {
    /// A store of `capacity` bytes that completes requests late and out of order and never fails.
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            alignment: SECTOR as u32,
            rounds_max: 6,
            read_error_rate: 0.0,
            write_error_rate: 0.0,
            write_error_end: u64::MAX,
            flush_error_rate: 0.0,
            loses_writes: false,
            late_max: 0,
            room: u64::MAX,
            frees_zeroes: false,
            journal: false,
        }
    }
}
