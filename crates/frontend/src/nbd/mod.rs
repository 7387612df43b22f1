//! The NBD server.
//!
//! A [`Listener`] accepts clients on a Unix socket or a TCP port and serves them the disks of its
//! [`Exports`]. A thread negotiates with each client; then a thread of the export serves the
//! connection, with a stack of the disk for each connection: see `transmission`. `docs/nbd.md`
//! describes the supported parts of the protocol.
//!
//! ```text
//!  listener ── accept ──▶ connection: negotiation (a state machine without I/O) ▶ transmission
//!      │                                   │                                        │
//!      └ status, counters               exports ── add, remove, restack ──▶ control (eventfd)
//! ```

mod bitmaps;
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

use fathom_nbd::wire;

pub use bitmaps::{BITMAPS_MAX, BitmapRefusal, Bitmaps};
pub use budget::{BUDGET_MIN, RequestBudget};
pub use control::ConnectionStatus;
pub use exports::{Exports, NameError, WithdrawnExport};
#[doc(hidden)]
pub use fuzz::{fuzz_negotiation, fuzz_requests};
pub use listener::{Address, Listener, ListenerCounters, ListenerOptions};
