//! Standing queries over streams of events.

pub mod read;
mod schema;

pub use schema::io_stream;
