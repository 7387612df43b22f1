//! CSV: fields separated by commas or tabs; the first line names the columns.
//!
//! A field may be quoted. Within quotes, a quote is doubled, and lines may end. An empty field is
//! null, `""` an empty text.

use std::sync::Arc;

use fathom_cql::Type;
use fathom_cql::catalog::StreamSchema;
use memchr::memchr;

use super::columns::{FIELD_MAX, count, each, integer, place, value, width};
use super::intern::{TextColumn, Texts, is_same};
use super::lines::{End, LINE_MAX, Lines};
use super::{
    BATCH_ROWS, Batch, Condition, ReadError, ReadOptions, ReadReport, Reader, Tally, TimeUnit,
    instant, shown,
};

/// The most columns of a file.
const COLUMNS_MAX: usize = 1024;

/// The default name of the time column.
const TIME_COLUMN: &str = "BlktapTS";

/// The byte order mark that some editors write before the first line.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// A reader of CSV.
pub struct Csv {
    lines: Lines,
    tally: Tally,
    layout: Layout,
    texts: TextColumns,
    fields: Fields,
}

/// The text columns of a batch, by their positions, and their texts.
struct TextColumns {
    texts: Texts,
    columns: Vec<Option<TextColumn>>,
}

/// The layout of the file's columns.
struct Layout {
    separator: u8,
    /// The number of fields of a record.
    count: usize,
    /// The wanted fields.
    fields: Vec<Field>,
    time: usize,
    time_name: String,
    unit: TimeUnit,
    width: usize,
    /// The wanted columns that the file does not have.
    missing: Vec<usize>,
    /// Conditions on fields. A wanted row meets all parts of at least one condition.
    conditions: Option<Vec<Condition>>,
}

/// A wanted column of the file.
struct Field {
    /// Its position in a record.
    at: usize,
    /// Its position in a batch.
    column: usize,
    kind: Type,
    name: String,
}

/// The positions of a record's fields.
#[derive(Default)]
struct Fields {
    /// The unquoted fields one after the other, if the record has quotes.
    bytes: Vec<u8>,
    /// The end of each field, and whether the field is quoted.
    ends: Vec<(u32, bool)>,
}

/// A record that has been split into fields.
#[derive(Clone, Copy)]
struct Record<'a> {
    bytes: &'a [u8],
    ends: &'a [(u32, bool)],
    /// The number of bytes between two fields.
    gap: usize,
}

impl<'a> Record<'a> {
    /// A field, and whether it is quoted.
    #[inline]
    fn field(&self, at: usize) -> Option<(&'a [u8], bool)> {
        let &(end, quoted) = self.ends.get(at)?;
        let start = match at.checked_sub(1) {
            Some(before) => self.ends[before].0 as usize + self.gap,
            None => 0,
        };
        Some((self.bytes.get(start..end as usize)?, quoted))
    }
}

/// Whether a line names a column of the schema.
pub fn is_header(line: &[u8], schema: &StreamSchema) -> bool {
    names(line).is_some_and(|(_, names)| names.iter().any(|name| schema.find(name).is_some()))
}

/// The separator, and the names of the columns.
fn names(line: &[u8]) -> Option<(u8, Vec<String>)> {
    let line = line.strip_prefix(MARK).unwrap_or(line);
    let separator = if line.contains(&b'\t') { b'\t' } else { b',' };
    let mut fields = Fields::default();
    if fields.split(line, separator) != Split::Whole || fields.ends.len() > COLUMNS_MAX {
        return None;
    }
    let record = fields.record();
    let names = (0..fields.ends.len()).filter_map(|at| record.field(at));
    let name = |(field, _): (&[u8], bool)| String::from_utf8_lossy(field).trim().to_owned();
    Some((separator, names.map(name).collect()))
}

