//! What the daemon does beyond serving disks. Each feature is a folder, and a line in [`FEATURES`]:
//! its `feature.rs` says when the daemon calls it.

pub(crate) mod audit;
pub(crate) mod background;
pub(crate) mod cache;
pub(crate) mod devices;
pub(crate) mod dirty;
pub(crate) mod events;
pub(crate) mod flush;
pub(crate) mod guests;
pub(crate) mod intercept;
pub(crate) mod keep;
pub(crate) mod lifetimes;
pub(crate) mod log;
pub(crate) mod monitor;
pub(crate) mod moves;
pub(crate) mod nbd;
pub(crate) mod offload;
pub(crate) mod pager;
pub(crate) mod patterns;
pub(crate) mod pools;
pub(crate) mod processes;
pub(crate) mod queries;
pub(crate) mod scrubs;
pub(crate) mod snapshots;

use crate::daemon::feature::Feature;
use crate::stores;

/// The features, in the order in which they are called.
pub(crate) static FEATURES: [&dyn Feature; 23] = [
    &stores::feature::Stores,
    &log::feature::Logs,
    &cache::feature::CachesOfDisks,
    &background::feature::Background,
    &offload::feature::Offload,
    &devices::feature::Devices,
    &guests::feature::Guests,
    &dirty::feature::Dirty,
    &processes::feature::GuestsProcesses,
    &patterns::feature::FilePatterns,
    &lifetimes::feature::ContentLifetimes,
    &pager::feature::SwappedMemory,
    &moves::feature::DiskMoves,
    &pools::feature::VolumesOfPools,
    &snapshots::feature::RollingSnapshots,
    &scrubs::feature::PoolScrubs,
    &intercept::feature::Interception,
    &flush::feature::Flush,
    &queries::feature::KeptQueries,
    &monitor::feature::Centre,
    &events::feature::EventStreams,
    &nbd::feature::Nbd,
    &audit::feature::AuditLog,
];
