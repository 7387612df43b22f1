//! The vocabulary of Fathom's data path.
//!
//! Read [`Stack`] first. The crate must not know what lies above it: layers, stores, front ends.
//!
//! A front end submits a [`Request`], which crosses the [`Layer`]s of its [`Disk`] downward. A
//! [`Backend`] carries it out, and its [`Outcome`] crosses the same layers upward. Each crossing
//! goes through one checked function, in [`Stack`]. A stack belongs to one queue and one thread: it
//! takes no lock and, after the first requests, allocates nothing. Layers whose queues share state
//! lock it for a moment, and never across I/O ([`Shared`]).
//!
//! ```text
//!  front end ─▶ Stack::submit ─▶ layer 0 ─▶ layer 1 ─▶ … ─▶ back end
//!                   ▲                                          │
//!            Stack::completed ◀── layer 0 ◀── layer 1 ◀── … ◀──┘
//! ```

// A new operation, kind of error or state does not compile until each match decides about it.
#![warn(clippy::wildcard_enum_match_arm)]

mod access;
mod aside;
mod backend;
mod background;
mod change;
mod clock;
mod crossing;
mod disk;
mod drive;
mod failures;
mod geometry;
mod layer;
mod leftovers;
mod observer;
mod open;
mod parted;
mod prefetch;
mod problem;
mod report;
mod request;
mod shared;
mod split;
mod stack;
mod waker;
mod work;

pub use access::{REQUEST_TIME_MAX, StoreAccess};
pub use aside::StoreId;
pub use backend::{Backend, BackendContext, BackendOpenContext, BackendQueue};
pub use background::{Background, BackgroundScheduler, BackgroundStep, Permission};
pub use change::{CHANGE_TIME_MAX, RestackError};
pub use clock::Clock;
pub use crossing::Crossing;
pub use disk::{ChangeListener, Disk, DiskChange, DiskOptions};
pub use drive::{Attendance, Attended, DriveThread, Mail, Mailbox, RequestSource, Wake};
pub use failures::{FailureCounts, Failures};
pub use fathom_guest_memory::{Buffers, Cursor, GuestAddress, faults};
pub use fathom_insight::{Facts, Insight, IoClass, Kind, Part};
pub use geometry::{Capabilities, Geometry, SECTOR_SIZE};
pub use layer::{LAYERS_MAX, Layer, LayerPart, LayerQueue};
pub use leftovers::Leftovers;
pub use observer::{Observed, Observer, ObserverPosition};
pub use open::{Offer, OpenContext};
pub use parted::{PartAnswer, PartAnswers, PartedRequests};
pub use prefetch::{prefetch, prefetch_to_change};
pub use problem::BackendProblem;
pub use report::{Figure, FigureKind, LayerCause, LayerProblem, LayerReport};
pub use request::{
    Allocation, CacheHit, Course, ErrorKind, Extent, Flags, HeldBy, Operation, Outcome,
    REQUEST_LENGTH_MAX, Request, SERIAL_LENGTH,
};
pub use shared::Shared;
pub use split::Split;
pub use stack::{Stack, StackCounters};
pub use waker::Waker;
pub use work::{Urgency, Work};
