//! Joins.

use differential_dataflow::VecCollection;
use differential_dataflow::operators::Join as _;
use fathom_cql::ast::JoinKind;
use fathom_cql::eval::{evaluate, is_true};
use fathom_cql::plan::{Expression, Join};
use fathom_cql::{Row, Value};
use timely::dataflow::Scope;

use super::sets::distinct;

/// The rows of a relation with what they are joined by; without those that have a null there,
/// which equals nothing.
fn keyed<G: Scope<Timestamp = u64>>(
    relation: &VecCollection<G, Row, isize>,
    expressions: Vec<Expression>,
) -> VecCollection<G, (Vec<Value>, Row), isize> {
    relation.flat_map(move |row| {
        let key: Vec<Value> = expressions.iter().map(|each| evaluate(each, &row)).collect();
        (!key.iter().any(Value::is_null)).then_some((key, row))
    })
}

/// The join of two relations.
pub(super) fn join<G: Scope<Timestamp = u64>>(
    left: &VecCollection<G, Row, isize>,
    right: &VecCollection<G, Row, isize>,
    join: &Join,
) -> VecCollection<G, Row, isize> {
    let (of_left, of_right) = join.equal.iter().cloned().unzip();
    let mut pairs = keyed(left, of_left).join_map(&keyed(right, of_right), |_, left, right| {
        let mut row = Row::with_capacity(left.len() + right.len());
        row.extend_from_slice(left);
        row.extend_from_slice(right);
        row
    });
    if let Some(residual) = join.residual.clone() {
        pairs = pairs.filter(move |row| is_true(&evaluate(&residual, row)));
    }
    let (left_columns, right_columns) = (join.left_columns, join.right_columns);
    let mut result = pairs.clone();
    if matches!(join.kind, JoinKind::Left | JoinKind::Full) {
        let matched = distinct(&pairs.map(move |row| row[..left_columns].to_vec()));
        let alone = left.map(|row| (row, ())).antijoin(&matched).map(move |(mut row, ())| {
            row.resize(left_columns + right_columns, Value::Null);
            row
        });
        result = result.concat(&alone);
    }
    if matches!(join.kind, JoinKind::Right | JoinKind::Full) {
        let matched = distinct(&pairs.map(move |row| row[left_columns..].to_vec()));
        let alone = right.map(|row| (row, ())).antijoin(&matched).map(move |(row, ())| {
            let mut whole = vec![Value::Null; left_columns];
            whole.extend(row);
            whole
        });
        result = result.concat(&alone);
    }
    result
}