impl Layout {
    fn new(
        header: &[u8],
        schema: &StreamSchema,
        wanted: &[bool],
        options: &ReadOptions,
        tally: &mut Tally,
    ) -> Result<Self, ReadError> {
        let fail = |message: String| ReadError::new(format!("{}: {message}", tally.name));
        let (separator, names) =
            names(header).ok_or_else(|| fail("the first line names no columns".into()))?;
        let columns: Vec<Option<usize>> = names.iter().map(|name| schema.find(name)).collect();
        for (position, column) in columns.iter().enumerate() {
            if column.is_some() && columns[..position].contains(column) {
                let name = shown(names[position].as_bytes());
                return Err(fail(format!("the first line names column {name} twice")));
            }
        }
        let time_name = match &options.time_column {
            Some(name) => name.as_str(),
            // The time of events, even if a script declares a stream of its own.
            None if names.iter().any(|name| name.eq_ignore_ascii_case(TIME_COLUMN)) => TIME_COLUMN,
            None => schema.columns.first().map_or("", |column| column.name.as_str()),
        };
        let of = |name: &String| match (schema.find(name), schema.find(time_name)) {
            (Some(column), Some(time)) => column == time,
            _ => name.eq_ignore_ascii_case(time_name),
        };
        let time = names.iter().position(of).ok_or_else(|| {
            let list: Vec<&str> = names.iter().map(String::as_str).take(40).collect();
            fail(format!("there is no column {time_name}, which would be the time of each row"))
                .advise(format!("name one with --time-column; there are {}", list.join(", ")))
        })?;
        let unknown: Vec<String> = names
            .iter()
            .zip(&columns)
            // Columns of the program's own results, such as `@time`, are not the stream's.
            .filter(|(name, column)| column.is_none() && !name.starts_with('@'))
            .map(|(name, _)| shown(name.as_bytes()))
            .take(20)
            .collect();
        if !unknown.is_empty() {
            let message = format!(
                "{} has no column {}: ignored",
                schema.name,
                unknown.join(", ").replace('"', "")
            );
            tally.note(1, &message);
        }
        let field = |(column, text): &(usize, Arc<str>)| {
            let at = columns.iter().position(|of| *of == Some(*column));
            at.map(|at| (at, Arc::clone(text)))
        };
        // A replacement character in a text may stand for any bytes, so that part of the condition
        // is left out.
        let is_plain = |(_, text): &&(usize, Arc<str>)| !text.contains(char::REPLACEMENT_CHARACTER);
        // A missing column is null and meets no condition.
        let conditions = options.conditions.as_ref().map(|conditions| {
            let fields = |all: &Condition| all.iter().filter(is_plain).map(field).collect();
            conditions.iter().filter_map(fields).collect()
        });
        let (count, time_name) = (names.len(), names[time].clone());
        let fields = names.into_iter().zip(columns).enumerate().filter_map(|(at, (name, of))| {
            let (of, column) = (of?, place(wanted, of?)?);
            Some(Field { at, column, kind: schema.columns[of].kind, name })
        });
        let fields: Vec<Field> = fields.collect();
        let (unit, width) = (options.time_unit, width(wanted));
        let is_missing = |column: &usize| fields.iter().all(|field| field.column != *column);
        let missing = (0..width).filter(is_missing).collect();
        Ok(Self { separator, count, fields, time, time_name, unit, width, missing, conditions })
    }

    fn text_columns(&self) -> TextColumns {
        let is_text = |column| {
            self.fields.iter().any(|field| field.column == column && field.kind == Type::Text)
        };
        let columns = (0..self.width).map(|column| is_text(column).then(TextColumn::new));
        TextColumns { texts: Texts::new(), columns: columns.collect() }
    }

    /// Moves the text columns into the batch, and fills the missing columns with nulls.
    fn end(&self, texts: &mut TextColumns, batch: &mut Batch) {
        let rows = batch.len();
        if rows > 0 {
            for (place, column) in batch.columns.iter_mut().zip(&mut texts.columns) {
                if let Some(column) = column {
                    *place = column.take();
                }
            }
            for &column in &self.missing {
                batch.columns[column].pad(rows);
            }
        }
    }

    /// Whether a record may meet one of the conditions.
    fn is_wanted(&self, record: Record<'_>) -> bool {
        let Some(conditions) = &self.conditions else { return true };
        let holds = |&(at, ref text): &(usize, Arc<str>)| {
            record.field(at).is_none_or(|(bytes, _)| is_same(bytes, text.as_bytes()))
        };
        conditions.iter().any(|all| all.iter().all(holds))
    }

    /// The time of a record, in the file's unit and in nanoseconds.
    fn time(&self, record: Record<'_>) -> Option<(i64, i64)> {
        let time = count(record.field(self.time)?.0.trim_ascii())?;
        Some((time, instant(time, self.unit)?))
    }

