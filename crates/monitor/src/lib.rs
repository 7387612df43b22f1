//! Standing queries over streams of events.
//!
//! Read [`Engine`] first. The crate must not know where events come from.
//!
//! The [`Engine`] runs the plans of `fathom-cql` over rows as they arrive. [`read`] decodes bytes
//! into rows, [`mod@write`] encodes results as bytes, and [`mod@replay`] runs queries over a file
//! with all three.

#![forbid(unsafe_code)]

pub mod cluster;
mod columns;
mod engine;
mod feed;
mod fuzz;
mod held;
pub mod link;
pub mod measure;
mod priority;
pub mod read;
pub mod recording;
pub mod replay;
mod schema;
pub mod write;

pub use columns::ColumnValues;
pub use engine::{Delta, Engine, EngineStatistics, StateSize};
pub use feed::span_text;
#[doc(hidden)]
pub use fuzz::{fuzz_events, fuzz_script};
pub use held::{HELD_MAX, HeldLimit, HeldLimitExceeded, HeldSteps};
pub use priority::give_way;
pub use replay::{QueryError, ReplayRequest, ReplaySummary, ResultSink, replay};
pub use schema::{io_stream, streams};
