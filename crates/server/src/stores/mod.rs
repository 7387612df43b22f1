//! The stores of disks and logs: the kinds of stores of disks, and what stores share.

mod attend;
pub(crate) mod clusters;
pub(crate) mod exports;
pub(crate) mod feature;
mod kept;
pub(crate) mod kinds;
pub(crate) mod location;
pub(crate) mod models;
pub(crate) mod options;
pub(crate) mod pools;
pub(crate) mod qemu;
