//! Writes the results of a script's queries as they arrive.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::io::{self, Write};

use fathom_cql::catalog::Column;
use fathom_cql::{Row, Value};

use super::csv::Csv;
use super::json::Json;
use super::table::TableWriter;
use super::{Form, Lead, RowWriter};
use crate::replay::ResultSink;

/// The options of a [`Printer`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrinterOptions {
    /// The format.
    pub form: Form,
    /// Whether to write each change with its instant and its sign. Otherwise the rows of a stream
    /// are written as they arrive, and the content of a relation at the end.
    pub deltas: bool,
}

/// Writes the results of queries.
///
/// If there are several queries, each row begins with its query's number, because the rows of
/// queries are mixed.
pub struct Printer<W> {
    out: W,
    options: PrinterOptions,
    queries: Vec<Query>,
    /// The query whose rows were written last.
    last: Option<usize>,
}

struct Query {
    writer: Box<dyn RowWriter>,
    columns: Vec<Column>,
    is_stream: bool,
    headed: bool,
    /// The content of the relation, if it is written at the end.
    rows: BTreeMap<Row, i64>,
    /// The columns of that order, each with whether the greatest values come first.
    order: Vec<(usize, bool)>,
}

/// The order of two rows.
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

    /// Writes the remaining rows and the contents of relations.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn finish(mut self) -> io::Result<W> {
        for query in 0..self.queries.len() {
            let held = std::mem::take(&mut self.queries[query].rows);
            let mut held: Vec<(Row, i64)> = held.into_iter().collect();
            // Rows that are equal in this order keep the order of their values.
            held.sort_by(|(a, _), (b, _)| compare(&self.queries[query].order, a, b));
            for (row, count) in held {
                self.write(query, None, count, &row)?;
            }
            self.switch_to(query, None)?;
            self.queries[query].writer.flush(&mut self.out)?;
        }
        self.out.flush()?;
        Ok(self.out)
    }

    fn lead(&self, query: usize, change: Option<(i64, bool)>) -> Lead {
        let several = self.queries.len() > 1;
        Lead { query: several.then_some(query + 1), change }
    }

    /// Switches to a query: writes the rows that another query holds back, and the query's header
    /// if it has none.
    fn switch_to(&mut self, query: usize, change: Option<(i64, bool)>) -> io::Result<()> {
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
        self.switch_to(query, change)?;
        let lead = self.lead(query, change);
        let writer = &mut self.queries[query].writer;
        (0..times).try_for_each(|_| writer.row(lead, row, &mut self.out))
    }
}

impl<W: Write> ResultSink for Printer<W> {
    fn begin(&mut self, query: usize, columns: &[Column], is_stream: bool) -> io::Result<()> {
        if query != self.queries.len() {
            return Err(io::Error::other("queries are announced in order"));
        }
        let writer: Box<dyn RowWriter> = match self.options.form {
            Form::Table => Box::<TableWriter>::default(),
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
            return Err(io::Error::other("a result of a query that was not announced"));
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
