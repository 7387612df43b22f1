//! Back ends: the stores of a disk's bytes.
//!
//! Read [`FileBackend`] first. The crate must not know layers and front ends.
//!
//! - [`FileBackend`]: a raw image or a block device, through `io_uring`.
//! - [`Memory`]: anonymous memory that lives as long as the daemon.
//! - [`Null`]: stores nothing and completes requests immediately; the do-nothing back end.

// A new operation, kind of error or state does not compile until each match decides about it.
#![warn(clippy::wildcard_enum_match_arm)]
#![allow(unsafe_code)]

mod file;
mod memory;
pub mod model;
mod null;

pub use file::{
    FileBackend, FileOptions, Keeper, Left, OpenError, count_syncs_in_flight, read_syncs_in_flight,
    report_of_keepsake, set_keeper,
};
pub use memory::Memory;
pub use null::Null;
