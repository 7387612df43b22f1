//! Writes rows as a Parquet file, for other tools.
//!
//! Each column of a recording is an optional column of the file. Rows are held in memory, by
//! column, until they fill a row group, as [`RowGroupLimits`] defines it. Then the columns are
//! written one after the other, so that the pages of only one column are in memory in addition.
//! Each distinct text is held, and written, once per row group.
//!
//! A reader begins at the end of the file, so an unfinished file cannot be read.

use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use fathom_cql::{Type, Value};
use parquet::basic::{
    Compression, Encoding, LogicalType, Repetition, TimeUnit, Type as PhysicalType,
};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::types::{ColumnPath, Type as Field};

use super::BLOCK_ROWS_MAX;
use super::column::Texts;
use super::header::{Clock, Header, RecordedColumn};
use super::write::RecordingSummary;
use crate::columns::ColumnValues as Values;
use crate::read::{Batch, ReadReport};

/// The number of rows between two checks of a row group's size.
const CHECK_ROWS: usize = 1024;
/// The number of texts that are passed to the Parquet writer at a time.
const TEXTS_PER_WRITE: usize = 4096;
/// The most row groups: the format numbers them in 15 bits.
const GROUPS_MAX: usize = i16::MAX as usize;
/// The number of row groups that remain when [`ParquetWriter::is_full`] begins to be true: enough
/// for the rows of a block.
const GROUPS_SPARE: usize = 2 * BLOCK_ROWS_MAX / CHECK_ROWS;
/// The most bytes of the file's end for each column of a row group, without the column's name.
const COLUMN_END: usize = 256;
/// The most bytes of the rest of the file's end.
const END: usize = 4096;
/// The size limit of a dictionary of integers, in bytes. Row groups with more distinct integers
/// store differences instead.
const NUMBERS_MAX: usize = 32 << 10;

/// The limits at which a row group is closed.
#[derive(Clone, Copy, Debug)]
pub struct RowGroupLimits {
    /// The number of rows.
    pub rows: usize,
    /// The number of bytes held in memory.
    pub bytes: usize,
}

impl Default for RowGroupLimits {
    /// 131,072 rows, 32 MiB.
    fn default() -> Self {
        Self { rows: 1 << 17, bytes: 32 << 20 }
    }
}

/// Writes rows as a Parquet file.
pub struct ParquetWriter<W: Write + Send> {
    file: SerializedFileWriter<W>,
    header: Header,
    columns: Vec<Column>,
    limits: RowGroupLimits,
    rows: usize,
    /// The events of the closed row groups.
    events: u64,
    dropped: u64,
}

/// A column of the open row group.
struct Column {
    /// For each row 1 if it has a value, otherwise 0.
    levels: Vec<i16>,
    held: Held,
}

/// The values that are not null.
enum Held {
    Booleans(Vec<bool>),
    /// The integers, and the number that was added to each.
    Integers(Vec<i64>, i64),
    Floats(Vec<f64>),
    /// The texts, their size in bytes, and for each row with a value the number of its text.
    Texts(Texts, usize, Vec<u32>),
}

fn failed(error: ParquetError) -> io::Error {
    match error {
        ParquetError::External(error) => match error.downcast::<io::Error>() {
            Ok(error) => *error,
            Err(error) => io::Error::other(error),
        },
        error => io::Error::other(error),
    }
}

/// The number to add to the values of a column to make them nanoseconds since 1970; `None` if they
/// are no times, or the offset is unknown.
fn since_1970(header: &Header, column: &RecordedColumn) -> Option<i64> {
    let of = header.wall_offset_ns;
    (column.is_time && column.kind == Type::Integer && of != 0).then_some(of)
}

fn field(header: &Header, column: &RecordedColumn) -> Result<Field, ParquetError> {
    let (kind, meaning) = match column.kind {
        Type::Boolean => (PhysicalType::BOOLEAN, None),
        Type::Integer => {
            let instant = LogicalType::timestamp(true, TimeUnit::NANOS);
            (PhysicalType::INT64, since_1970(header, column).map(|_| instant))
        }
        Type::Float => (PhysicalType::DOUBLE, None),
        Type::Text => (PhysicalType::BYTE_ARRAY, Some(LogicalType::String)),
    };
    Field::primitive_type_builder(&column.name, kind)
        .with_repetition(Repetition::OPTIONAL)
        .with_logical_type(meaning)
        .build()
}

