//! The vocabulary for the meaning of disk requests.
//!
//! Read [`Insight`] first. The crate must not know how anything is found out.
//!
//! A request carries an [`Insight`]: which kind of data the request moves, for which file, control
//! group and process of the guest. The insight has an [`InsightSource`] and a [`Confidence`]. Its
//! texts (paths, groups, commands) are numbers of a bounded table, [`Names`].
//!
//! The daemon reports what happens as streams of events: [`STREAMS`] is their table, and a
//! [`Stream`] has a [`Record`] and columns, which the queries use. The tap reports each request as
//! an [`event`]; a [`change`] is what an operator or the daemon changed, and a [`pattern`] what
//! several requests together say about a file, and a [`syscall`] a system call of a guest's
//! process. A [`Ring`] carries records from the thread that makes them to the one that collects
//! them.
//!
//! **An insight is a hint.** A guest can provide false values, and its memory changes while it is
//! read. A wrong insight may cost time, never data.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod change;
mod class;
mod database;
pub mod event;
mod kind;
mod names;
mod part;
pub mod pattern;
mod record;
mod ring;
pub mod stream;
pub mod syscall;
mod waiters;

pub use class::{ClassError, ClassTable, IoClass, class_of_hint};
pub use database::{Database, DatabasePart, DatabaseSystem};
pub use kind::{Confidence, InsightSource, Kind, ProcessRole};
pub use names::{Name, Names};
pub use part::{Facts, Insight, Part, RequestFlags};
pub use record::Record;
pub use ring::Ring;
pub use stream::{STREAMS, Stream, StreamKind};
pub use waiters::Waiters;
