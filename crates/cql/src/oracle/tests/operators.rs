//! Operators on relations.

use super::*;
use crate::ast::{JoinKind, SetOperation};
use crate::plan::{Aggregate, AggregateFunction, Join, OrderKey};

/// A count of all rows, or an aggregate of column 1.
fn aggregates() -> Vec<Aggregate> {
    let of = |function, argument| Aggregate { function, argument, distinct: false };
    vec![of(AggregateFunction::Count, None), of(AggregateFunction::Sum, Some(column(1)))]
}

#[test]
fn filters_keep_what_is_true() {
    let inputs = numbers(&[(1, 1), (2, 5), (3, NULL)]);
    let more = compare(BinaryOperator::Greater, column(0), constant(2));
    check(Relation::Filter(Box::new(all_of(0)), more.clone()), &inputs, &[(2, 1, &[5])]);
    let not = Expression::Unary(crate::ast::UnaryOperator::Not, Box::new(more));
    check(Relation::Filter(Box::new(all_of(0)), not), &inputs, &[(1, 1, &[1])]);
}

#[test]
fn projections_keep_counts() {
    let inputs = [input(0, 1, &[1, 5]), input(0, 1, &[2, 5]), input(0, 2, &[3, NULL])];
    let double = compare(BinaryOperator::Multiply, column(1), constant(2));
    let relation = Relation::Project(Box::new(all_of(0)), vec![double]);
    check(relation, &inputs, &[(1, 2, &[10]), (2, 1, &[NULL])]);
}

#[test]
fn aggregates_without_keys() {
    let inputs = [input(0, 1, &[1, 5]), input(0, 2, &[1, NULL]), input(0, 9, &[2, 7])];
    // Empty from 5 on: no row.
    check(
        Relation::Aggregate(Box::new(window(range(3))), vec![], aggregates()),
        &inputs,
        &[
            (1, 1, &[1, 5]),
            (2, -1, &[1, 5]),
            (2, 1, &[2, 5]),
            (4, 1, &[1, NULL]),
            (4, -1, &[2, 5]),
            (5, -1, &[1, NULL]),
            (9, 1, &[1, 7]),
            (12, -1, &[1, 7]),
        ],
    );
}

#[test]
fn aggregates_of_groups() {
    let inputs = [
        input(0, 1, &[1, 5]),
        input(0, 1, &[2, 6]),
        input(0, 1, &[NULL, 1]),
        input(0, 2, &[NULL, 2]),
        input(0, 2, &[1, 5]),
    ];
    check(
        Relation::Aggregate(Box::new(window(range(2))), vec![column(0)], aggregates()),
        &inputs,
        &[
            (1, 1, &[NULL, 1, 1]),
            (1, 1, &[1, 1, 5]),
            (1, 1, &[2, 1, 6]),
            (2, -1, &[NULL, 1, 1]),
            (2, 1, &[NULL, 2, 3]),
            (2, -1, &[1, 1, 5]),
            (2, 1, &[1, 2, 10]),
            (3, 1, &[NULL, 1, 2]),
            (3, -1, &[NULL, 2, 3]),
            (3, 1, &[1, 1, 5]),
            (3, -1, &[1, 2, 10]),
            (3, -1, &[2, 1, 6]),
            (4, -1, &[NULL, 1, 2]),
            (4, -1, &[1, 1, 5]),
        ],
    );
}

#[test]
fn groups_without_aggregates_are_distinct() {
    let inputs = numbers(&[(1, 1), (2, 1), (3, NULL), (3, NULL)]);
    let expected: &[(i64, i64, &[i64])] =
        &[(1, 1, &[1]), (3, 1, &[NULL]), (4, -1, &[1]), (5, -1, &[NULL])];
    let groups = Relation::Aggregate(Box::new(window(range(2))), vec![column(0)], vec![]);
    check(groups, &inputs, expected);
    check(Relation::Distinct(Box::new(window(range(2)))), &inputs, expected);
}

/// Inputs of a join. At 1 the left has (1, 10), (2, 20) and (null, 30), the right (1, 7), (1, 8),
/// (3, 9) and (null, 6).
fn pairs() -> Vec<InputRow> {
    vec![
        input(0, 1, &[1, 10]),
        input(0, 1, &[2, 20]),
        input(0, 1, &[NULL, 30]),
        input(1, 1, &[1, 7]),
        input(1, 1, &[1, 8]),
        input(1, 1, &[3, 9]),
        input(1, 1, &[NULL, 6]),
    ]
}

fn join(kind: JoinKind, residual: Option<Expression>) -> Relation {
    Relation::Join(Box::new(Join {
        left: all_of(0),
        right: all_of(1),
        kind,
        equal: vec![(column(0), column(0))],
        residual,
        left_columns: 2,
        right_columns: 2,
    }))
}

#[test]
fn joins() {
    const BOTH: [(i64, i64, &[i64]); 2] = [(1, 1, &[1, 10, 1, 7]), (1, 1, &[1, 10, 1, 8])];
    const LEFT: [(i64, i64, &[i64]); 2] =
        [(1, 1, &[NULL, 30, NULL, NULL]), (1, 1, &[2, 20, NULL, NULL])];
    const RIGHT: [(i64, i64, &[i64]); 2] =
        [(1, 1, &[NULL, NULL, NULL, 6]), (1, 1, &[NULL, NULL, 3, 9])];
    let inputs = pairs();
    check(join(JoinKind::Inner, None), &inputs, &BOTH);
    check(join(JoinKind::Left, None), &inputs, &[LEFT[0], BOTH[0], BOTH[1], LEFT[1]]);
    check(join(JoinKind::Right, None), &inputs, &[RIGHT[0], RIGHT[1], BOTH[0], BOTH[1]]);
    check(
        join(JoinKind::Full, None),
        &inputs,
        &[RIGHT[0], RIGHT[1], LEFT[0], BOTH[0], BOTH[1], LEFT[1]],
    );
}

