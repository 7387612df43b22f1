//! Plans: the meaning of queries as operators over streams and relations, with names resolved and
//! types checked.
//!
//! Time is an integer, in nanoseconds. A **stream** is a bag of rows, each with an instant. Rows of
//! one instant have an order of arrival, on which only windows of rows depend. A **relation** is a
//! bag of rows for each instant. The operators have the following meaning; where CQL leaves a
//! choice it is STREAM's:
//!
//! - **Range windows** hold at τ the rows that arrived in (τ − length, τ]: a row leaves exactly
//!   `length` after its arrival. `[now]` is the range of one nanosecond.
//! - **Sliding windows** hold at τ the rows that arrived in (e − length, e], where e is the last
//!   multiple of the slide at or before τ: they change at multiples only.
//! - **Row windows** hold the last N rows by instant and, within an instant, by arrival. They are
//!   evaluated when all rows of an instant have arrived. The rows that a relation gives to a stream
//!   at an instant arrive in the order of their values. If the relation [only
//!   grows](Relation::only_grows), they arrive in the order of its own stream instead.
//! - **Aggregates** without `group by` over an empty relation give no row, like a group that has
//!   become empty.
//! - **Istream** gives at τ the rows that are in the relation at τ and were not just before,
//!   **Dstream** the rows that were and are not, both as bags. **Rstream** gives all rows of the
//!   relation at each instant at which it has changed.
//! - **Views** are streams or relations like their queries. A relation that was registered as a
//!   stream is a relation if it is used without a window; with a window, its Istream is used.

use serde::{Deserialize, Serialize};

use crate::aggregate::distinct::Precision;
use crate::aggregate::histogram::Buckets;
use crate::ast::{BinaryOperator, JoinKind, SetOperation, ToStream, UnaryOperator};
use crate::catalog::Column;
use crate::value::{Type, Value};

/// The plan of a query.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The operators.
    pub output: Output,
    /// The columns of the result.
    pub columns: Vec<Column>,
}

/// The result of a plan: a stream or a relation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Output {
    /// Rows that arrive.
    Stream(Stream),
    /// Rows that are inserted and deleted.
    Relation(Relation),
}

/// An operator that gives a stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Stream {
    /// An input with all its columns, by its position in the catalogue.
    Source(usize),
    /// The changes of a relation.
    Of(ToStream, Box<Relation>),
}

/// An operator that gives a relation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Relation {
    /// Part of a stream.
    Window(Window, Box<Stream>),
    /// An input whose rows are inserted and deleted, with all its columns, by its position in the
    /// catalogue: a relation that other hosts have computed.
    Given(usize),
    /// The rows for which the predicate is true (neither false nor null).
    Filter(Box<Relation>, Expression),
    /// The values of the expressions, for each row.
    Project(Box<Relation>, Vec<Expression>),
    /// The pairs of rows that match: the columns of the left, then of the right.
    Join(Box<Join>),
    /// One row for each group: the keys, then the aggregates. Without keys all rows are one group.
    Aggregate(Box<Relation>, Vec<Expression>, Vec<Aggregate>),
    /// Each row once.
    Distinct(Box<Relation>),
    /// Two relations with columns of the same types, combined. As bags (`all`), union adds counts,
    /// except subtracts the right side's from the left side's, and intersect takes the smaller one.
    /// As sets, each row of the result occurs once.
    Set {
        /// The operation.
        operation: SetOperation,
        /// Whether rows keep their counts.
        all: bool,
        /// The left operand.
        left: Box<Relation>,
        /// The right operand.
        right: Box<Relation>,
    },
    /// The first `limit` rows by the keys and, if these are equal, by the whole row. The order
    /// itself matters only where results are printed.
    Top(Box<Relation>, Vec<OrderKey>, Option<u64>),
}

impl Relation {
    /// Whether the operators guarantee that no row is ever deleted. Then the stream of insertions
    /// has the same rows as the relation.
    pub fn only_grows(&self) -> bool {
        match self {
            Self::Window(Window::Unbounded, stream) => match &**stream {
                Stream::Source(_) => true,
                Stream::Of(ToStream::Insertions, relation) => relation.only_grows(),
                Stream::Of(ToStream::Deletions | ToStream::Whole, _) => false,
            },
            Self::Filter(input, _) | Self::Project(input, _) => input.only_grows(),
            _ => false,
        }
    }
}

/// A join.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Join {
    /// The left operand.
    pub left: Relation,
    /// The right operand.
    pub right: Relation,
    /// The rows without a partner that the result has.
    pub kind: JoinKind,
    /// Pairs of expressions, over the columns of the left and of the right operand, that must be
    /// equal and not null.
    pub equal: Vec<(Expression, Expression)>,
    /// A further condition, over the columns of both operands.
    pub residual: Option<Expression>,
    /// The number of columns of the left operand.
    pub left_columns: usize,
    /// The number of columns of the right operand.
    pub right_columns: usize,
}

