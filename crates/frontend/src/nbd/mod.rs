//! The NBD server.
//!
//! A [`Listener`] accepts clients on a Unix socket or a TCP port and serves them the disks that
//! [`Exports`] names. Each connection has a thread of its own, with its own ring and its own
//! stack of each disk: see `transmission`. What the protocol looks like here is written down in
//! `docs/nbd.md`.
//!
//! ```text
//!  listener ── accept ──▶ connection: negotiation (a pure machine over bytes) ▶ transmission
//!      │                                   │                                        │
//!      └ status, counters               exports ── add, remove, restack ──▶ control (eventfd)
//! ```

mod budget;
mod channel;
mod connection;
mod control;
mod exports;
mod fuzz;
mod listener;
mod negotiation;
mod reply;
mod threads;
mod transmission;
mod wire;

pub use budget::{BUDGET_MIN, Budget};
pub use control::ConnectionStatus;
pub use exports::{Exports, Leaving, NameError};
#[doc(hidden)]
pub use fuzz::{fuzz_negotiation, fuzz_requests};
pub use listener::{Address, Listener, ListenerCounters, ListenerOptions};
