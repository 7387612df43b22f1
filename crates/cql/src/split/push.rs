//! Moves filters down, as far as this is valid.

use crate::ast::{BinaryOperator, JoinKind, ToStream};
use crate::plan::{Expression, Join, Relation, Stream, Window};
use crate::planner::{combine, conjuncts, each_column, map_columns, sides};

/// The same relation, with each condition tested as early as possible.
pub(super) fn filters(relation: Relation) -> Relation {
    match relation {
        Relation::Filter(of, predicate) => {
            conjuncts(predicate).into_iter().fold(filters(*of), filtered)
        }
        Relation::Window(window, stream) => {
            let stream = match *stream {
                Stream::Of(how, of) => Stream::Of(how, Box::new(filters(*of))),
                source @ Stream::Source(_) => source,
            };
            Relation::Window(window, Box::new(stream))
        }
        given @ Relation::Given(_) => given,
        Relation::Project(of, values) => Relation::Project(Box::new(filters(*of)), values),
        Relation::Join(join) => Relation::Join(Box::new(joined(*join))),
        Relation::Aggregate(of, keys, aggregates) => {
            Relation::Aggregate(Box::new(filters(*of)), keys, aggregates)
        }
        Relation::Distinct(of) => Relation::Distinct(Box::new(filters(*of))),
        Relation::Set { operation, all, left, right } => {
            let (left, right) = (Box::new(filters(*left)), Box::new(filters(*right)));
            Relation::Set { operation, all, left, right }
        }
        Relation::Top(of, keys, limit) => Relation::Top(Box::new(filters(*of)), keys, limit),
    }
}

/// A filter over a relation.
fn filtered(relation: Relation, condition: Expression) -> Relation {
    match below(relation, condition) {
        Ok(relation) => relation,
        Err((relation, condition)) => Relation::Filter(Box::new(relation), condition),
    }
}

/// Moves a condition below the top operator of a relation. Returns both unchanged if this is not
/// valid.
fn below(
    relation: Relation,
    mut condition: Expression,
) -> Result<Relation, (Relation, Expression)> {
    match relation {
        Relation::Filter(of, first) => Ok(match below(*of, condition) {
            Ok(of) => Relation::Filter(Box::new(of), first),
            Err((of, condition)) => {
                let mut parts = conjuncts(first);
                parts.push(condition);
                Relation::Filter(Box::new(of), combine(BinaryOperator::And, parts))
            }
        }),
        Relation::Project(of, values) if moves(&mut condition, &values) => {
            Ok(Relation::Project(Box::new(filtered(*of, condition)), values))
        }
        Relation::Aggregate(of, keys, aggregates) if moves(&mut condition, &keys) => {
            Ok(Relation::Aggregate(Box::new(filtered(*of, condition)), keys, aggregates))
        }
        Relation::Distinct(of) => Ok(Relation::Distinct(Box::new(filtered(*of, condition)))),
        Relation::Set { operation, all, left, right } => {
            let left = Box::new(filtered(*left, condition.clone()));
            let right = Box::new(filtered(*right, condition));
            Ok(Relation::Set { operation, all, left, right })
        }
        Relation::Join(mut join) => match sides(&condition, join.left_columns) {
            (true, false) if matches!(join.kind, JoinKind::Inner | JoinKind::Left) => {
                join.left = filtered(join.left, condition);
                Ok(Relation::Join(join))
            }
            (false, true) if matches!(join.kind, JoinKind::Inner | JoinKind::Right) => {
                let left_columns = join.left_columns;
                map_columns(&mut condition, &|column| column - left_columns);
                join.right = filtered(join.right, condition);
                Ok(Relation::Join(join))
            }
            _ => Err((Relation::Join(join), condition)),
        },
        Relation::Window(window @ (Window::Unbounded | Window::Range { .. }), stream) => {
            match *stream {
                // The insertions into a filtered relation are the filtered insertions. Rstream does
                // not commute with a filter, because the filtered relation changes less often.
                Stream::Of(how @ (ToStream::Insertions | ToStream::Deletions), of) => {
                    let of = Box::new(filtered(*of, condition));
                    Ok(Relation::Window(window, Box::new(Stream::Of(how, of))))
                }
                other => Err((Relation::Window(window, Box::new(other)), condition)),
            }
        }
        other => Err((other, condition)),
    }
}

/// Replaces the columns of a condition by the columns below the projection. Returns false if the
/// condition uses a column that is not passed on unchanged.
fn moves(condition: &mut Expression, values: &[Expression]) -> bool {
    let below = |column: usize| match values.get(column) {
        Some(Expression::Column(below)) => Some(*below),
        _ => None,
    };
    let mut all = true;
    each_column(condition, &mut |column| all &= below(column).is_some());
    if all {
        map_columns(condition, &|column| below(column).unwrap_or(column));
    }
    all
}

/// Moves the conditions on one side of a join below the join. A side whose rows remain without a
/// partner keeps its conditions in the join.
fn joined(mut join: Join) -> Join {
    join.left = filters(join.left);
    join.right = filters(join.right);
    let left_columns = join.left_columns;
    let mut stay = Vec::new();
    for mut part in join.residual.take().map_or_else(Vec::new, conjuncts) {
        match sides(&part, left_columns) {
            (true, false) if matches!(join.kind, JoinKind::Inner | JoinKind::Right) => {
                join.left = filtered(join.left, part);
            }
            (false, true) if matches!(join.kind, JoinKind::Inner | JoinKind::Left) => {
                map_columns(&mut part, &|column| column - left_columns);
                join.right = filtered(join.right, part);
            }
            _ => stay.push(part),
        }
    }
    if !stay.is_empty() {
        join.residual = Some(combine(BinaryOperator::And, stay));
    }
    join
}
