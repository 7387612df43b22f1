//! What the daemon and an interceptor share.
//!
//! Read [`Writers`] first. The crate must not know how a guest is intercepted, or what the daemon
//! does with what it learns.
//!
//! An interceptor is a shared object in the process of a virtual machine. It stops the guest for an
//! instant where its kernel marks a page as dirty, and notes the process that wrote the page in a
//! table in shared memory ([`Writers`]). The daemon makes the table, tells the interceptor where
//! the guest's kernel has what it needs ([`Places`]), and reads the table when the page is written
//! to a disk. `docs/interception.md` describes the messages and the table.

#![warn(missing_docs)]

mod message;
mod socket;
mod writers;

pub use message::{
    HELLO_LENGTH, Hello, MEMORY_FILES_MAX, MemoryFile, MessageError, PLACES_LENGTH, Places,
    REGIONS_MAX, RegionPlace,
};
pub use socket::{receive, send};
pub use writers::{Slots, Writer, Writers};
