//! What the daemon and an interceptor share.
//!
//! Read [`Writers`] first. The crate must not know how a guest is intercepted, or what the daemon
//! does with what it learns.
//!
//! An interceptor is a shared object in the process of a virtual machine. It stops the guest for an
//! instant where its kernel marks a page as dirty, and notes the process that wrote the page in a
//! table in shared memory ([`Writers`]). The daemon makes the table, tells the interceptor where
//! the guest's kernel has what it needs ([`Places`]), and reads the table when the page is written
//! to a disk. By choice it also notes the system calls of some processes, in a ring ([`Calls`]).
//! `docs/interception.md` describes the messages, the table and the ring.

#![warn(missing_docs)]

mod calls;
mod hook;
mod linux;
mod mapping;
mod message;
mod pattern;
mod socket;
mod writers;

pub use calls::{Call, CallFile, CallPosition, CallReaders, Calls};
pub use hook::{Hook, HookState};
pub use linux::{CALLS, CallOffset, SystemCall, system_call};
pub use message::{
    CallPlaces, HELLO_LENGTH, Hello, MEMORY_FILES_MAX, MemoryFile, MessageError, PLACES_LENGTH,
    Places, REGIONS_MAX, RegionPlace,
};
pub use pattern::{COMMAND_LENGTH, CommandPattern, PATTERNS_MAX, matches};
pub use socket::{receive, send};
pub use writers::{Slots, Writer, Writers};
