//! Recordings: events in a self-describing, compressed binary format that can be read while it is
//! written.
//!
//! A recording is a [`Header`], which describes its streams, and blocks: of rows of a stream, of
//! notes about missing events, of moments (instants before which no more events follow), and an
//! end. `docs/recording.md` shows the layout.
//! [`Writer`] and [`BlockBuilder`] write, and [`Recording`] reads; `read::open` recognises
//! recordings by their first bytes. [`ParquetWriter`] writes the same rows for other tools.

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
pub use bytes::MalformedBytes;
pub use encode::{BlockBuilder, Cell};
#[doc(hidden)]
pub use fuzz::fuzz_recording;
pub use header::{Clock, Header, RecordedColumn, RecordedStream};
pub use reader::{Block, Item, Recording, RowReader};
pub use single::BlockReader;
pub(crate) use single::correct;
pub use write::{BlockLimits, RecordingSummary, Writer, dropped_block, end_block, moment_block};

/// The first bytes of a recording. No text begins with the first of them.
pub const MAGIC: [u8; 8] = *b"\x8eFATHOM\n";
/// The version of recordings of a single stream.
pub const VERSION_SINGLE: u16 = 1;
/// The newest version: recordings of several streams.
pub const VERSION: u16 = 2;
/// The most bytes of a block after decompression.
pub const BLOCK_MAX: usize = 16 << 20;
/// The most rows of a block.
pub const BLOCK_ROWS_MAX: usize = 1 << 16;
/// The most columns of a stream.
pub const COLUMNS_MAX: usize = 256;
/// The most streams.
pub const STREAMS_MAX: usize = 16;

/// The first bytes of each block.
const MARK: [u8; 4] = *b"FBLK";
/// The length of a block's head, in bytes.
const HEAD: usize = 40;
/// The length of a header before its streams, in bytes.
const HEADER: usize = 32;
/// The most bytes of a header's description of its streams.
const SCHEMA_MAX: usize = 1 << 16;
/// The most distinct texts of a block.
const TEXTS_MAX: usize = 1 << 20;
/// The most bytes of a text. Longer texts are shortened to their beginning.
const TEXT_MAX: usize = 8 << 10;
/// The size at which a block is closed, in bytes. It is below [`BLOCK_MAX`], so that one more row
/// never makes a block too long.
const BLOCK_FULL: usize = BLOCK_MAX / 4;

/// The content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum BlockKind {
    /// Rows.
    Rows = 1,
    /// A number of events that are missing at this position.
    Dropped = 2,
    /// An instant before which no more events follow.
    Moment = 3,
    /// The end of the recording.
    End = 4,
}

impl BlockKind {
    fn from_number(number: u8) -> Option<Self> {
        [Self::Rows, Self::Dropped, Self::Moment, Self::End]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

/// The compression of a block's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Packing {
    /// None.
    None = 0,
    /// A single LZ4 block.
    Lz4 = 1,
}

/// Where events were dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DropPlace {
    /// Unknown.
    Unknown = 0,
    /// In the ring of a queue, because it was not emptied fast enough.
    Ring = 1,
    /// In the buffer of a listener, because the listener did not read fast enough.
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

    /// The reason as a text for messages.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Unknown => "for an unknown reason",
            Self::Ring => "because they arrived faster than they were collected",
            Self::Listener => "because they arrived faster than they were read",
        }
    }
}
