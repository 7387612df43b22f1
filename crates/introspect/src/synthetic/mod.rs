//! A Linux guest in miniature: memory that holds a note, page tables, symbols, types, modules, and
//! what a kernel manages, all of it consistent, so that each request has an answer that is known
//! exactly. It stands in for a captured guest where tests and fuzzing have no room for one.

mod answer;
mod builder;
mod bytes;
mod description;
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
pub use linux::{COUNTS, Counts, Linux};
pub use mutation::{Effort, Outcome, READS_MAX, Subject, fuzz_introspection};
pub use scene::Request;
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

/// What a synthetic kernel is like.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Its release.
    pub release: String,
    /// The levels of its page tables, 4 or 5.
    pub levels: u32,
    /// How its table of symbols stores addresses.
    pub addresses: Addresses,
    /// Whether its structures are as in 6.12 rather than as in 6.1.
    pub recent: bool,
    /// Whether those that have changed with the releases from 7.0 to 7.2 are as in 7.2.
    pub seven: bool,
    /// The part of the memory that it uses, guest-physical: where it begins, a multiple of 2 MiB,
    /// and its length.
    pub room: (u64, u64),
    /// The guest-physical address of the page that its note is in; the next page has it again.
    pub note: u64,
    /// How far its image is shifted (KASLR), a multiple of 2 MiB.
    pub slide: u64,
    /// Where physical memory is mapped in order, a multiple of 1 GiB.
    pub direct: u64,
    /// Where page structures are.
    pub pages: u64,
    /// How many symbols it has that nobody asks for.
    pub symbols: usize,
    /// How many types it has that nobody asks for.
    pub types: usize,
}

impl Default for Shape {
    /// A kernel as of 6.1 with 4 levels, in 512 KiB from 2 MiB on, with its note in page 1.
    fn default() -> Self {
        Self {
            release: "6.1.0-synthetic".into(),
            levels: 4,
            addresses: Addresses::Below,
            recent: false,
            seven: false,
            room: (2 << 20, 512 << 10),
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
    /// A kernel as of 6.12 with 5 levels, above 4 GiB.
    pub fn recent() -> Self {
        Self {
            release: "6.12.0-synthetic".into(),
            levels: 5,
            addresses: Addresses::Above,
            recent: true,
            seven: false,
            room: (4 << 30, 512 << 10),
            note: PAGE,
            slide: 0x1e0_0000,
            direct: 0xff11_0000_0000_0000,
            pages: 0xffd4_0000_0000_0000,
            symbols: 0,
            types: 0,
        }
    }

    /// A kernel as of 7.2: as [`recent`](Self::recent) otherwise.
    pub fn seven() -> Self {
        Self {
            release: "7.2.0-synthetic".into(),
            addresses: Addresses::FromPlace,
            seven: true,
            ..Self::recent()
        }
    }

    /// The memory that it needs at least: some pages from address 0 on, and its own room.
    pub fn memory(&self) -> [(u64, u64); 2] {
        [(0, 16 * PAGE), self.room]
    }
}
