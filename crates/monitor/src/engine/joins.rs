//! Joins: each side is kept by key, and what changes on one side meets what is on the other.

use std::mem;

use differential_dataflow::VecCollection;
use fathom_cql::Value;
use fathom_cql::ast::JoinKind;
use fathom_cql::eval::{evaluate, is_true};
use fathom_cql::plan::{Expression, Join};
use hashbrown::HashMap;
use timely::dataflow::Scope;

use super::Tuple;
use super::agenda::Change;
use super::instants::by_instant;

const LEFT: usize = 0;
const RIGHT: usize = 1;

/// A row of one side, within its key.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    /// How often it is there.
    rows: isize,
    /// How many rows of the other side it has matched, each as often as it is there. Counted only
    /// where rows without a partner stay.
    partners: isize,
}

/// What is there of one key: the left's rows and the right's.
#[derive(Debug, Default)]
struct Bucket([HashMap<Tuple, Count>; 2]);

/// What a join is made of.
struct Joiner {
    equal: [Vec<Expression>; 2],
    residual: Option<Expression>,
    /// Whether rows of the left, and of the right, stay without a partner.
    stays: [bool; 2],
    columns: [usize; 2],
    buckets: HashMap<Tuple, Bucket>,
    scratch: Vec<Value>,
}

impl Joiner {
    fn new(join: &Join) -> Self {
        let (left, right) = join.equal.iter().cloned().unzip();
        Self {
            equal: [left, right],
            residual: join.residual.clone(),
            stays: [
                matches!(join.kind, JoinKind::Left | JoinKind::Full),
                matches!(join.kind, JoinKind::Right | JoinKind::Full),
            ],
            columns: [join.left_columns, join.right_columns],
            buckets: HashMap::new(),
            scratch: Vec::new(),
        }
    }

    /// A row beside one of the other side.
    fn pair(&mut self, side: usize, mine: &Tuple, theirs: &Tuple) -> Tuple {
        let (left, right) = if side == LEFT { (mine, theirs) } else { (theirs, mine) };
        self.scratch.clear();
        self.scratch.extend(left.iter().chain(right.iter()).cloned());
        self.scratch.drain(..).collect()
    }

    /// A row beside nothing.
    fn alone(&mut self, side: usize, mine: &Tuple) -> Tuple {
        let nulls = std::iter::repeat_n(Value::Null, self.columns[1 - side]);
        if side == LEFT {
            mine.iter().cloned().chain(nulls).collect()
        } else {
            nulls.chain(mine.iter().cloned()).collect()
        }
    }

    /// A row of one side is there `count` times more.
    fn change(&mut self, side: usize, row: &Tuple, count: isize, results: &mut Vec<Change<Tuple>>) {
        let key: Tuple = self.equal[side].iter().map(|each| evaluate(each, row)).collect();
        if key.iter().any(Value::is_null) {
            // A null equals nothing.
            if self.stays[side] {
                results.push((self.alone(side, row), count));
            }
            return;
        }
        // Taken out while it is worked on, so that the rest of the joiner can be used.
        let mut bucket = mem::take(self.buckets.entry(key.clone()).or_default());
        let counts_partners = self.stays[LEFT] || self.stays[RIGHT];
        let mut partners = 0;
        for (other, theirs) in &mut bucket.0[1 - side] {
            let pair = self.pair(side, row, other);
            if self.residual.as_ref().is_some_and(|residual| !is_true(&evaluate(residual, &pair))) {
                continue;
            }
            results.push((pair, count * theirs.rows));
            if counts_partners {
                partners += theirs.rows;
                let before = theirs.partners;
                theirs.partners += count;
                let becomes_alone = isize::from(theirs.partners == 0) - isize::from(before == 0);
                if self.stays[1 - side] && becomes_alone != 0 {
                    results.push((self.alone(1 - side, other), becomes_alone * theirs.rows));
                }
            }
        }
        if self.stays[side] && partners == 0 {
            results.push((self.alone(side, row), count));
        }
        let mine = bucket.0[side].entry(row.clone()).or_default();
        mine.rows += count;
        mine.partners = partners;
        if mine.rows == 0 {
            bucket.0[side].remove(row);
        }
        if bucket.0.iter().all(HashMap::is_empty) {
            self.buckets.remove(&key);
        } else if let Some(place) = self.buckets.get_mut(&key) {
            *place = bucket;
        }
    }
}

/// The join of two relations.
pub(super) fn join<G: Scope<Timestamp = u64>>(
    left: &VecCollection<G, Tuple, isize>,
    right: &VecCollection<G, Tuple, isize>,
    join: &Join,
) -> VecCollection<G, Tuple, isize> {
    let mut joiner = Joiner::new(join);
    let sides = left.map(|row| (LEFT, row)).concat(&right.map(|row| (RIGHT, row)));
    by_instant(&sides, "join", move |_, changes, results| {
        for ((side, row), count) in changes.drain(..) {
            joiner.change(side, &row, count, results);
        }
    })
}
