//! The rows of an input whose instants have not ended.

use std::rc::Rc;

use fathom_cql::Value;

use super::run::{Run, RunBuilder, RunCounts, in_order};
use crate::columns::ColumnValues;

/// Rows whose instants have not ended, in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Staged {
    runs: Vec<Run>,
    builder: RunBuilder,
    /// The latest instant of the rows in `builder`.
    last: u64,
    /// Whether rows of one instant arrive in the order of their values.
    by_value: bool,
}

impl Staged {
    /// The number of waiting rows.
    pub(super) fn len(&self) -> usize {
        self.builder.len() + self.runs.iter().map(Run::len).sum::<usize>()
    }

    /// The instants before `end` of the waiting rows.
    pub(super) fn times_before(&self, end: u64) -> impl Iterator<Item = u64> {
        let runs = self.runs.iter().map(Run::times).chain([self.builder.times()]);
        runs.flat_map(move |times| &times[..times.partition_point(|&time| time < end)]).copied()
    }

    /// Inserts or deletes a row.
    pub(super) fn push(&mut self, time: u64, count: i64, row: &[Value]) {
        if self.builder.len() > 0 && time < self.last {
            self.runs.extend(self.builder.take());
        }
        self.last = time;
        self.builder.push(time, count, row);
    }

    /// Inserts or deletes a row. From now on the rows of one instant arrive in the order of their
    /// values.
    pub(super) fn change(&mut self, time: u64, count: i64, row: &[Value]) {
        self.by_value = true;
        self.push(time, count, row);
    }

    /// Inserts rows, by column.
    pub(super) fn push_columns(&mut self, times: Vec<u64>, columns: Vec<ColumnValues>) {
        self.runs.extend(self.builder.take());
        let columns: Vec<Rc<ColumnValues>> = columns.into_iter().map(Rc::new).collect();
        if times.is_sorted() {
            self.runs.push(Run::new(times, RunCounts::All(1), columns));
            return;
        }
        let mut rows: Vec<u32> = (0..times.len() as u32).collect();
        rows.sort_by_key(|&row| times[row as usize]);
        let columns = columns.iter().map(|column| Rc::new(column.gather(&rows))).collect();
        let times = rows.iter().map(|&row| times[row as usize]).collect();
        self.runs.push(Run::new(times, RunCounts::All(1), columns));
    }

    /// Takes the rows before an instant, in order of time and, within an instant, of arrival.
    pub(super) fn take(&mut self, end: u64) -> Vec<Run> {
        self.runs.extend(self.builder.take());
        let mut now = Vec::new();
        let mut later = Vec::new();
        for run in self.runs.drain(..) {
            let (before, behind) = run.split(end);
            now.extend(Some(before).filter(|run| run.len() > 0));
            later.extend(Some(behind).filter(|run| run.len() > 0));
        }
        self.runs = later;
        in_arrival_order(now, self.by_value)
    }
}

/// Puts rows in order of time and, within an instant, in the order of the runs or, if `by_value`,
/// of their values.
pub(super) fn in_arrival_order(runs: Vec<Run>, by_value: bool) -> Vec<Run> {
    let follows = |pair: &[Run]| pair[0].times().last() <= pair[1].times().first();
    if runs.windows(2).all(follows) && !by_value {
        return runs;
    }
    let mut changes = Vec::new();
    in_order(&runs, &mut changes);
    if by_value {
        changes.sort_by(|left, right| {
            let values = || {
                let other = &runs[right.run as usize];
                runs[left.run as usize].compare(left.row as usize, other, right.row as usize, 0)
            };
            left.time.cmp(&right.time).then_with(values)
        });
    }
    let mut builder = RunBuilder::default();
    let mut row = Vec::new();
    for change in changes {
        let run = &runs[change.run as usize];
        run.read(change.row as usize, &mut row);
        builder.push(change.time, run.count(change.row as usize), &row);
    }
    builder.take().into_iter().collect()
}
