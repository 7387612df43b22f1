//! Writers of results as text.

mod csv;
mod json;
mod printer;
mod table;

use std::io::{self, Write};

use fathom_cql::Value;
use fathom_cql::catalog::Column;

pub use json::distinct;
pub use printer::{Printer, PrinterOptions, ShownTimes};

/// The format of results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Aligned columns.
    #[default]
    Table,
    /// Comma-separated, after a line with the names.
    Csv,
    /// One object per line.
    Json,
}

/// The values that precede the columns of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lead<'a> {
    /// `@query`: the number of the row's query, from 1.
    pub query: Option<usize>,
    /// `@time`: the instant as people read it.
    pub time: Option<&'a str>,
    /// `@ts` and `@sign`: the instant in nanoseconds, and whether the row was inserted or deleted.
    pub change: Option<(i64, bool)>,
}

impl<'a> Lead<'a> {
    /// The names.
    fn names<'n>(self) -> impl Iterator<Item = &'n str> + use<'n> {
        let change = self.change.map(|_| ["@ts", "@sign"]);
        let (query, time) = (self.query.map(|_| "@query"), self.time.map(|_| "@time"));
        query.into_iter().chain(time).chain(change.into_iter().flatten())
    }

    /// The values.
    fn values(self) -> impl Iterator<Item = Value> + use<'a> {
        let change = self.change.map(|(time_ns, came)| {
            [Value::Integer(time_ns), Value::text(if came { "+" } else { "-" })]
        });
        let query = self.query.map(|query| Value::Integer(query as i64));
        let time = self.time.map(Value::text);
        query.into_iter().chain(time).chain(change.into_iter().flatten())
    }
}

/// Writes the rows of one query.
trait RowWriter {
    /// Writes the header, if the format has one. The values of `lead` are not used.
    fn head(&mut self, lead: Lead<'_>, columns: &[Column], out: &mut dyn Write) -> io::Result<()>;

    /// Writes a row.
    fn row(&mut self, lead: Lead<'_>, row: &[Value], out: &mut dyn Write) -> io::Result<()>;

    /// Writes the rows that are held back.
    fn flush(&mut self, out: &mut dyn Write) -> io::Result<()>;
}

/// A value as text. A float is the shortest text that is read as the same float. Null is empty.
fn plain(value: &Value) -> String {
    match value {
        Value::Float(number) if number.is_finite() => format!("{number:?}"),
        Value::Float(number) if number.is_nan() => "NaN".into(),
        Value::Float(number) => (if *number > 0.0 { "inf" } else { "-inf" }).into(),
        other => other.to_string(),
    }
}
