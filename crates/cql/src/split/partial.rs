//! Groups, distinct rows and first rows that hosts compute, and what the centre makes of them.
//!
//! It is done where the result is the same to the bit, and where it is likely to pay. A row of a
//! stream travels once; a row of a relation travels when it comes and when it goes, and a group
//! that changes is a row that goes and one that comes. So groups are sent
//!
//! - over windows that slide: they change at each step, however many rows there were between,
//! - of nothing but `min` and `max` over other windows too: most rows change neither.
//!
//! Aggregates of distinct values need each value of a group once; it does not matter how many hosts
//! have it. Rows that are there for one instant only are sent as they are.
//!
//! Histograms, and the registers of an approximate count, travel as texts: counts add up, and of a
//! register the greatest rank of all hosts is that of all values. The values that are there most
//! often at each host do not say which are there most often at all: their rows are sent.
//!
//! The sum of a host may overflow where the sum of all does not. Sums travel as two: that of the
//! values divided by 2³², and that of the remainders; both fit for up to 2³¹ rows.

use crate::ast::{BinaryOperator, SetOperation, UnaryOperator};
use crate::catalog::Catalog;
use crate::check::{self, Kind};
use crate::plan::{Aggregate, AggregateFunction, Expression, Relation, Stage, Window};
use crate::value::{Type, Value};

use super::distributes;

/// So many first rows are few.
const FEW_ROWS: u64 = 1000;

/// The sums of values are sent in two parts: of what is above this, and below.
const PART: i64 = 1 << 32;

/// Of values up to this the sums of 2³² rows fit.
const SMALL: u64 = 1 << 31;

/// What the centre makes of the groups that hosts send.
pub(super) struct Merge {
    /// How many columns are keys. They come first.
    keys: usize,
    aggregates: Vec<Aggregate>,
    /// What is made of the keys and aggregates, where these are not what is wanted.
    values: Option<Vec<Expression>>,
}

impl Merge {
    /// The groups, over what is sent.
    pub(super) fn over(self, sent: Relation) -> Relation {
        let keys = (0..self.keys).map(Expression::Column).collect();
        let groups = Relation::Aggregate(Box::new(sent), keys, self.aggregates);
        match self.values {
            Some(values) => Relation::Project(Box::new(groups), values),
            None => groups,
        }
    }
}

/// How long rows of a window by time are there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stay {
    /// For an instant.
    Now,
    /// From one multiple of the slide to another.
    Steps,
    /// For longer.
    Long,
}

/// Whether all windows below a relation that distributes are of some kind.
fn all_windows(relation: &Relation, good: &dyn Fn(Stay) -> bool) -> bool {
    match relation {
        Relation::Window(Window::Range { slide_ns: Some(2..), .. }, _) => good(Stay::Steps),
        Relation::Window(Window::Range { length_ns: 1, .. }, _) => good(Stay::Now),
        Relation::Window(..) | Relation::Given(_) => good(Stay::Long),
        Relation::Filter(of, _) | Relation::Project(of, _) => all_windows(of, good),
        Relation::Set { operation: SetOperation::Union, all: true, left, right } => {
            all_windows(left, good) && all_windows(right, good)
        }
        _ => false,
    }
}

/// Whether hosts had better send each row once; of a relation that distributes.
pub(super) fn pays_distinct(relation: &Relation) -> bool {
    all_windows(relation, &|stay| stay != Stay::Now)
}

/// Whether hosts had better send their first rows; of a relation that distributes.
pub(super) fn pays_first(relation: &Relation, limit: Option<u64>) -> bool {
    let few = limit.is_some_and(|limit| limit <= FEW_ROWS);
    few && all_windows(relation, &|stay| stay != Stay::Now)
}

