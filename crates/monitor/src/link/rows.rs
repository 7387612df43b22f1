//! The rows of a fragment as blocks of a recording with one more column: the count of each row.

use std::iter::once;
use std::sync::Arc;

use fathom_cql::catalog::StreamSchema;
use fathom_cql::plan::Plan;
use fathom_cql::{Type, Value};

use super::frame::ROWS_MAX;
use super::plans::is_stream;
use crate::read::Batch;
use crate::recording::{BlockBuilder, BlockReader, Cell, Clock, Header, Item, MalformedBytes};

/// The number of rows at which a block is closed.
const BLOCK_ROWS: usize = 8192;
/// The number of bytes before compression at which a block is closed.
const BLOCK_BYTES: usize = 512 << 10;
/// The most bytes of a block after decompression. Blocks are closed below this limit, so that one
/// more row never makes a block too long.
const PLAIN_MAX: usize = ROWS_MAX - (64 << 10);

/// The most rows of a received block.
const BLOCK_ROWS_MAX: usize = 2 * BLOCK_ROWS;
/// The largest sum of the counts of a stream's block.
const COUNTS_MAX: i64 = 1 << 16;
/// The largest count of a single row of a stream.
const COUNT_MAX: i64 = COUNTS_MAX / 2;

/// A row that can be sent between threads.
pub type Tuple = Arc<[Value]>;

/// The most rows of all relations of a host.
pub const RELATION_ROWS_MAX: usize = 1 << 20;
/// The most memory that these rows may take, in bytes. A single text may have a mebibyte.
pub const RELATION_BYTES_MAX: usize = 256 << 20;

/// The memory that a row of a relation takes, in bytes, approximately.
pub fn row_bytes(row: &[Value]) -> usize {
    let text = |value: &Value| match value {
        Value::Text(text) => text.len(),
        _ => 0,
    };
    // A row takes an entry of a table, with a count, and an allocation.
    size_of::<(Tuple, i64)>() + 32 + size_of_val(row) + row.iter().map(text).sum::<usize>()
}

/// The header of a recording of a fragment's rows.
fn header(plan: &Plan) -> Header {
    let columns: Vec<(&str, Type)> = plan
        .columns
        .iter()
        .map(|column| (column.name.as_str(), column.kind))
        .chain(once(("@count", Type::Integer)))
        .collect();
    Header::new(&StreamSchema::new("fragment", &columns), Clock::Unknown, 0)
}

/// Writes rows of a fragment as blocks.
pub struct RowsWriter {
    builder: BlockBuilder,
    is_stream: bool,
    /// The sum of the block's counts.
    counts: i64,
}

impl RowsWriter {
    pub fn new(plan: &Plan) -> Self {
        Self { builder: BlockBuilder::new(&header(plan)), is_stream: is_stream(plan), counts: 0 }
    }

    /// Adds a change of a row's count at an instant. Calls `full` with each full block and its
    /// number of rows.
    pub fn add(
        &mut self,
        time_ns: i64,
        row: &[Value],
        count: i64,
        full: &mut dyn FnMut(Vec<u8>, u64),
    ) {
        let mut left = count;
        while left != 0 {
            let part = if self.is_stream { left.min(COUNT_MAX) } else { left };
            if self.is_stream && self.counts + part > COUNTS_MAX {
                self.give(full);
            }
            let cells = row.iter().map(Cell::from).chain(once(Cell::Integer(part)));
            self.builder.append(time_ns, cells);
            (left, self.counts) = (left - part, self.counts.saturating_add(part));
            if self.builder.len() >= BLOCK_ROWS || self.builder.size() >= BLOCK_BYTES {
                self.give(full);
            }
        }
    }

    fn give(&mut self, full: &mut dyn FnMut(Vec<u8>, u64)) {
        if let Some((block, rows)) = self.take() {
            full(block, rows);
        }
    }

    /// Takes the block and its number of rows; `None` if there are no rows.
    pub fn take(&mut self) -> Option<(Vec<u8>, u64)> {
        let rows = self.builder.len() as u64;
        self.counts = 0;
        Some((self.builder.take()?, rows))
    }
}

/// Changes of a fragment's result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowChanges {
    /// For each change the instant in nanoseconds, the row, and the change of the row's count.
    pub rows: Vec<(i64, Tuple, i64)>,
    /// The memory that they take, in bytes, approximately.
    pub weight: usize,
}

/// Reads rows of a fragment from untrusted blocks.
pub struct RowsReader {
    reader: BlockReader,
    /// The memory that a row takes besides its texts, in bytes, approximately.
    row_weight: usize,
    is_stream: bool,
    batch: Batch,
}

impl RowsReader {
    pub fn new(plan: &Plan) -> Self {
        let header = header(plan);
        let width = header.columns(0).len();
        Self {
            row_weight: (width + 2) * size_of::<Value>() + size_of::<(i64, Tuple, i64)>(),
            reader: BlockReader::new(header, PLAIN_MAX),
            is_stream: is_stream(plan),
            batch: Batch::default(),
        }
    }

