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

/// How the instants of rows are shown as people read them, beside the instants themselves.
#[derive(Clone, Copy)]
pub struct ShownTimes {
    /// The time since 1970 less the instant, in nanoseconds.
    pub wall_offset_ns: i64,
    /// A time since 1970, in nanoseconds, as text.
    pub text: fn(u64) -> String,
    /// Whether the rows of streams have it too, and not only changes with their instants.
    pub of_all_rows: bool,
}

impl ShownTimes {
    fn show(&self, time_ns: i64) -> String {
        let unix_ns = time_ns.saturating_add(self.wall_offset_ns);
        (self.text)(u64::try_from(unix_ns).unwrap_or(0))
    }
}

/// Writes the results of queries.
///
/// If there are several queries, each row begins with its query's number, because the rows of
/// queries are mixed.
pub struct Printer<W> {
    out: W,
    options: PrinterOptions,
    times: Option<ShownTimes>,
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
        Self { out, options, times: None, queries: Vec::new(), last: None }
    }

    /// Shows the times of the rows that follow, in a column `@time` before all others.
    pub fn show_times(&mut self, times: ShownTimes) {
        self.times = Some(times);
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
                self.write(query, None, None, count, &row)?;
            }
            self.switch_to(query, None, None)?;
            self.queries[query].writer.flush(&mut self.out)?;
        }
        self.out.flush()?;
        Ok(self.out)
    }

    fn lead<'t>(
        &self,
        query: usize,
        time: Option<&'t str>,
        change: Option<(i64, bool)>,
    ) -> Lead<'t> {
        let several = self.queries.len() > 1;
        Lead { query: several.then_some(query + 1), time, change }
    }

    /// The time of a row as text, if rows of its query have it.
    fn time(&self, query: usize, time_ns: i64) -> Option<String> {
        let is_stream = self.queries[query].is_stream;
        let is_shown = |times: &&ShownTimes| self.options.deltas || times.of_all_rows && is_stream;
        self.times.as_ref().filter(is_shown).map(|times| times.show(time_ns))
    }

    /// Switches to a query: writes the rows that another query holds back, and the query's header
    /// if it has none.
    fn switch_to(
        &mut self,
        query: usize,
        time: Option<&str>,
        change: Option<(i64, bool)>,
    ) -> io::Result<()> {
        if self.last != Some(query) {
            if let Some(last) = self.last {
                self.queries[last].writer.flush(&mut self.out)?;
            }
            self.last = Some(query);
        }
        if self.queries[query].headed {
            return Ok(());
        }
        // A header without rows has the same columns.
        let change = change.or(self.options.deltas.then_some((0, true)));
        let time = time.map(str::to_owned).or_else(|| self.time(query, 0));
        let lead = self.lead(query, time.as_deref(), change);
        let Query { writer, columns, headed, .. } = &mut self.queries[query];
        *headed = true;
        writer.head(lead, columns, &mut self.out)?;
        Ok(())
    }

    fn write(
        &mut self,
        query: usize,
        time: Option<&str>,
        change: Option<(i64, bool)>,
        times: i64,
        row: &[Value],
    ) -> io::Result<()> {
        self.switch_to(query, time, change)?;
        let lead = self.lead(query, time, change);
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
            let time = self.time(query, time_ns);
            return self.write(query, time.as_deref(), change, count.saturating_abs(), row);
        }
        if known.is_stream {
            let time = self.time(query, time_ns);
            return self.write(query, time.as_deref(), None, count.max(0), row);
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