    /// Adds a record's row to a batch if it is wanted. Returns the reason if the record is invalid.
    fn row(
        &self,
        record: Record<'_>,
        texts: &mut TextColumns,
        batch: &mut Batch,
    ) -> Result<(), String> {
        if record.ends.len() != self.count {
            return Err(format!("{} fields, but {} columns", record.ends.len(), self.count));
        }
        let Some((time, time_ns)) = self.time(record) else {
            let field = record.field(self.time).map_or(&b""[..], |(field, _)| field);
            return Err(format!(
                "{} is {}, which is not a valid time",
                self.time_name,
                shown(field)
            ));
        };
        if !self.is_wanted(record) {
            batch.filter_out(time_ns);
            return Ok(());
        }
        let rows = batch.len();
        batch.widen(self.width);
        for field in &self.fields {
            let Some((bytes, quoted)) = record.field(field.at) else { continue };
            match &mut texts.columns[field.column] {
                Some(column) if bytes.len() <= FIELD_MAX => {
                    if bytes.is_empty() && !quoted {
                        column.push_null();
                    } else {
                        column.push(bytes, &mut texts.texts);
                    }
                    continue;
                }
                _ => {}
            }
            let column = &mut batch.columns[field.column];
            let known = match field.kind {
                Type::Integer if field.at == self.time => Some(time),
                Type::Integer => integer(bytes),
                _ => None,
            };
            if let Some(integer) = known {
                column.push_integer(integer);
                continue;
            }
            match value(bytes, quoted, field.kind, &field.name, &mut texts.texts) {
                Ok(value) => column.push(value),
                Err(message) => {
                    batch.truncate(rows);
                    texts.columns.iter_mut().flatten().for_each(|column| column.truncate(rows));
                    return Err(message);
                }
            }
        }
        batch.end_row(time_ns);
        Ok(())
    }
}

/// The result of splitting a record with quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    /// The record is complete.
    Whole,
    /// The quotes of the last field are not closed.
    Open,
    /// Bytes follow a closing quote.
    Wrong,
}

impl Fields {
    fn split(&mut self, record: &[u8], separator: u8) -> Split {
        self.bytes.clear();
        self.ends.clear();
        let mut rest = record;
        loop {
            let quoted = rest.first() == Some(&b'"');
            if quoted {
                rest = &rest[1..];
                loop {
                    let Some(at) = memchr(b'"', rest) else { return Split::Open };
                    self.bytes.extend_from_slice(&rest[..at]);
                    rest = &rest[at + 1..];
                    if rest.first() != Some(&b'"') {
                        break;
                    }
                    self.bytes.push(b'"');
                    rest = &rest[1..];
                }
                if rest.first().is_some_and(|&byte| byte != separator) {
                    return Split::Wrong;
                }
            } else {
                let end = memchr(separator, rest).unwrap_or(rest.len());
                self.bytes.extend_from_slice(&rest[..end]);
                rest = &rest[end..];
            }
            self.ends.push((self.bytes.len() as u32, quoted));
            if rest.is_empty() {
                return Split::Whole;
            }
            rest = &rest[1..];
        }
    }

    /// The split record.
    fn record(&self) -> Record<'_> {
        Record { bytes: &self.bytes, ends: &self.ends, gap: 0 }
    }

    /// Splits a record without quotes. Fields are short, so examining eight bytes at a time is
    /// faster than a search for each separator.
    fn plain<'a>(&'a mut self, record: &'a [u8], separator: u8) -> Record<'a> {
        let ends = &mut self.ends;
        ends.clear();
        let mut words = record.chunks_exact(8);
        for (number, word) in words.by_ref().enumerate() {
            let word = word.try_into().map_or(0, u64::from_le_bytes);
            let mut separators = found(word, separator);
            while separators != 0 {
                let at = number * 8 + separators.trailing_zeros() as usize / 8;
                ends.push((at as u32, false));
                separators &= separators - 1;
            }
        }
        let rest = record.len() / 8 * 8;
        for (at, &byte) in words.remainder().iter().enumerate() {
            if byte == separator {
                ends.push(((rest + at) as u32, false));
            }
        }
        ends.push((record.len() as u32, false));
        Record { bytes: record, ends, gap: 1 }
    }
}

/// Finds a byte in a word: sets the highest bit of each equal byte.
fn found(word: u64, byte: u8) -> u64 {
    let differs = word ^ each(byte);
    !(((differs & each(0x7f)) + each(0x7f)) | differs | each(0x7f))
}

