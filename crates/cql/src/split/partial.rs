//! Groups, distinct rows and first rows that hosts compute, and how the centre merges them.
//!
//! Hosts compute these if the result is the same to the bit and less data is likely to be sent. A
//! row of a stream is sent once. A row of a relation is sent when it is inserted and when it is
//! deleted, and the change of a group is a deletion and an insertion. So groups are sent
//!
//! - over windows that slide: they change only at each step, regardless of the number of rows,
//! - over other windows too if all aggregates are `min` and `max`: most rows change neither.
//!
//! Aggregates of distinct values need each value of a group once, no matter how many hosts have it.
//! Rows that exist for one instant only are sent unchanged.
//!
//! Histograms and the registers of approximate counts are sent as texts: counts are added, and the
//! greatest rank of a register is the maximum over all hosts. The most frequent values of all hosts
//! cannot be computed from those of each host, so for them rows are sent.
//!
//! The sum of a host may overflow although the sum of all hosts does not. So a sum is sent as two:
//! that of the values divided by 2³², and that of the remainders. Neither overflows with up to 2³¹
//! rows.

use crate::ast::{BinaryOperator, SetOperation, UnaryOperator};
use crate::catalog::Catalog;
use crate::check::{self, KnownType};
use crate::plan::{Aggregate, AggregateFunction, Expression, Relation, Stage, Window};
use crate::value::{Type, Value};

use super::distributes;

/// The most first rows that hosts send for `limit`.
const FIRST_ROWS_MAX: u64 = 1000;

/// The divisor for the two parts of a sum: the sum of the quotients, and that of the remainders.
const SUM_DIVISOR: i64 = 1 << 32;

/// The greatest magnitude of values whose sum is sent as one: the sum of fewer than 2³² such values
/// does not overflow.
const SMALL_MAX: u64 = 1 << 31;

/// How the centre merges the groups of the hosts.
pub(super) struct Merge {
    /// The number of keys, which are the first columns.
    keys: usize,
    aggregates: Vec<Aggregate>,
    /// The expressions over the keys and aggregates that give the result; `None` if these are the
    /// result.
    values: Option<Vec<Expression>>,
}

impl Merge {
    /// The merged groups, over the sent relation.
    pub(super) fn over(self, sent: Relation) -> Relation {
        let keys = (0..self.keys).map(Expression::Column).collect();
        let groups = Relation::Aggregate(Box::new(sent), keys, self.aggregates);
        match self.values {
            Some(values) => Relation::Project(Box::new(groups), values),
            None => groups,
        }
    }
}

/// How long rows remain in a window.
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

/// Whether hosts send each distinct row of a relation that distributes once.
pub(super) fn sends_distinct(relation: &Relation) -> bool {
    all_windows(relation, &|stay| stay != Stay::Now)
}

/// Whether hosts send only the first rows of a relation that distributes.
pub(super) fn sends_first_rows(relation: &Relation, limit: Option<u64>) -> bool {
    let few = limit.is_some_and(|limit| limit <= FIRST_ROWS_MAX);
    few && all_windows(relation, &|stay| stay != Stay::Now)
}

/// The relation that hosts send of an aggregation, and how the centre merges it; `None` if hosts
/// send rows.
pub(super) fn aggregates(
    of: &Relation,
    keys: &[Expression],
    aggregates: &[Aggregate],
    catalog: &Catalog,
) -> Option<(Relation, Merge)> {
    if !distributes(of) {
        return None;
    }
    // The registers of a group are smaller than its values, unless they are sent for each row.
    let steps = all_windows(of, &|stay| stay == Stay::Steps);
    let registers = steps && aggregates.iter().all(|each| is_approximate(each.function));
    if !aggregates.is_empty() && !registers && aggregates.iter().all(of_distinct_values) {
        return distinct_values(of, keys, aggregates);
    }
    let rarely_changes = aggregates.iter().all(|each| is_extreme(each.function));
    if !all_windows(of, &|stay| stay == Stay::Steps || (rarely_changes && stay == Stay::Long)) {
        return None;
    }
    let columns = check::columns(of, catalog).ok()?;
    let mut parts = Parts { keys: keys.len(), sent: Vec::new(), merged: Vec::new() };
    let mut values: Vec<Expression> = (0..keys.len()).map(Expression::Column).collect();
    for aggregate in aggregates {
        values.push(parts.value(aggregate, &columns)?);
    }
    let sent = Relation::Aggregate(Box::new(of.clone()), keys.to_vec(), parts.sent);
    let is_unchanged = values.len() == keys.len() + parts.merged.len()
        && values.iter().enumerate().all(|(at, value)| *value == Expression::Column(at));
    let values = (!is_unchanged).then_some(values);
    let merge = Merge { keys: keys.len(), aggregates: parts.merged, values };
    Some((sent, merge))
}

