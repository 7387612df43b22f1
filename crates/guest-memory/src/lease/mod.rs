//! Leases: which pages of a guest's memory are in use, in memory that a pager and the daemon share.
//!
//! A table is a file in memory with one [`PageWord`] for each page of one file of guest memory.
//! The pager makes it; each process that maps the guest's memory, a *holder*, has a place in it.
//! All changes of a word are single atomic steps, so that neither a holder nor the pager ever waits
//! for the other:
//!
//! ```text
//!             leave: no lease                 evict: still leaving
//!  resident ───────────────────▶ leaving ───────────────────────────▶ evicted
//!    ▲  ▲  ▲                      │    │                                │
//!    │  │  └──── any lease ───────┘    │ copied: still leaving          │ come
//!    │  └──────────────────────────────┘ (resident, with a valid copy)  ▼
//!    └──────────────────────────── arrive ─────────────────────────── coming
//! ```
//! - A lease on a page that is leaving makes it resident: the pager notices at its next step.
//! - A lease for writing makes the pager's copy invalid in the same step, because writes through
//!   another mapping than the VMM's raise no event.
//! - A lease on a page that is not there is refused. It is remembered that the page is wanted, and
//!   the pager is woken by a futex in the table (`wanted.rs`), but for a look.
//! - A touch without a lease of a page that is away is an error: a holder's mappings are registered
//!   (`mapping/missing.rs`), and it says *ready for eviction* only when no other mapping is in use.
//! - Of a holder that has died, reads are given back; pages that it may still be writing, by direct
//!   I/O in the kernel, stay where they are.
//!
//! `model.rs` explores all interleavings of pager, holders, devices and guest, and takes each rule
//! away once. `eviction_model.rs` does the same for a page that leaves, with a pager that dies at
//! each step and what outlives it.

#[cfg(test)]
mod absent_tests;
mod admission;
#[cfg(test)]
mod eviction_model;
mod figures;
mod folder;
mod holder;
#[cfg(test)]
mod model;
mod table;
#[cfg(test)]
mod tests;
mod wanted;
mod word;

pub use figures::{EvictionHold, PagerFigures, PagerPhase, published_now_ns};
pub use folder::{LEASE_FOLDER, TableOwner};
pub use holder::GuestLeases;
pub use table::{HOLDERS, LeaseTable, MemoryFile, PagerLeases};
pub use wanted::WantedPages;
pub use word::{PageState, PageWord};
