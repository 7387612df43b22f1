//! A write-ahead log: its format, its ring, and its content. The crate does no I/O: it returns the
//! bytes to write and their places in the log volume, and takes the bytes that were read there. So
//! it works over any store.
//!
//! Read [`Log`] first. The crate must not know layers, disks and I/O.
//!
//! - [`Superblock`]: the log's owner and ages, and its tail.
//! - [`Record`]: the unit of writing: a header, and the data of some entries.
//! - [`Scanner`]: reads the records from the tail to the first torn or stale one;
//!   [`find_damage`]: whether records are missing that were durable.
//! - [`Map`]: the ranges of the disk whose newest content is in the log, and its places.
//! - [`Log`]: the log's state: space that is reserved before a write begins, records that become
//!   durable in order, and the checkpoint, which frees space.
//!
//! - [`Witness`]: what home has to have, so that one that was set back to an earlier state is
//!   noticed.
//!
//! `docs/wal.md` describes the format byte by byte.

#![forbid(unsafe_code)]

mod fuzz;
mod held;
mod log;
mod map;
mod record;
mod scan;
mod superblock;
mod witness;

pub use fuzz::fuzz_log;
pub use held::{Held, Utc};
pub use log::{Checkpoint, Full, Log, Pin, Reservation, Round};
pub use map::{ContentLocation, Map, Segment};
pub use record::{
    BLOCK_SIZE_MAX, BLOCK_SIZE_MIN, DATA_LENGTH_MAX, Entry, EntryKind, Record, RecordError,
    entries_max, finish, is_record,
};
pub use scan::{Damage, FoundRecord, ScanEnd, Scanner, find_damage};
pub use superblock::{Owner, RING_BLOCKS_MIN, Superblock};
pub use witness::{Sample, WITNESS_LENGTH, WITNESSES_MAX, Witness};

/// The checksum of an entry's data.
pub fn checksum(data: &[u8]) -> u32 {
    crc32c::crc32c(data)
}

/// Where the ring begins, in bytes from the start of the region: behind both superblocks.
pub const RING_OFFSET: u64 = 2 * fathom_persistence::SUPERBLOCK_LENGTH as u64;
