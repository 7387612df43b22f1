//! JSON: one object per line. Floats that JSON does not have (NaN and infinities) are null.

use std::collections::HashSet;
use std::io::{self, Write};

use fathom_cql::Value;
use fathom_cql::catalog::Column;

use super::{Lead, RowWriter};

/// Writes JSON.
#[derive(Default)]
pub struct Json {
    names: Vec<String>,
}

/// Distinct names for columns: the second `a` becomes `a_2`, because JSON readers keep only one of
/// equal names.
pub fn distinct(columns: &[Column]) -> Vec<String> {
    let mut taken: HashSet<String> = columns.iter().map(|column| column.name.clone()).collect();
    let mut seen = HashSet::new();
    let mut own = |column: &Column| {
        if seen.insert(column.name.clone()) {
            return column.name.clone();
        }
        let mut number = 2;
        loop {
            let name = format!("{}_{number}", column.name);
            if taken.insert(name.clone()) {
                return name;
            }
            number += 1;
        }
    };
    columns.iter().map(&mut own).collect()
}

fn text(text: &str, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer(out, text).map_err(io::Error::from)
}

impl RowWriter for Json {
    fn head(
        &mut self,
        _lead: Lead<'_>,
        columns: &[Column],
        _out: &mut dyn Write,
    ) -> io::Result<()> {
        self.names = distinct(columns);
        Ok(())
    }

    fn row(&mut self, lead: Lead<'_>, row: &[Value], out: &mut dyn Write) -> io::Result<()> {
        let mut first = true;
        let mut field = |name: &str, value: &Value| {
            out.write_all(if std::mem::take(&mut first) { b"{" } else { b"," })?;
            text(name, out)?;
            out.write_all(b":")?;
            match value {
                Value::Null => out.write_all(b"null"),
                Value::Boolean(value) => write!(out, "{value}"),
                Value::Integer(value) => write!(out, "{value}"),
                Value::Float(value) if !value.is_finite() => out.write_all(b"null"),
                Value::Float(value) => write!(out, "{value:?}"),
                Value::Text(value) => text(value, out),
            }
        };
        lead.names().zip(lead.values()).try_for_each(|(name, value)| field(name, &value))?;
        self.names.iter().zip(row).try_for_each(|(name, value)| field(name, value))?;
        if first {
            out.write_all(b"{")?;
        }
        out.write_all(b"}\n")
    }

    fn flush(&mut self, _out: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}
