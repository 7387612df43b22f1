//! Reads single blocks.

use super::HEAD;
use super::bytes::MalformedBytes;
use super::checksum::Sum;
use super::decode::{Rows, Target};
use super::header::Header;
use super::reader::{BlockHead, Item};
use crate::read::{Batch, Texts, WantedStream};

/// The number of bytes after which the cache of texts is emptied.
const TEXT_BYTES: usize = 16 << 20;

/// Reads blocks that belong to one header. Unlike a [`Recording`](super::Recording) it skips no
/// damage: a damaged block is an error.
pub struct BlockReader {
    header: Header,
    /// For each stream of the header the columns that are read; `None` to skip its rows.
    targets: Vec<Option<Target>>,
    texts: Texts,
    /// The number of bytes read since the cache of texts was emptied.
    read: usize,
    plain_max: usize,
    plain: usize,
    rows: Option<Rows>,
}

impl BlockReader {
    /// Reads all columns of blocks that have at most `plain_max` bytes after decompression.
    pub fn new(header: Header, plain_max: usize) -> Self {
        let targets = (0..header.streams.len()).map(|at| Some(Target::all(&header, at))).collect();
        Self::with_targets(header, targets, plain_max)
    }

    /// Reads the wanted columns of some streams. Columns that the header does not have are null,
    /// and other streams are skipped. A batch has the position of its stream in `wanted`.
    pub fn of_streams(header: Header, wanted: &[WantedStream], plain_max: usize) -> Self {
        let targets = Target::of_streams(&header, wanted);
        Self::with_targets(header, targets, plain_max)
    }

    fn with_targets(header: Header, targets: Vec<Option<Target>>, plain_max: usize) -> Self {
        let (texts, rows) = (Texts::new(), None);
        Self { header, targets, texts, read: 0, plain_max, plain: 0, rows }
    }

    /// Opens a block. Its rows, if any, come from [`rows`](Self::rows). `None` is a block of an
    /// unknown kind.
    ///
    /// # Errors
    /// If the block is invalid.
    pub fn open(&mut self, bytes: &[u8]) -> Result<Option<Item>, MalformedBytes> {
        self.rows = None;
        let head = BlockHead::of(bytes)?;
        if head.plain > self.plain_max {
            return Err(MalformedBytes("it is too long"));
        }
        if HEAD + head.stored != bytes.len() {
            return Err(MalformedBytes("its length is wrong"));
        }
        let Some(block) = head.block(bytes.to_vec())? else { return Ok(None) };
        if !block.has_rows() {
            return block.note().map(Some);
        }
        let stream = block.stream(&self.header)?;
        let Some(target) = &self.targets[stream] else { return Ok(Some(Item::Rows)) };
        let payload = block.unpacked()?;
        self.plain = payload.len();
        self.read += payload.len();
        if self.read > TEXT_BYTES {
            (self.texts, self.read) = (Texts::new(), 0);
        }
        let (count, span) = (block.count() as usize, block.span());
        let columns = self.header.columns(stream);
        let rows = Rows::new(payload, count, span, columns, target, &mut self.texts)?;
        self.rows = Some(rows).filter(|rows| rows.left() > 0);
        Ok(Some(Item::Rows))
    }

    /// The size of the block of rows that was opened last, in bytes after decompression.
    pub fn plain(&self) -> usize {
        self.plain
    }

    /// Replaces the content of `batch` by the next rows of the block. Returns `false` after the
    /// last row.
    ///
    /// # Errors
    /// If the block is invalid.
    pub fn rows(&mut self, batch: &mut Batch) -> Result<bool, MalformedBytes> {
        batch.clear();
        Rows::next(&mut self.rows, batch)
    }
}

/// Corrects the length and the checksum of a block, for fuzzing.
pub(crate) fn correct(block: &mut [u8]) {
    if block.len() < HEAD {
        return;
    }
    let (head, stored) = block.split_at_mut(HEAD);
    head[8..12].copy_from_slice(&(stored.len() as u32).to_le_bytes());
    let sum = Sum::new().add(&head[..HEAD - 4]).add(stored).value();
    head[HEAD - 4..].copy_from_slice(&sum.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::io_stream;
    use crate::recording::{BlockBuilder, Cell, Clock, moment_block};

    #[test]
    fn a_block_is_read_as_written_and_a_changed_one_is_rejected() {
        let header = Header::new(&io_stream(), Clock::Monotonic, 0);
        let mut builder = BlockBuilder::new(&header);
        let text: Arc<str> = "Q".into();
        for time in 0..3000 {
            builder.append(time, [Cell::Integer(time), Cell::Text(&text)]);
        }
        let block = builder.take().unwrap();
        let mut reader = BlockReader::new(header.clone(), 1 << 20);
        let mut batch = Batch::default();
        assert_eq!(reader.open(&block), Ok(Some(Item::Rows)));
        let mut times = Vec::new();
        while reader.rows(&mut batch).unwrap() {
            assert_eq!(batch.row(0)[1], fathom_cql::Value::text("Q"));
            times.append(&mut batch.times_ns);
        }
        assert_eq!(times, (0..3000).collect::<Vec<_>>());
        assert_eq!(reader.open(&moment_block(7)), Ok(Some(Item::Moment(7))));
        for at in 0..block.len() {
            let mut changed = block.clone();
            changed[at] ^= 4;
            assert!(reader.open(&changed).is_err(), "{at}");
            assert!(reader.open(&block[..at]).is_err(), "{at}");
        }
        assert!(BlockReader::new(header, 100).open(&block).is_err());
    }
}
