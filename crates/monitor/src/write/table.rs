//! Text in columns: numbers are aligned to the right, other values to the left.
//!
//! Rows are collected and aligned together. The next rows keep the widths, or widen them. Control
//! characters are replaced, so that they do not affect the terminal. Null is `–`.

use std::io::{self, Write};

use fathom_cql::catalog::Column;
use fathom_cql::{Type, Value};

use super::{Lead, RowWriter, plain};

/// The number of rows that are aligned together.
const PAGE_ROWS: usize = 256;
/// The widest cell, in characters. Longer texts are cut.
const CELL_MAX: usize = 120;
const GAP: &str = "  ";

/// Writes a table.
#[derive(Default)]
pub struct TableWriter {
    names: Vec<String>,
    right: Vec<bool>,
    widths: Vec<usize>,
    page: Vec<Vec<String>>,
    headed: bool,
}

fn cell(value: &Value) -> String {
    let text = match value {
        Value::Null => return "–".into(),
        other => plain(other),
    };
    let harmless = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    if text.chars().count() > CELL_MAX {
        return text.chars().take(CELL_MAX - 1).map(harmless).chain(['…']).collect();
    }
    text.chars().map(harmless).collect()
}

impl TableWriter {
    fn line(&self, cells: &[String], out: &mut dyn Write) -> io::Result<()> {
        let mut line = String::new();
        for ((text, &width), &right) in cells.iter().zip(&self.widths).zip(&self.right) {
            let space = " ".repeat(width.saturating_sub(text.chars().count()));
            let parts = if right { [space.as_str(), text] } else { [text.as_str(), &space] };
            line.extend(parts);
            line.push_str(GAP);
        }
        writeln!(out, "{}", line.trim_end())
    }
}

impl RowWriter for TableWriter {
    fn head(&mut self, lead: Lead<'_>, columns: &[Column], _out: &mut dyn Write) -> io::Result<()> {
        let leads = lead.names().map(|name| (name.to_owned(), name != "@sign"));
        let number = |kind| matches!(kind, Type::Integer | Type::Float);
        let own =
            columns.iter().map(|column| (cell(&Value::text(&column.name)), number(column.kind)));
        (self.names, self.right) = leads.chain(own).unzip();
        self.widths = self.names.iter().map(|name| name.chars().count()).collect();
        self.headed = false;
        Ok(())
    }

    fn row(&mut self, lead: Lead<'_>, row: &[Value], out: &mut dyn Write) -> io::Result<()> {
        let leads = lead.values().map(|value| cell(&value));
        self.page.push(leads.chain(row.iter().map(cell)).collect());
        if self.page.len() >= PAGE_ROWS { self.flush(out) } else { Ok(()) }
    }

    fn flush(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let page = std::mem::take(&mut self.page);
        for cells in &page {
            for (width, text) in self.widths.iter_mut().zip(cells) {
                *width = (*width).max(text.chars().count());
            }
        }
        if !std::mem::replace(&mut self.headed, true) {
            self.line(&self.names, out)?;
        }
        page.iter().try_for_each(|cells| self.line(cells, out))
    }
}
