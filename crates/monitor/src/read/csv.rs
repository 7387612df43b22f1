//! CSV: fields between commas or tabs, the first line names the columns.
//!
//! A field may be in quotes, where a quote is doubled and lines may end. An empty field is null,
//! `""` an empty text.

use fathom_cql::catalog::StreamSchema;
use fathom_cql::{Row, Type};
use memchr::{memchr, memchr_iter};

use super::columns::{LONGEST_FIELD, count, place, value, width};
use super::intern::Texts;
use super::lines::{End, LONGEST, Lines};
use super::{
    BATCH_ROWS, Batch, ReadError, ReadOptions, ReadReport, Reader, Tally, TimeUnit, instant, nulls,
    shown,
};

/// The most columns that a file may have.
const COLUMNS: usize = 1024;
/// What an editor may put before the first line.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// A reader of CSV.
pub struct Csv {
    lines: Lines,
    tally: Tally,
    layout: Layout,
    texts: Texts,
    fields: Fields,
}

/// What the columns of the file are.
struct Layout {
    separator: u8,
    fields: Vec<Field>,
    time: usize,
    unit: TimeUnit,
    width: usize,
}

/// A column of the file.
struct Field {
    /// Which column of the stream it is, if that is asked for.
    column: Option<usize>,
    kind: Type,
    name: String,
}

/// The fields of a record that has quotes.
#[derive(Default)]
struct Fields {
    bytes: Vec<u8>,
    /// Behind each field, and whether it is in quotes.
    ends: Vec<(usize, bool)>,
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
    if fields.split(line, separator) != Split::Whole || fields.ends.len() > COLUMNS {
        return None;
    }
    let name = |(field, _): (&[u8], bool)| String::from_utf8_lossy(field).trim().to_owned();
    Some((separator, fields.iter().map(name).collect()))
}

impl Layout {
    fn new(
        header: &[u8],
        schema: &StreamSchema,
        wanted: &[bool],
        options: &ReadOptions,
        tally: &mut Tally,
    ) -> Result<Self, ReadError> {
        let fail = |what: String| ReadError::new(format!("{}: {what}", tally.name));
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
            None => schema.columns.first().map_or("", |column| column.name.as_str()),
        };
        let of = |name: &String| match (schema.find(name), schema.find(time_name)) {
            (Some(column), Some(time)) => column == time,
            _ => name.eq_ignore_ascii_case(time_name),
        };
        let time = names.iter().position(of).ok_or_else(|| {
            let list: Vec<&str> = names.iter().map(String::as_str).take(40).collect();
            fail(format!("there is no column {time_name}, which would tell the time of each row"))
                .advise(format!("name one with --time-column; there are {}", list.join(", ")))
        })?;
        let unknown: Vec<String> = names
            .iter()
            .zip(&columns)
            .filter(|(_, column)| column.is_none())
            .map(|(name, _)| shown(name.as_bytes()))
            .take(20)
            .collect();
        if !unknown.is_empty() {
            let what = format!(
                "{} has no column {}: passed over",
                schema.name,
                unknown.join(", ").replace('"', "")
            );
            tally.note(1, &what);
        }
        let fields = names
            .into_iter()
            .zip(columns)
            .map(|(name, column)| Field {
                column: column.and_then(|column| place(wanted, column)),
                kind: column.map_or(Type::Text, |column| schema.columns[column].kind),
                name,
            })
            .collect();
        let (unit, width) = (options.time_unit, width(wanted));
        Ok(Self { separator, fields, time, unit, width })
    }

    /// The row of a record, or what is wrong with it.
    fn row<'a>(
        &self,
        fields: impl Iterator<Item = (&'a [u8], bool)>,
        texts: &mut Texts,
    ) -> Result<(i64, Row), String> {
        let mut row = nulls(self.width);
        let mut time_ns = 0;
        let mut found = 0;
        for (position, (bytes, quoted)) in fields.enumerate() {
            found += 1;
            let Some(field) = self.fields.get(position) else { continue };
            if position == self.time {
                time_ns = count(bytes.trim_ascii())
                    .and_then(|time| instant(time, self.unit))
                    .ok_or_else(|| {
                        format!("{} is {}, which is no time", field.name, shown(bytes))
                    })?;
            }
            if let Some(column) = field.column {
                row[column] = value(bytes, quoted, field.kind, &field.name, texts)?;
            }
        }
        if found == self.fields.len() {
            Ok((time_ns, row))
        } else {
            Err(format!("{found} fields, but {} columns", self.fields.len()))
        }
    }
}

