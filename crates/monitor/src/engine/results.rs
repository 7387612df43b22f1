//! The results of queries.

use std::cell::RefCell;
use std::rc::Rc;

use fathom_cql::Value;

use super::run::{Change, Epoch, Run, in_order};
use crate::columns::ColumnValues;

/// A change of a query's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Delta<'a> {
    /// The query's number: its position among the plans.
    pub query: usize,
    /// The instant, in nanoseconds.
    pub time_ns: u64,
    /// The change of the row's count. For a stream, the number of times the row arrives.
    pub count: i64,
    /// The row.
    pub row: &'a [Value],
}

/// Results of queries that have not been taken yet, each with the number of its output.
#[derive(Clone, Debug, Default)]
pub(super) struct Results(Rc<RefCell<Outputs>>);

type Outputs = Vec<(usize, Rc<Epoch>)>;

impl Results {
    pub(super) fn add(&self, output: usize, epoch: Rc<Epoch>) {
        if epoch.runs.iter().any(|run| run.len() > 0) {
            self.0.borrow_mut().push((output, epoch));
        }
    }

    pub(super) fn take(&self) -> Outputs {
        self.0.take()
    }
}

/// The ranks of a run's rows by its first columns, as long as these have few distinct values. With
/// ranks, distinct values are compared once, instead of in each comparison of two rows.
#[derive(Debug, Default)]
struct Ranks {
    /// The first row of the run.
    first: usize,
    /// The ranks of the rows from `first` on. Rows with the same values in the first columns have
    /// the same rank. Empty if there are no ranks.
    rows: Vec<u64>,
    /// The number of columns that the ranks cover.
    columns: usize,
}

impl Ranks {
    /// Computes the ranks. Several runs have no common ranks, because each has its own values.
    fn find(&mut self, runs: &[Run]) {
        self.rows.clear();
        self.columns = 0;
        let [run] = runs else { return };
        self.first = run.rows().start;
        let mut all = 1_u64;
        for column in &**run.columns() {
            let ColumnValues::Indexed(of, values) = &**column else { break };
            if of.len() > run.len() {
                break;
            }
            let (ranks, count) = of.ranks();
            let Some(product) = all.checked_mul(count) else { break };
            all = product;
            self.rows.resize(run.len(), 0);
            for (rank, &value) in self.rows.iter_mut().zip(&values[run.rows()]) {
                *rank = *rank * count + ranks[value as usize];
            }
            self.columns += 1;
        }
    }

    fn of(&self, row: usize) -> Option<u64> {
        self.rows.get(row.wrapping_sub(self.first)).copied()
    }
}

/// Reports the net changes of runs.
#[derive(Debug, Default)]
pub(super) struct Reporter {
    changes: Vec<Change>,
    ranks: Ranks,
    row: Vec<Value>,
}

impl Reporter {
    /// Calls `sink` for each net change, in order of time, and within an instant in order of the
    /// rows.
    pub(super) fn report(&mut self, runs: &[Run], mut sink: impl FnMut(u64, i64, &[Value])) {
        let Self { changes, ranks, row } = self;
        in_order(runs, changes);
        if changes.windows(2).any(|pair| pair[0].time == pair[1].time) {
            ranks.find(runs);
        }
        let of = |change: &Change| (&runs[change.run as usize], change.row as usize);
        for instant in changes.chunk_by_mut(|one, next| one.time == next.time) {
            let time = instant[0].time;
            let compare = |left: &Change, right: &Change| {
                let ((left, left_row), (right, right_row)) = (of(left), of(right));
                let order = ranks.of(left_row).cmp(&ranks.of(right_row));
                order.then_with(|| left.compare(left_row, right, right_row, ranks.columns))
            };
            // Whether the comparisons of the sort have found equal rows.
            let mut any_equal = false;
            if let [one, next] = instant {
                // The usual case: the old and the new row of one group.
                let order = compare(one, next);
                any_equal = order.is_eq();
                if order.is_gt() {
                    instant.swap(0, 1);
                }
            } else if instant.len() > 2 {
                instant.sort_by(|left, right| {
                    let order = compare(left, right);
                    any_equal |= order.is_eq();
                    order
                });
            }
            for same in instant.chunk_by(|one, next| any_equal && compare(one, next).is_eq()) {
                let count: i64 = same.iter().map(of).map(|(run, row)| run.count(row)).sum();
                if count != 0 {
                    let (run, at) = of(&same[0]);
                    run.read(at, row);
                    sink(time, count, row);
                }
            }
        }
    }
}
