//! Operators from relations to relations.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::bag::{self, Bag};
use super::{Changing, InputRow, Oracle};
use crate::aggregate::aggregate;
use crate::ast::JoinKind;
use crate::eval::{evaluate, is_true};
use crate::plan::{Aggregate, Expression, Join, OrderKey, Relation};
use crate::value::{Row, Value};

impl Oracle {
    /// A relation, as a function of the instant.
    pub(super) fn relation<'a>(&'a self, relation: &'a Relation) -> Changing<'a> {
        match relation {
            Relation::Window(window, stream) => self.window(window, stream),
            Relation::Given(source) => self.given(*source),
            Relation::Filter(of, predicate) => self.map(of, |bag| {
                bag.into_iter().filter(|row| is_true(&evaluate(predicate, row))).collect()
            }),
            Relation::Project(of, expressions) => {
                self.map(of, |bag| bag.into_iter().map(|row| values(expressions, &row)).collect())
            }
            Relation::Aggregate(of, keys, aggregates) => {
                self.map(of, |bag| groups(&bag, keys, aggregates))
            }
            Relation::Distinct(of) => self.map(of, Bag::distinct),
            Relation::Top(of, keys, limit) => self.map(of, |bag| first(bag, keys, *limit)),
            Relation::Set { operation, all, left, right } => {
                self.map_both(left, right, |left, right| bag::set(*operation, *all, left, right))
            }
            Relation::Join(join) => self.map_both(&join.left, &join.right, |left, right| {
                if self.step(left.len() * right.len()) {
                    joined(join, left, right)
                } else {
                    Bag::default()
                }
            }),
        }
    }

    /// The sum of an input's changes. A negative count is treated as 0.
    fn given(&self, source: usize) -> Changing<'_> {
        let changes: Vec<&InputRow> =
            self.inputs.iter().filter(|input| input.source == source).collect();
        let instants = changes.iter().map(|change| change.time_ns).collect();
        let at = Box::new(move |instant| {
            let mut counts: BTreeMap<&Row, i64> = BTreeMap::new();
            for change in changes.iter().filter(|change| change.time_ns <= instant) {
                *counts.entry(&change.row).or_default() += change.count;
            }
            if !self.step(changes.len()) {
                return Bag::default();
            }
            let often = |(row, count): (&Row, i64)| {
                std::iter::repeat_n(row.clone(), usize::try_from(count).unwrap_or(0))
            };
            counts.into_iter().flat_map(often).collect()
        });
        Changing { instants, at }
    }

    fn map<'a>(
        &'a self,
        relation: &'a Relation,
        function: impl Fn(Bag) -> Bag + 'a,
    ) -> Changing<'a> {
        let Changing { instants, at } = self.relation(relation);
        let at = Box::new(move |instant| {
            let bag = at(instant);
            if self.step(bag.len()) { function(bag) } else { Bag::default() }
        });
        Changing { instants, at }
    }

    fn map_both<'a>(
        &'a self,
        left: &'a Relation,
        right: &'a Relation,
        function: impl Fn(&Bag, &Bag) -> Bag + 'a,
    ) -> Changing<'a> {
        let left = self.relation(left);
        let right = self.relation(right);
        let instants = left.instants.union(&right.instants).copied().collect();
        let at = Box::new(move |instant| {
            let (left, right) = ((left.at)(instant), (right.at)(instant));
            if self.step(left.len() + right.len()) {
                function(&left, &right)
            } else {
                Bag::default()
            }
        });
        Changing { instants, at }
    }
}

fn values(expressions: &[Expression], row: &[Value]) -> Row {
    expressions.iter().map(|expression| evaluate(expression, row)).collect()
}

fn groups(bag: &Bag, keys: &[Expression], aggregates: &[Aggregate]) -> Bag {
    let mut groups: BTreeMap<Row, Vec<Row>> = BTreeMap::new();
    for row in bag.rows() {
        groups.entry(values(keys, row)).or_default().push(row.clone());
    }
    let result = |(key, rows): (Row, Vec<Row>)| -> Row {
        key.into_iter().chain(aggregates.iter().map(|of| aggregate(of, &rows))).collect()
    };
    groups.into_iter().map(result).collect()
}

fn first(bag: Bag, keys: &[OrderKey], limit: Option<u64>) -> Bag {
    let order = |left: &Row, right: &Row| -> Ordering {
        let by = |key: &OrderKey| {
            let order = evaluate(&key.expression, left).cmp(&evaluate(&key.expression, right));
            if key.descending { order.reverse() } else { order }
        };
        keys.iter().map(by).find(|order| order.is_ne()).unwrap_or_else(|| left.cmp(right))
    };
    let mut rows: Vec<Row> = bag.into_iter().collect();
    rows.sort_by(order);
    let limit = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    rows.into_iter().take(limit).collect()
}

fn joined(join: &Join, left: &Bag, right: &Bag) -> Bag {
    let matches = |left: &Row, right: &Row, both: &Row| {
        let equal = join.equal.iter().all(|(of_left, of_right)| {
            let value = evaluate(of_left, left);
            !value.is_null() && value == evaluate(of_right, right)
        });
        equal && join.residual.as_ref().is_none_or(|residual| is_true(&evaluate(residual, both)))
    };
    let both = |left: &Row, right: &Row| -> Row { left.iter().chain(right).cloned().collect() };
    let mut rows = Vec::new();
    let mut right_matched = vec![false; right.len()];
    for left_row in left.rows() {
        let mut left_matched = false;
        for (right_row, right_matched) in right.rows().iter().zip(&mut right_matched) {
            let pair = both(left_row, right_row);
            if matches(left_row, right_row, &pair) {
                left_matched = true;
                *right_matched = true;
                rows.push(pair);
            }
        }
        if !left_matched && matches!(join.kind, JoinKind::Left | JoinKind::Full) {
            rows.push(both(left_row, &vec![Value::Null; join.right_columns]));
        }
    }
    for (right_row, matched) in right.rows().iter().zip(right_matched) {
        if !matched && matches!(join.kind, JoinKind::Right | JoinKind::Full) {
            rows.push(both(&vec![Value::Null; join.left_columns], right_row));
        }
    }
    rows.into_iter().collect()
}
