//! The header of a batch: what the blocks that were written with it are.
//!
//! ```text
//!  0        8        12      16         32          40        48        56      60      64
//!  ┌────────┬────────┬───────┬──────────┬───────────┬─────────┬─────────┬───────┬───────┬───
//!  │FATHOMBH│ version│ length│ identity │ generation│ sequence│ frontier│ runs  │ zero  │runs
//!  └────────┴────────┴───────┴──────────┴───────────┴─────────┴─────────┴───────┴───────┴───
//! ```
//! The runs take `length` bytes. The last 16 bytes of its block are the [code](crate::seal) of the
//! fields and the runs, or, in version 1, of all before. All numbers are little-endian.
//!
//! | run | bytes |
//! |---|---|
//! | data | kind 1, 1 byte; 0, 1 byte; blocks, 2 bytes; volume, 4 bytes; first block of the volume, 8 bytes; first block of the device, 8 bytes; the CRC-32C of each block, 4 bytes each |
//! | references | kind 4, then as for data: blocks that have the content, and were written earlier |
//! | zeroes | kind 2, 1 byte; 0, 3 bytes; volume, 4 bytes; first block of the volume, 8 bytes; blocks, 8 bytes |
//! | change | kind 3, 1 byte; 0, 1 byte; length, 2 bytes; a change of the catalogue |
//!
//! A header whose batch was known to be durable carries no mark of that. Instead, `frontier` says
//! up to which sequence all batches were durable when the header was written: a block of such a
//! batch with another content is damaged. A block of a later batch with another content was not
//! written, which is no error.

use std::ops::Range;

use fathom_persistence::Identity;
use fathom_persistence::bytes::{array, put, u16_at, u32_at, u64_at};

use crate::layout::{BLOCK_BYTES, POOL_BLOCKS_MAX};
use crate::seal::{Code, Key};
use crate::tree::BLOCKS_MAX;

const MAGIC: [u8; 8] = *b"FATHOMBH";
const VERSION: u32 = 2;
const RUNS_AT: usize = 64;
const CODE_AT: usize = BLOCK_BYTES - 16;
/// More batches than any pool has.
pub(crate) const SEQUENCE_MAX: u64 = 1 << 62;
/// The bytes of all runs of a header.
pub(crate) const RUNS_LENGTH_MAX: usize = CODE_AT - RUNS_AT;
/// The bytes of a run of data without its checksums.
pub(crate) const DATA_RUN: usize = 24;
/// The bytes of a block's checksum.
pub(crate) const DATA_BLOCK: usize = 4;
const ZERO_RUN: usize = 24;
/// The longest change of the catalogue, in bytes.
pub(crate) const CHANGE_LENGTH_MAX: usize = RUNS_LENGTH_MAX - 4;

/// Adjoining blocks of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// Blocks with data, which adjoin on the device too.
    Data {
        volume: u32,
        /// The first block of the volume.
        first: u64,
        /// The first block on the device.
        block: u64,
        /// The CRC-32C of each.
        checksums: Vec<u32>,
    },
    /// Blocks whose content was written earlier. Fields as for data.
    References { volume: u32, first: u64, block: u64, checksums: Vec<u32> },
    /// Blocks that read as zeroes.
    Zeroes { volume: u32, first: u64, count: u64 },
    /// A change of the catalogue.
    Change(Vec<u8>),
}

impl Run {
    /// Whether a block of the volume, as data or as a reference, goes on with the run.
    pub(crate) fn goes_on_with(&self, is_reference: bool, next: u64, place: u64) -> bool {
        let (is_references, first, block, checksums) = match self {
            Self::Data { first, block, checksums, .. } => (false, first, block, checksums),
            Self::References { first, block, checksums, .. } => (true, first, block, checksums),
            Self::Zeroes { .. } | Self::Change(_) => return false,
        };
        let length = checksums.len() as u64;
        is_references == is_reference && first + length == next && block + length == place
    }

    /// The volume and its blocks that it changes; `None` for a change of the catalogue.
    pub(crate) fn blocks(&self) -> Option<(u32, Range<u64>)> {
        let (volume, first, count) = match self {
            Self::Data { volume, first, checksums, .. }
            | Self::References { volume, first, checksums, .. } => {
                (*volume, *first, checksums.len() as u64)
            }
            Self::Zeroes { volume, first, count } => (*volume, *first, *count),
            Self::Change(_) => return None,
        };
        Some((volume, first..first.saturating_add(count)))
    }

