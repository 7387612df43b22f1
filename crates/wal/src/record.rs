//! A record, the unit in which the ring is written: a header of one block, and the data of its
//! entries, each at the start of a block.

use std::fmt;

use fathom_persistence::bytes::{array, put, u16_at, u32_at, u64_at};

use crate::superblock::{COUNT_MAX, POSITION_MAX, Superblock};

/// The smallest block of a log, in bytes.
pub const BLOCK_SIZE_MIN: u32 = 512;
/// The largest block of a log, in bytes.
pub const BLOCK_SIZE_MAX: u32 = 4096;
/// The most data of a record, in bytes.
pub const DATA_LENGTH_MAX: u64 = 1 << 20;
/// The first bytes of a header of format 1, which proves nothing about other records.
const MAGIC_1: [u8; 4] = *b"WREC";
/// The first bytes of a header of format 2.
const MAGIC: [u8; 4] = *b"WRC2";
const CHECKSUM_AT: usize = 4;
const ENTRIES_AT_1: usize = 64;
const ENTRIES_AT: usize = 96;
const ENTRY_LENGTH: usize = 32;
const KEEP_ALLOCATED: u8 = 1;

/// The most entries of a record in a log whose blocks have `block_size` bytes.
pub fn entries_max(block_size: u32) -> usize {
    (block_size as usize - ENTRIES_AT) / ENTRY_LENGTH
}

/// The effect of an entry on its range of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// The range holds the entry's data afterwards.
    Data {
        /// The data's CRC-32C.
        checksum: u32,
    },
    /// The range reads as zeroes afterwards.
    Zeroes {
        /// Whether the range stays allocated in the disk's store.
        keep_allocated: bool,
    },
    /// The range is not needed any more, and reads as zeroes afterwards.
    Discard,
}

/// A change of one range of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where the range begins, in bytes.
    pub offset: u64,
    /// The length of the range, in bytes; never 0.
    pub length: u64,
    /// The kind of change.
    pub kind: EntryKind,
}

impl Entry {
    /// The length of the entry's data in the log, in bytes, rounded up to whole blocks.
    pub fn data_length(&self, block_size: u32) -> u64 {
        match self.kind {
            EntryKind::Data { .. } => self.length.next_multiple_of(u64::from(block_size)),
            EntryKind::Zeroes { .. } | EntryKind::Discard => 0,
        }
    }
}

/// A record's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The epoch in which the record was written.
    pub epoch: u64,
    /// Counts the records, without a gap.
    pub sequence: u64,
    /// The position in the ring where the record begins. Positions count on from lap to lap.
    pub position: u64,
    /// The length of the record in bytes, with its header.
    pub length: u64,
    /// All records before this sequence were durable when the record was reserved; 0 if that is
    /// not known.
    pub durable: u64,
    /// The stamp of the record's changes; see [`Superblock::ages`].
    pub age: u64,
    /// When the record was written, in nanoseconds since 1970; 0 if that is not known.
    pub time_ns: u64,
    /// The changes, in order.
    pub entries: Vec<Entry>,
}

/// Why there is no valid record in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordError {
    /// There is no header of this log: nothing was written here, or only a part of a header.
    Missing,
    /// There is a header of an earlier lap or opening.
    Stale,
    /// The header's checksum is wrong.
    TornHeader,
    /// The checksum of an entry's data is wrong.
    TornData,
    /// The header contradicts itself, although its checksum is right.
    Malformed,
}

impl fmt::Display for RecordError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Missing => "nothing was written there",
            Self::Stale => "an earlier record is there",
            Self::TornHeader => "the header is torn",
            Self::TornData => "the data are torn",
            Self::Malformed => "the header contradicts itself",
        })
    }
}

impl std::error::Error for RecordError {}

/// Whether a record of any log begins with these bytes.
pub fn is_record(bytes: &[u8]) -> bool {
    [MAGIC, MAGIC_1].iter().any(|magic| bytes.starts_with(magic))
}

