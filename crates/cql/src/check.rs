//! Checks of plans: types, columns and sizes.

use crate::aggregate::frequent::VALUES_MAX;
use crate::aggregate::histogram::Buckets;
use crate::ast::{BinaryOperator, UnaryOperator};
use crate::catalog::Catalog;
use crate::plan::{
    Aggregate, AggregateFunction, Expression, Function, Join, Output, Plan, Relation, Stage,
    Stream, Window,
};
use crate::value::Type;

/// The type of an expression or a column; `None` if it can only be null.
pub(crate) type KnownType = Option<Type>;

/// Checks a plan, which may come from another host.
///
/// # Errors
///
/// A description of the first mistake.
pub fn check(plan: &Plan, catalog: &Catalog) -> Result<(), String> {
    let kinds = match &plan.output {
        Output::Stream(stream) => stream_columns(stream, catalog)?,
        Output::Relation(relation) => columns(relation, catalog)?,
    };
    let named: Vec<KnownType> = plan.columns.iter().map(|column| Some(column.kind)).collect();
    ensure(fits(&kinds, &named), || format!("the columns have the types {kinds:?}, not {named:?}"))
}

/// The types of a stream's columns, or its first mistake.
pub(crate) fn stream_columns(stream: &Stream, catalog: &Catalog) -> Result<Vec<KnownType>, String> {
    match stream {
        Stream::Source(source) => input_columns(*source, catalog),
        Stream::Of(_, relation) => columns(relation, catalog),
    }
}

fn input_columns(input: usize, catalog: &Catalog) -> Result<Vec<KnownType>, String> {
    let input = catalog.streams.get(input).ok_or("no such input")?;
    Ok(input.columns.iter().map(|column| Some(column.kind)).collect())
}

/// The types of a relation's columns, or its first mistake.
pub(crate) fn columns(relation: &Relation, catalog: &Catalog) -> Result<Vec<KnownType>, String> {
    match relation {
        Relation::Window(window, stream) => {
            let kinds = stream_columns(stream, catalog)?;
            let good = match window {
                Window::Unbounded => true,
                Window::Range { length_ns, slide_ns } => *length_ns > 0 && *slide_ns != Some(0),
                Window::Rows { by, .. } => by.iter().all(|column| *column < kinds.len()),
            };
            ensure(good, || format!("invalid window: {window:?}"))?;
            Ok(kinds)
        }
        Relation::Given(input) => input_columns(*input, catalog),
        Relation::Filter(of, predicate) => {
            let kinds = columns(of, catalog)?;
            expect(predicate, &kinds, Type::Boolean)?;
            Ok(kinds)
        }
        Relation::Project(of, expressions) => all(expressions, &columns(of, catalog)?),
        Relation::Join(join) => joined(join, catalog),
        Relation::Aggregate(of, keys, aggregates) => {
            let kinds = columns(of, catalog)?;
            let mut result = all(keys, &kinds)?;
            for aggregate in aggregates {
                result.push(aggregated(aggregate, &kinds)?);
            }
            Ok(result)
        }
        Relation::Distinct(of) => columns(of, catalog),
        Relation::Set { left, right, .. } => {
            let (left, right) = (columns(left, catalog)?, columns(right, catalog)?);
            ensure(fits(&left, &right), || {
                format!("invalid combination of {left:?} and {right:?}")
            })?;
            Ok(left.into_iter().zip(right).map(|(left, right)| left.or(right)).collect())
        }
        Relation::Top(of, keys, _) => {
            let kinds = columns(of, catalog)?;
            for key in keys {
                kind(&key.expression, &kinds)?;
            }
            Ok(kinds)
        }
    }
}

