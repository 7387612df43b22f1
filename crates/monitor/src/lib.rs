//! Standing queries over streams of events.

#![forbid(unsafe_code)]

mod engine;

pub use engine::{Delta, Engine, EngineStatistics, Tuple};