/// What became of a record in quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    /// All fields are there.
    Whole,
    /// The last field's quotes do not end.
    Open,
    /// Something stands behind a quote, or there is too much.
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
            self.ends.push((self.bytes.len(), quoted));
            if rest.is_empty() {
                return Split::Whole;
            }
            rest = &rest[1..];
        }
    }

    fn iter(&self) -> impl Iterator<Item = (&[u8], bool)> {
        let mut start = 0;
        self.ends.iter().map(move |&(end, quoted)| {
            let field = &self.bytes[start..end];
            start = end;
            (field, quoted)
        })
    }
}

/// The fields of a record without quotes.
fn plain(record: &[u8], separator: u8) -> impl Iterator<Item = (&[u8], bool)> {
    let mut start = 0;
    memchr_iter(separator, record).chain([record.len()]).map(move |end| {
        let field = &record[start..end];
        start = end + 1;
        (field, false)
    })
}

impl Csv {
    /// Reads on behind the header.
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
        Ok(Self { lines, tally, layout, texts: Texts::new(), fields: Fields::default() })
    }

    /// The record that begins here, which has quotes; `None` where more of it is to be waited for.
    /// Says also how long it is, and how many lines it has.
    #[allow(clippy::type_complexity, reason = "one caller")]
    fn quoted(
        &mut self,
        first: (usize, usize),
        wait: bool,
    ) -> Result<Option<(Result<(i64, Row), String>, usize, u64)>, ReadError> {
        let (mut length, mut next) = first;
        let mut lines = 1;
        loop {
            let record = self.lines.bytes(0..length);
            match self.fields.split(record, self.layout.separator) {
                Split::Whole => {
                    let row = self.layout.row(self.fields.iter(), &mut self.texts);
                    return Ok(Some((row, next, lines)));
                }
                Split::Wrong => {
                    let what = "a quoted field does not end with its quote";
                    return Ok(Some((Err(what.into()), first.1, 1)));
                }
                Split::Open => {}
            }
            // Each line more means to split all again: a field of so many lines is none.
            let end = self.lines.find(next, wait).map_err(|error| self.tally.io(&error))?;
            match end {
                End::Line { length: l, next: n } if lines < 64 && l <= LONGEST_FIELD * 4 => {
                    (length, next) = (l, n);
                    lines += 1;
                }
                End::Wait => return Ok(None),
                _ => return Ok(Some((Err("a quote without its other".into()), first.1, 1))),
            }
        }
    }
}

impl Reader for Csv {
    fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError> {
        batch.clear();
        while batch.len() < BATCH_ROWS {
            let wait = batch.is_empty();
            let end = self.lines.find(0, wait).map_err(|error| self.tally.io(&error))?;
            let (row, next, lines) = match end {
                End::Line { length, next } => {
                    let record = self.lines.bytes(0..length);
                    if memchr(b'"', record).is_some() {
                        match self.quoted((length, next), wait)? {
                            Some(done) => done,
                            None => break,
                        }
                    } else if record.is_empty() {
                        self.lines.consume(next, 1);
                        continue;
                    } else {
                        let fields = plain(record, self.layout.separator);
                        (self.layout.row(fields, &mut self.texts), next, 1)
                    }
                }
                End::TooLong => {
                    self.lines.skip().map_err(|error| self.tally.io(&error))?;
                    self.tally.lines += 1;
                    let what = format!("a line of more than {LONGEST} bytes");
                    self.tally.bad(self.lines.number(), &what)?;
                    continue;
                }
                End::Input | End::Wait => break,
            };
            self.tally.lines += 1;
            match row {
                Ok((time_ns, row)) => batch.push(time_ns, row),
                Err(what) => self.tally.bad(self.lines.number() + 1, &what)?,
            }
            self.lines.consume(next, lines);
        }
        self.tally.batch(batch)
    }

    fn report(&self) -> &ReadReport {
        &self.tally.report
    }
}
