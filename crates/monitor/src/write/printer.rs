//! The results of a script's queries, as they come.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::io::{self, Write};

use fathom_cql::catalog::Column;
use fathom_cql::{Row, Value};

use super::csv::Csv;
use super::json::Json;
use super::table::Table;
use super::{Form, Lead, RowWriter};
use crate::replay::ResultSink;

/// How a [`Printer`] writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrinterOptions {
    /// The form.
    pub form: Form,
    /// Whether each change is written, with its instant and its sign. Otherwise a stream's rows
    /// are written as they come, and of a relation what it holds at the end.
    pub deltas: bool,
}

/// Writes results.
///
/// With several queries each row says of which it is: the queries' rows mix as they come.
pub struct Printer<W> {
    out: W,
    options: PrinterOptions,
    queries: Vec<Query>,
    /// The query that has written last.
    last: Option<usize>,
}

struct Query {
    writer: Box<dyn RowWriter>,
    columns: Vec<Column>,
    is_stream: bool,
    headed: bool,
    /// What the relation holds, where that is what is wanted.
    rows: BTreeMap<Row, i64>,
    /// By which columns that is ordered, and of each whether the greatest comes first.
    order: Vec<(usize, bool)>,
}

/// Which of two rows comes first.
fn compare(order: &[(usize, bool)], left: &[Value], right: &[Value]) -> Ordering {
    let by = |&(column, descending): &(usize, bool)| {
        let ordering = left.get(column).cmp(&right.get(column));
        if descending { ordering.reverse() } else { ordering }
    };
    order.iter().map(by).find(|ordering| ordering.is_ne()).unwrap_or(Ordering::Equal)
}

impl<W: Write> Printer<W> {
    /// Writes to `out`.
    pub fn new(out: W, options: PrinterOptions) -> Self {
        Self { out, options, queries: Vec::new(), last: None }
    }

    /// Writes what is left, also the contents of relations.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(mut self) -> io::Result<W> {
        for query in 0..self.queries.len() {
            let held = std::mem::take(&mut self.queries[query].rows);
            let mut held: Vec<(Row, i64)> = held.into_iter().collect();
            // Rows that the order does not tell apart stay in the order of all of their values.
            held.sort_by(|(a, _), (b, _)| compare(&self.queries[query].order, a, b));
            for (row, count) in held {
                self.write(query, None, count, &row)?;
            }
            self.turn_to(query, None)?;
            self.queries[query].writer.flush(&mut self.out)?;
        }
        self.out.flush()?;
        Ok(self.out)
    }

    fn lead(&self, query: usize, change: Option<(i64, bool)>) -> Lead {
        let several = self.queries.len() > 1;
        Lead { query: several.then_some(query + 1), change }
    }

    /// Heads the query, if it has no head; what others hold back comes first.
    fn turn_to(&mut self, query: usize, change: Option<(i64, bool)>) -> io::Result<()> {
        if self.last != Some(query) {
            if let Some(last) = self.last {
                self.queries[last].writer.flush(&mut self.out)?;
            }
            self.last = Some(query);
        }
        let change = change.or(self.options.deltas.then_some((0, true)));
        let lead = self.lead(query, change);
        let Query { writer, columns, headed, .. } = &mut self.queries[query];
        if !std::mem::replace(headed, true) {
            writer.head(lead, columns, &mut self.out)?;
        }
        Ok(())
    }

    fn write(
        &mut self,
        query: usize,
        change: Option<(i64, bool)>,
        times: i64,
        row: &[Value],
    ) -> io::Result<()> {
        self.turn_to(query, change)?;
        let lead = self.lead(query, change);
        let writer = &mut self.queries[query].writer;
        (0..times).try_for_each(|_| writer.row(lead, row, &mut self.out))
    }
}

impl<W: Write> ResultSink for Printer<W> {
    fn begin(&mut self, query: usize, columns: &[Column], is_stream: bool) -> io::Result<()> {
        if query != self.queries.len() {
            return Err(io::Error::other("queries are begun in order"));
        }
        let writer: Box<dyn RowWriter> = match self.options.form {
            Form::Table => Box::<Table>::default(),
            Form::Csv => Box::new(Csv),
            Form::Json => Box::<Json>::default(),
        };
        let (columns, rows) = (columns.to_vec(), BTreeMap::new());
        let order = Vec::new();
        self.queries.push(Query { writer, columns, is_stream, headed: false, rows, order });
        Ok(())
    }

    fn order(&mut self, query: usize, columns: &[(usize, bool)]) {
        if let Some(known) = self.queries.get_mut(query) {
            known.order = columns.to_vec();
        }
    }

    fn delta(&mut self, query: usize, time_ns: i64, count: i64, row: &[Value]) -> io::Result<()> {
        let Some(known) = self.queries.get_mut(query) else {
            return Err(io::Error::other("a result of a query that was not begun"));
        };
        if self.options.deltas {
            let change = Some((time_ns, count > 0));
            return self.write(query, change, count.saturating_abs(), row);
        }
        if known.is_stream {
            return self.write(query, None, count.max(0), row);
        }
        if let Some(held) = known.rows.get_mut(row) {
            *held += count;
            if *held == 0 {
                known.rows.remove(row);
            }
        } else if count != 0 {
            known.rows.insert(row.to_vec(), count);
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        for query in &mut self.queries {
            if query.headed {
                query.writer.flush(&mut self.out)?;
            }
        }
        self.out.flush()
    }

    fn held(&self) -> usize {
        self.queries.iter().map(|query| query.rows.len()).sum()
    }
}
