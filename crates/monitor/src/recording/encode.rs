//! Encodes blocks of rows.

use super::bytes::{put_varint, zigzag};
use super::checksum::Sum;
use super::column::BlockColumn;
pub use super::column::Cell;
use super::header::Header;
use super::{BLOCK_FULL, BLOCK_ROWS_MAX, BlockKind, COLUMNS_MAX, HEAD, MARK, Packing, TEXTS_MAX};
use crate::read::LAST_TIME_NS;

/// The length in bytes from which a block is compressed.
const PACKED_MIN: usize = 64;

/// Collects rows and encodes them as blocks.
#[derive(Debug)]
pub struct BlockBuilder {
    /// The position of the stream in the header.
    stream: u8,
    columns: Vec<BlockColumn>,
    times: Vec<u8>,
    previous: i64,
    first: i64,
    last: i64,
    rows: usize,
    payload: Vec<u8>,
    packed: Vec<u8>,
}

impl BlockBuilder {
    /// An empty builder for the first stream of a recording with this header.
    pub fn new(header: &Header) -> Self {
        Self::of_stream(header, 0)
    }

    /// An empty builder for a stream of a recording, by its position in the header.
    pub fn of_stream(header: &Header, stream: usize) -> Self {
        let columns = header.columns(stream).iter();
        Self {
            stream: stream as u8,
            columns: columns.map(|column| BlockColumn::new(column.kind)).collect(),
            times: Vec::new(),
            previous: 0,
            first: i64::MAX,
            last: 0,
            rows: 0,
            payload: Vec::new(),
            packed: Vec::new(),
        }
    }

    /// Adds a row with this instant, in nanoseconds. Columns without a cell are null, and so are
    /// columns whose cell has another type.
    pub fn append<'a>(&mut self, time_ns: i64, cells: impl IntoIterator<Item = Cell<'a>>) {
        let time_ns = time_ns.clamp(0, LAST_TIME_NS);
        put_varint(&mut self.times, zigzag(time_ns - self.previous));
        self.previous = time_ns;
        self.first = self.first.min(time_ns);
        self.last = self.last.max(time_ns);
        self.rows += 1;
        let mut cells = cells.into_iter();
        for column in &mut self.columns {
            column.append(cells.next().unwrap_or(Cell::Null), time_ns);
        }
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// The size of the block before compression, in bytes, approximately.
    pub fn size(&self) -> usize {
        self.times.len() + self.columns.iter().map(BlockColumn::size).sum::<usize>()
    }

    /// Whether the block has to be taken before another row is added. This check is too costly to
    /// make after each row.
    pub fn is_full(&self) -> bool {
        self.rows >= BLOCK_ROWS_MAX
            || self.size() >= BLOCK_FULL
            || self.columns.iter().map(BlockColumn::texts).sum::<usize>() + COLUMNS_MAX >= TEXTS_MAX
    }

    /// The bytes of a block of all rows since the last call; `None` if there are no rows.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        if self.rows == 0 {
            return None;
        }
        self.payload.clear();
        put_varint(&mut self.payload, self.times.len() as u64);
        self.payload.append(&mut self.times);
        for column in &mut self.columns {
            column.finish(&mut self.payload);
        }
        let mut stored = self.payload.as_slice();
        let mut packing = Packing::None;
        if self.payload.len() >= PACKED_MIN {
            let most = lz4_flex::block::get_maximum_output_size(self.payload.len());
            if self.packed.len() < most {
                self.packed.resize(most, 0);
            }
            match lz4_flex::block::compress_into(&self.payload, &mut self.packed) {
                Ok(length) if length < self.payload.len() => {
                    (stored, packing) = (&self.packed[..length], Packing::Lz4);
                }
                _ => {}
            }
        }
        let plain = self.payload.len();
        let block = Head {
            kind: BlockKind::Rows,
            stream: self.stream,
            packing,
            plain,
            count: self.rows as u32,
            first: self.first,
            last: self.last,
        }
        .block(stored);
        (self.previous, self.first, self.last, self.rows) = (0, i64::MAX, 0, 0);
        Some(block)
    }
}

/// The head of a block.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    pub kind: BlockKind,
    /// The position of the stream in the header; 0 for blocks that have no stream.
    pub stream: u8,
    pub packing: Packing,
    pub plain: usize,
    pub count: u32,
    pub first: i64,
    pub last: i64,
}

impl Head {
    /// The bytes of a block with this head and these stored bytes.
    pub fn block(&self, stored: &[u8]) -> Vec<u8> {
        let mut block = Vec::with_capacity(HEAD + stored.len());
        block.extend_from_slice(&MARK);
        block.extend_from_slice(&[self.kind as u8, self.packing as u8, self.stream, 0]);
        for number in [stored.len() as u32, self.plain as u32, self.count] {
            block.extend_from_slice(&number.to_le_bytes());
        }
        for time in [self.first, self.last] {
            block.extend_from_slice(&time.to_le_bytes());
        }
        let sum = Sum::new().add(&block).add(stored).value();
        block.extend_from_slice(&sum.to_le_bytes());
        block.extend_from_slice(stored);
        block
    }
}
