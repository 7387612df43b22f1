//! The memory of guests: what is mapped of it, and the only way to it.
//!
//! Read [`GuestMemory`] first. The crate must not know what the memory contains (rings, requests,
//! kernels), nor disks.
//!
//! A guest's memory belongs to another process, and the guest changes it at any time. So no Rust
//! reference to its bytes exists. All of Fathom reads and writes it through this crate: the rings,
//! the data of requests, introspection. [`GuestMemory`] is a table of regions, each mapped from a
//! file of the VMM. It gives out:
//!
//! | for | by | the pages are needed |
//! |---|---|---|
//! | one read or write | [`GuestMemory::access`], and short forms of it | during the call |
//! | a ring | [`GuestMemory::hold`] | as long as the [`MemoryAccess`] lives |
//! | the data of a request, for the kernel | [`GuestMemory::lend`] | until the [`Buffers`] are cleared |
//! | introspection | [`GuestMemory::u64`], [`GuestMemory::window`] | never: it only looks |
//! | what the host has swapped out | [`GuestMemory::residency`] | never: the kernel counts them |
//!
//! **Who may access a page now** is decided in one place: a memory can have a [`Pager`], from which
//! every access takes a [`Lease`] on its range. [`GuestLeases`] is that of a pager in another
//! process, with which it shares a table of the pages. Without one, which is the usual case, an
//! access tests nothing more: a memory with a pager has no fast path. The mappings of a memory with
//! leases are registered, so that a touch of a page that is away is an error and never zeroes.
//!
//! **Who maps and who unmaps.** [`GuestMemory::add`] maps a region. A clone of a memory, which may
//! have other regions, shares the mappings. A region is unmapped when the last memory that has it,
//! and the last `MemoryAccess` that is held in it, are dropped. So introspection keeps what it
//! reads mapped, and a ring its three parts. Lent memory is the exception: its lender keeps the
//! memory.
//!
//! **Pages that are lost** (the VMM truncates its file) read as zeroes from then on, and
//! [`MemoryOwner::is_lost`] becomes true: see [`Mapping`].
//!
//! Addresses and lengths are the guest's, and untrusted: what does not lie within one region is
//! `None`.

#![allow(unsafe_code)]
#![warn(missing_docs)]

mod access;
mod buffer;
mod dirty_log;
mod kept;
mod lease;
mod mapping;
mod memory;
mod pager;
#[cfg(feature = "recording")]
pub mod recording;
mod region;
mod residency;
#[cfg(test)]
mod tests;
pub mod userfault;
mod volatile;
mod window;

pub use access::MemoryAccess;
pub use buffer::{Buffers, Cursor, GuestAddress};
pub use dirty_log::DirtyLog;
pub use lease::{
    EvictionHold, GuestLeases, HOLDERS, LEASE_FOLDER, LeaseTable, MemoryFile, PageState, PageWord,
    PagerFigures, PagerLeases, PagerPhase, TableOwner, WantedPages, published_now_ns,
};
pub use mapping::{LossCause, Mapping, MappingBudget, MemoryOwner, faults};
pub use memory::GuestMemory;
pub use pager::{Lease, Pager, Purpose, absences, arrivals};
pub use region::{Region, Touched};
pub use residency::{HostSwap, Residency, ResidencyError};
pub use window::MemoryWindow;