fn properties(header: &Header, limits: RowGroupLimits) -> WriterProperties {
    let mut properties = WriterProperties::builder()
        .set_created_by(concat!("fathom version ", env!("CARGO_PKG_VERSION")).into())
        .set_compression(Compression::LZ4_RAW)
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_offset_index_disabled(true)
        // Larger than the texts of a row group, so that the dictionary holds all of them.
        .set_dictionary_page_size_limit(limits.bytes.saturating_mul(2));
    for column in header.columns(0) {
        let path = ColumnPath::new(vec![column.name.clone()]);
        let dictionary = match column.kind {
            Type::Text => true,
            Type::Integer => !column.is_time,
            Type::Boolean | Type::Float => false,
        };
        properties = properties.set_column_dictionary_enabled(path.clone(), dictionary);
        if column.kind == Type::Integer {
            properties = properties
                .set_column_encoding(path.clone(), Encoding::DELTA_BINARY_PACKED)
                .set_column_dictionary_page_size_limit(path, NUMBERS_MAX);
        }
    }
    properties.build()
}

impl<W: Write + Send> ParquetWriter<W> {
    /// Begins a file whose columns are those of the first stream of a header.
    ///
    /// # Errors
    /// If the file cannot be written, or there are no columns.
    pub fn new(out: W, header: &Header, limits: RowGroupLimits) -> io::Result<Self> {
        if header.columns(0).is_empty() {
            let message = "a Parquet file needs at least one column";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let fields = header.columns(0).iter().map(|column| field(header, column).map(Arc::new));
        let fields = fields.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let schema = Field::group_type_builder(&header.streams[0].name).with_fields(fields).build();
        let schema = Arc::new(schema.map_err(failed)?);
        let limits = RowGroupLimits { rows: limits.rows.max(1), ..limits };
        let properties = Arc::new(properties(header, limits));
        let column = |column: &RecordedColumn| Column {
            levels: Vec::new(),
            held: match column.kind {
                Type::Boolean => Held::Booleans(Vec::new()),
                Type::Integer => {
                    Held::Integers(Vec::new(), since_1970(header, column).unwrap_or(0))
                }
                Type::Float => Held::Floats(Vec::new()),
                Type::Text => Held::Texts(Texts::default(), 0, Vec::new()),
            },
        };
        Ok(Self {
            file: SerializedFileWriter::new(out, schema, properties).map_err(failed)?,
            columns: header.columns(0).iter().map(column).collect(),
            header: header.clone(),
            limits,
            rows: 0,
            events: 0,
            dropped: 0,
        })
    }

    /// Adds the rows of a batch, whose columns are those of the header. Values of another type and
    /// missing columns become null.
    ///
    /// # Errors
    /// If a row group cannot be written.
    pub fn append(&mut self, batch: &Batch) -> io::Result<()> {
        let none = Values::default();
        let mut from = 0;
        while from < batch.len() {
            let count = CHECK_ROWS.min(batch.len() - from).min(self.limits.rows - self.rows);
            for (number, column) in self.columns.iter_mut().enumerate() {
                column.append(batch.columns.get(number).unwrap_or(&none), from..from + count);
            }
            from += count;
            self.rows += count;
            if self.rows >= self.limits.rows || self.held() >= self.limits.bytes {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Counts events that are missing at this position.
    pub fn note_dropped(&mut self, count: u64) {
        self.dropped = self.dropped.saturating_add(count);
    }

    /// The number of bytes held in memory.
    fn held(&self) -> usize {
        self.columns.iter().map(Column::size).sum()
    }

    /// Closes the row group.
    ///
    /// # Errors
    /// If it cannot be written, or the file already has the most row groups.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.rows == 0 {
            return Ok(());
        }
        if self.groups() >= GROUPS_MAX {
            let message = format!("a Parquet file has at most {GROUPS_MAX} row groups");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
        }
        self.write().map_err(failed)?;
        self.events += self.rows as u64;
        self.rows = 0;
        Ok(())
    }

    fn write(&mut self) -> Result<(), ParquetError> {
        let mut group = self.file.next_row_group()?;
        for column in &mut self.columns {
            if let Some(mut out) = group.next_column()? {
                column.write(&mut out)?;
                out.close()?;
            }
            column.clear();
        }
        group.close().map(drop)
    }

    fn groups(&self) -> usize {
        self.file.flushed_row_groups().len()
    }

    /// Whether there may be too few row groups left for the rows of another block of a recording.
    pub fn is_full(&self) -> bool {
        self.groups() >= GROUPS_MAX - GROUPS_SPARE
    }

    /// The summary of the rows added so far. Its bytes are those already written.
    pub fn summary(&self) -> RecordingSummary {
        RecordingSummary {
            events: self.events + self.rows as u64,
            dropped: self.dropped,
            bytes: self.file.bytes_written() as u64,
        }
    }

    /// The most bytes that the file would have if it ended now.
    pub fn bytes(&self) -> u64 {
        let columns = self.header.columns(0).iter().map(|column| column.name.len() + COLUMN_END);
        let end = (self.groups() + 1) * columns.sum::<usize>() + END;
        (self.file.bytes_written() + self.held() + end) as u64
    }

    /// Writes the end, with the metadata of the rows: the stream, the clock, and from `report` the
    /// numbers of missing and of invalid events, and the first few notes.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn finish(mut self, report: &ReadReport) -> io::Result<RecordingSummary> {
        self.flush()?;
        for (key, value) in self.metadata(report) {
            let key = format!("fathom.{key}");
            self.file.append_key_value_metadata(KeyValue { key, value: Some(value) });
        }
        self.file.finish().map_err(failed)?;
        Ok(self.summary())
    }

    fn metadata(&self, report: &ReadReport) -> Vec<(&'static str, String)> {
        let clock = match self.header.clock {
            Clock::Unknown => "unknown",
            Clock::Monotonic => "monotonic",
        };
        let mut metadata =
            vec![("stream", self.header.streams[0].name.clone()), ("clock", clock.to_owned())];
        if self.header.wall_offset_ns != 0 {
            metadata.push(("wall_offset_ns", self.header.wall_offset_ns.to_string()));
        }
        metadata.push(("events", self.events.to_string()));
        metadata.push(("dropped", report.dropped.to_string()));
        metadata.push(("bad", report.bad.to_string()));
        if !report.notes.is_empty() {
            metadata.push(("notes", report.notes.join("\n")));
        }
        metadata
    }
}

impl Column {
    /// The number of bytes held in memory.
    fn size(&self) -> usize {
        size_of_val(&*self.levels)
            + match &self.held {
                Held::Booleans(values) => values.len(),
                Held::Integers(values, _) => size_of_val(&**values),
                Held::Floats(values) => size_of_val(&**values),
                Held::Texts(_, bytes, numbers) => bytes + size_of_val(&**numbers),
            }
    }

