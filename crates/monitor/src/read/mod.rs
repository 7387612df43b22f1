//! Readers of events from files.
//!
//! [`open`] recognises the format of a file by its content and returns a [`Reader`] for it. Files
//! are untrusted: lines, fields, tables and waits are bounded. An invalid line is counted and
//! skipped, and the first few are reported. Too many invalid lines are an error. Events are
//! returned in the order of the file, which may differ from the order of their times.

mod blkparse;
mod columns;
pub(crate) use columns::{place as place_of, width as width_of};
mod csv;
mod formats;
mod intern;
mod iolog;
mod lines;
mod oracle_general;
mod recognise;
mod records;
mod request;
mod requests;
mod source;
mod text;
mod vscsi;

pub(crate) use intern::Texts;
pub(crate) use lines::read_full;

use std::fmt;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use fathom_cql::catalog::StreamSchema;
use fathom_cql::{Row, Value};

use crate::columns::ColumnValues;
use crate::recording::Header;
use source::ByteSource;

/// The most rows of a batch.
pub const BATCH_ROWS: usize = 4096;
/// The latest instant of an event, in nanoseconds. Ends of windows after it do not overflow. Events
/// have no negative instants.
pub const LAST_TIME_NS: i64 = i64::MAX / 4;

/// The most messages about invalid lines that are kept.
const NOTES_MAX: usize = 5;
/// The number of invalid lines that is accepted in any file. Above it, at most one line in 100 may
/// be invalid.
const BAD_LINES: u64 = 100;

/// A stream whose rows are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedStream {
    /// The stream.
    pub schema: StreamSchema,
    /// For each of its columns whether it is wanted. Rows have the wanted columns only, in the
    /// order of the schema.
    pub columns: Vec<bool>,
}

impl WantedStream {
    /// Some columns of a stream.
    pub fn new(schema: &StreamSchema, columns: &[bool]) -> Self {
        Self { schema: schema.clone(), columns: columns.to_vec() }
    }

    /// All columns of a stream.
    pub fn whole(schema: &StreamSchema) -> Self {
        Self::new(schema, &vec![true; schema.columns.len()])
    }
}

/// Rows of one stream, by column.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The position of the stream among the wanted ones, or, if all are read, in the recording.
    pub stream: usize,
    /// The instant of each row, in nanoseconds.
    pub times_ns: Vec<i64>,
    /// The wanted columns; each has a value for each row.
    pub columns: Vec<ColumnValues>,
    /// The latest instant that was read, including filtered rows, in nanoseconds; 0 if there is
    /// none.
    pub latest_ns: i64,
    /// The number of rows that were filtered out because they meet no condition.
    pub filtered: u64,
    /// The latest instants of filtered rows: the number of rows before them in the batch, and the
    /// instant, in nanoseconds. Both increase.
    pub(crate) passed: Vec<(usize, i64)>,
}

impl Batch {
    /// Removes all rows.
    pub fn clear(&mut self) {
        self.truncate(0);
        (self.latest_ns, self.filtered) = (0, 0);
        self.passed.clear();
    }

    /// Prepares the empty batch for rows of a stream.
    pub(crate) fn reuse_for(&mut self, stream: usize) {
        if self.stream != stream {
            self.stream = stream;
            self.columns.clear();
        }
    }

    /// The number of rows read, including filtered rows.
    pub(crate) fn read(&self) -> usize {
        self.len() + self.filtered as usize
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.times_ns.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.times_ns.is_empty()
    }

