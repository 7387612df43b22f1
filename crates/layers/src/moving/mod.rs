//! The move of a disk to another store while it is used.
//!
//! A copier ([`MoveCopier`]) copies the store from its first byte to its last. Meanwhile guests
//! change it. A layer beneath all others ([`MoveWatch`]) notes the regions of completed changes,
//! and the copier copies these again, pass after pass, until few are left. Then the disk changes
//! over to the target: its queues stop, the copier copies the rest, and the target is durable.
//!
//! The store is the only authority until then. No request waits for the target, and no failure of
//! the target reaches a guest. A guest that changes more than the copier can copy is slowed down in
//! the end, within [`BRAKE_MAX_NS`] for each write, and only if the copier makes progress.
//!
//! - `regions`: which regions are to be copied.
//! - `state`: what the watch, the copier and the owner of the move share.
//! - `watch`, `copier`: the two layers.
//! - `piece`: what of a run of regions is copied, and what is zeroed.
//! - `pace`: when the copier may begin with the next bytes.

mod copier;
mod pace;
mod piece;
mod regions;
mod state;
mod watch;

pub use copier::MoveCopier;
pub use state::{MoveFailure, MoveOptions, MovePart, MoveProgress, MoveStage, MoveState};
pub use watch::MoveWatch;

/// The longest time for which a write is held, in nanoseconds.
pub const BRAKE_MAX_NS: u64 = 100_000_000;
