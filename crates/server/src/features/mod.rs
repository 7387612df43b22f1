//! What the daemon does beyond serving disks. Each feature is a folder.

pub(crate) mod background;
pub(crate) mod cache;
pub(crate) mod devices;
pub(crate) mod dirty;
pub(crate) mod events;
pub(crate) mod flush;
pub(crate) mod guests;
pub(crate) mod keep;
pub(crate) mod log;
pub(crate) mod monitor;
pub(crate) mod nbd;
pub(crate) mod offload;
pub(crate) mod queries;
