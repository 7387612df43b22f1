//! CSV (RFC 4180, but lines end with a line feed). Null is empty, an empty text is `""`.

use std::io::{self, Write};

use fathom_cql::Value;
use fathom_cql::catalog::Column;

use super::{Lead, RowWriter, plain};

/// Writes CSV.
pub struct Csv;

fn field(text: &str, out: &mut dyn Write) -> io::Result<()> {
    let quoted = text.is_empty()
        || text.contains([',', '"', '\n', '\r', '\t'])
        || text.starts_with(' ')
        || text.ends_with(' ');
    if quoted {
        write!(out, "\"{}\"", text.replace('"', "\"\""))
    } else {
        out.write_all(text.as_bytes())
    }
}

fn comma(first: &mut bool, out: &mut dyn Write) -> io::Result<()> {
    if !std::mem::take(first) {
        out.write_all(b",")?;
    }
    Ok(())
}

impl RowWriter for Csv {
    fn head(&mut self, lead: Lead<'_>, columns: &[Column], out: &mut dyn Write) -> io::Result<()> {
        let mut first = true;
        for name in lead.names().chain(columns.iter().map(|column| column.name.as_str())) {
            comma(&mut first, out)?;
            field(name, out)?;
        }
        out.write_all(b"\n")
    }

    fn row(&mut self, lead: Lead<'_>, row: &[Value], out: &mut dyn Write) -> io::Result<()> {
        let mut first = true;
        let mut value = |value: &Value| {
            comma(&mut first, out)?;
            match value {
                Value::Text(text) => field(text, out),
                other => out.write_all(plain(other).as_bytes()),
            }
        };
        lead.values().try_for_each(|lead| value(&lead))?;
        row.iter().try_for_each(value)?;
        out.write_all(b"\n")
    }

    fn flush(&mut self, _out: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}
