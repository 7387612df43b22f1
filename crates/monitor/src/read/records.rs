//! A reader of formats with binary records of one length.

use super::intern::Texts;
use super::lines::read_some;
use super::source::ByteSource;
use super::{BATCH_ROWS, Batch, ReadError, ReadReport, Reader, Tally};

/// A format of records of one length.
pub trait RecordFormat: Send {
    /// The length of a record, in bytes.
    fn size(&self) -> usize;

    /// Adds the events of a record, which has this length, to a batch. Returns the reason if the
    /// record is invalid.
    fn record(&mut self, record: &[u8], texts: &mut Texts, batch: &mut Batch)
    -> Result<(), String>;
}

/// A reader of such a format.
pub struct RecordReader<F> {
    source: ByteSource,
    format: F,
    texts: Texts,
    tally: Tally,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    ended: bool,
}

impl<F: RecordFormat> RecordReader<F> {
    /// Reads records in this format.
    pub fn new(name: &str, source: ByteSource, format: F) -> Self {
        Self {
            source,
            texts: Texts::new(),
            tally: Tally::new(name),
            buffer: vec![0; format.size() * BATCH_ROWS],
            format,
            start: 0,
            end: 0,
            ended: false,
        }
    }
}

impl<F: RecordFormat> Reader for RecordReader<F> {
    fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError> {
        batch.clear();
        let size = self.format.size();
        while batch.len() < BATCH_ROWS {
            if self.end - self.start >= size {
                self.tally.lines += 1;
                let record = &self.buffer[self.start..self.start + size];
                if let Err(message) = self.format.record(record, &mut self.texts, batch) {
                    self.tally.bad(self.tally.lines, &format!("record: {message}"))?;
                }
                self.start += size;
                continue;
            }
            if !batch.is_empty() || self.ended {
                break;
            }
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let read = read_some(&mut self.source, &mut self.buffer[self.end..])
                .map_err(|error| self.tally.io(&error))?;
            self.end += read;
            self.ended = read == 0;
            if self.ended && self.end > 0 {
                self.tally.lines += 1;
                self.tally.bad(self.tally.lines, "record: the last one is cut off")?;
            }
        }
        self.tally.batch(batch)
    }

    fn report(&self) -> &ReadReport {
        &self.tally.report
    }
}

/// A little-endian number of `N` bytes at a place of a record.
pub fn number<const N: usize>(record: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes[..N].copy_from_slice(&record[at..at + N]);
    u64::from_le_bytes(bytes)
}
