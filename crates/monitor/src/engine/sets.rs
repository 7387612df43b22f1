//! Bags as sets, differences, intersections, and the first rows of an order.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use differential_dataflow::VecCollection;
use fathom_cql::Value;
use fathom_cql::ast::SetOperation;
use fathom_cql::eval::evaluate;
use fathom_cql::plan::OrderKey;
use hashbrown::HashMap;
use timely::dataflow::Scope;

use super::Tuple;
use super::changes::add;
use super::instants::by_instant;

/// Each row once.
pub(super) fn distinct<G: Scope<Timestamp = u64>>(
    relation: &VecCollection<G, Tuple, isize>,
) -> VecCollection<G, Tuple, isize> {
    let mut counts: BTreeMap<Tuple, isize> = BTreeMap::new();
    by_instant(relation, "distinct", move |_, changes, results| {
        for (row, count) in changes.drain(..) {
            let (before, after) = add(&mut counts, row.clone(), count);
            let change = isize::from(after > 0) - isize::from(before > 0);
            if change != 0 {
                results.push((row, change));
            }
        }
    })
}

/// Two relations combined.
pub(super) fn combine<G: Scope<Timestamp = u64>>(
    left: &VecCollection<G, Tuple, isize>,
    right: &VecCollection<G, Tuple, isize>,
    operation: SetOperation,
    all: bool,
) -> VecCollection<G, Tuple, isize> {
    if operation == SetOperation::Union {
        let both = left.concat(right);
        return if all { both } else { distinct(&both) };
    }
    let count = move |left: isize, right: isize| match (operation, all) {
        (SetOperation::Except, true) => (left - right).max(0),
        (SetOperation::Except, false) => isize::from(left > 0 && right == 0),
        (_, true) => left.min(right),
        (_, false) => isize::from(left > 0 && right > 0),
    };
    let mut counts: HashMap<Tuple, [isize; 2]> = HashMap::new();
    let sides = left.map(|row| (row, 0_usize)).concat(&right.map(|row| (row, 1)));
    by_instant(&sides, "combine", move |_, changes, results| {
        // Both sides of a row are neighbours.
        for same in changes.chunk_by(|one, next| one.0.0 == next.0.0) {
            let Some(((row, _), _)) = same.first() else { continue };
            let counts_of = counts.entry(row.clone()).or_default();
            let before = count(counts_of[0], counts_of[1]);
            for ((_, side), change) in same {
                counts_of[*side] += change;
            }
            let after = count(counts_of[0], counts_of[1]);
            if *counts_of == [0, 0] {
                counts.remove(row);
            }
            if before != after {
                results.push((row.clone(), after - before));
            }
        }
    })
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

/// The first `limit` rows by `keys`, then by the whole row.
pub(super) fn top<G: Scope<Timestamp = u64>>(
    relation: &VecCollection<G, Tuple, isize>,
    keys: Vec<OrderKey>,
    limit: u64,
) -> VecCollection<G, Tuple, isize> {
    let limit = isize::try_from(limit).unwrap_or(isize::MAX);
    let mut rows: BTreeMap<(Vec<Rank>, Tuple), isize> = BTreeMap::new();
    let mut shown: BTreeMap<Tuple, isize> = BTreeMap::new();
    by_instant(relation, "top", move |_, changes, results| {
        for (row, count) in changes.drain(..) {
            let rank = |key: &OrderKey| match (evaluate(&key.expression, &row), key.descending) {
                (value, false) => Rank::Up(value),
                (value, true) => Rank::Down(Reverse(value)),
            };
            let place = (keys.iter().map(rank).collect(), row.clone());
            match rows.entry(place) {
                Entry::Vacant(vacant) => {
                    vacant.insert(count);
                }
                Entry::Occupied(mut occupied) => {
                    *occupied.get_mut() += count;
                    if *occupied.get() == 0 {
                        occupied.remove();
                    }
                }
            }
        }
        let mut left = limit;
        let mut first: BTreeMap<Tuple, isize> = BTreeMap::new();
        for ((_, row), &count) in &rows {
            if left <= 0 {
                break;
            }
            first.insert(row.clone(), count.min(left));
            left -= count;
        }
        for (row, &count) in &shown {
            let change = first.get(row).copied().unwrap_or(0) - count;
            if change != 0 {
                results.push((row.clone(), change));
            }
        }
        let new = first.iter().filter(|(row, _)| !shown.contains_key(*row));
        results.extend(new.map(|(row, &count)| (row.clone(), count)));
        shown = first;
    })
}
