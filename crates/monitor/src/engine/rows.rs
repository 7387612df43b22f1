//! Operators that process rows one by one, instant by instant.

use super::Tuple;
use super::run::{Change, Run, RunBuilder, in_order};

/// Rows and the changes of their counts.
pub(super) type Results = Vec<(Tuple, i64)>;

/// Calls a function for each instant of some runs, in order of time.
#[derive(Debug, Default)]
pub(super) struct ByInstant {
    changes: Vec<Change>,
    rows: Vec<(usize, Tuple, i64)>,
    results: Results,
    builder: RunBuilder,
}

impl ByInstant {
    /// Passes the net changes of each instant to `logic`, each with the number of its side: sorted,
    /// with the counts of a side's equal rows added up, and without counts of 0. The results of
    /// `logic` are changes at that instant.
    pub(super) fn net(
        &mut self,
        sides: &[&[Run]],
        mut logic: impl FnMut(&[(usize, Tuple, i64)], &mut Results),
    ) -> Vec<Run> {
        self.each(sides, |rows, results| {
            if rows.len() > 1 {
                rows.sort_by(|(side, row, _), (other_side, other, _)| {
                    row.cmp(other).then(side.cmp(other_side))
                });
                rows.dedup_by(|next, kept| {
                    let same = next.0 == kept.0 && next.1 == kept.1;
                    if same {
                        kept.2 += next.2;
                    }
                    same
                });
            }
            rows.retain(|&(_, _, count)| count != 0);
            if !rows.is_empty() {
                logic(rows, results);
            }
        })
    }

    /// Passes the rows of each instant to `logic`, in the order of their arrival.
    pub(super) fn each(
        &mut self,
        sides: &[&[Run]],
        mut logic: impl FnMut(&mut Vec<(usize, Tuple, i64)>, &mut Results),
    ) -> Vec<Run> {
        let runs: Vec<(usize, &Run)> = sides
            .iter()
            .enumerate()
            .flat_map(|(side, runs)| runs.iter().map(move |run| (side, run)))
            .collect();
        in_order(runs.iter().map(|&(_, run)| run), &mut self.changes);
        let mut values = Vec::new();
        for instant in self.changes.chunk_by(|one, next| one.time == next.time) {
            self.rows.clear();
            for change in instant {
                let (side, run) = runs[change.run as usize];
                run.read(change.row as usize, &mut values);
                let row: Tuple = values.drain(..).collect();
                self.rows.push((side, row, run.count(change.row as usize)));
            }
            logic(&mut self.rows, &mut self.results);
            for (row, count) in self.results.drain(..) {
                self.builder.push(instant[0].time, count, &row);
            }
        }
        self.rows.clear();
        self.builder.take().into_iter().collect()
    }
}

/// The values of some columns of a row. Missing columns are null.
pub(super) fn key(row: &Tuple, columns: &[usize]) -> Tuple {
    let value = |&column: &usize| row.get(column).cloned();
    columns.iter().map(|column| value(column).unwrap_or(fathom_cql::Value::Null)).collect()
}
