//! The host's devices beneath images.
//!
//! | part | question |
//! |---|---|
//! | [`resolve`] | Which physical devices does an image lie on? |
//! | [`HostActivity`] | What does a device do now, for all programs of the host? |
//!
//! All files of `/sys` and `/proc` are read up to a limit, and parsed as if they were hostile.

#![forbid(unsafe_code)]

mod activity;
mod mounts;
pub mod resolve;
mod text;

pub use activity::{DeviceFacts, HostActivity, SysDevices};
pub use resolve::{Medium, MediumKind, Placement, resolve_within};
