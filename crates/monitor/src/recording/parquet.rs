//! Rows as a Parquet file, for other tools.
//!
//! Each column of a recording is an optional column of the file. Rows are held in memory, by column,
//! until they fill a row group: as many as a [`RowGroupLimits`] lets them be. What is held then is
//! written one column after the other, so that beside it there are at most the pages of one. Texts
//! are held, and written, once each in a row group.
//!
//! A reader begins at the end of the file: one that is not finished is none.

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
use crate::columns::Column as Values;
use crate::read::{Batch, ReadReport};

/// So many rows are added between two looks at the size of a row group.
const LOOK_ROWS: usize = 1024;
/// So many values are handed on at a time.
const PIECE: usize = 4096;
/// The most row groups: the format numbers them in 15 bits.
const GROUPS_MAX: usize = i16::MAX as usize;
/// So many are left where there is hardly room: more than a block's rows can be.
const GROUPS_SPARE: usize = 2 * BLOCK_ROWS_MAX / LOOK_ROWS;
/// So many bytes at most the end of the file has for each column of a row group, beside its name,
/// and besides.
const COLUMN_END: usize = 256;
const END: usize = 4096;
/// Numbers of which a row group has more different ones than fit into so many bytes are written as
/// differences, others by their places in a dictionary.
const NUMBERS_MAX: usize = 32 << 10;

/// When a row group is closed.
#[derive(Clone, Copy, Debug)]
pub struct RowGroupLimits {
    /// It has so many rows.
    pub rows: usize,
    /// So many bytes of it are held.
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
    /// The events of the row groups that are closed.
    events: u64,
    dropped: u64,
}

/// A column of the row group that is not closed yet.
struct Column {
    /// For each row 1 where it has a value, else 0.
    levels: Vec<i16>,
    held: Held,
}

/// The values that are not null.
enum Held {
    Booleans(Vec<bool>),
    /// The integers, and what was added to each.
    Integers(Vec<i64>, i64),
    Floats(Vec<f64>),
    /// The texts, their bytes, and the number of that of each row that has one.
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

/// What is added to the values of a column so that they are nanoseconds since 1970; `None` where
/// they are no times, or it is not known since when they count.
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
        // More than the texts of a row group can have: none is written twice.
        .set_dictionary_page_size_limit(limits.bytes.saturating_mul(2));
    for column in &header.columns {
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
    /// Begins a file of rows with a header's columns.
    ///
    /// # Errors
    /// When it cannot be written, or there are no columns.
    pub fn new(out: W, header: &Header, limits: RowGroupLimits) -> io::Result<Self> {
        if header.columns.is_empty() {
            let what = "a Parquet file has one column at least";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let fields = header.columns.iter().map(|column| field(header, column).map(Arc::new));
        let fields = fields.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let schema = Field::group_type_builder(&header.stream).with_fields(fields).build();
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
            columns: header.columns.iter().map(column).collect(),
            header: header.clone(),
            limits,
            rows: 0,
            events: 0,
            dropped: 0,
        })
    }

    /// Adds the rows of a batch, whose columns are those of the header. A value of another type is
    /// null, and so are those of columns that are not there.
    ///
    /// # Errors
    /// When a row group cannot be written.
    pub fn append(&mut self, batch: &Batch) -> io::Result<()> {
        let none = Values::default();
        let mut from = 0;
        while from < batch.len() {
            let count = LOOK_ROWS.min(batch.len() - from).min(self.limits.rows - self.rows);
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

    /// So many events are missing here.
    pub fn note_dropped(&mut self, count: u64) {
        self.dropped = self.dropped.saturating_add(count);
    }

    /// How many bytes are held.
    fn held(&self) -> usize {
        self.columns.iter().map(Column::size).sum()
    }

    /// Closes the row group.
    ///
    /// # Errors
    /// When it cannot be written, or there are as many as a file can have.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.rows == 0 {
            return Ok(());
        }
        if self.groups() >= GROUPS_MAX {
            let what = format!("a Parquet file has at most {GROUPS_MAX} row groups");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
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

    /// Whether there is hardly room for more: for as many rows as a block of a recording has.
    pub fn is_full(&self) -> bool {
        self.groups() >= GROUPS_MAX - GROUPS_SPARE
    }

    /// What has been added so far; the bytes are those that were written.
    pub fn summary(&self) -> RecordingSummary {
        RecordingSummary {
            events: self.events + self.rows as u64,
            dropped: self.dropped,
            bytes: self.file.bytes_written() as u64,
        }
    }

    /// How many bytes there would be if it ended now, at most.
    pub fn bytes(&self) -> u64 {
        let columns = self.header.columns.iter().map(|column| column.name.len() + COLUMN_END);
        let end = (self.groups() + 1) * columns.sum::<usize>() + END;
        (self.file.bytes_written() + self.held() + end) as u64
    }

    /// Writes the end, with what is known of the rows: the stream, the clock, and from `report` how
    /// many are missing or made no sense, and the first few notes.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(mut self, report: &ReadReport) -> io::Result<RecordingSummary> {
        self.flush()?;
        for (key, value) in self.told(report) {
            let key = format!("fathom.{key}");
            self.file.append_key_value_metadata(KeyValue { key, value: Some(value) });
        }
        self.file.finish().map_err(failed)?;
        Ok(self.summary())
    }

    fn told(&self, report: &ReadReport) -> Vec<(&'static str, String)> {
        let clock = match self.header.clock {
            Clock::Unknown => "unknown",
            Clock::Monotonic => "monotonic",
        };
        let mut told = vec![("stream", self.header.stream.clone()), ("clock", clock.to_owned())];
        if self.header.wall_offset_ns != 0 {
            told.push(("wall_offset_ns", self.header.wall_offset_ns.to_string()));
        }
        told.push(("events", self.events.to_string()));
        told.push(("dropped", report.dropped.to_string()));
        told.push(("bad", report.bad.to_string()));
        if !report.notes.is_empty() {
            told.push(("notes", report.notes.join("\n")));
        }
        told
    }
}

impl Column {
    /// How many bytes are held.
    fn size(&self) -> usize {
        size_of_val(&*self.levels)
            + match &self.held {
                Held::Booleans(values) => values.len(),
                Held::Integers(values, _) => size_of_val(&**values),
                Held::Floats(values) => size_of_val(&**values),
                Held::Texts(_, bytes, numbers) => bytes + size_of_val(&**numbers),
            }
    }

    /// Adds the values of some rows, null behind the last.
    fn append(&mut self, values: &Values, rows: Range<usize>) {
        let end = self.levels.len() + rows.len();
        let rows = rows.start.min(values.len())..rows.end.min(values.len());
        match values {
            Values::Nulls(_) => {}
            Values::Integers(integers) => {
                integers[rows].iter().for_each(|integer| self.push(&Value::Integer(*integer)));
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
        let mut values: Vec<<ByteArrayType as DataType>::T> = Vec::with_capacity(PIECE);
        for levels in self.levels.chunks(PIECE) {
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
