//! Writes a recording to a stream of bytes.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use fathom_cql::Row;

use super::bytes::put_varint;
use super::encode::{BlockBuilder, Cell, Head};
use super::header::Header;
use super::{BLOCK_ROWS_MAX, BlockKind, DropPlace, Packing};

/// The number of rows between two checks of a block's size and age.
const CHECK_ROWS: usize = 256;

/// The limits at which a block is closed.
#[derive(Clone, Copy, Debug)]
pub struct BlockLimits {
    /// The number of rows.
    pub rows: usize,
    /// The number of bytes before compression.
    pub bytes: usize,
    /// The time since its first row was added.
    pub age: Duration,
}

impl Default for BlockLimits {
    /// 32,768 rows, 1 MiB, a second.
    fn default() -> Self {
        Self { rows: 1 << 15, bytes: 1 << 20, age: Duration::from_secs(1) }
    }
}

/// The summary of a written recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordingSummary {
    /// The number of events.
    pub events: u64,
    /// The number of missing events, as the notes report them.
    pub dropped: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// Writes a recording.
#[derive(Debug)]
pub struct Writer<W: Write> {
    out: W,
    /// The open block of each stream.
    builders: Vec<BlockBuilder>,
    limits: BlockLimits,
    begun: Option<Instant>,
    summary: RecordingSummary,
}

impl<W: Write> Writer<W> {
    /// Writes the header.
    ///
    /// # Errors
    /// If it cannot be written, or the header is invalid.
    pub fn new(out: W, header: &Header, limits: BlockLimits) -> io::Result<Self> {
        let mut writer = Self {
            out,
            builders: (0..header.streams.len())
                .map(|stream| BlockBuilder::of_stream(header, stream))
                .collect(),
            limits: BlockLimits { rows: limits.rows.clamp(1, BLOCK_ROWS_MAX), ..limits },
            begun: None,
            summary: RecordingSummary::default(),
        };
        writer.put(&header.to_bytes()?)?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.summary.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Adds a row of the first stream with this instant, in nanoseconds.
    ///
    /// # Errors
    /// If a block cannot be written.
    pub fn append_row(&mut self, time_ns: i64, row: &Row) -> io::Result<()> {
        self.append(0, time_ns, row.iter().map(Cell::from))
    }

    /// Adds a row of a stream, by its position in the header, as [`BlockBuilder::append`] does.
    ///
    /// # Errors
    /// If there is no such stream, or a block cannot be written.
    pub fn append<'a>(
        &mut self,
        stream: usize,
        time_ns: i64,
        cells: impl IntoIterator<Item = Cell<'a>>,
    ) -> io::Result<()> {
        let Some(builder) = self.builders.get_mut(stream) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "there is no such stream"));
        };
        builder.append(time_ns, cells);
        let rows = builder.len();
        if rows == 1 {
            self.begun.get_or_insert_with(Instant::now);
        }
        if rows >= self.limits.rows {
            return self.flush();
        }
        if rows % CHECK_ROWS == 0 { self.flush_if_due() } else { Ok(()) }
    }

    /// Closes the blocks if one has reached a limit of size or age.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn flush_if_due(&mut self) -> io::Result<()> {
        let old = self.begun.is_some_and(|begun| begun.elapsed() >= self.limits.age);
        let is_large =
            |builder: &BlockBuilder| builder.size() >= self.limits.bytes || builder.is_full();
        if old || self.builders.iter().any(is_large) { self.flush() } else { Ok(()) }
    }

    /// Closes the blocks of all streams, and flushes the output.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        self.begun = None;
        for stream in 0..self.builders.len() {
            let rows = self.builders[stream].len() as u64;
            if let Some(block) = self.builders[stream].take() {
                self.put(&block)?;
                self.summary.events += rows;
            }
        }
        self.out.flush()
    }

    /// Adds a block of rows that was read from a recording with the same header.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn copy(&mut self, block: &super::Block) -> io::Result<()> {
        self.flush()?;
        self.put(block.bytes())?;
        self.summary.events += u64::from(block.count());
        Ok(())
    }

    /// Notes that events are missing at this position. If `disk` is empty, they may be of any disk.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn note_dropped(&mut self, count: u64, place: DropPlace, disk: &str) -> io::Result<()> {
        self.flush()?;
        self.summary.dropped = self.summary.dropped.saturating_add(count);
        self.put(&dropped_block(count, place, disk))
    }

    /// The summary so far, without the rows of the open block.
    pub fn summary(&self) -> RecordingSummary {
        self.summary
    }

    /// The most bytes that the recording would have if it ended now.
    pub fn bytes(&self) -> u64 {
        self.summary.bytes
            + self.builders.iter().map(BlockBuilder::size).sum::<usize>() as u64
            + 4096
    }

    /// Writes the end.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn finish(mut self) -> io::Result<(W, RecordingSummary)> {
        self.flush()?;
        let end = end_block(self.summary.events, self.summary.dropped);
        self.put(&end)?;
        self.out.flush()?;
        Ok((self.out, self.summary))
    }
}

fn note(kind: BlockKind, time_ns: i64, payload: &[u8]) -> Vec<u8> {
    let (packing, plain) = (Packing::None, payload.len());
    Head { kind, stream: 0, packing, plain, count: 0, first: time_ns, last: time_ns }.block(payload)
}

/// The block that notes that `count` events are missing; if `disk` is empty, of any disk.
pub fn dropped_block(count: u64, place: DropPlace, disk: &str) -> Vec<u8> {
    let mut payload = count.to_le_bytes().to_vec();
    payload.push(place as u8);
    let mut end = disk.len().min(255);
    while !disk.is_char_boundary(end) {
        end -= 1;
    }
    put_varint(&mut payload, end as u64);
    payload.extend_from_slice(&disk.as_bytes()[..end]);
    note(BlockKind::Dropped, 0, &payload)
}

/// The block that notes an instant, in nanoseconds, before which no more events follow.
pub fn moment_block(time_ns: i64) -> Vec<u8> {
    note(BlockKind::Moment, time_ns, &[])
}

/// The last block of a recording with these numbers of written and of missing events.
pub fn end_block(events: u64, dropped: u64) -> Vec<u8> {
    note(BlockKind::End, 0, &[events.to_le_bytes(), dropped.to_le_bytes()].concat())
}
