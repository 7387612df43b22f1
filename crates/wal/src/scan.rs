//! Reading the records from the tail on.
//!
//! A record is the next one if its header says so: this log, the next sequence, this position
//! (which counts on from lap to lap, so that no earlier lap's fits), an epoch that is not before
//! the last one's (so that nothing fits that was written behind a record that an earlier opening
//! found torn), and checksums that are right. The first place without one ends the log.

use crate::record::{Expected, Record, RecordError};
use crate::superblock::Superblock;
use crate::{RING_OFFSET, superblock::POSITION_MAX};

/// A record that was read, and its data.
#[derive(Debug, PartialEq, Eq)]
pub struct Found<'a> {
    /// Its header.
    pub record: Record,
    /// All its bytes: header, and data.
    pub bytes: &'a [u8],
}

/// Where and why a scan ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanEnd {
    /// The position of the next record to be written.
    pub position: u64,
    /// Its sequence.
    pub sequence: u64,
    /// What is there instead of a record.
    pub reason: RecordError,
}

/// See the module. It asks for bytes of the region ([`want`](Self::want)), and is given them
/// ([`give`](Self::give)), until it has come to the end.
#[derive(Debug)]
pub struct Scanner {
    superblock: Superblock,
    position: u64,
    sequence: u64,
    epoch: u64,
    /// The header of the record whose data are wanted.
    header: Option<Record>,
    /// What was found at the end of a lap, while its start is looked at.
    lap_end: Option<RecordError>,
    end: Option<ScanEnd>,
}

impl Scanner {
    /// A scan from the tail of `superblock` on.
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

    /// The position that is looked at: the start of the next lap, once the end of one is over.
    fn place(&self) -> u64 {
        match self.lap_end {
            Some(_) => self.position.next_multiple_of(self.superblock.ring_length),
            None => self.position,
        }
    }

    /// What is to be read next: where, in bytes from the start of the region, and how much. `None`
    /// at the end.
    pub fn want(&self) -> Option<(u64, usize)> {
        if self.end.is_some() {
            return None;
        }
        let length = match &self.header {
            Some(record) => record.length,
            None => u64::from(self.superblock.block_size),
        };
        Some((RING_OFFSET + self.place() % self.superblock.ring_length, length as usize))
    }

    /// Takes the bytes that were wanted. A record that they complete comes back.
    pub fn give<'a>(&mut self, bytes: &'a [u8]) -> Option<Found<'a>> {
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
            // Without data it is complete.
            Ok(record) if record.length == u64::from(block_size) => {
                self.header = Some(record);
                self.give(bytes)
            }
            Ok(record) => {
                self.header = Some(record);
                None
            }
            Err(reason) => self.fail(reason),
        }
    }

    /// There is no record here. One that did not fit the end of a lap stands at the next one's start.
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

    /// Where and why it ended; `None` while it has not.
    pub fn end(&self) -> Option<ScanEnd> {
        self.end
    }
}
