//! Layers between a front end and a back end.
//!
//! Read [`LayerKind`] first. The crate must not know front ends, and of each other only what a
//! layer is made of (`offload` of `wal`).
//!
//! | layer | function |
//! |---|---|
//! | [`Classify`] | finds out what requests of a guest mean, and accounts for them |
//! | [`Passthrough`] | passes all requests unchanged: an example of a layer |
//! | [`Tap`] | counts and measures requests, and emits events for requests and responses |
//! | [`Patterns`] | recognises copies and encryption of files by their content |
//! | [`Lifetimes`] | finds out how long what a guest writes lives |
//! | [`SwapWatch`] | counts the I/O that is needless because the host swaps the guest's memory |
//! | [`Delay`] | makes operations slower, by a fixed time and a seeded jitter |
//! | [`Fault`] | makes operations fail, by seed, kind, range and count; tears writes |
//! | [`WaitForRoom`] | holds writes while the storage is full, and tries them again |
//! | [`MoveWatch`] | notes what guests change while their disk moves to another store |
//! | [`Wal`] | makes changes durable in a log first, and writes them back home later |
//! | [`Offload`] | carries changes and reads of a contended disk on another device, while it is switched on |
//! | [`Cache`] | keeps blocks of slow disks on a fast device or in memory |
//! | [`Limit`] | limits requests and bytes per second, of disks, groups, containers and kinds |
//! | [`Schedule`] | decides which requests of several disks use a shared device first |
//! | [`Log`] | writes a line for each request and each response |
//!
//! A layer knows neither its neighbours, but what it is made of (`Offload` of `Wal`), nor the
//! source of requests. It works in the threads of the queues, and gets time and randomness on a
//! request's path as arguments, so a seed replays a whole run. Calls that no queue makes, such as
//! the opening of a log, read the host's clock; and a cache asks a store in a thread of its own
//! whether it answers.

// A new operation, kind of error or state does not compile until each match decides about it.
#![warn(clippy::wildcard_enum_match_arm)]
#![forbid(unsafe_code)]

mod bucket;
pub mod cache;
mod change_notes;
pub mod classify;
mod delay;
mod fault;
pub mod guest_pages;
mod kind;
pub mod lifetimes;
mod limit;
mod log;
mod moving;
pub mod offload;
mod opened;
mod passthrough;
pub mod patterns;
mod room;
mod schedule;
mod slot;
pub mod swap_watch;
pub mod tap;
pub mod wal;

pub use cache::Cache;
pub use change_notes::ChangeNotes;
pub use classify::Classify;
pub use delay::{Delay, DelayOptions, DelayTime};
pub use fault::{Fault, FaultEffect, FaultOptions, FaultRule};
pub use kind::{KINDS, LayerContext, LayerKind, LayerOptions, Operations, Prepared, Rank};
pub use lifetimes::Lifetimes;
pub use limit::{Limit, LimitGroups, LimitOptions};
pub use log::{Log, LogOptions, LogSink};
pub use moving::{
    BRAKE_MAX_NS, MoveCopier, MoveFailure, MoveOptions, MovePart, MoveProgress, MoveStage,
    MoveState, MoveWatch,
};
pub use offload::Offload;
pub use opened::Opened;
pub use passthrough::Passthrough;
pub use patterns::Patterns;
pub use room::WaitForRoom;
pub use schedule::{Schedule, ScheduleDevices, ScheduleOptions};
pub use slot::GuestSlot;
pub use swap_watch::SwapWatch;
pub use tap::Tap;
pub use wal::Wal;

/// A random generator for a queue, from a layer's `seed` and the queue's number. Different queues
/// get unrelated sequences.
fn generator(seed: u64, queue: u64) -> fastrand::Rng {
    fastrand::Rng::with_seed(seed ^ (queue + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}
