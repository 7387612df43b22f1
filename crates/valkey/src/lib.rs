//! A back end whose blocks are in a Valkey cluster, for example as the log volume of a layer
//! `offload` that many hosts share. `docs/valkey.md` describes the keys, the scripts, and what is
//! promised when.
//!
//! Read [`ClusterVolume`] first. The crate must not know layers and front ends.
//!
//! - `client`: what is asked of nodes, through the crate `redis`; `connection`: its connections;
//!   `answer`: the bounds of what nodes send.
//! - `scripts`: what nodes do; `layout`: which keys they have; `format`: their values.
//! - `volume`: how a volume is opened, and what its requests do; `nodes`: which nodes it refuses.
//! - `versions`: what this opening knows of blocks and shards, so that old content is found.
//! - `queue`, `cluster_volume`: the back end.
//! - `local`: a small cluster of this host, for trials and tests.

#![forbid(unsafe_code)]

mod answer;
mod client;
mod cluster_volume;
mod connection;
mod format;
mod fuzz;
mod layout;
pub mod local;
mod nodes;
mod queue;
mod scripts;
mod versions;
mod volume;

pub use client::{ClusterOptions, ClusterTls};
pub use cluster_volume::{ClusterVolume, forget};
pub use format::BLOCK;
pub use fuzz::fuzz_value;
pub use layout::is_name;
pub use volume::VolumeOptions;