    /// Returns a row.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> Row {
        self.columns.iter().map(|column| column.value(row)).collect()
    }

    /// The rows in their order.
    pub fn rows(&self) -> impl Iterator<Item = Row> {
        (0..self.len()).map(|row| self.row(row))
    }

    /// Adds a row. All rows have the same number of columns.
    pub fn push(&mut self, time_ns: i64, row: Row) {
        self.widen(row.len());
        for (column, value) in self.columns.iter_mut().zip(row) {
            column.push(value);
        }
        self.end_row(time_ns);
    }

    /// Takes the rows out: the instant of each row (negative ones become 0), and the columns.
    pub fn take(&mut self) -> (Vec<u64>, Vec<ColumnValues>) {
        let times = self.times_ns.drain(..).map(|time_ns| u64::try_from(time_ns).unwrap_or(0));
        let times = times.collect();
        let capacity = self.times_ns.capacity();
        let columns = self.columns.iter_mut().map(|column| column.replace(capacity)).collect();
        (times, columns)
    }

    /// Adds empty columns up to the number `width`.
    pub(crate) fn widen(&mut self, width: usize) {
        if self.columns.len() < width {
            self.columns.resize_with(width, ColumnValues::default);
        }
    }

    /// Counts a row that is filtered out.
    pub(crate) fn filter_out(&mut self, time_ns: i64) {
        self.filtered += 1;
        if time_ns <= self.latest_ns {
            return;
        }
        self.latest_ns = time_ns;
        let rows = self.len();
        match self.passed.last_mut() {
            Some((before, latest_ns)) if *before == rows => *latest_ns = time_ns,
            _ => self.passed.push((rows, time_ns)),
        }
    }

    /// Ends a row whose values have been added to the columns.
    pub(crate) fn end_row(&mut self, time_ns: i64) {
        self.times_ns.push(time_ns);
        self.latest_ns = self.latest_ns.max(time_ns);
    }

    /// Keeps only the first rows, and removes all values of other rows.
    pub(crate) fn truncate(&mut self, rows: usize) {
        self.times_ns.truncate(rows);
        for column in &mut self.columns {
            column.truncate(rows);
        }
    }
}

/// A source of events.
pub trait Reader: Send {
    /// Replaces the content of `batch` by the next rows. Unless the input has ended, there is at
    /// least one row or one filtered row. Returns `false` at the end. It waits for the input only
    /// while it has no row to return.
    ///
    /// # Errors
    /// If the input cannot be read, or too much of it is invalid. All rows before the error have
    /// been returned.
    fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError>;

    /// The report so far.
    fn report(&self) -> &ReadReport;
}

impl<R: Reader + ?Sized> Reader for &mut R {
    fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError> {
        (**self).next_batch(batch)
    }

    fn report(&self) -> &ReadReport {
        (**self).report()
    }
}

/// The report of a reader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadReport {
    /// The number of events.
    pub events: u64,
    /// The number of invalid lines or records.
    pub bad: u64,
    /// The number of missing events, as a recording reports them.
    pub dropped: u64,
    /// Messages about invalid or missing data, `file:line: message`; only the first few.
    pub notes: Vec<String>,
}

/// The unit of a column of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeUnit {
    /// Nanoseconds.
    #[default]
    Nanoseconds,
    /// Microseconds, as in the monitoring paper's tables.
    Microseconds,
    /// Milliseconds.
    Milliseconds,
    /// Seconds.
    Seconds,
}

impl TimeUnit {
    /// The length of the unit, in nanoseconds.
    pub fn nanoseconds(self) -> i64 {
        match self {
            Self::Nanoseconds => 1,
            Self::Microseconds => 1_000,
            Self::Milliseconds => 1_000_000,
            Self::Seconds => 1_000_000_000,
        }
    }
}

/// A condition: columns of the schema, by their positions, that must have these texts.
pub type Condition = Vec<(usize, Arc<str>)>;

/// The options for reading a file.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// The column with the rows' times. `None` is `BlktapTS`, or the first column of the schema if
    /// the file has no `BlktapTS`. Formats other than CSV have a single time.
    pub time_column: Option<String>,
    /// The unit of that column. Formats with a fixed unit convert their times to this unit.
    pub time_unit: TimeUnit,
    /// A wanted row meets at least one of these conditions. `None` if all rows may be wanted. A
    /// reader may filter out the other rows.
    pub conditions: Option<Vec<Condition>>,
}

/// Why a file cannot be read.
#[derive(Debug)]
pub struct ReadError {
    message: String,
    help: Option<String>,
}