/// The fields that the next record must have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    pub(crate) position: u64,
    pub(crate) sequence: u64,
    /// The lowest and the highest epoch that the record may have.
    pub(crate) epochs: (u64, u64),
    /// The bytes that the record may take at most: up to the end of the lap, and up to the tail.
    pub(crate) room: u64,
}

/// Writes the header of `record` into its first block. The caller writes the data of the entries
/// behind it.
///
/// # Panics
/// If `block` has another length than a block of the log, or there are too many entries.
pub fn finish(block: &mut [u8], superblock: &Superblock, record: &Record) {
    assert_eq!(block.len(), superblock.block_size as usize, "a header has a block of its own");
    assert!(record.entries.len() <= entries_max(superblock.block_size), "entries fit the header");
    block.fill(0);
    put(block, 0, &MAGIC);
    put(block, 8, &superblock.log.0[..8]);
    put(block, 16, &record.epoch.to_le_bytes());
    put(block, 24, &record.sequence.to_le_bytes());
    put(block, 32, &record.position.to_le_bytes());
    put(block, 40, &record.length.to_le_bytes());
    put(block, 48, &(record.entries.len() as u16).to_le_bytes());
    put(block, 56, &record.durable.to_le_bytes());
    put(block, 64, &record.age.to_le_bytes());
    put(block, 72, &record.time_ns.to_le_bytes());
    for (index, entry) in record.entries.iter().enumerate() {
        let at = ENTRIES_AT + index * ENTRY_LENGTH;
        let (kind, flags, checksum) = match entry.kind {
            EntryKind::Data { checksum } => (1, 0, checksum),
            EntryKind::Zeroes { keep_allocated: true } => (2, KEEP_ALLOCATED, 0),
            EntryKind::Zeroes { keep_allocated: false } => (2, 0, 0),
            EntryKind::Discard => (3, 0, 0),
        };
        put(block, at, &[kind, flags]);
        put(block, at + 4, &checksum.to_le_bytes());
        put(block, at + 8, &entry.offset.to_le_bytes());
        put(block, at + 16, &entry.length.to_le_bytes());
    }
    let checksum = header_checksum(block, superblock);
    put(block, CHECKSUM_AT, &checksum.to_le_bytes());
}

/// The checksum of a header's block without the checksum itself. That of format 2 begins with the
/// part of the log's identity that no record has, so that nobody makes a header who has only seen
/// records.
pub(crate) fn header_checksum(block: &[u8], superblock: &Superblock) -> u32 {
    let secret = if block[..4] == MAGIC { &superblock.log.0[8..] } else { &[] };
    let checksum = crc32c::crc32c_append(crc32c::crc32c(secret), &block[..CHECKSUM_AT]);
    crc32c::crc32c_append(checksum, &block[CHECKSUM_AT + 4..])
}

/// What a header proves, wherever it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Proof {
    /// The epoch in which the record was written.
    pub(crate) epoch: u64,
    /// All records before this sequence were durable.
    pub(crate) durable: u64,
}

impl Proof {
    /// The proof in the header in `block`, if that is a sound header of format 2 of this log, and
    /// its position is at `place` bytes from the start of the ring.
    pub(crate) fn decode(block: &[u8], superblock: &Superblock, place: u64) -> Option<Self> {
        let is_header = block[..4] == MAGIC && block[8..16] == superblock.log.0[..8];
        let is_here = is_header && u64_at(block, 32) % superblock.ring_length == place;
        if !is_here || u32_at(block, CHECKSUM_AT) != header_checksum(block, superblock) {
            return None;
        }
        let (epoch, sequence, durable) = (u64_at(block, 16), u64_at(block, 24), u64_at(block, 56));
        let is_sane = durable <= sequence && sequence <= COUNT_MAX && epoch <= COUNT_MAX;
        is_sane.then_some(Self { epoch, durable })
    }
}

