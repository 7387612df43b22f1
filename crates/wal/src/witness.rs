//! Witnesses: some places of home, and what they have had since the log wrote them home.
//!
//! A store that was set back to an earlier state, such as a logical volume by a snapshot, has its
//! mark elsewhere and no modification time, so that nothing of it tells its age. Its content does:
//! at the next start, each witness whose place no record has changed since has to be as it was.
//!
//! This holds as long as home changes only by way of the log. So
//! - a place whose content is in the log is no witness: it may have been written home already, or
//!   in part;
//! - a round that writes a place home, or zeroes it, drops its earlier witness together with its
//!   records: the superblock with the new tail has the new witnesses, too;
//! - only what is durable in the log is written home, so that home never has what a crash takes
//!   from the log;
//! - whoever changes home without the log drops all witnesses first. While a log is empty, home may
//!   have been changed without it: those that are not as they were are dropped at the next opening.

use std::ops::Range;

use fathom_persistence::bytes::{put, u32_at, u64_at};

use crate::map::Map;

/// The length of a place, in bytes. Each begins at a multiple of it.
pub const WITNESS_LENGTH: u64 = 4096;
/// The most witnesses of a log.
pub const WITNESSES_MAX: usize = 32;
/// The most witnesses of one round: those of earlier rounds tell an older state apart.
const SAMPLE_MAX: usize = 24;
/// Where the witnesses are in a superblock: in its second sector. An earlier program leaves that
/// zeroed.
const AT: usize = 512;
const END: usize = AT + 512;
const CHECKSUM_AT: usize = AT + 12;
const LIST_AT: usize = AT + 16;
const ITEM_LENGTH: usize = 12;

/// A place of home, and the checksum of what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Witness {
    /// Where the place begins, in bytes.
    pub offset: u64,
    /// The [checksum](crate::checksum) of its content.
    pub checksum: u32,
}

impl Witness {
    /// The place, in bytes.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(WITNESS_LENGTH)
    }

    /// Whether a record has content for the place or a part of it: one of those up to `sequence`.
    pub fn has_content(&self, map: &Map, sequence: u64) -> bool {
        let mut has_content = false;
        map.segments(self.range(), |segment| {
            has_content |= segment.source.is_some() && segment.sequence <= sequence;
        });
        has_content
    }
}

/// A sample of the places that a round writes home, evenly spread over them.
#[derive(Debug)]
pub struct Sample {
    witnesses: Vec<Witness>,
    /// One of so many places is kept.
    interval: u64,
    seen: u64,
}

impl Default for Sample {
    fn default() -> Self {
        Self { witnesses: Vec::new(), interval: 1, seen: 0 }
    }
}

impl Sample {
    /// A piece of `length` bytes is written home at `offset`. `content` returns what a place in it
    /// gets.
    pub fn add(&mut self, offset: u64, length: u64, mut content: impl FnMut(u64) -> [u8; 4096]) {
        let mut at = offset.next_multiple_of(WITNESS_LENGTH);
        while at + WITNESS_LENGTH <= offset + length {
            if self.seen % self.interval == 0 {
                if self.witnesses.len() == SAMPLE_MAX {
                    self.thin();
                }
                if self.seen % self.interval == 0 {
                    let checksum = crate::checksum(&content(at));
                    self.witnesses.push(Witness { offset: at, checksum });
                }
            }
            self.seen += 1;
            at += WITNESS_LENGTH;
        }
    }

    /// Keeps every other witness.
    fn thin(&mut self) {
        let mut number = 0;
        self.witnesses.retain(|_| {
            number += 1;
            number % 2 == 1
        });
        self.interval *= 2;
    }

    /// The witnesses of a log after the round. `earlier` are those that the round has not changed.
    pub(crate) fn join(self, earlier: &[Witness]) -> Vec<Witness> {
        let mut witnesses = self.witnesses;
        witnesses.extend(earlier);
        witnesses.truncate(WITNESSES_MAX);
        witnesses
    }
}