impl Csv {
    /// Reads the header and prepares to read the records after it.
    pub fn new(
        name: &str,
        mut lines: Lines,
        schema: &StreamSchema,
        wanted: &[bool],
        options: &ReadOptions,
    ) -> Result<Self, ReadError> {
        let mut tally = Tally::new(name);
        let layout = loop {
            match lines.find(0, true).map_err(|error| tally.io(&error))? {
                End::Line { length, next } => {
                    let header = lines.bytes(0..length);
                    if header.trim_ascii().is_empty() {
                        lines.consume(next, 1);
                        continue;
                    }
                    let layout = Layout::new(header, schema, wanted, options, &mut tally)?;
                    lines.consume(next, 1);
                    break layout;
                }
                _ => return Err(ReadError::new(format!("{name}: the first line is too long"))),
            }
        };
        let texts = layout.text_columns();
        Ok(Self { lines, tally, layout, texts, fields: Fields::default() })
    }

    /// Reads a record with quotes from the current position. Returns the result, the record's
    /// length in bytes and its number of lines; `None` if the record is incomplete and `wait` does
    /// not allow waiting for more.
    fn quoted(
        &mut self,
        first: (usize, usize),
        wait: bool,
        batch: &mut Batch,
    ) -> Result<Option<Done>, ReadError> {
        let (mut length, mut next) = first;
        let mut lines = 1;
        loop {
            let record = self.lines.bytes(0..length);
            match self.fields.split(record, self.layout.separator) {
                Split::Whole => {
                    let read = self.layout.row(self.fields.record(), &mut self.texts, batch);
                    return Ok(Some((read, next, lines)));
                }
                Split::Wrong => {
                    let message = "text follows the end of a quoted field";
                    return Ok(Some((Err(message.into()), first.1, 1)));
                }
                Split::Open => {}
            }
            // Each further line means to split the whole record again, so the number of lines is
            // limited.
            let end = self.lines.find(next, wait).map_err(|error| self.tally.io(&error))?;
            match end {
                End::Line { length: l, next: n } if lines < 64 && l <= FIELD_MAX * 4 => {
                    (length, next) = (l, n);
                    lines += 1;
                }
                End::Wait => return Ok(None),
                _ => return Ok(Some((Err("a quote is not closed".into()), first.1, 1))),
            }
        }
    }
}

/// The result of a record, its length in bytes, and its number of lines.
type Done = (Result<(), String>, usize, u64);

impl Reader for Csv {
    fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError> {
        batch.clear();
        self.texts.columns.iter_mut().flatten().for_each(|column| column.truncate(0));
        while batch.read() < BATCH_ROWS {
            let wait = batch.read() == 0;
            let end = self.lines.find(0, wait).map_err(|error| self.tally.io(&error))?;
            let (read, next, lines) = match end {
                End::Line { length, next } => {
                    let has_quote = self.lines.has_quote(length);
                    let record = self.lines.bytes(0..length);
                    if has_quote {
                        match self.quoted((length, next), wait, batch)? {
                            Some(done) => done,
                            None => break,
                        }
                    } else if record.is_empty() {
                        self.lines.consume(next, 1);
                        continue;
                    } else {
                        let record = self.fields.plain(record, self.layout.separator);
                        (self.layout.row(record, &mut self.texts, batch), next, 1)
                    }
                }
                End::TooLong => {
                    self.lines.skip().map_err(|error| self.tally.io(&error))?;
                    self.tally.lines += 1;
                    let message = format!("a line of more than {LINE_MAX} bytes");
                    self.tally.bad(self.lines.number(), &message)?;
                    continue;
                }
                End::Input | End::Wait => break,
            };
            self.tally.lines += 1;
            if let Err(message) = read {
                self.tally.bad(self.lines.number() + 1, &message)?;
            }
            self.lines.consume(next, lines);
        }
        self.layout.end(&mut self.texts, batch);
        self.tally.batch(batch)
    }

    fn report(&self) -> &ReadReport {
        &self.tally.report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_split_at_separators_at_any_position() {
        let mut state = 1_u64;
        for _ in 0..2000 {
            let mut record = Vec::new();
            while state % 40 != 0 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                record
                    .push([b',', b'a', 0, 0xff, b',' + 0x80, b',' - 1][(state >> 40) as usize % 6]);
                state ^= state >> 29;
            }
            state += 1;
            let expected: Vec<&[u8]> = record.split(|&byte| byte == b',').collect();
            let mut fields = Fields::default();
            let found = fields.plain(&record, b',');
            let count = found.ends.len();
            let fields = (0..=count).map_while(|at| found.field(at)).map(|(field, _)| field);
            assert!(fields.eq(expected), "{record:?}");
        }
    }
}
