//! A synthetic Linux guest: memory with a note, page tables, symbols, types, modules and a kernel's
//! objects. All of it is consistent, so the result for each request is known exactly. It replaces a
//! captured guest in tests and fuzzing, for which such a guest is too large.

mod answer;
mod builder;
mod bytes;
mod description;
pub(crate) mod dirty;
mod flushes;
mod linux;
mod mutation;
mod objects;
pub(crate) mod reads;
mod scene;
mod stage;
mod store;
mod symbols;
mod types;

pub use answer::NamedFacts;
pub use linux::{COUNTS, CURRENT_PLACE, KernelCounts, Linux, UPTIME_NS};
pub use mutation::{Effort, MutationOutcome, MutationSubject, READS_MAX, fuzz_introspection};
pub use scene::SyntheticRequest;
pub use store::Store;
pub use symbols::Addresses;

#[cfg(test)]
pub(crate) use description::Description;
#[cfg(test)]
pub(crate) use mutation::{MUTATION, attach, check};
#[cfg(test)]
pub(crate) use types::{BEFORE_SEVEN, COMMON, EARLY};

/// The size of a page, in bytes.
const PAGE: u64 = 4096;
/// The ticks of the clock, 250 a second.
const TICKS: u64 = 4_294_967_296;

/// The properties of a synthetic kernel.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The kernel's release.
    pub release: String,
    /// The levels of the page tables: 4 or 5.
    pub levels: u32,
    /// The encoding of addresses in the table of symbols.
    pub addresses: Addresses,
    /// Whether the structures are those of 6.12 rather than those of 6.1.
    pub recent: bool,
    /// Whether the structures that changed from 7.0 to 7.2 are those of 7.2.
    pub seven: bool,
    /// The guest-physical memory of the kernel: its start, a multiple of 2 MiB, and its length.
    pub room: (u64, u64),
    /// The guest-physical address of the page with the note. The next page has the second copy.
    pub note: u64,
    /// The shift of the image (KASLR), a multiple of 2 MiB.
    pub slide: u64,
    /// The virtual address of the direct map, a multiple of 1 GiB.
    pub direct: u64,
    /// The virtual address of the page structures.
    pub pages: u64,
    /// The number of symbols that introspection does not use.
    pub symbols: usize,
    /// The number of types that introspection does not use.
    pub types: usize,
}

impl Default for Shape {
    /// A kernel like 6.1 with 4 levels, in 512 KiB from 2 MiB on, with its note in page 1.
    fn default() -> Self {
        Self {
            release: "6.1.0-synthetic".into(),
            levels: 4,
            addresses: Addresses::Below,
            recent: false,
            seven: false,
            room: (2 << 20, 640 << 10),
            note: PAGE,
            slide: 0x1a0_0000,
            direct: 0xffff_8880_0000_0000,
            pages: 0xffff_ea00_0000_0000,
            symbols: 0,
            types: 0,
        }
    }
}

impl Shape {
    /// A kernel like 6.12 with 5 levels, above 4 GiB.
    pub fn recent() -> Self {
        Self {
            release: "6.12.0-synthetic".into(),
            levels: 5,
            addresses: Addresses::Above,
            recent: true,
            seven: false,
            room: (4 << 30, 640 << 10),
            note: PAGE,
            slide: 0x1e0_0000,
            direct: 0xff11_0000_0000_0000,
            pages: 0xffd4_0000_0000_0000,
            symbols: 0,
            types: 0,
        }
    }

    /// A kernel like 7.2, otherwise as [`recent`](Self::recent).
    pub fn seven() -> Self {
        Self {
            release: "7.2.0-synthetic".into(),
            addresses: Addresses::FromPlace,
            seven: true,
            ..Self::recent()
        }
    }

    /// The minimum memory of the kernel: some pages from address 0 on, and its own room.
    pub fn memory(&self) -> [(u64, u64); 2] {
        [(0, 16 * PAGE), self.room]
    }
}
