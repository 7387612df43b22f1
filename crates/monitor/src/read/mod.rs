//! Readers: bytes become events.
//!
//! [`open`] finds out by its content what a file is and gives the [`Reader`] for it. A file is
//! nobody's word to be relied on: lines, fields, tables and waits are bounded, and a line that
//! makes no sense is counted, told (the first few) and passed over, until there are too many.
//! Events come as they are in the file, also out of order.

mod blkparse;
mod columns;
pub(crate) use columns::{place as place_of, width as width_of};
mod csv;
mod intern;
mod lines;
mod recognise;
mod source;
mod tencent;
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

use crate::columns::Column;
use crate::recording::Header;
use source::Source;

/// The most rows that a batch has.
pub const BATCH_ROWS: usize = 4096;
/// The last instant that an event may have, in nanoseconds; windows reach beyond it without
/// overflow. Events have no instants below 0.
pub const LAST_TIME_NS: i64 = i64::MAX / 4;

/// How many messages about bad lines are kept.
const NOTES: usize = 5;
/// So many bad lines are never too many.
const BAD_LINES: u64 = 100;

/// Rows of one stream, by column.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The instant of each row.
    pub times_ns: Vec<i64>,
    /// The columns that were asked for, each as long as there are rows.
    pub columns: Vec<Column>,
    /// The latest instant that was read, be it of a row that was left out; 0 where there is none.
    pub latest_ns: i64,
    /// How many rows were left out, as nobody wants them.
    pub left_out: u64,
}

impl Batch {
    /// Takes everything out.
    pub fn clear(&mut self) {
        self.truncate(0);
        (self.latest_ns, self.left_out) = (0, 0);
    }

    /// How many rows have been read, those that were left out too.
    pub(crate) fn read(&self) -> usize {
        self.len() + self.left_out as usize
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.times_ns.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.times_ns.is_empty()
    }

    /// A row.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn row(&self, row: usize) -> Row {
        self.columns.iter().map(|column| column.value(row)).collect()
    }

    /// The rows, one behind the other.
    pub fn rows(&self) -> impl Iterator<Item = Row> {
        (0..self.len()).map(|row| self.row(row))
    }

    /// Adds a row. All are equally wide.
    pub fn push(&mut self, time_ns: i64, row: Row) {
        self.widen(row.len());
        for (column, value) in self.columns.iter_mut().zip(row) {
            column.push(value);
        }
        self.end_row(time_ns);
    }

    /// Takes the rows out: the instant of each, none below 0, and the columns.
    pub fn take(&mut self) -> (Vec<u64>, Vec<Column>) {
        let times = self.times_ns.drain(..).map(|time_ns| u64::try_from(time_ns).unwrap_or(0));
        let times = times.collect();
        let capacity = self.times_ns.capacity();
        let columns = self.columns.iter_mut().map(|column| column.replace(capacity)).collect();
        (times, columns)
    }

    /// There are so many columns at least.
    pub(crate) fn widen(&mut self, width: usize) {
        if self.columns.len() < width {
            self.columns.resize_with(width, Column::default);
        }
    }

    /// A row whose values are in the columns is there.
    pub(crate) fn end_row(&mut self, time_ns: i64) {
        self.times_ns.push(time_ns);
        self.latest_ns = self.latest_ns.max(time_ns);
    }

    /// Keeps the first rows, and no values of others.
    pub(crate) fn truncate(&mut self, rows: usize) {
        self.times_ns.truncate(rows);
        for column in &mut self.columns {
            column.truncate(rows);
        }
    }
}

/// Something that gives events.
pub trait Reader: Send {
    /// Puts the next rows in place of what is in `batch`: at least one, or as many as were left
    /// out; none and `false` at the end. It waits for the input only while it has nothing to give.
    ///
    /// # Errors
    /// When the input cannot be read, or too much of it makes no sense. Rows that were read before
    /// have been given.
    fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError>;

