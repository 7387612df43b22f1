//! Distinct rows, set operations, and the first rows of an order.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;

use fathom_cql::Value;
use fathom_cql::ast::SetOperation;
use fathom_cql::eval::evaluate;
use fathom_cql::plan::OrderKey;
use hashbrown::HashMap;

use super::Tuple;
use super::bag::Bag;
use super::build::Stateful;
use super::rows::Results;

/// Outputs the change of the distinct rows when the count of a row changes.
pub(super) fn distinct(counts: &mut Bag<Tuple>, row: &Tuple, count: i64, results: &mut Results) {
    let (before, after) = counts.add(row.clone(), count);
    let change = i64::from(after > 0) - i64::from(before > 0);
    if change != 0 {
        results.push((row.clone(), change));
    }
}

/// The state of a set operation on two relations.
#[derive(Debug)]
pub(super) struct Combination {
    operation: SetOperation,
    all: bool,
    counts: HashMap<Tuple, [i64; 2]>,
}

impl Combination {
    pub(super) fn new(operation: SetOperation, all: bool) -> Self {
        Self { operation, all, counts: HashMap::new() }
    }

    /// The count of a row in the result, computed from its counts on both sides.
    fn count(&self, [left, right]: [i64; 2]) -> i64 {
        match (self.operation, self.all) {
            (SetOperation::Union, true) => left + right,
            (SetOperation::Union, false) => i64::from(left > 0 || right > 0),
            (SetOperation::Except, true) => (left - right).max(0),
            (SetOperation::Except, false) => i64::from(left > 0 && right == 0),
            (SetOperation::Intersect, true) => left.min(right),
            (SetOperation::Intersect, false) => i64::from(left > 0 && right > 0),
        }
    }

    /// Applies the changes of an instant. The changes of a row on both sides are neighbours.
    pub(super) fn change(&mut self, changes: &[(usize, Tuple, i64)], results: &mut Results) {
        for same in changes.chunk_by(|(_, one, _), (_, next, _)| one == next) {
            let row = &same[0].1;
            let before = self.counts.get(row).copied().unwrap_or_default();
            let mut after = before;
            for &(side, _, count) in same {
                after[side] += count;
            }
            if after == [0, 0] {
                self.counts.remove(row);
            } else {
                self.counts.insert(row.clone(), after);
            }
            let change = self.count(after) - self.count(before);
            if change != 0 {
                results.push((row.clone(), change));
            }
        }
    }
}

impl Stateful for Combination {
    fn rows(&self) -> usize {
        self.counts.len()
    }
}

/// A value of a sort key.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rank {
    Up(Value),
    Down(Reverse<Value>),
}

impl Ord for Rank {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Up(left), Self::Up(right)) => left.cmp(right),
            (Self::Down(left), Self::Down(right)) => left.cmp(right),
            // A key has the same direction in all rows, so these cases do not occur.
            (Self::Up(_), Self::Down(_)) => Ordering::Less,
            (Self::Down(_), Self::Up(_)) => Ordering::Greater,
        }
    }
}

impl PartialOrd for Rank {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A row after the values of its sort keys.
type Ranked = (Vec<Rank>, Tuple);

/// The first rows by some keys, then by the whole row.
///
/// The last shown row is a position in the order. It moves by as many rows as are inserted and
/// deleted before it. So a change costs O(log n), independent of the limit.
#[derive(Debug)]
pub(super) struct Top {
    keys: Vec<OrderKey>,
    limit: i64,
    rows: Bag<Ranked>,
    edge: Option<Edge>,
}

/// The last shown row. All rows before it are shown, and no rows after it.
#[derive(Debug)]
struct Edge {
    /// The row, which may have been deleted.
    row: Ranked,
    /// The number of its shown copies.
    shown: i64,
    /// The number of rows before it.
    before: i64,
}

impl Top {
    pub(super) fn new(keys: Vec<OrderKey>, limit: u64) -> Self {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        Self { keys, limit, rows: Bag::default(), edge: None }
    }

    /// Applies the changes of an instant.
    pub(super) fn change(&mut self, changes: &[(usize, Tuple, i64)], results: &mut Results) {
        let mut shown: BTreeMap<Tuple, i64> = BTreeMap::new();
        let mut show = |(_, row): &Ranked, count: i64| {
            if count != 0 {
                *shown.entry(Tuple::clone(row)).or_default() += count;
            }
        };
        for (_, row, count) in changes {
            let rank = |key: &OrderKey| match (evaluate(&key.expression, row), key.descending) {
                (value, false) => Rank::Up(value),
                (value, true) => Rank::Down(Reverse(value)),
            };
            let ranked = (self.keys.iter().map(rank).collect(), row.clone());
            if let Some(edge) = self.edge.as_mut().filter(|edge| ranked < edge.row) {
                edge.before += count;
                show(&ranked, *count);
            }
            self.rows.add(ranked, *count);
        }
        self.move_edge(&mut show);
        results.extend(shown.into_iter().filter(|(_, count)| *count != 0));
    }

    /// Moves the edge to the limit, and outputs the resulting changes.
    fn move_edge(&mut self, show: &mut impl FnMut(&Ranked, i64)) {
        let (limit, rows) = (self.limit, &self.rows);
        if self.edge.is_none() {
            let first = rows.iter().next();
            self.edge = first.map(|(row, _)| Edge { row: row.clone(), shown: 0, before: 0 });
        }
        let Some(edge) = &mut self.edge else { return };
        loop {
            let here = rows.count(&edge.row);
            let shown = (limit - edge.before).clamp(0, here.max(0));
            show(&edge.row, shown - edge.shown);
            edge.shown = shown;
            let next = if edge.before > limit {
                rows.before(&edge.row).map(|(row, count)| (row, count, edge.before - count))
            } else if edge.before + here < limit {
                rows.after(&edge.row).map(|(row, _)| (row, 0, edge.before + here))
            } else {
                return;
            };
            let Some((row, shown, before)) = next else { return };
            *edge = Edge { row: row.clone(), shown, before };
        }
    }
}

impl Stateful for Top {
    fn rows(&self) -> usize {
        self.rows.rows()
    }
}
