//! What a pager has done.

use fathom_histogram::Histogram;
use serde::{Deserialize, Serialize};

/// Counts of a pager's life, which begins with its attaching or adopting.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerCounts {
    /// Faults of missing pages.
    pub faults: u64,
    /// Bytes of zeroes that came into being for them.
    pub zeroed_bytes: u64,
    /// Faults of pages that were there when they were served: another thread's, or the daemon's.
    pub repeated: u64,
    /// Faults of memory that was unmapped meanwhile.
    pub strays: u64,
    /// Mappings that were left to the kernel, because it could not make a page.
    pub released: u64,
    /// Guards that ended and were replaced.
    pub guards_lost: u64,
    /// From the moment at which a fault was read to that at which it was served, in nanoseconds.
    pub fault_ns: Histogram,
}

/// What shadow eviction has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ShadowCounts {
    /// The most bytes that are copied at a time; 0 without shadow eviction.
    pub budget_bytes: u64,
    /// The bytes of the pages that are copied and protected now.
    pub copied_bytes: u64,
    /// Why it does nothing now; empty if it works.
    pub suspended: String,
    /// Why no page could leave now, though copies are made; empty if pages could.
    pub obstacle: String,
    /// Pages that were copied.
    pub copies: u64,
    /// Writes of the guest to protected pages.
    pub write_faults: u64,
    /// Comparisons in which the page was equal to its copy.
    pub equal: u64,
    /// Comparisons in which it was not, though nobody had a lease for writing. Each of them would
    /// be a lost write if the page had left.
    pub mismatches: u64,
    /// Copies that a lease for writing has made invalid.
    pub overwritten: u64,
    /// Copied pages that QEMU has given back.
    pub vanished: u64,
    /// Pages that were not copied because somebody had a lease.
    pub leased: u64,
    /// Pages that were not copied because somebody took a lease meanwhile, or the page went.
    pub disturbed: u64,
    /// Pages that were not copied because they are part of a large folio.
    pub large: u64,
}

/// What has left the guest's memory, and what has come back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EvictionCounts {
    /// The most bytes of the guest's memory that are to be in the host's memory; 0 without a limit.
    pub limit_bytes: u64,
    /// The bytes that are, as the kernel counts the memory's files; 0 before a first limit.
    pub resident_bytes: u64,
    /// The bytes of the pages that are away now.
    pub away_bytes: u64,
    /// The part of them that the store keeps as a number, because each page is the same throughout.
    pub filled_bytes: u64,
    /// The bytes of the host's memory that the contents of the others take.
    pub store_bytes: u64,
    /// The bytes of the swap file that contents take; 0 without one.
    pub file_bytes: u64,
    /// Pages that were written to the swap file.
    pub file_written: u64,
    /// Pages that were read from it.
    pub file_read: u64,
    /// Writes and reads of it that have failed.
    pub file_failed: u64,
    /// Why nothing is moved to it now; empty if it can be.
    pub file_obstacle: String,
    /// The part of `fault_ns` that is of pages that had to be read from the swap file.
    pub file_fault_ns: Histogram,
    /// Why all pages come in and none leaves; empty if that is not so.
    pub retreat: String,
    /// Why no page leaves now; empty if pages may.
    pub obstacle: String,
    /// Pages that have left.
    pub evicted: u64,
    /// Pages that have come back.
    pub brought: u64,
    /// Of these, pages that the daemon wanted.
    pub wanted: u64,
    /// Of these, pages whose content was not needed, because a read of a disk was going to
    /// overwrite all of it.
    pub overwritten: u64,
    /// Pages that existed when they were to come back: at most eight after the death of a pager.
    /// More means that another process has made them, and the guest may have read zeroes.
    pub existing: u64,
    /// Pages whose content is damaged, so that they cannot come back.
    pub damaged: u64,
    /// Pages that did not leave because somebody had a lease.
    pub leased: u64,
    /// Pages that did not leave because somebody took a lease meanwhile, or the page went.
    pub disturbed: u64,
    /// Pages that did not leave because they do not become smaller.
    pub incompressible: u64,
    /// Pages that did not leave because they are part of a large folio.
    pub large: u64,
    /// How often the store had no memory.
    pub full: u64,
    /// From the moment at which the fault of a page that was away was read to that at which it was
    /// served, in nanoseconds.
    pub fault_ns: Histogram,
    /// The sum of these times, in nanoseconds.
    pub fault_sum_ns: u64,
}

/// The state of a pager.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerStatus {
    /// The VMM's process.
    pub process: i32,
    /// The pager's process; 0 if there is none.
    pub pager: u32,
    /// Its guard's process; 0 if there is none.
    pub guard: u32,
    /// `attached`, `detaching` (its pages come in), `detached`, `orphaned` (attached, and the pager
    /// is dead) or `ended` (the VMM has).
    pub state: String,
    /// Whether the descriptor was there already: nothing was injected.
    pub is_adopted: bool,
    /// For how long the VMM's main thread stood still for the injection, in nanoseconds; 0 without
    /// one.
    pub pause_ns: u64,
    /// The guest's memory, in bytes.
    pub memory_bytes: u64,
    /// The part of it whose faults the kernel reports, in bytes.
    pub registered_bytes: u64,
    /// Whether a touch of a missing page by the pager was tried and was an error.
    pub is_tripwire_tried: bool,
    /// What it has done.
    pub counts: PagerCounts,
    /// The pages that could leave.
    #[serde(default)]
    pub shadow: ShadowCounts,
    /// The pages that have left.
    #[serde(default)]
    pub eviction: EvictionCounts,
    /// Why a request was not carried out; empty if it was.
    #[serde(default)]
    pub refused: String,
}
