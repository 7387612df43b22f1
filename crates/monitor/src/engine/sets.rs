//! Bags as sets, differences, intersections, and the first rows of an order.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;

use fathom_cql::Value;
use fathom_cql::ast::SetOperation;
use fathom_cql::eval::evaluate;
use fathom_cql::plan::OrderKey;
use hashbrown::HashMap;

use super::Tuple;
use super::bag::Bag;
use super::build::Holds;
use super::rows::Results;

/// What changes of the rows that are there at all, as a row is there so many times more.
pub(super) fn distinct(counts: &mut Bag<Tuple>, row: &Tuple, count: i64, results: &mut Results) {
    let (before, after) = counts.add(row.clone(), count);
    let change = i64::from(after > 0) - i64::from(before > 0);
    if change != 0 {
        results.push((row.clone(), change));
    }
}

/// Two relations combined.
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

    /// How often a row is there that the sides have so often.
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

    /// The sides change at an instant; both sides of a row are neighbours.
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

impl Holds for Combination {
    fn rows(&self) -> usize {
        self.counts.len()
    }
}

/// A value by which rows are ordered.
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
            // The same key has the same direction in every row.
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

/// The first rows by some keys, then by the whole row.
#[derive(Debug)]
pub(super) struct Top {
    keys: Vec<OrderKey>,
    limit: i64,
    rows: Bag<(Vec<Rank>, Tuple)>,
    shown: BTreeMap<Tuple, i64>,
}

impl Top {
    pub(super) fn new(keys: Vec<OrderKey>, limit: u64) -> Self {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        Self { keys, limit, rows: Bag::default(), shown: BTreeMap::new() }
    }

    /// The relation changes at an instant.
    pub(super) fn change(&mut self, changes: &[(usize, Tuple, i64)], results: &mut Results) {
        for (_, row, count) in changes {
            let rank = |key: &OrderKey| match (evaluate(&key.expression, row), key.descending) {
                (value, false) => Rank::Up(value),
                (value, true) => Rank::Down(Reverse(value)),
            };
            let ranks = self.keys.iter().map(rank).collect();
            self.rows.add((ranks, row.clone()), *count);
        }
        let mut left = self.limit;
        let mut first = BTreeMap::new();
        for ((_, row), count) in self.rows.iter() {
            if left <= 0 {
                break;
            }
            first.insert(row.clone(), count.min(left));
            left -= count;
        }
        for (row, &count) in &self.shown {
            let change = first.get(row).copied().unwrap_or(0) - count;
            if change != 0 {
                results.push((row.clone(), change));
            }
        }
        let new = first.iter().filter(|(row, _)| !self.shown.contains_key(*row));
        results.extend(new.map(|(row, &count)| (row.clone(), count)));
        self.shown = first;
    }
}

impl Holds for Top {
    fn rows(&self) -> usize {
        self.rows.rows()
    }
}
