//! The settings of an open pool.

use crate::rules::Rules;

/// The settings of an open pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolOptions {
    /// After this time a checkpoint is written if anything has changed, in nanoseconds.
    pub checkpoint_ns: u64,
    /// The shortest time between two walks, in nanoseconds.
    pub walk_pause_ns: u64,
    /// The shortest time between two searches for equal blocks that were written several times, in
    /// nanoseconds.
    pub merge_pause_ns: u64,
    /// Whether blocks that adjoin in a volume are put together; by default on rotational devices.
    pub relocates: Option<bool>,
    /// Whether free segments are given back to what is beneath the pool, if it can take them.
    pub punches: bool,
    /// How long no request must have come before blocks are moved, in nanoseconds.
    pub idle_ns: u64,
    /// The most pages of maps in memory, of 4 KiB each, besides those that have changed.
    pub cached_pages: usize,
    /// The most pages of the fingerprint table in memory, which take about 20 KiB each and describe
    /// 2 MiB of the device, besides those that have changed.
    pub index_pages: usize,
    #[doc(hidden)]
    pub rules: Rules,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            checkpoint_ns: 30_000_000_000,
            walk_pause_ns: 10_000_000_000,
            merge_pause_ns: 600_000_000_000,
            relocates: None,
            punches: true,
            idle_ns: 200_000_000,
            cached_pages: 1 << 14,
            index_pages: 1 << 11,
            rules: Rules::default(),
        }
    }
}
