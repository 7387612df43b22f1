//! Seeded faults and plain models to compare with: for development only.
//!
//! - [`SimBackend`]: a store with a volatile cache that completes late and out of order, tears
//!   writes, loses what was not flushed, fails and runs full, all by seed.
//! - [`SimRecord`]: several such stores, which crash at one instant.
//! - [`ModelDisk`]: what every sector may legally hold, now and after a crash.
//! - [`Workload`]: requests by seed.
//! - [`Harness`]: drives the queues of any disk with a workload and compares with the model.
//!
//! A failure names its seed, and the same seed fails again: `FATHOM_SEED=7 cargo test …` runs that
//! seed alone, `FATHOM_CASES=1000` runs more of them than usual.

#![forbid(unsafe_code)]

mod backend;
mod device;
mod harness;
mod model;
mod record;
mod seed;
mod workload;

pub use backend::{JournalEntry, SimBackend, SimOptions};
pub use device::{DEVICE_BLOCK, FaultyDevice};
pub use harness::{Harness, HarnessOptions, Statistics};
pub use model::{ModelDisk, Violation};
pub use record::{Images, SimRecord};
pub use seed::each_seed;
pub use workload::{Action, Workload, WorkloadOptions, pattern};

/// The unit in which contents are remembered and torn, in bytes.
pub const SECTOR: u64 = fathom_block::SECTOR_SIZE;

/// [`SECTOR`] as an index.
const SECTOR_BYTES: usize = SECTOR as usize;