    /// What has been read so far.
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

/// What a reader has read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadReport {
    /// The events.
    pub events: u64,
    /// The lines or records that made no sense.
    pub bad: u64,
    /// The events that a recording says are missing.
    pub dropped: u64,
    /// What was noticed: each `file:line: what`, the first few only.
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
    /// Its length.
    pub fn nanoseconds(self) -> i64 {
        match self {
            Self::Nanoseconds => 1,
            Self::Microseconds => 1_000,
            Self::Milliseconds => 1_000_000,
            Self::Seconds => 1_000_000_000,
        }
    }
}

/// Columns of the schema, by their positions, that must have these texts, all of them.
pub type Condition = Vec<(usize, Arc<str>)>;

/// How a file is to be understood.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// The column that says when a row came; `None` is `BlktapTS`, or where the file has no such column
    /// the schema's first. Formats other than CSV
    /// have one time only.
    pub time_column: Option<String>,
    /// The unit of that column. Formats that know their unit give their times in this one.
    pub time_unit: TimeUnit,
    /// What is known of the rows that somebody wants: each of them meets one of these conditions.
    /// `None` where nothing is known. A reader may leave out the others.
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

    /// What to do, where there is something.
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

/// Opens a file, or standard input for `-`. Rows have the columns that are
/// `wanted`, in the order of the schema.
///
/// # Errors
/// When it cannot be read, or is in no format that is known.
pub fn open(
    path: &Path,
    schema: &StreamSchema,
    wanted: &[bool],
    options: &ReadOptions,
) -> Result<Box<dyn Reader>, ReadError> {
    let (name, source) = source_of(path)?;
    recognise::reader(&name, source, schema, wanted, options)
}

/// Opens a file like [`open`], with all the columns that it has: those of a recording, or of the
/// stream of I/O events for another. The header says which they are, and what is known of its
/// times.
///
/// # Errors
/// See [`open`].
pub fn open_whole(
    path: &Path,
    options: &ReadOptions,
) -> Result<(Box<dyn Reader>, Header), ReadError> {
    let (name, source) = source_of(path)?;
    recognise::whole(&name, source, options)
}

/// What messages call a file, and its bytes.
fn source_of(path: &Path) -> Result<(String, Source), ReadError> {
    if path.as_os_str() == "-" {
        return Ok(("standard input".into(), Box::new(io::stdin())));
    }
    let name = path.display().to_string();
    let file = std::fs::File::open(path).map_err(|error| ReadError::io(&name, &error))?;
    Ok((name, Box::new(file)))
}

/// Like [`open`], for bytes from anywhere; messages call them `name`.
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
    recognise::reader(name, Box::new(bytes), schema, wanted, options)
}

/// Counts lines and what is wrong with them.
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

    pub(crate) fn note(&mut self, line: u64, what: &str) {
        if self.report.notes.len() < NOTES {
            self.report.notes.push(format!("{}:{line}: {what}", self.name));
        }
    }

    /// A line is bad; an error when these are too many.
    pub(crate) fn bad(&mut self, line: u64, what: &str) -> Result<(), ReadError> {
        self.report.bad += 1;
        self.note(line, what);
        let (bad, lines) = (self.report.bad, self.lines.max(self.report.bad));
        if bad > BAD_LINES && bad > lines / 100 {
            let what = format!("{}:{line}: {what}; {bad} of {lines} lines are bad", self.name);
            return Err(ReadError::new(what).advise("is this the file that was meant?"));
        }
        Ok(())
    }

    /// A batch is full, or the input has ended.
    pub(crate) fn batch(&mut self, batch: &Batch) -> Result<bool, ReadError> {
        let read = batch.read();
        self.report.events += read as u64;
        if self.report.events == 0 && self.report.bad > 0 {
            let first = self.report.notes.last().map_or("nothing makes sense", String::as_str);
            return Err(ReadError::new(format!("{first}; no line of the file is good")));
        }
        Ok(read > 0)
    }

    pub(crate) fn io(&self, error: &io::Error) -> ReadError {
        ReadError::io(&self.name, error)
    }
}

/// A text of the file as messages show it.
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

/// A time in nanoseconds, if it is one that events may have.
fn instant(value: i64, unit: TimeUnit) -> Option<i64> {
    let time = value.checked_mul(unit.nanoseconds())?;
    (0..=LAST_TIME_NS).contains(&time).then_some(time)
}
