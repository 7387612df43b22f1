//! What comes out at the end.

use std::cell::RefCell;
use std::rc::Rc;

use fathom_cql::Value;

use super::run::{Change, Epoch, Run, in_order};

/// A change of a query's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Delta<'a> {
    /// The query's number: its place among the plans.
    pub query: usize,
    /// The instant, in nanoseconds.
    pub time_ns: u64,
    /// How often more the row is there; less, where it is negative. Of a stream, how often it
    /// comes.
    pub count: i64,
    /// The row.
    pub row: &'a [Value],
}

/// What queries have given and nobody has seen yet, each with the number of its output.
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

/// Tells the net changes of runs.
#[derive(Debug, Default)]
pub(super) struct Teller {
    changes: Vec<Change>,
    row: Vec<Value>,
}

impl Teller {
    /// Calls `tell` for each net change: in order of time, and within an instant of the rows.
    pub(super) fn tell(&mut self, runs: &[Run], mut tell: impl FnMut(u64, i64, &[Value])) {
        let Self { changes, row } = self;
        in_order(runs, changes);
        let of = |change: &Change| (&runs[change.run as usize], change.row as usize);
        for instant in changes.chunk_by_mut(|one, next| one.time == next.time) {
            let time = instant[0].time;
            let compare = |left: &Change, right: &Change| {
                let ((left, left_row), (right, right_row)) = (of(left), of(right));
                left.compare(left_row, right, right_row)
            };
            // Equal rows are compared with each other while they are sorted.
            let mut any_equal = false;
            if let [one, next] = instant {
                // As a group's row goes and comes.
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
                    tell(time, count, row);
                }
            }
        }
    }
}
