//! Standing queries over streams of events.
