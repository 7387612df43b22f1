//! The control interface and `/metrics` over HTTP, on one thread.

pub(crate) mod listen;
mod noted;
pub(crate) mod routes;
pub(crate) mod scrape;
