//! The stores of disks and logs that need more than a path.

pub(crate) mod clusters;
pub(crate) mod feature;
pub(crate) mod location;
pub(crate) mod models;