    /// The bytes that it takes in a header.
    fn length(&self) -> usize {
        match self {
            Self::Data { checksums, .. } | Self::References { checksums, .. } => {
                DATA_RUN + checksums.len() * DATA_BLOCK
            }
            Self::Zeroes { .. } => ZERO_RUN,
            Self::Change(bytes) => 4 + bytes.len(),
        }
    }
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BatchHeader {
    pub(crate) generation: u64,
    pub(crate) sequence: u64,
    pub(crate) frontier: u64,
    pub(crate) runs: Vec<Run>,
}

/// Whether so many blocks in so many runs of data and references, and `zeroes` runs of zeroes, fit
/// in a header.
pub(crate) fn fits(runs: usize, blocks: usize, zeroes: usize) -> bool {
    runs * DATA_RUN + blocks * DATA_BLOCK + zeroes * ZERO_RUN <= RUNS_LENGTH_MAX
}

impl BatchHeader {
    /// Writes the header into its block.
    ///
    /// # Panics
    /// If the runs do not [fit](fits).
    pub(crate) fn encode(&self, identity: Identity, key: &Key, block: &mut [u8]) {
        block.fill(0);
        let length: usize = self.runs.iter().map(Run::length).sum();
        assert!(length <= RUNS_LENGTH_MAX, "the maker of a batch counts its runs");
        put(block, 0, &MAGIC);
        put(block, 8, &VERSION.to_le_bytes());
        put(block, 12, &(length as u32).to_le_bytes());
        put(block, 16, &identity.0);
        put(block, 32, &self.generation.to_le_bytes());
        put(block, 40, &self.sequence.to_le_bytes());
        put(block, 48, &self.frontier.to_le_bytes());
        put(block, 56, &(self.runs.len() as u32).to_le_bytes());
        let mut at = RUNS_AT;
        for run in &self.runs {
            encode_run(run, block, at);
            at += run.length();
        }
        let code = key.code(&block[..at]);
        put(block, CODE_AT, &code.0);
    }

    /// The bytes of a header that its code is of; `None` if it has no such version, or impossible
    /// sizes.
    pub(crate) fn sealed(block: &[u8]) -> Option<&[u8]> {
        match u32_at(block, 8) {
            1 => block.get(..CODE_AT),
            VERSION => block.get(..CODE_AT)?.get(..RUNS_AT + u32_at(block, 12) as usize),
            _ => None,
        }
    }

