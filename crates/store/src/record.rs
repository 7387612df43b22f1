//! The record of a checkpoint: all of its state that is in no page.
//!
//! | field | bytes |
//! |---|---|
//! | last sequence whose batch is in the checkpoint, unless it is among the following | 8 |
//! | count of batches in flight, and the sequence of each | 4, 8 each |
//! | count of segments with such batches, and the number of each | 4, 4 each |
//! | count of segments that later batches may use, and the number of each in order of use | 4, 4 each |
//! | pages of maps | 4 |
//! | whether blocks may be in use that nothing refers to | 1 |
//! | the catalogue | rest |
//!
//! The superblock has the length and the [code](crate::seal) of the record.

use crate::batch::SEQUENCE_MAX;
use crate::catalogue::Catalogue;
use crate::words::{WordReader, WordWriter};

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CheckpointRecord {
    pub(crate) sequence: u64,
    pub(crate) in_flight: Vec<u64>,
    /// The segments that had batches in flight, or were open. Recovery reads each of them.
    pub(crate) busy: Vec<u32>,
    /// The segments for later batches, in the order in which they are opened.
    pub(crate) order: Vec<u32>,
    /// One more than the highest page of a map.
    pub(crate) pages: u32,
    /// Whether a walk has to find blocks that nothing refers to.
    pub(crate) has_garbage: bool,
    pub(crate) catalogue: Catalogue,
}

impl CheckpointRecord {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = WordWriter::default();
        out.u64(self.sequence);
        out.u32(self.in_flight.len() as u32);
        for sequence in &self.in_flight {
            out.u64(*sequence);
        }
        for segments in [&self.busy, &self.order] {
            out.u32(segments.len() as u32);
            for segment in segments {
                out.u32(*segment);
            }
        }
        out.u32(self.pages);
        out.u8(u8::from(self.has_garbage));
        self.catalogue.encode(&mut out);
        out.0
    }

    /// Reads a record of a pool with so many segments, in a version of the format.
    pub(crate) fn decode(bytes: &[u8], segments: u32, version: u32) -> Option<Self> {
        let mut input = WordReader(bytes);
        let sequence = input.u64()?;
        let count = input.u32()?;
        let in_flight = input.list(count, WordReader::u64)?;
        let mut list = || {
            let count = input.u32()?;
            input.list(count, |input| input.u32().filter(|segment| *segment < segments))
        };
        let (busy, order) = (list()?, list()?);
        let pages = input.u32()?;
        let has_garbage = match input.u8()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let catalogue = Catalogue::decode(&mut input, version)?;
        let record = Self { sequence, in_flight, busy, order, pages, has_garbage, catalogue };
        let is_sane = input.0.is_empty()
            && sequence < SEQUENCE_MAX
            && record.catalogue.roots().chain(record.catalogue.set_roots()).all(|id| id < pages);
        is_sane.then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_written_and_segments_beyond_the_pool_are_refused() {
        let record = CheckpointRecord {
            sequence: 77,
            in_flight: vec![70, 75],
            busy: vec![3],
            order: vec![5, 4],
            pages: 9,
            has_garbage: true,
            catalogue: Catalogue::new(),
        };
        let bytes = record.encode();
        // An empty catalogue of version 2 has no count of guarantees, one of version 1 none of sets
        // either.
        for (version, missing) in [(1, 8), (2, 4), (3, 0)] {
            let bytes = &bytes[..bytes.len() - missing];
            let decoded = CheckpointRecord::decode(bytes, 6, version);
            assert_eq!(decoded.as_ref(), Some(&record), "{version}");
        }
        assert_eq!(CheckpointRecord::decode(&bytes, 5, 3), None);
        for length in 0..bytes.len() {
            assert_eq!(CheckpointRecord::decode(&bytes[..length], 6, 3), None);
        }
        assert_eq!(CheckpointRecord::decode(&[&bytes[..], &[0]].concat(), 6, 3), None);
    }
}
