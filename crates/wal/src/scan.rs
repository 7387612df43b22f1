//! Reads the records of a log, beginning at its tail.
//!
//! The record at a place is the next one if its header has the identity of this log, the next
//! sequence, this position, and an epoch that is not lower than the last record's, and if all its
//! checksums are right. Positions count on from lap to lap, so a record of an earlier lap never
//! matches. The epoch excludes records behind one that an earlier opening found torn. The first
//! place without a next record is the end of the log.
//!
//! That end is right only if all records were found that had been durable: what a crash tears was
//! not durable yet. The superblock and each later header say up to where the log was durable when
//! they were written. So [`find_damage`] reads what is behind the end. What a header says stays
//! true wherever the header is, so a guest that stores a copy of its own log changes nothing.

use std::fmt;

use crate::record::{BLOCK_SIZE_MAX, DATA_LENGTH_MAX, Expected, Proof, Record, RecordError};
use crate::superblock::Superblock;
use crate::{RING_OFFSET, superblock::POSITION_MAX};

/// The most bytes that a search reads at a time: a record of the greatest length, so that there is
/// a header in every such piece of a written ring.
const PIECE_LENGTH: u64 = DATA_LENGTH_MAX + BLOCK_SIZE_MAX as u64;
/// The bytes behind the end of a scan that are searched without a gap.
const SEARCH_LENGTH: u64 = 64 * PIECE_LENGTH;
/// Farther away, a piece is searched each time the distance has grown by this part of it.
const SEARCH_STEPS: u64 = 16;

/// A record that was read, and its data.
#[derive(Debug, PartialEq, Eq)]
pub struct FoundRecord<'a> {
    /// The record's header.
    pub record: Record,
    /// All bytes of the record: its header, and its data.
    pub bytes: &'a [u8],
}

/// The place and the reason of a scan's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanEnd {
    /// The position of the next record to be written.
    pub position: u64,
    /// The sequence of the next record to be written.
    pub sequence: u64,
    /// Why there is no record at this position.
    pub reason: RecordError,
}

/// Records are missing that were durable: the volume is damaged, or has an older state of a part of
/// the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Where the first missing record would be, in bytes from the start of the region.
    pub offset: u64,
    /// The sequence of the first missing record.
    pub sequence: u64,
    /// At least the records before this sequence were durable.
    pub durable: u64,
    /// Whether a record is newer than the superblock: the newest superblock is missing.
    pub is_superblock_old: bool,
    /// The highest epoch that was seen.
    pub epoch: u64,
    /// What is in the place of the first missing record.
    pub reason: RecordError,
}

impl fmt::Display for Damage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, sequence, durable, reason, .. } = self;
        if self.is_superblock_old {
            return write!(
                formatter,
                "the log is damaged: it has records of a later opening than its superblock, the first \
                 of them behind byte {offset}"
            );
        }
        let count = durable - sequence;
        let records = if count == 1 { "record" } else { "records" };
        write!(
            formatter,
            "the log is damaged at byte {offset}: {reason}, and it had at least {count} {records} from \
             there on that were durable"
        )
    }
}

/// Searches for what proves that records were durable which a scan has not found: `end` is where it
/// has ended. `read` reads bytes, from an offset in bytes from the start of the region. About 65
/// MiB are read; what is farther behind the end is sampled.
///
/// # Errors
/// If `read` fails.
pub fn find_damage<E>(
    superblock: &Superblock,
    end: ScanEnd,
    mut read: impl FnMut(u64, u64) -> Result<Vec<u8>, E>,
) -> Result<Option<Damage>, E> {
    let (block_size, ring_length) = (u64::from(superblock.block_size), superblock.ring_length);
    let damage = |durable, epoch: u64| Damage {
        offset: RING_OFFSET + end.position % ring_length,
        sequence: end.sequence,
        durable,
        is_superblock_old: epoch > superblock.epoch,
        epoch: epoch.max(superblock.epoch),
        reason: end.reason,
    };
    if superblock.durable > end.sequence {
        return Ok(Some(damage(superblock.durable, 0)));
    }
    let mut found: Option<Damage> = None;
    // How far behind the end.
    let mut distance = 0;
    while distance < ring_length {
        let place = (end.position + distance) % ring_length;
        let length = PIECE_LENGTH.min(ring_length - place).min(ring_length - distance);
        let bytes = read(RING_OFFSET + place, length)?;
        for (index, block) in bytes.chunks_exact(block_size as usize).enumerate() {
            let at = place + index as u64 * block_size;
            let Some(proof) = Proof::decode(block, superblock, at) else { continue };
            let is_later = proof.epoch > superblock.epoch;
            let is_lost = proof.durable > end.sequence && proof.epoch >= superblock.proofs_since;
            if is_later || is_lost {
                let (durable, epoch) =
                    found.map_or((0, 0), |damage| (damage.durable, damage.epoch));
                found = Some(damage(durable.max(proof.durable), epoch.max(proof.epoch)));
            }
        }
        distance += length;
        if distance >= SEARCH_LENGTH {
            if found.is_some() {
                break;
            }
            distance +=
                (distance / SEARCH_STEPS).saturating_sub(PIECE_LENGTH) / block_size * block_size;
        }
    }
    Ok(found)
}