    /// Reads a header of the pool with this identity and key, which a batch of the opening
    /// `generation` has, or of any opening; `None` if the block is none.
    pub(crate) fn decode(
        identity: Identity,
        key: &Key,
        generation: Option<u64>,
        block: &[u8],
    ) -> Option<Self> {
        let is_likely = block.len() == BLOCK_BYTES
            && block.starts_with(&MAGIC)
            && Identity(array(block, 16)) == identity
            && generation.is_none_or(|generation| u64_at(block, 32) == generation);
        if !is_likely || key.code(Self::sealed(block)?) != Code(array(block, CODE_AT)) {
            return None;
        }
        let length = u32_at(block, 12) as usize;
        let mut left = block.get(RUNS_AT..CODE_AT)?.get(..length)?;
        let mut runs = Vec::new();
        for _ in 0..u32_at(block, 56) {
            let run = decode_run(left)?;
            left = &left[run.length()..];
            runs.push(run);
        }
        if !left.is_empty() {
            return None;
        }
        let generation = u64_at(block, 32);
        let (sequence, frontier) = (u64_at(block, 40), u64_at(block, 48));
        if sequence >= SEQUENCE_MAX {
            return None;
        }
        Some(Self { generation, sequence, frontier, runs })
    }
}

fn encode_run(run: &Run, block: &mut [u8], at: usize) {
    match run {
        Run::Data { volume, first, block: place, checksums }
        | Run::References { volume, first, block: place, checksums } => {
            block[at] = if matches!(run, Run::Data { .. }) { 1 } else { 4 };
            put(block, at + 2, &(checksums.len() as u16).to_le_bytes());
            put(block, at + 4, &volume.to_le_bytes());
            put(block, at + 8, &first.to_le_bytes());
            put(block, at + 16, &place.to_le_bytes());
            for (index, checksum) in checksums.iter().enumerate() {
                put(block, at + DATA_RUN + index * DATA_BLOCK, &checksum.to_le_bytes());
            }
        }
        Run::Zeroes { volume, first, count } => {
            block[at] = 2;
            put(block, at + 4, &volume.to_le_bytes());
            put(block, at + 8, &first.to_le_bytes());
            put(block, at + 16, &count.to_le_bytes());
        }
        Run::Change(bytes) => {
            block[at] = 3;
            put(block, at + 2, &(bytes.len() as u16).to_le_bytes());
            put(block, at + 4, bytes);
        }
    }
}

/// The run at the beginning of `bytes`.
fn decode_run(bytes: &[u8]) -> Option<Run> {
    let head = bytes.get(..4)?;
    let count = usize::from(u16_at(head, 2));
    if head[0] == 3 {
        return Some(Run::Change(bytes.get(4..4 + count)?.to_vec()));
    }
    let body = bytes.get(..DATA_RUN)?;
    let (volume, first, last) = (u32_at(body, 4), u64_at(body, 8), u64_at(body, 16));
    match head[0] {
        kind @ (1 | 4) => {
            let checksums = bytes.get(DATA_RUN..DATA_RUN + count * DATA_BLOCK)?;
            let checksums = checksums.chunks(DATA_BLOCK).map(|bytes| u32_at(bytes, 0)).collect();
            let is_sane = first < BLOCKS_MAX && last < POOL_BLOCKS_MAX;
            is_sane.then_some(match kind {
                1 => Run::Data { volume, first, block: last, checksums },
                _ => Run::References { volume, first, block: last, checksums },
            })
        }
        2 => {
            let is_sane = first < BLOCKS_MAX && (1..=BLOCKS_MAX).contains(&last);
            is_sane.then_some(Run::Zeroes { volume, first, count: last })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: Identity = Identity(*b"0123456789abcdef");
    const KEY: Key = Key([7; 32]);

    fn header() -> BatchHeader {
        let runs = vec![
            Run::Data { volume: 3, first: 1 << 35, block: 99, checksums: vec![1, 2, u32::MAX] },
            Run::Zeroes { volume: 4, first: 7, count: 1 << 36 },
            Run::Change(b"a change".to_vec()),
            Run::Data { volume: 5, first: 0, block: 1, checksums: Vec::new() },
        ];
        BatchHeader { generation: 2, sequence: 1000, frontier: 990, runs }
    }

    fn encoded(header: &BatchHeader) -> Vec<u8> {
        let mut block = vec![0xee; BLOCK_BYTES];
        header.encode(IDENTITY, &KEY, &mut block);
        block
    }

    #[test]
    fn a_header_is_read_as_written_and_only_by_its_pool_and_generation() {
        let block = encoded(&header());
        assert_eq!(BatchHeader::decode(IDENTITY, &KEY, Some(2), &block), Some(header()));
        assert_eq!(BatchHeader::decode(Identity::NONE, &KEY, Some(2), &block), None);
        assert_eq!(BatchHeader::decode(IDENTITY, &Key([8; 32]), Some(2), &block), None);
        assert_eq!(BatchHeader::decode(IDENTITY, &KEY, Some(3), &block), None);
        assert_eq!(BatchHeader::decode(IDENTITY, &KEY, Some(2), &block[1..]), None);
        let end = BatchHeader::sealed(&block).unwrap().len();
        for bit in (0..end * 8).step_by(7).chain(CODE_AT * 8..BLOCK_BYTES * 8) {
            let mut other = block.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(BatchHeader::decode(IDENTITY, &KEY, Some(2), &other), None, "bit {bit}");
        }
    }

    #[test]
    fn a_header_of_version_1_has_the_code_of_all_before() {
        let mut block = encoded(&header());
        put(&mut block, 8, &1_u32.to_le_bytes());
        assert_eq!(BatchHeader::decode(IDENTITY, &KEY, Some(2), &block), None);
        let code = KEY.code(&block[..CODE_AT]);
        put(&mut block, CODE_AT, &code.0);
        assert_eq!(BatchHeader::decode(IDENTITY, &KEY, Some(2), &block), Some(header()));
    }

    #[test]
    fn the_longest_runs_fit_and_impossible_ones_are_refused() {
        let blocks = (RUNS_LENGTH_MAX - DATA_RUN) / DATA_BLOCK;
        assert!(fits(1, blocks, 0) && !fits(1, blocks + 1, 0) && !fits(2, blocks, 0));
        let checksums = vec![5; blocks];
        let runs = vec![Run::Data { volume: 1, first: 2, block: 3, checksums }];
        let header = BatchHeader { runs, ..header() };
        assert_eq!(BatchHeader::decode(IDENTITY, &KEY, Some(2), &encoded(&header)), Some(header));
        // A pool that is wrong, but has the key.
        for (at, value) in [(12, 255), (13, 255), (56, 200), (RUNS_AT, 9), (RUNS_AT + 3, 255)] {
            let mut block = encoded(&self::header());
            block[at] = value;
            let code = BatchHeader::sealed(&block).map(|bytes| KEY.code(bytes));
            put(&mut block, CODE_AT, &code.unwrap_or_default().0);
            assert_eq!(BatchHeader::decode(IDENTITY, &KEY, Some(2), &block), None, "byte {at}");
        }
    }
}