/// What hosts send of groups, and what the centre makes of it.
pub(super) fn aggregates(
    of: &Relation,
    keys: &[Expression],
    aggregates: &[Aggregate],
    catalog: &Catalog,
) -> Option<(Relation, Merge)> {
    if !distributes(of) {
        return None;
    }
    // The registers of a group are less than its values, where they are not sent at each row.
    let steps = all_windows(of, &|stay| stay == Stay::Steps);
    let registers = steps && aggregates.iter().all(|each| is_approximate(each.function));
    if !aggregates.is_empty() && !registers && aggregates.iter().all(of_distinct_values) {
        return distinct_values(of, keys, aggregates);
    }
    let seldom = aggregates.iter().all(|each| is_extreme(each.function));
    if !all_windows(of, &|stay| stay == Stay::Steps || (seldom && stay == Stay::Long)) {
        return None;
    }
    let columns = check::columns(of, catalog).ok()?;
    let mut parts = Parts { keys: keys.len(), sent: Vec::new(), merged: Vec::new() };
    let mut values: Vec<Expression> = (0..keys.len()).map(Expression::Column).collect();
    for aggregate in aggregates {
        values.push(parts.value(aggregate, &columns)?);
    }
    let sent = Relation::Aggregate(Box::new(of.clone()), keys.to_vec(), parts.sent);
    let as_they_are = values.len() == keys.len() + parts.merged.len()
        && values.iter().enumerate().all(|(at, value)| *value == Expression::Column(at));
    let values = (!as_they_are).then_some(values);
    let merge = Merge { keys: keys.len(), aggregates: parts.merged, values };
    Some((sent, merge))
}

/// Whether it does not matter to an aggregate how often a value is there, but for the smallest and
/// the greatest, of which a host needs to send only its own.
fn of_distinct_values(aggregate: &Aggregate) -> bool {
    (aggregate.distinct && !is_extreme(aggregate.function)) || is_approximate(aggregate.function)
}

/// Hosts send each different row of keys and arguments.
fn distinct_values(
    of: &Relation,
    keys: &[Expression],
    aggregates: &[Aggregate],
) -> Option<(Relation, Merge)> {
    if !pays_distinct(of) {
        return None;
    }
    let mut values = keys.to_vec();
    let mut merged = Vec::with_capacity(aggregates.len());
    for aggregate in aggregates {
        let argument = aggregate.argument.as_ref()?;
        let known = values.iter().position(|value| value == argument);
        let at = known.unwrap_or(values.len());
        if known.is_none() {
            values.push(argument.clone());
        }
        merged.push(Aggregate { argument: Some(Expression::Column(at)), ..aggregate.clone() });
    }
    let rows = Relation::Project(Box::new(of.clone()), values);
    let merge = Merge { keys: keys.len(), aggregates: merged, values: None };
    Some((Relation::Distinct(Box::new(rows)), merge))
}

/// The aggregates that hosts send, and how those of all hosts become one.
struct Parts {
    keys: usize,
    sent: Vec<Aggregate>,
    merged: Vec<Aggregate>,
}

impl Parts {
    /// The value of an aggregate, over the keys and the merged parts; `None` where it cannot be had
    /// of parts.
    fn value(&mut self, aggregate: &Aggregate, columns: &[Kind]) -> Option<Expression> {
        let function = aggregate.function;
        if aggregate.distinct && !is_extreme(function) && !is_approximate(function) {
            return None;
        }
        let Some(argument) = &aggregate.argument else {
            return Some(self.part(AggregateFunction::Count, None));
        };
        match function {
            AggregateFunction::Count | AggregateFunction::Minimum | AggregateFunction::Maximum => {
                Some(self.part(function, Some(argument.clone())))
            }
            AggregateFunction::ApproximateDistinct(precision, Stage::Whole) => {
                let part = AggregateFunction::ApproximateDistinct(precision, Stage::Part);
                Some(self.part(part, Some(argument.clone())))
            }
            AggregateFunction::Histogram(buckets, Stage::Whole) => {
                let part = AggregateFunction::Histogram(buckets, Stage::Part);
                Some(self.part(part, Some(argument.clone())))
            }
            _ if check::kind(argument, columns) != Ok(Some(Type::Integer)) => None,
            AggregateFunction::Sum => Some(self.sum(argument).whole()),
            AggregateFunction::Average => {
                let count = self.part(AggregateFunction::Count, Some(argument.clone()));
                Some(binary(BinaryOperator::Divide, self.sum(argument).float(), to_float(count)))
            }
            AggregateFunction::Variance
            | AggregateFunction::StandardDeviation
            | AggregateFunction::Percentile(_)
            | AggregateFunction::MostFrequent(_)
            | AggregateFunction::ApproximateDistinct(..)
            | AggregateFunction::Histogram(..) => None,
        }
    }