fn joined(join: &Join, catalog: &Catalog) -> Result<Vec<KnownType>, String> {
    let (mut left, right) = (columns(&join.left, catalog)?, columns(&join.right, catalog)?);
    let counts = (join.left_columns, join.right_columns);
    ensure((left.len(), right.len()) == counts, || {
        format!("wrong numbers of joined columns: {counts:?}")
    })?;
    for (of_left, of_right) in &join.equal {
        let (of_left, of_right) = (kind(of_left, &left)?, kind(of_right, &right)?);
        same(of_left, of_right)?;
    }
    left.extend(right);
    if let Some(residual) = &join.residual {
        expect(residual, &left, Type::Boolean)?;
    }
    Ok(left)
}

fn aggregated(aggregate: &Aggregate, columns: &[KnownType]) -> Result<KnownType, String> {
    let Some(argument) = &aggregate.argument else {
        let count = aggregate.function == AggregateFunction::Count && !aggregate.distinct;
        ensure(count, || "only count applies to all rows".to_owned())?;
        return Ok(Some(Type::Integer));
    };
    let argument = kind(argument, columns)?;
    let numeric = || {
        let number = matches!(argument, None | Some(Type::Integer | Type::Float));
        ensure(number, || format!("invalid argument of {:?}: {argument:?}", aggregate.function))
    };
    match aggregate.function {
        AggregateFunction::Count => Ok(Some(Type::Integer)),
        AggregateFunction::Sum => numeric().map(|()| argument),
        AggregateFunction::Average
        | AggregateFunction::Variance
        | AggregateFunction::StandardDeviation => numeric().map(|()| Some(Type::Float)),
        AggregateFunction::Percentile(percentage) => {
            ensure((0.0..=100.0).contains(&percentage), || {
                format!("invalid percentile: {percentage}")
            })?;
            Ok(argument)
        }
        AggregateFunction::Minimum | AggregateFunction::Maximum => Ok(argument),
        AggregateFunction::MostFrequent(wanted) => {
            ensure((1..=VALUES_MAX).contains(&wanted), || {
                format!("invalid number of values: {wanted}")
            })?;
            Ok(Some(Type::Text))
        }
        AggregateFunction::ApproximateDistinct(_, stage) => match stage {
            Stage::Whole => Ok(Some(Type::Integer)),
            Stage::Part => Ok(Some(Type::Text)),
            Stage::Merge => is(argument, Type::Text).map(|_| Some(Type::Integer)),
        },
        AggregateFunction::Histogram(buckets, stage) => {
            let (width, counted) = match buckets {
                Buckets::PowersOfTwo => (1.0, number(argument)),
                Buckets::Integers(width) => (width.get() as f64, is(argument, Type::Integer)),
                Buckets::Floats(width) => (width, is(argument, Type::Float)),
            };
            ensure(Buckets::WIDTHS.contains(&width), || {
                format!("invalid width of buckets: {width}")
            })?;
            let counted = if stage == Stage::Merge { is(argument, Type::Text) } else { counted };
            counted.map(|_| Some(Type::Text))
        }
    }
}

/// The type of an expression over columns, or its first mistake.
pub(crate) fn kind(expression: &Expression, columns: &[KnownType]) -> Result<KnownType, String> {
    match expression {
        Expression::Column(position) => {
            columns.get(*position).copied().ok_or_else(|| format!("no column {position}"))
        }
        Expression::Literal(value) => Ok(value.kind()),
        Expression::Unary(UnaryOperator::Not, operand) => expect(operand, columns, Type::Boolean),
        Expression::Unary(UnaryOperator::Negate, operand) => number(kind(operand, columns)?),
        Expression::Binary(operator, left, right) => {
            let operands = same(kind(left, columns)?, kind(right, columns)?)?;
            match operator {
                BinaryOperator::And | BinaryOperator::Or => is(operands, Type::Boolean),
                BinaryOperator::Concatenate => is(operands, Type::Text),
                BinaryOperator::Add
                | BinaryOperator::Subtract
                | BinaryOperator::Multiply
                | BinaryOperator::Divide
                | BinaryOperator::Remainder => number(operands),
                BinaryOperator::Equal
                | BinaryOperator::NotEqual
                | BinaryOperator::Less
                | BinaryOperator::LessOrEqual
                | BinaryOperator::Greater
                | BinaryOperator::GreaterOrEqual => Ok(Some(Type::Boolean)),
            }
        }
        Expression::IsNull(operand) => kind(operand, columns).map(|_| Some(Type::Boolean)),
        Expression::Like(text, pattern) => {
            expect(text, columns, Type::Text)?;
            expect(pattern, columns, Type::Text)?;
            Ok(Some(Type::Boolean))
        }
        Expression::Cast(operand, to) => kind(operand, columns).map(|_| Some(*to)),
        Expression::Case(branches, otherwise) => {
            let mut result = match otherwise {
                Some(otherwise) => kind(otherwise, columns)?,
                None => None,
            };
            for (condition, value) in branches {
                expect(condition, columns, Type::Boolean)?;
                result = same(result, kind(value, columns)?)?;
            }
            Ok(result)
        }
        Expression::Call(function, arguments) => call(*function, &all(arguments, columns)?),
    }
}

