//! The data between operators: inserted and deleted rows, by column, in order of time.

use std::cmp::Ordering;
use std::ops::Range;
use std::rc::Rc;

use fathom_cql::Value;

use crate::columns::ColumnValues;

/// The changes of the counts of a run's rows.
#[derive(Clone, Debug)]
pub(super) enum RunCounts {
    /// The same change for all rows.
    All(i64),
    /// The change of each row.
    Each(Rc<Vec<i64>>),
}

/// Inserted and deleted rows, in order of time. Cheap to clone, because the data is shared.
#[derive(Clone, Debug)]
pub(super) struct Run {
    times: Rc<Vec<u64>>,
    counts: RunCounts,
    columns: Rc<Vec<Rc<ColumnValues>>>,
    /// The valid rows of the columns.
    rows: Range<usize>,
}

impl Run {
    /// All rows of some columns.
    pub(super) fn new(times: Vec<u64>, counts: RunCounts, columns: Vec<Rc<ColumnValues>>) -> Self {
        debug_assert!(times.is_sorted(), "the rows of a run are in order of time");
        let rows = 0..times.len();
        Self { times: Rc::new(times), counts, columns: Rc::new(columns), rows }
    }

    pub(super) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn time(&self, row: usize) -> u64 {
        self.times[row]
    }

    /// The times of the valid rows.
    pub(super) fn times(&self) -> &[u64] {
        &self.times[self.rows.clone()]
    }

    pub(super) fn count(&self, row: usize) -> i64 {
        match &self.counts {
            RunCounts::All(count) => *count,
            RunCounts::Each(counts) => counts[row],
        }
    }

    /// The changes of the counts of all rows of the columns, valid or not.
    pub(super) fn counts(&self) -> &RunCounts {
        &self.counts
    }

    pub(super) fn columns(&self) -> &Rc<Vec<Rc<ColumnValues>>> {
        &self.columns
    }

    /// A column; `None` if the run does not have it, which means that all its values are null.
    pub(super) fn column(&self, column: usize) -> Option<&Rc<ColumnValues>> {
        self.columns.get(column)
    }

    /// A part of the rows.
    pub(super) fn slice(&self, rows: Range<usize>) -> Self {
        Self { rows, ..self.clone() }
    }

    /// The same rows with other columns of the same length.
    pub(super) fn with_columns(&self, columns: Vec<Rc<ColumnValues>>) -> Self {
        Self { columns: Rc::new(columns), ..self.clone() }
    }

    /// The same rows in the same order, with other times, and with counts multiplied by `factor`.
    pub(super) fn moved(&self, factor: i64, time: impl Fn(u64) -> u64) -> Self {
        // Rows before the first valid one are ignored.
        let before = std::iter::repeat_n(0, self.rows.start);
        let times = before.chain(self.times().iter().map(|&each| time(each))).collect();
        let counts = match &self.counts {
            RunCounts::All(count) => RunCounts::All(count * factor),
            RunCounts::Each(counts) => {
                RunCounts::Each(Rc::new(counts.iter().map(|count| count * factor).collect()))
            }
        };
        Self { times: Rc::new(times), counts, ..self.clone() }
    }

    /// The counts of some rows.
    fn counts_of(&self, rows: &[u32]) -> RunCounts {
        match &self.counts {
            RunCounts::All(count) => RunCounts::All(*count),
            RunCounts::Each(counts) => {
                RunCounts::Each(Rc::new(rows.iter().map(|&row| counts[row as usize]).collect()))
            }
        }
    }

    /// Some of the rows, with `columns`, which have only these rows.
    pub(super) fn gathered(&self, rows: &[u32], columns: Vec<Rc<ColumnValues>>) -> Self {
        let times = rows.iter().map(|&row| self.times[row as usize]).collect();
        Self::new(times, self.counts_of(rows), columns)
    }

    /// Some of the rows, with new columns that have only these rows.
    pub(super) fn gather(&self, rows: &[u32]) -> Self {
        let columns = self.columns.iter().map(|column| Rc::new(column.gather(rows)));
        self.gathered(rows, columns.collect())
    }

    /// Splits the rows at an instant: those before it, and the others.
    pub(super) fn split(&self, time: u64) -> (Self, Self) {
        let middle = self.rows.start + self.times().partition_point(|&each| each < time);
        (self.slice(self.rows.start..middle), self.slice(middle..self.rows.end))
    }