/// Writes the witnesses into the superblock with this number.
pub(crate) fn encode(witnesses: &[Witness], number: u64, superblock: &mut [u8]) {
    if witnesses.is_empty() {
        return;
    }
    let witnesses = &witnesses[..witnesses.len().min(WITNESSES_MAX)];
    put(superblock, AT, &number.to_le_bytes());
    put(superblock, AT + 8, &(witnesses.len() as u32).to_le_bytes());
    for (index, witness) in witnesses.iter().enumerate() {
        let at = LIST_AT + index * ITEM_LENGTH;
        put(superblock, at, &witness.offset.to_le_bytes());
        put(superblock, at + 8, &witness.checksum.to_le_bytes());
    }
    let checksum = crc32c::crc32c(&superblock[AT..END]);
    put(superblock, CHECKSUM_AT, &checksum.to_le_bytes());
}

/// The witnesses in the superblock with this number. There are none if its second sector is not the
/// one that was written with it: then nothing is noticed.
pub(crate) fn decode(superblock: &[u8], number: u64) -> Vec<Witness> {
    let Some(sector) = superblock.get(AT..END) else { return Vec::new() };
    let mut sector = sector.to_vec();
    let (checksum, count) = (u32_at(&sector, CHECKSUM_AT - AT), u32_at(&sector, 8) as usize);
    sector[CHECKSUM_AT - AT..LIST_AT - AT].fill(0);
    if u64_at(&sector, 0) != number || count > WITNESSES_MAX || crc32c::crc32c(&sector) != checksum
    {
        return Vec::new();
    }
    let items = (0..count).map(|index| {
        let at = LIST_AT - AT + index * ITEM_LENGTH;
        Witness { offset: u64_at(&sector, at), checksum: u32_at(&sector, at + 8) }
    });
    items.filter(|witness| witness.offset % WITNESS_LENGTH == 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::ContentLocation;

    fn witness(block: u64) -> Witness {
        Witness { offset: block * WITNESS_LENGTH, checksum: block as u32 }
    }

    #[test]
    fn witnesses_belong_to_their_superblock() {
        let all: Vec<_> = (0..WITNESSES_MAX as u64).map(witness).collect();
        let mut bytes = [0; 4096];
        encode(&all, 7, &mut bytes);
        assert!(bytes[..AT].iter().chain(&bytes[END..]).all(|byte| *byte == 0));
        assert_eq!(decode(&bytes, 7), all);
        assert_eq!(decode(&bytes, 8), []);
        assert_eq!(decode(&bytes[..AT], 7), []);
        for byte in AT..END {
            let mut other = bytes;
            other[byte] ^= 4;
            assert_eq!(decode(&other, 7), [], "byte {byte}");
        }
        assert_eq!(decode(&[0; 4096], 0), []);
    }

    #[test]
    fn a_sample_is_spread_over_a_round() {
        let mut sample = Sample::default();
        // Only whole places are witnesses.
        sample.add(512, 8000, |at| [at as u8; 4096]);
        assert_eq!(sample.seen, 1);
        for block in 2..1000 {
            sample.add(block * WITNESS_LENGTH, WITNESS_LENGTH, |_| [1; 4096]);
        }
        let found = sample.join(&[witness(5000); 40]);
        assert_eq!(found.len(), WITNESSES_MAX);
        let own: Vec<_> = found.iter().filter(|it| it.offset < 5000 * WITNESS_LENGTH).collect();
        assert!((SAMPLE_MAX / 2..=SAMPLE_MAX).contains(&own.len()), "{found:?}");
        assert!(own.last().unwrap().offset > 900 * WITNESS_LENGTH, "{found:?}");
    }

    #[test]
    fn a_place_of_which_a_record_has_a_part_is_found() {
        let mut map = Map::default();
        map.insert(8192..8704, 1, ContentLocation::Zeroes { keep_allocated: false });
        map.insert(16_384..20_480, 2, ContentLocation::Ring(0));
        map.insert(28_000..29_000, 3, ContentLocation::Discard);
        let found = |sequence| -> Vec<u64> {
            (0..9).filter(|block| witness(*block).has_content(&map, sequence)).collect()
        };
        assert_eq!([found(0), found(1), found(2)], [vec![], vec![2], vec![2, 4]]);
        assert_eq!(found(u64::MAX), [2, 4, 6, 7]);
    }
}
