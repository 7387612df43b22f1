//! Writers: results become text.

mod csv;
mod json;
mod printer;
mod table;

use std::io::{self, Write};

use fathom_cql::Value;
use fathom_cql::catalog::Column;

pub use json::distinct;
pub use printer::{Printer, PrinterOptions};

/// How results are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Columns below each other.
    #[default]
    Table,
    /// Comma-separated, with a line of names.
    Csv,
    /// An object a line.
    Json,
}

/// What stands before the columns of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lead {
    /// `@query`: which query it is of, from 1 on.
    pub query: Option<usize>,
    /// `@ts` and `@sign`: when it came, or went.
    pub change: Option<(i64, bool)>,
}

impl Lead {
    /// The names.
    fn names<'n>(self) -> impl Iterator<Item = &'n str> {
        let change = self.change.map(|_| ["@ts", "@sign"]);
        self.query.map(|_| "@query").into_iter().chain(change.into_iter().flatten())
    }

    /// The values.
    fn values(self) -> impl Iterator<Item = Value> {
        let change = self.change.map(|(time_ns, came)| {
            [Value::Integer(time_ns), Value::text(if came { "+" } else { "-" })]
        });
        let query = self.query.map(|query| Value::Integer(query as i64));
        query.into_iter().chain(change.into_iter().flatten())
    }
}

/// Writes the rows of one query.
trait RowWriter {
    /// Writes what stands above the rows, where something does. The lead's values mean nothing.
    fn head(&mut self, lead: Lead, columns: &[Column], out: &mut dyn Write) -> io::Result<()>;

    /// Writes a row.
    fn row(&mut self, lead: Lead, row: &[Value], out: &mut dyn Write) -> io::Result<()>;

    /// Writes what has been held back.
    fn flush(&mut self, out: &mut dyn Write) -> io::Result<()>;
}

/// A value as text; the shortest that is read as the same float again. Null is empty.
fn plain(value: &Value) -> String {
    match value {
        Value::Float(number) if number.is_finite() => format!("{number:?}"),
        Value::Float(number) if number.is_nan() => "NaN".into(),
        Value::Float(number) => (if *number > 0.0 { "inf" } else { "-inf" }).into(),
        other => other.to_string(),
    }
}
