//! Attaches to a virtual machine that runs, and serves the faults of its memory.
//!
//! Read [`Pager`] first. The crate must not know disks, and not what is in memory.
//!
//! A stock QEMU that was started with shared memory is all that is needed. One system call is
//! injected into it ([`inject()`]), by which it makes a userfaultfd of its own memory; the pager
//! fetches a copy and does everything else from outside. With a limit, pages leave the guest's
//! memory (`evict.rs`) for a store (`store/`), and come back when somebody wants them (`away.rs`).
//! *Shadow eviction* (`shadow.rs`) does all but that, and proves that it would be right.
//!
//! ```text
//!             attach: inject, fetch, guard, register
//!   foreign ─────────────────────────────────────────▶ attached ◀──┐ adopt: fetch, guard, register
//!      ▲                                                │  │       │ the pager dies: the guard serves,
//!      │ the VMM ends                    detach         │  │       │ or unregisters if no page is away
//!      └──────────── detached ◀─────────────────────────┘  └──────▶ orphaned
//!                       └── attach: as adopt; the VMM has kept the userfaultfd ──▶ attached
//! ```
//! The safety argument is in `docs/pager.md`.

#![cfg(target_arch = "x86_64")]

mod attach;
mod away;
mod control;
mod counts;
mod daemon;
mod evict;
mod faults;
mod folios;
mod frame;
mod guard;
mod hazard;
mod inject;
mod isolate;
mod limit;
mod look;
mod memory;
mod pager;
mod publish;
mod qmp;
mod record;
mod refusal;
mod shadow;
mod store;
#[cfg(test)]
mod test_guest;
mod trace;
mod tripwire;
mod vmm;

pub use attach::{AttachOptions, AttachStep, Helpers, attach, detach_orphan};
pub use away::clean;
pub use control::{Control, Request, ask, ask_to_detach, list};
pub use counts::{EvictionCounts, PagerCounts, PagerStatus, ShadowCounts};
pub use fathom_guest_memory::LEASE_FOLDER;
use fathom_guest_memory::userfault;
pub use faults::RUN_PAGES;
pub use frame::SystemCall;
pub use guard::guard;
pub use inject::{InjectReport, InjectStep, TRACE_TIME_MAX, inject};
pub use limit::LimitHandle;
pub use memory::MappedMemory;
pub use pager::{EvictionOptions, Pager, ServeEnd, ShadowOptions};
pub use record::{FOLDER, PagerRecord};
pub use refusal::AttachRefusal;
pub use store::{STORE_FOLDER, SwapOptions};
pub use vmm::Vmm;
