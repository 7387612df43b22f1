//! Which part of a database a page belongs to, read off a few bytes of the page itself.
//!
//! Read [`of_path`] first. The crate must not know layers and disks.
//!
//! [`of_path`] recognises the files that a database names by rules; [`sqlite::Header`] recognises a
//! database of SQLite by its first page. [`innodb::Tablespace`], [`postgresql::Relation`] and
//! [`sqlite::Header`] then examine single pages. Nothing here does I/O or keeps pages.
//!
//! **Every byte is hostile.** The guest that wrote a page can write anything. A page that fails a
//! check is `other`; a wrong part may cost time, never data. No function panics, and each reads a
//! bounded number of bytes.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod fuzz;
pub mod innodb;
mod path;
pub mod postgresql;
pub mod sqlite;

pub use fathom_insight::{Database, DatabasePart, DatabaseSystem};
pub use fuzz::fuzz_pages;
pub use path::{Named, of_path};

/// The content of a page, or of the part of it that a request transfers.
pub trait PageBytes {
    /// Copies the bytes from `at` on, or returns `false` if the request does not have all of them.
    fn read(&self, at: u64, target: &mut [u8]) -> bool;
}

impl PageBytes for [u8] {
    fn read(&self, at: u64, target: &mut [u8]) -> bool {
        let start = usize::try_from(at).unwrap_or(usize::MAX);
        let source = start.checked_add(target.len()).and_then(|end| self.get(start..end));
        source.inspect(|source| target.copy_from_slice(source)).is_some()
    }
}

/// The `N` bytes at a place; `None` if the request does not have all of them.
fn take<const N: usize>(bytes: &(impl PageBytes + ?Sized), at: u64) -> Option<[u8; N]> {
    let mut target = [0; N];
    bytes.read(at, &mut target).then_some(target)
}

/// A big-endian number of 16 bits in `bytes`, all of which are there.
fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// A big-endian number of 32 bits.
fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// A big-endian number of 64 bits.
fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

/// A little-endian number of 16 bits.
fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// What a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatabasePage {
    /// The part.
    pub part: DatabasePart,
    /// The number of the table or index; 0 if the page does not name it.
    pub index: u32,
}

impl DatabasePage {
    /// A page that is neither table nor index nor log.
    pub const OTHER: Self = Self { part: DatabasePart::Other, index: 0 };
}