impl Record {
    /// Reads the header in `block` and compares it with the `expected` fields.
    pub(crate) fn decode(
        block: &[u8],
        superblock: &Superblock,
        expected: Expected,
    ) -> Result<Self, RecordError> {
        let block_size = superblock.block_size;
        if block.len() != block_size as usize
            || ![MAGIC, MAGIC_1].contains(&array(block, 0))
            || block[8..16] != superblock.log.0[..8]
        {
            return Err(RecordError::Missing);
        }
        let is_first_format = array::<4>(block, 0) == MAGIC_1;
        if u32_at(block, CHECKSUM_AT) != header_checksum(block, superblock) {
            return Err(RecordError::TornHeader);
        }
        let (epoch, sequence, position) = (u64_at(block, 16), u64_at(block, 24), u64_at(block, 32));
        let (earliest, latest) = expected.epochs;
        if (sequence, position) != (expected.sequence, expected.position)
            || !(earliest..=latest).contains(&epoch)
        {
            return Err(RecordError::Stale);
        }
        let count = usize::from(u16_at(block, 48));
        let length = u64_at(block, 40);
        let (entries_at, proved) = if is_first_format {
            (ENTRIES_AT_1, [0; 3])
        } else {
            (ENTRIES_AT, [u64_at(block, 56), u64_at(block, 64), u64_at(block, 72)])
        };
        let [durable, age, time_ns] = proved;
        if count > (block.len() - entries_at) / ENTRY_LENGTH
            || durable > sequence
            || age > superblock.ages.age
            || length < u64::from(block_size)
            || length > expected.room.min(u64::from(block_size) + DATA_LENGTH_MAX)
            || length % u64::from(block_size) != 0
        {
            return Err(RecordError::Malformed);
        }
        let mut entries = Vec::with_capacity(count);
        let mut data = 0_u64;
        for index in 0..count {
            let at = entries_at + index * ENTRY_LENGTH;
            let kind = match (block[at], block[at + 1]) {
                (1, 0) => EntryKind::Data { checksum: u32_at(block, at + 4) },
                (2, 0) => EntryKind::Zeroes { keep_allocated: false },
                (2, KEEP_ALLOCATED) => EntryKind::Zeroes { keep_allocated: true },
                (3, 0) => EntryKind::Discard,
                _ => return Err(RecordError::Malformed),
            };
            let entry =
                Entry { offset: u64_at(block, at + 8), length: u64_at(block, at + 16), kind };
            let end = entry.offset.checked_add(entry.length);
            if entry.length == 0 || end.is_none_or(|end| end > POSITION_MAX) {
                return Err(RecordError::Malformed);
            }
            data += entry.data_length(block_size);
            if data > length - u64::from(block_size) {
                return Err(RecordError::Malformed);
            }
            entries.push(entry);
        }
        Ok(Self { epoch, sequence, position, length, durable, age, time_ns, entries })
    }

    /// The first position after the record.
    pub fn end(&self) -> u64 {
        self.position + self.length
    }

    /// Each entry, and the position in the ring where its data begin.
    pub fn places(&self, block_size: u32) -> impl Iterator<Item = (&Entry, u64)> {
        let mut position = self.position + u64::from(block_size);
        self.entries.iter().map(move |entry| {
            let place = position;
            position += entry.data_length(block_size);
            (entry, place)
        })
    }

    /// Compares the data in `bytes`, which are the whole record, with their checksums.
    pub(crate) fn verify(&self, bytes: &[u8], block_size: u32) -> Result<(), RecordError> {
        for (entry, position) in self.places(block_size) {
            let EntryKind::Data { checksum } = entry.kind else { continue };
            let start = (position - self.position) as usize;
            let data = bytes.get(start..start + entry.length as usize);
            if data.is_none_or(|data| crc32c::crc32c(data) != checksum) {
                return Err(RecordError::TornData);
            }
        }
        Ok(())
    }
}