    /// An aggregate that hosts send, as the centre has it.
    fn part(&mut self, function: AggregateFunction, argument: Option<Expression>) -> Expression {
        let part = Aggregate { function, argument, distinct: false };
        let known = self.sent.iter().position(|known| *known == part);
        let at = self.keys + known.unwrap_or(self.sent.len());
        if known.is_none() {
            let function = match function {
                AggregateFunction::Count => AggregateFunction::Sum,
                AggregateFunction::ApproximateDistinct(precision, _) => {
                    AggregateFunction::ApproximateDistinct(precision, Stage::Merge)
                }
                AggregateFunction::Histogram(buckets, _) => {
                    AggregateFunction::Histogram(buckets, Stage::Merge)
                }
                other => other,
            };
            let argument = Some(Expression::Column(at));
            self.merged.push(Aggregate { function, argument, distinct: false });
            self.sent.push(part);
        }
        Expression::Column(at)
    }

    fn sum(&mut self, argument: &Expression) -> Sum {
        if greatest(argument).is_some_and(|most| most <= SMALL) {
            return Sum::Small(self.part(AggregateFunction::Sum, Some(argument.clone())));
        }
        let mut of = |operator| {
            let part = binary(operator, argument.clone(), integer(PART));
            self.part(AggregateFunction::Sum, Some(part))
        };
        Sum::Parts { high: of(BinaryOperator::Divide), low: of(BinaryOperator::Remainder) }
    }
}

fn is_extreme(function: AggregateFunction) -> bool {
    matches!(function, AggregateFunction::Minimum | AggregateFunction::Maximum)
}

fn is_approximate(function: AggregateFunction) -> bool {
    matches!(function, AggregateFunction::ApproximateDistinct(..))
}

/// The sum of what all hosts have.
enum Sum {
    /// As it is.
    Small(Expression),
    /// `high` · 2³² + `low`, where `low` may be any integer.
    Parts { high: Expression, low: Expression },
}

impl Sum {
    /// An integer; null where it does not fit.
    fn whole(self) -> Expression {
        match self {
            Self::Small(sum) => sum,
            Self::Parts { high, low } => {
                let (high, low) = carried(high, low);
                let high = binary(BinaryOperator::Multiply, high, integer(PART));
                binary(BinaryOperator::Add, high, low)
            }
        }
    }

    /// The float that is nearest. The upper part is one exactly as long as the sum is below 2⁸⁵, and
    /// the lower one always; so they are rounded once, when they are added.
    fn float(self) -> Expression {
        match self {
            Self::Small(sum) => to_float(sum),
            Self::Parts { high, low } => {
                let (high, low) = carried(high, low);
                let part = Expression::Literal(Value::Float(PART as f64));
                let high = binary(BinaryOperator::Multiply, to_float(high), part);
                binary(BinaryOperator::Add, high, to_float(low))
            }
        }
    }
}

/// The same sum in parts of which the lower is from 0 to 2³² − 1.
fn carried(high: Expression, low: Expression) -> (Expression, Expression) {
    let remainder = |of| binary(BinaryOperator::Remainder, of, integer(PART));
    let rest = remainder(binary(BinaryOperator::Add, remainder(low.clone()), integer(PART)));
    let carry = binary(BinaryOperator::Subtract, low, rest.clone());
    let carry = binary(BinaryOperator::Divide, carry, integer(PART));
    (binary(BinaryOperator::Add, high, carry), rest)
}

/// How far from 0 an integer can be at most, where that is easily told.
fn greatest(expression: &Expression) -> Option<u64> {
    match expression {
        Expression::Literal(Value::Integer(number)) => Some(number.unsigned_abs()),
        Expression::Literal(Value::Null) => Some(0),
        Expression::Unary(UnaryOperator::Negate, operand) => greatest(operand),
        Expression::Case(branches, otherwise) => {
            let values = branches.iter().map(|(_, value)| value);
            let values = values.chain(otherwise.as_deref());
            values.map(greatest).try_fold(0, |most, value| Some(value?.max(most)))
        }
        _ => None,
    }
}

fn binary(operator: BinaryOperator, left: Expression, right: Expression) -> Expression {
    Expression::Binary(operator, Box::new(left), Box::new(right))
}

fn integer(number: i64) -> Expression {
    Expression::Literal(Value::Integer(number))
}

fn to_float(of: Expression) -> Expression {
    Expression::Cast(Box::new(of), Type::Float)
}