    /// Replaces `values` by the values of a row.
    pub(super) fn read(&self, row: usize, values: &mut Vec<Value>) {
        values.resize_with(self.columns.len(), || Value::Null);
        for (column, place) in self.columns.iter().zip(values) {
            column.read(row, place);
        }
    }

    /// The order of two rows by their values, without the first `skipped` columns.
    pub(super) fn compare(
        &self,
        row: usize,
        other: &Self,
        other_row: usize,
        skipped: usize,
    ) -> Ordering {
        let pairs = self.columns.iter().zip(other.columns.iter());
        pairs
            .skip(skipped)
            .map(|(mine, theirs)| mine.compare(row, theirs, other_row))
            .find(|order| order.is_ne())
            .unwrap_or(Ordering::Equal)
    }
}

/// All changes within an interval of time. The epochs between two operators follow each other
/// without a gap. Each epoch is sent once, even if it is empty.
#[derive(Clone, Debug, Default)]
pub(super) struct Epoch {
    /// The first instant after the epoch.
    pub(super) end: u64,
    /// The changes. Each run is in order of time. Rows of a stream at one instant arrive in the
    /// order of the runs.
    pub(super) runs: Vec<Run>,
}

/// A row of one of several runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub(super) time: u64,
    pub(super) run: u32,
    pub(super) row: u32,
}

/// Puts the rows of several runs into order of time; rows of one instant are ordered by run, then
/// by position.
pub(super) fn in_order<'a>(runs: impl IntoIterator<Item = &'a Run>, changes: &mut Vec<Change>) {
    changes.clear();
    for (run, number) in runs.into_iter().zip(0..) {
        let rows = run.rows();
        let each = rows.clone().zip(run.times());
        changes.extend(each.map(|(row, &time)| Change { time, run: number, row: row as u32 }));
    }
    if !changes.is_sorted_by_key(|change| change.time) {
        // A stable sort, which is fast for a few sorted runs.
        changes.sort_by_key(|change| change.time);
    }
}

/// Builds a run row by row, in order of time.
#[derive(Debug, Default)]
pub(super) struct RunBuilder {
    times: Vec<u64>,
    /// Empty as long as each count is 1.
    counts: Vec<i64>,
    columns: Vec<ColumnValues>,
}

impl RunBuilder {
    pub(super) fn len(&self) -> usize {
        self.times.len()
    }

    /// The times of the rows.
    pub(super) fn times(&self) -> &[u64] {
        &self.times
    }

    /// Begins a row. The caller adds its values, one to each of the `width` columns.
    #[inline]
    pub(super) fn begin(&mut self, time: u64, count: i64, width: usize) -> &mut [ColumnValues] {
        if count != 1 && self.counts.is_empty() {
            self.counts.resize(self.times.len(), 1);
        }
        if count != 1 || !self.counts.is_empty() {
            self.counts.push(count);
        }
        self.times.push(time);
        if self.columns.len() < width {
            self.columns.resize_with(width, ColumnValues::default);
        }
        &mut self.columns[..width]
    }

    /// Adds a row.
    #[inline]
    pub(super) fn push(&mut self, time: u64, count: i64, row: &[Value]) {
        for (column, value) in self.begin(time, count, row.len()).iter_mut().zip(row) {
            column.push_copy(value);
        }
    }

    /// Adds a row that is deleted, and the row that takes its place.
    #[inline]
    pub(super) fn push_replaced(&mut self, time: u64, old: &[Value], new: &[Value]) {
        self.counts.resize(self.times.len(), 1);
        self.counts.extend([-1, 1]);
        self.times.extend([time, time]);
        if self.columns.len() < new.len() {
            self.columns.resize_with(new.len(), ColumnValues::default);
        }
        for (column, (old, new)) in self.columns.iter_mut().zip(old.iter().zip(new)) {
            column.push_copies(old, new);
        }
    }

    /// Takes the rows as a run; `None` if there are none.
    pub(super) fn take(&mut self) -> Option<Run> {
        if self.times.is_empty() {
            return None;
        }
        // The next run will probably have about as many rows.
        let room = self.times.len();
        let times = std::mem::replace(&mut self.times, Vec::with_capacity(room));
        let columns = self.columns.iter_mut().map(|column| Rc::new(column.replace(room)));
        let columns = columns.collect();
        let counts = if self.counts.is_empty() {
            RunCounts::All(1)
        } else {
            RunCounts::Each(Rc::new(std::mem::take(&mut self.counts)))
        };
        Some(Run::new(times, counts, columns))
    }
}
