//! The host's devices beneath images.
//!
//! Read [`resolve`] first. The crate must not know disks and the daemon.
//!
//! | part | question |
//! |---|---|
//! | [`resolve`] | Which physical devices does an image lie on? |
//! | [`IdleTracker`], [`Predictor`] | When is it idle, and for how long will it stay idle? |
//! | [`HostActivity`] | What does a device do now, for all programs of the host? |
//! | [`Schedule`] | When does background work begin? |
//! | [`contention`] | When will the disks of a device wait for each other? |
//!
//! All files of `/sys` and `/proc` are read up to a limit, and parsed as if they were hostile.

#![forbid(unsafe_code)]

mod activity;
pub mod contention;
mod fuzz;
mod idle;
mod mounts;
pub mod predict;
pub mod resolve;
mod schedule;
mod text;

pub use activity::{DeviceFacts, HostActivity, SysDevices};
pub use contention::{Contention, ContentionOptions};
pub use fuzz::fuzz_devices;
pub use idle::{IdleOptions, IdleTracker};
pub use predict::Predictor;
pub use resolve::{Medium, MediumKind, Placement, resolve_within};
pub use schedule::{Offer, Others, Schedule, WorkCounts};