impl ReadError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), help: None }
    }

    pub(crate) fn io(name: &str, error: &io::Error) -> Self {
        let text = error.to_string();
        let reason = text.split(" (os error").next().unwrap_or_default();
        Self::new(format!("cannot read {name}: {reason}"))
    }

    pub(crate) fn advise(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }

    /// Advice to the user, if there is any.
    pub fn help(&self) -> Option<&str> {
        self.help.as_deref()
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for ReadError {}

/// Opens a file, or standard input for `-`. Rows have the wanted columns, in the order of the
/// schema.
///
/// # Errors
/// If it cannot be read, or its format is unknown.
pub fn open(
    path: &Path,
    schema: &StreamSchema,
    wanted: &[bool],
    options: &ReadOptions,
) -> Result<Box<dyn Reader>, ReadError> {
    open_streams(path, &[WantedStream::new(schema, wanted)], options)
}

/// Opens a file like [`open`], with the rows of several streams. Only recordings have more than
/// one. A batch has the position of its stream in `wanted`.
///
/// # Errors
/// See [`open`]; or if the file has none of the streams.
pub fn open_streams(
    path: &Path,
    wanted: &[WantedStream],
    options: &ReadOptions,
) -> Result<Box<dyn Reader>, ReadError> {
    let (name, source) = source_of(path)?;
    recognise::reader(&name, source, wanted, options)
}

/// Opens a file like [`open`], with all columns of a stream: of a recording the stream named
/// `stream`, or its first one; for other formats the named stream, or the stream of I/O events. The
/// header describes the columns and the clock.
///
/// # Errors
/// See [`open`]; or if there is no such stream.
pub fn open_whole(
    path: &Path,
    stream: Option<&str>,
    options: &ReadOptions,
) -> Result<(Box<dyn Reader>, Header), ReadError> {
    let (name, source) = source_of(path)?;
    recognise::whole(&name, source, stream, options)
}

/// The names of the formats of other programs that [`open`] recognises.
pub fn trace_formats() -> impl Iterator<Item = &'static str> {
    formats::FORMATS.into_iter().map(|format| format.name)
}

/// The name of a file in messages, and its bytes.
fn source_of(path: &Path) -> Result<(String, ByteSource), ReadError> {
    if path.as_os_str() == "-" {
        return Ok(("standard input".into(), Box::new(io::stdin())));
    }
    let name = path.display().to_string();
    let file = std::fs::File::open(path).map_err(|error| ReadError::io(&name, &error))?;
    Ok((name, Box::new(file)))
}

/// Like [`open`], for bytes from any source; `name` is the source's name in messages.
///
/// # Errors
/// See [`open`].
pub fn from_bytes(
    name: &str,
    bytes: impl Read + Send + 'static,
    schema: &StreamSchema,
    wanted: &[bool],
    options: &ReadOptions,
) -> Result<Box<dyn Reader>, ReadError> {
    recognise::reader(name, Box::new(bytes), &[WantedStream::new(schema, wanted)], options)
}

/// Counts lines and collects messages about them.
#[derive(Debug)]
pub(crate) struct Tally {
    pub(crate) name: String,
    pub(crate) lines: u64,
    pub(crate) report: ReadReport,
}

impl Tally {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), lines: 0, report: ReadReport::default() }
    }

    pub(crate) fn note(&mut self, line: u64, message: &str) {
        if self.report.notes.len() < NOTES_MAX {
            self.report.notes.push(format!("{}:{line}: {message}", self.name));
        }
    }

    /// Counts an invalid line. An error if there are too many.
    pub(crate) fn bad(&mut self, line: u64, message: &str) -> Result<(), ReadError> {
        self.report.bad += 1;
        self.note(line, message);
        let (bad, lines) = (self.report.bad, self.lines.max(self.report.bad));
        if bad > BAD_LINES && bad > lines / 100 {
            let message =
                format!("{}:{line}: {message}; {bad} of {lines} lines are bad", self.name);
            return Err(ReadError::new(message).advise("check that this is the right file"));
        }
        Ok(())
    }

    /// Counts the events of a batch. Returns `false` if the input has ended.
    pub(crate) fn batch(&mut self, batch: &Batch) -> Result<bool, ReadError> {
        let read = batch.read();
        self.report.events += read as u64;
        if self.report.events == 0 && self.report.bad > 0 {
            let first = self.report.notes.last().map_or("invalid lines", String::as_str);
            return Err(ReadError::new(format!("{first}; no line of the file is valid")));
        }
        Ok(read > 0)
    }

    pub(crate) fn io(&self, error: &io::Error) -> ReadError {
        ReadError::io(&self.name, error)
    }
}

/// A text of the file in a form for messages.
fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(160)]);
    let short: String = text.chars().take(40).collect();
    let more = if short.len() < bytes.len() { "…" } else { "" };
    format!("{short:?}{more}")
}

/// A row of nulls. (`vec![Value::Null; width]` would clone the null.)
fn nulls(width: usize) -> Row {
    std::iter::repeat_with(|| Value::Null).take(width).collect()
}

/// A time in nanoseconds; `None` if it is outside the range of events' instants.
fn instant(value: i64, unit: TimeUnit) -> Option<i64> {
    let time = value.checked_mul(unit.nanoseconds())?;
    (0..=LAST_TIME_NS).contains(&time).then_some(time)
}
