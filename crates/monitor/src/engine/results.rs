//! The results of queries.

use std::cell::RefCell;
use std::cmp::Ordering;
use std::rc::Rc;

use fathom_cql::Value;

use super::run::{Change, Epoch, Run, in_order};
use crate::columns::{ColumnValues, ColumnView};

/// A change of the result that one or more queries have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Delta<'a> {
    /// The numbers of the queries: their positions among the plans.
    pub queries: &'a [usize],
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

    /// The rank of a row; 0 for all rows if there are no ranks.
    #[inline]
    fn of(&self, row: usize) -> u64 {
        self.rows.get(row.wrapping_sub(self.first)).copied().unwrap_or(0)
    }
}

/// A changed row of an instant, and its rank.
type Ranked = (u64, Change);

/// Reports the net changes of runs.
#[derive(Debug, Default)]
pub(super) struct Reporter {
    changes: Vec<Change>,
    ranks: Ranks,
    instant: Vec<Ranked>,
    row: Vec<Value>,
}

impl Reporter {
    /// Calls `sink` for each net change, in order of time, and within an instant in order of the
    /// rows.
    pub(super) fn report(&mut self, runs: &[Run], mut sink: impl FnMut(u64, i64, &[Value])) {
        let Self { changes, ranks, instant, row } = self;
        in_order(runs, changes);
        if changes.windows(2).any(|pair| pair[0].time == pair[1].time) {
            ranks.find(runs);
        }
        let views: Vec<Vec<ColumnView<'_>>> = runs
            .iter()
            .map(|run| run.columns().iter().map(|column| ColumnView::new(column)).collect())
            .collect();
        let of = |change: &Change| (&runs[change.run as usize], change.row as usize);
        let mut report = |change: &Change, count: i64| {
            let views = &views[change.run as usize];
            row.resize_with(views.len(), || Value::Null);
            for (view, place) in views.iter().zip(&mut *row) {
                view.read(change.row as usize, place);
            }
            sink(change.time, count, row);
        };
        let compare = |(rank, left): &Ranked, (other_rank, right): &Ranked| {
            rank.cmp(other_rank).then_with(|| {
                let ((left, left_row), (right, right_row)) = (of(left), of(right));
                left.compare(left_row, right, right_row, ranks.columns)
            })
        };
        for same_time in changes.chunk_by(|one, next| one.time == next.time) {
            instant.clear();
            instant.extend(same_time.iter().map(|change| (ranks.of(change.row as usize), *change)));
            let any_equal = sort(instant, compare);
            for same in instant.chunk_by(|one, next| any_equal && compare(one, next).is_eq()) {
                let counts = same.iter().map(|(_, change)| of(change));
                let count: i64 = counts.map(|(run, row)| run.count(row)).sum();
                if count != 0 {
                    report(&same[0].1, count);
                }
            }
        }
    }
}

/// The most rows that are sorted by insertion, which is faster for a few.
const FEW: usize = 8;

/// Sorts the rows of an instant; equal ones keep their order. Returns whether there are equal rows.
#[inline]
fn sort(rows: &mut [Ranked], compare: impl Fn(&Ranked, &Ranked) -> Ordering) -> bool {
    let mut any_equal = false;
    let mut compare = |left: &Ranked, right: &Ranked| {
        let order = compare(left, right);
        any_equal |= order.is_eq();
        order
    };
    if rows.len() > FEW {
        rows.sort_by(compare);
        return any_equal;
    }
    for end in 1..rows.len() {
        let mut at = end;
        while at > 0 && compare(&rows[at - 1], &rows[at]).is_gt() {
            rows.swap(at - 1, at);
            at -= 1;
        }
    }
    any_equal
}