/// A window: the part of a stream that is a relation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Window {
    /// All rows so far.
    Unbounded,
    /// By time, in nanoseconds.
    Range {
        /// The length; at least 1.
        length_ns: u64,
        /// The interval at which the window moves; at least 1. `None`: at every instant.
        slide_ns: Option<u64>,
    },
    /// The last rows for each combination of values of some columns. Without columns: the last rows
    /// of the stream.
    Rows {
        /// The columns that partition the stream.
        by: Vec<usize>,
        /// The number of rows in each partition; may be 0.
        rows: u64,
    },
}

/// One key of an order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OrderKey {
    /// The expression.
    pub expression: Expression,
    /// Whether the greatest value comes first.
    pub descending: bool,
}

/// An aggregate over the rows of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Aggregate {
    /// The function.
    pub function: AggregateFunction,
    /// The argument; `None` for `count(*)`. Nulls are ignored.
    pub argument: Option<Expression>,
    /// Whether equal values are counted once.
    pub distinct: bool,
}

/// The aggregates. Without values that are not null, counts are 0 and the others are null.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum AggregateFunction {
    /// The number of values, or of rows for `count(*)`.
    Count,
    /// The sum: an integer for integers (null after an overflow), a float for floats.
    Sum,
    /// The mean, a float.
    Average,
    /// The smallest.
    Minimum,
    /// The greatest.
    Maximum,
    /// The variance of all values (divided by their number), a float.
    Variance,
    /// The square root of the variance.
    StandardDeviation,
    /// `percentile(x, p)`: the smallest value such that at least `p` per cent of the values are
    /// not greater.
    Percentile(f64),
    /// `top_k(x, k)`: the k most frequent values with their counts, as a
    /// [text](crate::aggregate::frequent::to_text).
    MostFrequent(u16),
    /// `approx_count_distinct(x, precision)`: the [approximate](crate::aggregate::distinct) number
    /// of distinct values; `distinct` makes no difference. The result of a part is a text of its
    /// registers.
    ApproximateDistinct(Precision, Stage),
    /// `histogram(x)`, `histogram(x, width)`: the number of values in each bucket, as a
    /// [text](Buckets::text). The result of a part is [another text](Buckets::part).
    Histogram(Buckets, Stage),
}

/// The stage of an aggregate that can be merged from parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// From all values to the result.
    Whole,
    /// From some of the values to a text, which is null without values.
    Part,
    /// From the texts of all parts to the result. A text that is not the result of a part is
    /// ignored.
    Merge,
}

/// An expression over the columns of a row. Evaluation never fails: the result is null instead.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Expression {
    /// A column, by its position.
    Column(usize),
    /// A constant.
    Literal(Value),
    /// One operand.
    Unary(UnaryOperator, Box<Expression>),
    /// Two operands of the same type (the planner adds casts from integer to float).
    Binary(BinaryOperator, Box<Expression>, Box<Expression>),
    /// Whether a value is null.
    IsNull(Box<Expression>),
    /// Whether a text matches a pattern.
    Like(Box<Expression>, Box<Expression>),
    /// A value as another type; null if the conversion is impossible.
    Cast(Box<Expression>, Type),
    /// The value of the first branch whose condition is true, or else the other expression's.
    Case(Vec<(Expression, Expression)>, Option<Box<Expression>>),
    /// A function of its arguments.
    Call(Function, Vec<Expression>),
}

/// The functions. Each but [`Coalesce`](Self::Coalesce) is null if an argument is null.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Function {
    /// `lower(text)`.
    Lower,
    /// `upper(text)`.
    Upper,
    /// `length(text)`: in characters.
    Length,
    /// `substring(text, from, length)`: positions are counted from 1; the length is optional.
    Substring,
    /// `position(part, text)`: counted from 1; 0 if the part does not occur.
    Position,
    /// `starts_with(text, part)`.
    StartsWith,
    /// `ends_with(text, part)`.
    EndsWith,
    /// `replace(text, part, by)`.
    Replace,
    /// `split_part(text, separator, n)`: the n-th part, counted from 1; empty if there is none.
    SplitPart,
    /// `trim(text)`.
    Trim,
    /// `abs(number)`.
    Absolute,
    /// `floor(float)`, a float.
    Floor,
    /// `ceil(float)`, a float.
    Ceiling,
    /// `round(float)`: half away from zero, a float.
    Round,
    /// `sqrt(float)`: null below zero.
    SquareRoot,
    /// `ln(float)`: null at and below zero.
    Logarithm,
    /// `power(float, float)`.
    Power,
    /// `greatest(a, b, …)`.
    Greatest,
    /// `least(a, b, …)`.
    Least,
    /// `coalesce(a, b, …)`: the first argument that is not null.
    Coalesce,
}