#[test]
fn the_residual_condition_decides_on_partners() {
    let inputs = pairs();
    let more = |number| compare(BinaryOperator::Greater, column(3), constant(number));
    check(join(JoinKind::Inner, Some(more(7))), &inputs, &[(1, 1, &[1, 10, 1, 8])]);
    check(
        join(JoinKind::Left, Some(more(8))),
        &inputs,
        &[
            (1, 1, &[NULL, 30, NULL, NULL]),
            (1, 1, &[1, 10, NULL, NULL]),
            (1, 1, &[2, 20, NULL, NULL]),
        ],
    );
}

#[test]
fn an_outer_join_follows_its_sides() {
    let left = Relation::Window(range(4), Box::new(Stream::Source(0)));
    let right = Relation::Window(range(2), Box::new(Stream::Source(1)));
    let join = Join {
        left,
        right,
        kind: JoinKind::Left,
        equal: vec![(column(0), column(0))],
        residual: None,
        left_columns: 1,
        right_columns: 1,
    };
    let inputs = [input(0, 1, &[5]), input(0, 1, &[5]), input(1, 2, &[5]), input(1, 2, &[5])];
    check(
        Relation::Join(Box::new(join)),
        &inputs,
        &[
            (1, 2, &[5, NULL]),
            (2, -2, &[5, NULL]),
            (2, 4, &[5, 5]),
            (4, 2, &[5, NULL]),
            (4, -4, &[5, 5]),
            (5, -2, &[5, NULL]),
        ],
    );
}

#[test]
fn a_join_without_conditions_is_a_product() {
    let join = Join {
        left: all_of(0),
        right: all_of(0),
        kind: JoinKind::Inner,
        equal: vec![],
        residual: None,
        left_columns: 1,
        right_columns: 1,
    };
    check(
        Relation::Join(Box::new(join)),
        &numbers(&[(1, 1), (1, 2)]),
        &[(1, 1, &[1, 1]), (1, 1, &[1, 2]), (1, 1, &[2, 1]), (1, 1, &[2, 2])],
    );
}

/// Changes of a relation: time, count, row.
type Rows<'a> = &'a [(i64, i64, &'a [i64])];

#[test]
fn combinations() {
    // Left: 1, 1, 1, 2 and null; right: 1, 1, 3 and null. Null equals null.
    let mut inputs = numbers(&[(1, 1), (1, 1), (1, 1), (1, 2), (1, NULL)]);
    inputs.extend([1, 1, 3, NULL].map(|number| input(1, 1, &[number])));
    let set = |operation, all| Relation::Set {
        operation,
        all,
        left: Box::new(all_of(0)),
        right: Box::new(all_of(1)),
    };
    let cases: [(SetOperation, bool, Rows<'_>); 6] = [
        (SetOperation::Union, true, &[(1, 2, &[NULL]), (1, 5, &[1]), (1, 1, &[2]), (1, 1, &[3])]),
        (SetOperation::Union, false, &[(1, 1, &[NULL]), (1, 1, &[1]), (1, 1, &[2]), (1, 1, &[3])]),
        (SetOperation::Except, true, &[(1, 1, &[1]), (1, 1, &[2])]),
        (SetOperation::Except, false, &[(1, 1, &[2])]),
        (SetOperation::Intersect, true, &[(1, 1, &[NULL]), (1, 2, &[1])]),
        (SetOperation::Intersect, false, &[(1, 1, &[NULL]), (1, 1, &[1])]),
    ];
    for (operation, all, expected) in cases {
        check(set(operation, all), &inputs, expected);
    }
}

#[test]
fn the_first_rows() {
    let inputs = [
        input(0, 1, &[1, 10]),
        input(0, 1, &[2, 10]),
        input(0, 1, &[2, 10]),
        input(0, 1, &[3, NULL]),
        input(0, 2, &[0, 5]),
    ];
    let top = |descending, limit| {
        let key = OrderKey { expression: column(1), descending };
        Relation::Top(Box::new(all_of(0)), vec![key], limit)
    };
    // Null comes first. Ties are broken by the whole row, and equal rows may be cut off too.
    check(
        top(false, Some(3)),
        &inputs,
        &[
            (1, 1, &[1, 10]),
            (1, 1, &[2, 10]),
            (1, 1, &[3, NULL]),
            (2, 1, &[0, 5]),
            (2, -1, &[2, 10]),
        ],
    );
    check(top(true, Some(2)), &inputs, &[(1, 1, &[1, 10]), (1, 1, &[2, 10])]);
    check(top(true, Some(0)), &inputs, &[]);
    check(
        top(true, None),
        &inputs,
        &[(1, 1, &[1, 10]), (1, 2, &[2, 10]), (1, 1, &[3, NULL]), (2, 1, &[0, 5])],
    );
}

#[test]
fn steps_run_out() {
    let output = Output::Relation(join(JoinKind::Full, None));
    let plan = Plan { output, columns: Vec::new() };
    assert!(run_within(&plan, &pairs(), 100, 10).is_none());
    assert_eq!(run_within(&plan, &pairs(), 100, 1000), Some(run(&plan, &pairs(), 100)));
    assert!(run(&plan, &[], 100).is_empty());
}
