//! The NBD protocol, and a back end whose blocks another server has: another host's Fathom,
//! `qemu-nbd`, `nbdkit` or any other that speaks it. `docs/nbd.md` describes what such a server has
//! to offer, and what is promised when.
//!
//! Read [`RemoteDisk`] first. The crate must not know layers and front ends.
//!
//! - `wire`: the constants of the protocol, which the server in `fathom-frontend` uses, too.
//! - `uri`: where an export is; `stream`: the way to it; `handshake`: what it offers.
//! - `job`, `session`: requests on a connection; `unflushed`: changes that the server may still
//!   lose; `record`: what a later daemon has to know of them.
//! - `remote`, `queue`: the back end.

// A new operation, kind of error or state does not compile until each match decides about it.
#![warn(clippy::wildcard_enum_match_arm)]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod fuzz;
mod handshake;
mod job;
mod queue;
mod record;
mod remote;
mod session;
mod stream;
mod unflushed;
mod uri;
pub mod wire;

#[doc(hidden)]
pub use fuzz::fuzz_server;
pub use record::{Earlier, ExportRecord};
pub use remote::{RemoteDisk, RemoteOptions};
pub use uri::NbdUri;
