//! A write-ahead log: its format, its ring and what it holds. It does no I/O: it says which bytes
//! go where in the log volume, and is given what was read there. So it works over any store.
//!
//! - [`Superblock`]: whose log it is, and from where on it counts. Two copies, written in turn.
//! - [`Record`]: what is written at one go: a header and the data of some entries.
//! - [`Scanner`]: reads the records from the tail on, up to the first that is torn or stale.
//! - [`Map`]: which bytes of the disk are newer in the log, and where.
//! - [`Log`]: all of it: space that is reserved before a write begins, records that become durable
//!   in their order, and the checkpoint, which gives space back.
//!
//! `docs/wal.md` has the format byte by byte.

#![forbid(unsafe_code)]

mod bytes;
mod fuzz;
mod log;
mod map;
mod record;
mod scan;
mod superblock;

pub use fuzz::fuzz_log;
pub use log::{Checkpoint, Full, Log, Pin, Reservation, Round};
pub use map::{Map, Segment, Source};
pub use record::{
    BLOCK_SIZE_MAX, BLOCK_SIZE_MIN, DATA_LENGTH_MAX, Entry, EntryKind, Record, RecordError,
    entries_max, finish,
};
pub use scan::{Found, ScanEnd, Scanner};
pub use superblock::{
    HOME_LENGTH_MAX, MAGIC, NAME_LENGTH_MAX, Owner, SUPERBLOCK_LENGTH, Superblock, SuperblockError,
    select,
};

/// The checksum of an entry's data.
pub fn checksum(data: &[u8]) -> u32 {
    crc32c::crc32c(data)
}

/// Where the ring begins, in bytes from the start of the region: behind both superblocks.
pub const RING_OFFSET: u64 = 2 * SUPERBLOCK_LENGTH as u64;
