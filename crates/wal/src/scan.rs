//! Reads the records of a log, beginning at its tail.
//!
//! The record at a place is the next one if its header has the identity of this log, the next
//! sequence, this position, and an epoch that is not lower than the last record's, and if all its
//! checksums are right. Positions count on from lap to lap, so a record of an earlier lap never
//! matches. The epoch excludes records behind one that an earlier opening found torn. The first
//! place without a next record is the end of the log.

use crate::record::{Expected, Record, RecordError};
use crate::superblock::Superblock;
use crate::{RING_OFFSET, superblock::POSITION_MAX};

/// A record that was read, and its data.
#[derive(Debug, PartialEq, Eq)]
pub struct Found<'a> {
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
    pub fn feed<'a>(&mut self, bytes: &'a [u8]) -> Option<Found<'a>> {
        let block_size = self.superblock.block_size;
        if let Some(record) = self.header.take() {
            return match record.verify(bytes, block_size) {
                Ok(()) => {
                    self.position = record.end();
                    self.sequence += 1;
                    self.epoch = record.epoch;
                    self.lap_end = None;
                    Some(Found { record, bytes })
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
    fn fail(&mut self, reason: RecordError) -> Option<Found<'static>> {
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