/// A scan of the ring. Its user reads the bytes that [`next_read`](Self::next_read) names, and
/// passes them to [`feed`](Self::feed), until there is no next read. See the module.
#[derive(Debug)]
pub struct Scanner {
    superblock: Superblock,
    position: u64,
    sequence: u64,
    epoch: u64,
    /// The header of the record whose data are read next.
    header: Option<Record>,
    /// Why there was no record at the end of a lap, while the start of the next lap is checked.
    lap_end: Option<RecordError>,
    end: Option<ScanEnd>,
}

impl Scanner {
    /// A scan from the tail of `superblock`.
    pub fn new(superblock: &Superblock) -> Self {
        Self {
            position: superblock.tail_position,
            sequence: superblock.tail_sequence,
            epoch: superblock.tail_epoch,
            superblock: superblock.clone(),
            header: None,
            lap_end: None,
            end: None,
        }
    }

    /// The position to check next: the start of the next lap, if there was no record before the end
    /// of this one.
    fn place(&self) -> u64 {
        match self.lap_end {
            Some(_) => self.position.next_multiple_of(self.superblock.ring_length),
            None => self.position,
        }
    }

    /// The next bytes to read: their offset in bytes from the start of the region, and their
    /// length. `None` at the end.
    pub fn next_read(&self) -> Option<(u64, usize)> {
        if self.end.is_some() {
            return None;
        }
        let length = match &self.header {
            Some(record) => record.length,
            None => u64::from(self.superblock.block_size),
        };
        Some((RING_OFFSET + self.place() % self.superblock.ring_length, length as usize))
    }

    /// Takes the bytes that [`next_read`](Self::next_read) named. Returns the record that they
    /// complete, if any.
    pub fn feed<'a>(&mut self, bytes: &'a [u8]) -> Option<FoundRecord<'a>> {
        let block_size = self.superblock.block_size;
        if let Some(record) = self.header.take() {
            return match record.verify(bytes, block_size) {
                Ok(()) => {
                    self.position = record.end();
                    self.sequence += 1;
                    self.epoch = record.epoch;
                    self.lap_end = None;
                    Some(FoundRecord { record, bytes })
                }
                Err(reason) => self.fail(reason),
            };
        }
        let place = self.place();
        let ring_length = self.superblock.ring_length;
        let used = place - self.superblock.tail_position;
        let expected = Expected {
            position: place,
            sequence: self.sequence,
            epochs: (self.epoch, self.superblock.epoch),
            room: ring_length.saturating_sub(used).min(ring_length - place % ring_length),
        };
        match Record::decode(bytes, &self.superblock, expected) {
            // A record without data is complete.
            Ok(record) if record.length == u64::from(block_size) => {
                self.header = Some(record);
                self.feed(bytes)
            }
            Ok(record) => {
                self.header = Some(record);
                None
            }
            Err(reason) => self.fail(reason),
        }
    }

    /// There is no record here. A record that did not fit the end of a lap is at the start of the
    /// next.
    fn fail(&mut self, reason: RecordError) -> Option<FoundRecord<'static>> {
        let (position, ring_length) = (self.position, self.superblock.ring_length);
        let at_start = position % ring_length == 0;
        let lap = position.next_multiple_of(ring_length);
        let is_full = lap - self.superblock.tail_position >= ring_length;
        if self.lap_end.is_none() && !at_start && !is_full && lap < POSITION_MAX {
            self.lap_end = Some(reason);
            return None;
        }
        let reason = self.lap_end.unwrap_or(reason);
        self.end = Some(ScanEnd { position, sequence: self.sequence, reason });
        None
    }

    /// The place and the reason of the scan's end; `None` before it has ended.
    pub fn end(&self) -> Option<ScanEnd> {
        self.end
    }
}