fn call(function: Function, arguments: &[KnownType]) -> Result<KnownType, String> {
    use Type::{Boolean, Float, Integer, Text};
    let (expected, result): (&[Type], Type) = match function {
        Function::Lower | Function::Upper | Function::Trim => (&[Text], Text),
        Function::Length => (&[Text], Integer),
        Function::Substring if arguments.len() == 2 => (&[Text, Integer], Text),
        Function::Substring => (&[Text, Integer, Integer], Text),
        Function::Position => (&[Text, Text], Integer),
        Function::StartsWith | Function::EndsWith => (&[Text, Text], Boolean),
        Function::Replace => (&[Text, Text, Text], Text),
        Function::SplitPart => (&[Text, Text, Integer], Text),
        Function::Absolute => {
            let [argument] = arguments else {
                return Err(format!("invalid arguments of {function:?}: {arguments:?}"));
            };
            return number(*argument);
        }
        Function::Floor
        | Function::Ceiling
        | Function::Round
        | Function::SquareRoot
        | Function::Logarithm => (&[Float], Float),
        Function::Power => (&[Float, Float], Float),
        Function::Greatest | Function::Least | Function::Coalesce => {
            ensure(!arguments.is_empty(), || format!("{function:?} has no arguments"))?;
            return arguments.iter().try_fold(None, |kind, argument| same(kind, *argument));
        }
    };
    let expected: Vec<KnownType> = expected.iter().copied().map(Some).collect();
    ensure(fits(arguments, &expected), || {
        format!("invalid arguments of {function:?}: {arguments:?}")
    })?;
    Ok(Some(result))
}

fn all(expressions: &[Expression], columns: &[KnownType]) -> Result<Vec<KnownType>, String> {
    expressions.iter().map(|expression| kind(expression, columns)).collect()
}

fn expect(
    expression: &Expression,
    columns: &[KnownType],
    expected: Type,
) -> Result<KnownType, String> {
    is(kind(expression, columns)?, expected)
}

fn is(kind: KnownType, expected: Type) -> Result<KnownType, String> {
    same(kind, Some(expected))
}

fn number(kind: KnownType) -> Result<KnownType, String> {
    let number = matches!(kind, None | Some(Type::Integer | Type::Float));
    ensure(number, || format!("{kind:?} is not a number")).map(|()| kind)
}

fn same(left: KnownType, right: KnownType) -> Result<KnownType, String> {
    let same = left.is_none() || right.is_none() || left == right;
    ensure(same, || format!("the types {left:?} and {right:?} differ")).map(|()| left.or(right))
}

fn fits(left: &[KnownType], right: &[KnownType]) -> bool {
    left.len() == right.len() && left.iter().zip(right).all(|(a, b)| same(*a, *b).is_ok())
}

fn ensure(good: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if good { Ok(()) } else { Err(message()) }
}