    /// The changes in a block.
    ///
    /// # Errors
    /// If the block is invalid.
    pub fn read(&mut self, block: &[u8]) -> Result<RowChanges, MalformedBytes> {
        if self.reader.open(block)? != Some(Item::Rows) {
            return Err(MalformedBytes("a block without rows"));
        }
        let mut changes = RowChanges { rows: Vec::new(), weight: self.reader.plain() };
        let mut counts = 0;
        while self.reader.rows(&mut self.batch)? {
            let times = self.batch.times_ns.iter();
            for (&time_ns, mut row) in times.zip(self.batch.rows()) {
                let Some(Value::Integer(count)) = row.pop() else {
                    return Err(MalformedBytes("a row without a count"));
                };
                // A stream's row is stored once for each occurrence.
                let copies = if self.is_stream { count } else { 1 };
                let good = if self.is_stream { 1..=COUNT_MAX } else { -(1 << 40)..=1 << 40 };
                counts += copies.clamp(0, COUNT_MAX);
                if !good.contains(&count) || count == 0 || counts > COUNTS_MAX {
                    return Err(MalformedBytes("a row has an invalid count"));
                }
                changes.weight += self.row_weight * copies as usize;
                changes.rows.push((time_ns, row.into(), count));
            }
            if changes.rows.len() > BLOCK_ROWS_MAX {
                return Err(MalformedBytes("a block has too many rows"));
            }
        }
        Ok(changes)
    }
}

#[cfg(test)]
pub mod tests {
    use fathom_cql::ParseOptions;

    use super::*;
    use crate::replay::Script;

    /// The plan of a query, over all columns of the events.
    pub fn plan(text: &str) -> Plan {
        let script = Script::prepare(text, &[], ParseOptions::default()).unwrap();
        script.queries()[0].plan.clone()
    }

    #[test]
    fn changes_are_read_as_they_were_written() {
        let plan = plan("select VDisk, Size * 0.5, Size from IOstream [range 1 second]");
        let mut writer = RowsWriter::new(&plan);
        let row = |number: i64| -> Tuple {
            let values = [Value::text("disk"), Value::Float(f64::NAN), Value::Integer(number)];
            values.into()
        };
        let mut written = Vec::new();
        let mut blocks = Vec::new();
        for number in 0..20_000 {
            let change = (number / 2, row(number), if number % 3 == 0 { -1 } else { 2 });
            let mut full = |block, rows| blocks.push((block, rows));
            writer.add(change.0, &change.1, change.2, &mut full);
            written.push(change);
        }
        blocks.extend(writer.take());
        assert!(writer.take().is_none() && blocks.len() > 1);
        let mut reader = RowsReader::new(&plan);
        let mut read = Vec::new();
        for (block, _) in &blocks {
            let mut changes = reader.read(block).unwrap();
            assert!(changes.weight > changes.rows.len() * 100);
            read.append(&mut changes.rows);
        }
        assert_eq!(read, written);
        // The rows of a stream are never deleted.
        let stream = super::tests::plan("select VDisk, Size * 0.5, Size from IOstream");
        assert!(RowsReader::new(&stream).read(&blocks[0].0).is_err());
    }

    #[test]
    fn rows_with_large_counts_are_sent_in_parts() {
        let plan = plan("select Size from IOstream");
        let mut writer = RowsWriter::new(&plan);
        let row: Tuple = [Value::Integer(1)].into();
        let mut blocks = Vec::new();
        for count in [1, 500_000, 7] {
            writer.add(5, &row, count, &mut |block, _| blocks.push(block));
        }
        blocks.extend(writer.take().map(|(block, _)| block));
        let mut reader = RowsReader::new(&plan);
        let changes = blocks.iter().flat_map(|block| reader.read(block).unwrap().rows);
        assert_eq!(changes.map(|(_, _, count)| count).sum::<i64>(), 500_008);
    }

    /// The widest possible rows fit into a block that can be read.
    #[test]
    fn no_block_is_too_long() {
        let long = "x".repeat(8 << 10);
        let columns = (0..250).map(|at| format!("'{at}' || Path as c{at}"));
        let columns: Vec<String> = columns.collect();
        let plan = plan(&format!("select {} from IOstream", columns.join(", ")));
        let mut writer = RowsWriter::new(&plan);
        let mut blocks = Vec::new();
        for number in 0..4 {
            let texts = (0..250).map(|at| Value::text(&format!("{number} {at} {long}")));
            writer.add(number, &texts.collect::<Vec<_>>(), 1, &mut |block, rows| {
                blocks.push((block, rows));
            });
        }
        blocks.extend(writer.take());
        let mut reader = RowsReader::new(&plan);
        for (block, _) in &blocks {
            assert!(block.len() <= ROWS_MAX - 64);
            assert_eq!(reader.read(block).unwrap().rows.len(), 1);
        }
        assert_eq!(blocks.len(), 4);
    }
}
