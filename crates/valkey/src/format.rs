//! The value of a block's key: a header, and the bytes of the block.
//!
//! ```text
//!  0        8        12       16       24         32      40        56          at most 4152
//!  ┌────────┬────────┬────────┬────────┬──────────┬───────┬─────────┬──────────────────┐
//!  │ magic  │ CRC-32C│ length │ epoch  │ sequence │ block │ volume  │ bytes            │
//!  └────────┴────────┴────────┴────────┴──────────┴───────┴─────────┴──────────────────┘
//! ```
//! All numbers are little-endian. The checksum covers everything behind it. The zeroes at the end
//! of a block are left out: `length` is the number of bytes before them. Scripts compare epoch and
//! sequence, at the offsets 16 and 24.

use std::fmt;

use fathom_persistence::Identity;
use fathom_persistence::bytes::{u32_at, u64_at};

/// The size of a block, in bytes.
pub const BLOCK: u64 = 4096;
/// The length of the header, in bytes.
pub(crate) const HEADER: usize = 56;

const MAGIC: [u8; 8] = *b"FATHOMVB";

/// When a block was written: by which opening of the volume, and as which write of it. Later
/// versions are greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockVersion {
    /// The epoch of the opening; 0 for a block that has never been written.
    pub epoch: u64,
    /// The number of the write within the epoch.
    pub sequence: u64,
}

/// Why a value is not that of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueDefect {
    /// It has no header, or another length than its header says.
    Length,
    /// The magic is unknown.
    Header,
    /// The checksum differs.
    Checksum,
    /// It is the value of another block, or of another volume.
    Place,
}

impl fmt::Display for ValueDefect {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Length => "its length is wrong",
            Self::Header => "its header is not that of a block",
            Self::Checksum => "its checksum is wrong",
            Self::Place => "it belongs to another block",
        })
    }
}

/// The value of `block` of a volume. `bytes` are those of the block, or its beginning if zeroes
/// follow.
pub fn encode(volume: Identity, block: u64, version: BlockVersion, bytes: &[u8]) -> Vec<u8> {
    let length = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let mut value = Vec::with_capacity(HEADER + length);
    value.extend_from_slice(&MAGIC);
    value.extend_from_slice(&[0; 4]);
    value.extend_from_slice(&(length as u32).to_le_bytes());
    for number in [version.epoch, version.sequence, block] {
        value.extend_from_slice(&number.to_le_bytes());
    }
    value.extend_from_slice(&volume.0);
    value.extend_from_slice(&bytes[..length]);
    let sum = crc32c::crc32c(&value[12..]);
    value[8..12].copy_from_slice(&sum.to_le_bytes());
    value
}

/// The version of a value, and the bytes before the zeroes at the block's end.
///
/// # Errors
/// If it is not the value of this block of this volume.
pub fn decode(
    volume: Identity,
    block: u64,
    value: &[u8],
) -> Result<(BlockVersion, &[u8]), ValueDefect> {
    let (header, bytes) = value.split_at_checked(HEADER).ok_or(ValueDefect::Length)?;
    let (sum, length) = (u32_at(header, 8), u64::from(u32_at(header, 12)));
    if header[..8] != MAGIC {
        return Err(ValueDefect::Header);
    }
    if length > BLOCK || bytes.len() as u64 != length {
        return Err(ValueDefect::Length);
    }
    if crc32c::crc32c(&value[12..]) != sum {
        return Err(ValueDefect::Checksum);
    }
    if u64_at(header, 32) != block || header[40..56] != volume.0 {
        return Err(ValueDefect::Place);
    }
    Ok((BlockVersion { epoch: u64_at(header, 16), sequence: u64_at(header, 24) }, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: Identity = Identity(*b"0123456789abcdef");

    #[test]
    fn a_value_is_that_of_its_block_and_nothing_else() {
        let version = BlockVersion { epoch: 3, sequence: 70_000 };
        let bytes = vec![7; BLOCK as usize];
        let value = encode(VOLUME, 12, version, &bytes);
        assert_eq!(decode(VOLUME, 12, &value), Ok((version, &bytes[..])));
        assert_eq!(decode(VOLUME, 13, &value), Err(ValueDefect::Place));
        assert_eq!(decode(Identity(*b"other volume 123"), 12, &value), Err(ValueDefect::Place));
        let zeroes = encode(VOLUME, 12, version, &[0; 4096]);
        assert_eq!((zeroes.len(), decode(VOLUME, 12, &zeroes)), (HEADER, Ok((version, &[][..]))));
        let begun = encode(VOLUME, 12, version, &[1, 0, 2, 0, 0]);
        assert_eq!(decode(VOLUME, 12, &begun), Ok((version, &[1, 0, 2][..])));
        assert_eq!(decode(VOLUME, 12, &value[..HEADER]), Err(ValueDefect::Length));
        assert_eq!(decode(VOLUME, 12, &[]), Err(ValueDefect::Length));
    }

    /// The bytes are those that earlier builds have written.
    #[test]
    fn a_value_is_as_it_was() {
        let value = encode(VOLUME, 12, BlockVersion { epoch: 3, sequence: 70_000 }, b"abc\0");
        let header =
            b"FATHOMVB\xc3\x95\x04\x64\x03\0\0\0\x03\0\0\0\0\0\0\0p\x11\x01\0\0\0\0\0\x0c\0\0\0\0\0\0\0";
        assert_eq!(value, [&header[..], &VOLUME.0[..], b"abc"].concat());
    }

    #[test]
    fn every_changed_byte_is_found() {
        let value = encode(VOLUME, 5, BlockVersion { epoch: 1, sequence: 2 }, &[9; 4096]);
        let mut chance = fastrand::Rng::with_seed(1);
        let places: Vec<usize> = (0..2000).map(|_| chance.usize(..value.len())).collect();
        for at in (0..HEADER).chain(places) {
            let mut changed = value.clone();
            changed[at] ^= 1 << chance.u32(..8);
            assert!(decode(VOLUME, 5, &changed).is_err(), "byte {at}");
            assert!(decode(VOLUME, 5, &value[..at]).is_err(), "{at} bytes");
        }
    }
}
