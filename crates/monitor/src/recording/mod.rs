//! Recordings: events in a binary format that says itself what it holds, packed, and readable
//! while it is written.
//!
//! A recording is a [`Header`] and blocks: of rows, of notes about events that are missing, of
//! moments before which nothing comes any more, and an end. `docs/recording.md` draws the layout.
//! [`Writer`] and [`BlockBuilder`] write, [`Recording`] reads; `read::open` knows recordings by
//! their first bytes. [`ParquetWriter`] writes the same rows for other tools.

pub(crate) mod bytes;
mod checksum;
mod column;
mod decode;
mod encode;
mod fuzz;
mod header;
mod parquet;
mod reader;
mod single;
mod write;

pub use self::parquet::{ParquetWriter, RowGroupLimits};
pub use bytes::Wrong;
pub use encode::{BlockBuilder, Cell};
#[doc(hidden)]
pub use fuzz::fuzz_recording;
pub use header::{Clock, Header, RecordedColumn};
pub use reader::{Block, Item, Recording, RowReader};
pub use single::BlockReader;
pub(crate) use single::mend;
pub use write::{BlockLimits, RecordingSummary, Writer, dropped_block, end_block, moment_block};

/// How a recording begins. No text has its first byte.
pub const MAGIC: [u8; 8] = *b"\x8eFATHOM\n";
/// The version that is written and read.
pub const VERSION: u16 = 1;
/// The most bytes of a block once it is unpacked.
pub const BLOCK_MAX: usize = 16 << 20;
/// The most rows of a block.
pub const BLOCK_ROWS_MAX: usize = 1 << 16;
/// The most columns.
pub const COLUMNS_MAX: usize = 256;

/// How each block begins.
const MARK: [u8; 4] = *b"FBLK";
/// The bytes of a block's head.
const HEAD: usize = 40;
/// The bytes of a header before its columns.
const HEADER: usize = 32;
/// The most bytes of a header's columns.
const SCHEMA_MAX: usize = 1 << 16;
/// The most different texts of a block.
const TEXTS_MAX: usize = 1 << 20;
/// The most bytes of a text; of a longer one the beginning is kept.
const TEXT_MAX: usize = 8 << 10;
/// A block is closed when it has so many bytes, so that one row more never makes it too long.
const BLOCK_FULL: usize = BLOCK_MAX / 4;

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum BlockKind {
    /// Rows.
    Rows = 1,
    /// So many events are missing here.
    Dropped = 2,
    /// Nothing from before a moment comes any more.
    Moment = 3,
    /// The end.
    End = 4,
}

impl BlockKind {
    fn from_number(number: u8) -> Option<Self> {
        [Self::Rows, Self::Dropped, Self::Moment, Self::End]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

/// How a block's bytes are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Packing {
    /// Not at all.
    None = 0,
    /// As one block of LZ4.
    Lz4 = 1,
}

/// Where events were dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DropPlace {
    /// Nobody knows.
    Unknown = 0,
    /// In the ring of a queue: they were not collected fast enough.
    Ring = 1,
    /// In the buffer of a listener: it did not read fast enough.
    Listener = 2,
}

impl DropPlace {
    fn from_number(number: u8) -> Self {
        match number {
            1 => Self::Ring,
            2 => Self::Listener,
            _ => Self::Unknown,
        }
    }

    /// Why, in words.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Unknown => "for a reason that is not told",
            Self::Ring => "because they came faster than they were collected",
            Self::Listener => "because they came faster than they were read",
        }
    }
}
