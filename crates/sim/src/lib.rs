//! Seeded faults, and simple models to compare with: for development only.
//!
//! Read [`Harness`] first. The crate must not know layers and front ends.
//!
//! - [`SimBackend`]: a store with a volatile cache that completes requests late and out of order,
//!   tears writes, loses unflushed data, fails and becomes full, all by seed.
//! - [`SimRecord`]: several such stores, which crash at one instant.
//! - [`ModelDisk`]: the contents that each sector may have, now and after a crash.
//! - [`Workload`]: requests by seed.
//! - [`OneRequest`]: a queue with one request at a time; [`certificates`]: for tests with TLS.
//! - [`Harness`]: drives the queues of any disk with a workload and compares the disk with the
//!   model.
//!
//! A failure reports its seed, and the same seed fails again: `FATHOM_SEED=7 cargo test …` runs
//! only that seed, `FATHOM_CASES=1000` runs that many seeds.

// A new operation, kind of error or state does not compile until each match decides about it.
#![warn(clippy::wildcard_enum_match_arm)]
#![forbid(unsafe_code)]

mod backend;
mod certificates;
mod device;
mod harness;
mod model;
mod one_request;
mod record;
mod seed;
mod workload;

pub use backend::{JournalEntry, SimBackend, SimCounts, SimOptions};
pub use certificates::certificates;
pub use device::{DEVICE_BLOCK, FaultyDevice, LoopDevice, run_command};
pub use harness::{Harness, HarnessOptions, Statistics};
pub use model::{ModelDisk, Violation};
pub use one_request::OneRequest;
pub use record::{Images, SimRecord};
pub use seed::{each_seed, each_seed_beside};
pub use workload::{Action, Workload, WorkloadOptions, pattern};

/// The unit in which contents are recorded and writes are torn, in bytes.
pub const SECTOR: u64 = fathom_block::SECTOR_SIZE;

/// [`SECTOR`] as an index.
const SECTOR_BYTES: usize = SECTOR as usize;