    /// Adds the values of some rows. Rows after the last value are null.
    fn append(&mut self, values: &Values, rows: Range<usize>) {
        let end = self.levels.len() + rows.len();
        let rows = rows.start.min(values.len())..rows.end.min(values.len());
        match values {
            Values::Nulls(_) => {}
            Values::Integers(integers) => {
                integers[rows].iter().for_each(|integer| self.push(&Value::Integer(*integer)));
            }
            Values::Floats(floats) => {
                floats[rows].iter().for_each(|number| self.push(&Value::Float(*number)));
            }
            Values::Values(values) => values[rows].iter().for_each(|value| self.push(value)),
            Values::Indexed(of, at) => {
                at[rows].iter().for_each(|row| self.push(&of.value(*row as usize)));
            }
        }
        self.levels.resize(end, 0);
    }

    fn push(&mut self, value: &Value) {
        match (&mut self.held, value) {
            (Held::Booleans(values), Value::Boolean(value)) => values.push(*value),
            (Held::Integers(values, add), Value::Integer(value)) => {
                values.push(value.wrapping_add(*add));
            }
            (Held::Floats(values), Value::Float(value)) => values.push(*value),
            (Held::Texts(texts, bytes, numbers), Value::Text(text)) => {
                let before = texts.entries().len();
                numbers.push(texts.number(text));
                if texts.entries().len() > before {
                    *bytes += text.len() + size_of::<Arc<str>>();
                }
            }
            _ => return self.levels.push(0),
        }
        self.levels.push(1);
    }

    fn write(&self, out: &mut SerializedColumnWriter<'_>) -> Result<(), ParquetError> {
        match &self.held {
            Held::Booleans(values) => {
                out.typed::<BoolType>().write_batch(values, Some(&self.levels), None)?;
            }
            Held::Integers(values, _) => {
                out.typed::<Int64Type>().write_batch(values, Some(&self.levels), None)?;
            }
            Held::Floats(values) => {
                out.typed::<DoubleType>().write_batch(values, Some(&self.levels), None)?;
            }
            Held::Texts(texts, _, numbers) => self.write_texts(texts, numbers, out)?,
        }
        Ok(())
    }

    fn write_texts(
        &self,
        texts: &Texts,
        numbers: &[u32],
        out: &mut SerializedColumnWriter<'_>,
    ) -> Result<(), ParquetError> {
        let bytes = |text: &Arc<str>| ByteArray::from(text.as_bytes().to_vec());
        let texts: Vec<ByteArray> = texts.entries().iter().map(bytes).collect();
        let mut numbers = numbers.iter();
        let mut values: Vec<<ByteArrayType as DataType>::T> = Vec::with_capacity(TEXTS_PER_WRITE);
        for levels in self.levels.chunks(TEXTS_PER_WRITE) {
            values.clear();
            let count = levels.iter().filter(|level| **level == 1).count();
            values.extend(numbers.by_ref().take(count).map(|at| texts[*at as usize].clone()));
            out.typed::<ByteArrayType>().write_batch(&values, Some(levels), None)?;
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.levels.clear();
        match &mut self.held {
            Held::Booleans(values) => values.clear(),
            Held::Integers(values, _) => values.clear(),
            Held::Floats(values) => values.clear(),
            Held::Texts(texts, bytes, numbers) => {
                texts.clear();
                numbers.clear();
                *bytes = 0;
            }
        }
    }
}
