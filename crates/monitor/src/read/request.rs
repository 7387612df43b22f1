//! The requests of traces: most formats have nothing else.

use std::borrow::Cow;

use super::Batch;
use super::columns::{EventColumn, EventColumns, FIELD_MAX};
use super::intern::Texts;

/// The length of a sector, in bytes.
const SECTOR: i64 = 512;

/// A request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedRequest<'l> {
    /// Its instant, in nanoseconds.
    pub time_ns: i64,
    /// The operation.
    pub operation: TracedOperation,
    /// The first sector, and the number of sectors.
    pub sectors: (i64, i64),
    /// The disk's name; empty if the format has none.
    pub disk: Cow<'l, [u8]>,
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracedOperation {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A flush.
    Flush,
    /// A discard.
    Discard,
    /// A write of zeroes.
    WriteZeroes,
}

impl TracedOperation {
    /// A read or a write.
    pub fn read_if(is_read: bool) -> Self {
        if is_read { Self::Read } else { Self::Write }
    }

    /// Its letter in the column `IOOp`.
    fn letter(self) -> &'static [u8] {
        match self {
            Self::Read => b"r",
            Self::Write => b"w",
            Self::Flush => b"f",
            Self::Discard => b"d",
            Self::WriteZeroes => b"z",
        }
    }
}

/// The sectors of a range in bytes: the first one, and their number. `None` if the range is too
/// long.
pub fn sectors_of(offset: i64, length: i64) -> Option<(i64, i64)> {
    let end = offset.checked_add(length)?.checked_add(SECTOR - 1)? / SECTOR;
    Some((offset / SECTOR, end - offset / SECTOR))
}

/// Makes rows of the requests of a trace, and numbers them.
pub struct TracedRequests {
    columns: EventColumns,
    count: i64,
}

impl TracedRequests {
    /// Rows with these columns.
    pub fn new(columns: EventColumns) -> Self {
        Self { columns, count: 0 }
    }

    /// The number of requests so far, which is the number of the next one.
    pub fn count(&self) -> i64 {
        self.count
    }

    /// Adds the row of a request. Returns the reason if it cannot be a row.
    pub fn add(
        &mut self,
        request: &TracedRequest<'_>,
        texts: &mut Texts,
        batch: &mut Batch,
    ) -> Result<(), String> {
        let TracedRequest { time_ns, operation, sectors: (sector, size), disk } = request;
        if disk.len() > FIELD_MAX {
            return Err("the disk's name is too long".into());
        }
        let (columns, mut row) = (&self.columns, self.columns.row(*time_ns));
        columns.text(&mut row, EventColumn::Type, b"Q", texts);
        columns.text(&mut row, EventColumn::Operation, operation.letter(), texts);
        columns.integer(&mut row, EventColumn::Request, self.count);
        columns.integer(&mut row, EventColumn::Sector, *sector);
        columns.integer(&mut row, EventColumn::Size, *size);
        if !disk.is_empty() {
            columns.text(&mut row, EventColumn::VDisk, disk, texts);
        }
        self.count += 1;
        batch.push(*time_ns, row);
        Ok(())
    }
}
