//! Checks that plans are what their contract says: columns are there, operands have one type.

use fathom_cql::Type;
use fathom_cql::ast::BinaryOperator as Operator;
use fathom_cql::ast::UnaryOperator;
use fathom_cql::catalog::Catalog;
use fathom_cql::plan::{
    AggregateFunction, Expression, Function, Output, Plan, Relation, Stream, Window,
};

type Kind = Option<Type>;

/// Panics where a plan breaks a rule.
pub fn check(plan: &Plan, catalog: &Catalog) {
    let kinds = match &plan.output {
        Output::Stream(of) => stream(of, catalog),
        Output::Relation(of) => relation(of, catalog),
    };
    assert_eq!(kinds.len(), plan.columns.len());
    for (kind, column) in kinds.iter().zip(&plan.columns) {
        assert!(fits(*kind, Some(column.kind)), "{kind:?} {column:?}");
    }
}

fn fits(one: Kind, other: Kind) -> bool {
    one.is_none() || other.is_none() || one == other
}

fn stream(of: &Stream, catalog: &Catalog) -> Vec<Kind> {
    match of {
        Stream::Source(at) => input(*at, catalog),
        Stream::Of(_, of) => relation(of, catalog),
    }
}

fn input(at: usize, catalog: &Catalog) -> Vec<Kind> {
    catalog.streams[at].columns.iter().map(|column| Some(column.kind)).collect()
}

fn condition(of: &Expression, columns: &[Kind]) {
    assert!(fits(kind(of, columns), Some(Type::Boolean)), "{of:?}");
}

fn relation(of: &Relation, catalog: &Catalog) -> Vec<Kind> {
    match of {
        Relation::Window(window, of) => {
            let columns = stream(of, catalog);
            match window {
                Window::Rows { by, .. } => assert!(by.iter().all(|by| *by < columns.len())),
                Window::Range { length_ns, slide_ns } => {
                    assert!(*length_ns > 0 && *slide_ns != Some(0));
                }
                Window::Unbounded => {}
            }
            columns
        }
        Relation::Given(at) => input(*at, catalog),
        Relation::Filter(of, predicate) => {
            let columns = relation(of, catalog);
            condition(predicate, &columns);
            columns
        }
        Relation::Project(of, expressions) => {
            let columns = relation(of, catalog);
            expressions.iter().map(|expression| kind(expression, &columns)).collect()
        }
        Relation::Join(join) => {
            let mut columns = relation(&join.left, catalog);
            let right = relation(&join.right, catalog);
            assert_eq!((join.left_columns, join.right_columns), (columns.len(), right.len()));
            for (one, other) in &join.equal {
                assert!(fits(kind(one, &columns), kind(other, &right)), "{one:?} {other:?}");
            }
            columns.extend(right);
            if let Some(residual) = &join.residual {
                condition(residual, &columns);
            }
            columns
        }
        Relation::Aggregate(of, keys, aggregates) => {
            let columns = relation(of, catalog);
            let mut kinds: Vec<Kind> = keys.iter().map(|key| kind(key, &columns)).collect();
            for aggregate in aggregates {
                let argument = aggregate.argument.as_ref().and_then(|of| kind(of, &columns));
                kinds.push(match aggregate.function {
                    AggregateFunction::Count | AggregateFunction::ApproximateDistinct => {
                        Some(Type::Integer)
                    }
                    AggregateFunction::Average
                    | AggregateFunction::Variance
                    | AggregateFunction::StandardDeviation => Some(Type::Float),
                    _ => argument,
                });
            }
            kinds
        }
        Relation::Distinct(of) => relation(of, catalog),
        Relation::Set { left, right, .. } => {
            let (left, right) = (relation(left, catalog), relation(right, catalog));
            assert_eq!(left.len(), right.len());
            let both = left.into_iter().zip(right);
            both.map(|(one, other)| {
                assert!(fits(one, other));
                one.or(other)
            })
            .collect()
        }
        Relation::Top(of, keys, _) => {
            let columns = relation(of, catalog);
            for key in keys {
                kind(&key.expression, &columns);
            }
            columns
        }
    }
}

fn kind(of: &Expression, columns: &[Kind]) -> Kind {
    match of {
        Expression::Column(at) => columns[*at],
        Expression::Literal(value) => value.kind(),
        Expression::Unary(UnaryOperator::Negate, of) => kind(of, columns),
        Expression::Unary(UnaryOperator::Not, of) => {
            condition(of, columns);
            Some(Type::Boolean)
        }
        Expression::Binary(operator, left, right) => {
            let (left, right) = (kind(left, columns), kind(right, columns));
            assert!(fits(left, right), "{of:?}");
            match operator {
                Operator::Add
                | Operator::Subtract
                | Operator::Multiply
                | Operator::Divide
                | Operator::Remainder => left.or(right),
                Operator::Concatenate => Some(Type::Text),
                _ => Some(Type::Boolean),
            }
        }
        Expression::IsNull(of) => {
            kind(of, columns);
            Some(Type::Boolean)
        }
        Expression::Like(text, pattern) => {
            assert!(fits(kind(text, columns), Some(Type::Text)));
            assert!(fits(kind(pattern, columns), Some(Type::Text)));
            Some(Type::Boolean)
        }
        Expression::Cast(of, to) => {
            kind(of, columns);
            Some(*to)
        }
        Expression::Case(branches, otherwise) => {
            let mut all = otherwise.as_ref().and_then(|value| kind(value, columns));
            for (when, then) in branches {
                condition(when, columns);
                let then = kind(then, columns);
                assert!(fits(then, all), "{of:?}");
                all = all.or(then);
            }
            all
        }
        Expression::Call(function, arguments) => {
            let kinds: Vec<Kind> = arguments.iter().map(|of| kind(of, columns)).collect();
            match function {
                Function::Length | Function::Position => Some(Type::Integer),
                Function::StartsWith | Function::EndsWith => Some(Type::Boolean),
                Function::Lower
                | Function::Upper
                | Function::Substring
                | Function::Replace
                | Function::SplitPart
                | Function::Trim => Some(Type::Text),
                Function::Floor
                | Function::Ceiling
                | Function::Round
                | Function::SquareRoot
                | Function::Logarithm
                | Function::Power => Some(Type::Float),
                _ => kinds.iter().copied().find(Option::is_some).flatten(),
            }
        }
    }
}
