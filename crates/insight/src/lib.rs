//! The vocabulary for the meaning of disk requests.
//!
//! A request carries an [`Insight`]: which kind of data the request moves, for which file, control
//! group and process of the guest. The insight has a [`Source`] and a [`Confidence`]. Its texts
//! (paths, groups, commands) are numbers of a bounded table, [`Names`].
//!
//! The tap reports a request as an [`event`]. The columns of the queries are made from events.
//!
//! **An insight is a hint.** A guest can provide false values, and its memory changes while it is
//! read. A wrong insight may cost time, never data.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod class;
mod database;
pub mod event;
mod kind;
mod names;
mod part;
mod waiters;

pub use class::{ClassError, ClassTable, IoClass};
pub use database::{Database, DatabasePart, DatabaseSystem};
pub use kind::{Confidence, Kind, Source};
pub use names::{Name, Names};
pub use part::{Facts, Insight, Part, RequestFlags};
pub use waiters::Waiters;
