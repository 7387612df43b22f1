//! Standing queries over streams of events.

pub mod read;
pub mod replay;
mod schema;
pub mod write;

pub use replay::{QueryError, ReplayRequest, ReplaySummary, ResultSink, replay};
pub use schema::io_stream;