/// Whether the number of equal values does not matter to an aggregate. `min` and `max` are not
/// counted among these, because a host needs to send only its own extreme.
fn of_distinct_values(aggregate: &Aggregate) -> bool {
    (aggregate.distinct && !is_extreme(aggregate.function)) || is_approximate(aggregate.function)
}

/// The form in which hosts send each distinct row of keys and arguments.
fn distinct_values(
    of: &Relation,
    keys: &[Expression],
    aggregates: &[Aggregate],
) -> Option<(Relation, Merge)> {
    if !sends_distinct(of) {
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

/// The aggregates that hosts send, and those that merge them.
struct Parts {
    keys: usize,
    sent: Vec<Aggregate>,
    merged: Vec<Aggregate>,
}

impl Parts {
    /// The value of an aggregate, over the keys and the merged parts; `None` if it cannot be
    /// computed from parts.
    fn value(&mut self, aggregate: &Aggregate, columns: &[KnownType]) -> Option<Expression> {
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

    /// Adds an aggregate that hosts send. Returns its merged value at the centre.
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
        if greatest(argument).is_some_and(|most| most <= SMALL_MAX) {
            return Sum::Small(self.part(AggregateFunction::Sum, Some(argument.clone())));
        }
        let mut of = |operator| {
            let part = binary(operator, argument.clone(), integer(SUM_DIVISOR));
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

/// The sum of the values of all hosts.
enum Sum {
    /// The sum in one part.
    Small(Expression),
    /// `high` · 2³² + `low`, where `low` may be any integer.
    Parts { high: Expression, low: Expression },
}

impl Sum {
    /// The sum as an integer; null after an overflow.
    fn whole(self) -> Expression {
        match self {
            Self::Small(sum) => sum,
            Self::Parts { high, low } => {
                let (high, low) = carried(high, low);
                let high = binary(BinaryOperator::Multiply, high, integer(SUM_DIVISOR));
                binary(BinaryOperator::Add, high, low)
            }
        }
    }

    /// The sum as the nearest float. The lower part is always an exact float, and the upper part is
    /// if the sum is below 2⁸⁵. So the sum is rounded once, when the parts are added.
    fn float(self) -> Expression {
        match self {
            Self::Small(sum) => to_float(sum),
            Self::Parts { high, low } => {
                let (high, low) = carried(high, low);
                let part = Expression::Literal(Value::Float(SUM_DIVISOR as f64));
                let high = binary(BinaryOperator::Multiply, to_float(high), part);
                binary(BinaryOperator::Add, high, to_float(low))
            }
        }
    }
}

/// The same sum with a lower part from 0 to 2³² − 1.
fn carried(high: Expression, low: Expression) -> (Expression, Expression) {
    let remainder = |of| binary(BinaryOperator::Remainder, of, integer(SUM_DIVISOR));
    let rest = remainder(binary(BinaryOperator::Add, remainder(low.clone()), integer(SUM_DIVISOR)));
    let carry = binary(BinaryOperator::Subtract, low, rest.clone());
    let carry = binary(BinaryOperator::Divide, carry, integer(SUM_DIVISOR));
    (binary(BinaryOperator::Add, high, carry), rest)
}

/// The greatest possible magnitude of an integer expression, if it is easy to compute.
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
