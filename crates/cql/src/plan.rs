//! What a query means: operators over streams and relations, names resolved and types checked.
//!
//! Time is an integer, in nanoseconds. A **stream** is a bag of rows, each with an instant; rows
//! of one instant have an order of arrival, which only windows of rows see. A **relation** is a
//! bag of rows for each instant. What follows is the meaning of each operator; where CQL leaves a
//! choice it is STREAM's:
//!
//! - **Range windows** hold at τ what arrived in (τ − length, τ]: a row leaves exactly `length`
//!   after it came. `[now]` is the range of one nanosecond.
//! - **Sliding windows** hold at τ what arrived in (e − length, e], where e is the last multiple
//!   of the slide at or before τ: they change at multiples only.
//! - **Row windows** hold the last so many rows by instant and, within one, by arrival. All rows
//!   of an instant have arrived before the window is looked at. What a relation gives to a stream
//!   at an instant arrives in the order of its values, unless the relation [only
//!   grows](Relation::only_grows): then its rows arrive in the order of the stream that it is of.
//! - **Aggregates** without `group by` over an empty relation give no row, as groups do that have
//!   become empty.
//! - **Istream** gives at τ what is in the relation at τ and was not just before, **Dstream** what
//!   was and is not, both as bags; **Rstream** gives all of the relation at each instant at which
//!   it has changed.
//! - **Views** are what their query is. A relation that was registered as a stream stays a
//!   relation where it is used without a window; with a window, its Istream is used.

use serde::{Deserialize, Serialize};

use crate::aggregate::distinct::Precision;
use crate::aggregate::histogram::Buckets;
use crate::ast::{BinaryOperator, JoinKind, SetOperation, ToStream, UnaryOperator};
use crate::catalog::Column;
use crate::value::{Type, Value};

/// What a query gives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The operators.
    pub output: Output,
    /// The columns of the result.
    pub columns: Vec<Column>,
}

/// Whether the result is a stream or a relation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Output {
    /// Rows that come.
    Stream(Stream),
    /// Rows that come and go.
    Relation(Relation),
}

/// An operator that gives a stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Stream {
    /// An input, by its position in the catalogue; all its columns.
    Source(usize),
    /// What a relation's changes are.
    Of(ToStream, Box<Relation>),
}

/// An operator that gives a relation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Relation {
    /// Part of a stream.
    Window(Window, Box<Stream>),
    /// An input whose rows come and go, by its position among the inputs: what was computed
    /// elsewhere; all its columns.
    Given(usize),
    /// The rows for which the predicate is true (neither false nor null).
    Filter(Box<Relation>, Expression),
    /// A row for each row.
    Project(Box<Relation>, Vec<Expression>),
    /// The pairs of rows that match: the columns of the left, then of the right.
    Join(Box<Join>),
    /// A row for each group: the keys, then the aggregates. Without keys all rows are one group.
    Aggregate(Box<Relation>, Vec<Expression>, Vec<Aggregate>),
    /// Each row once.
    Distinct(Box<Relation>),
    /// Two relations of as many columns of the same types. Of bags: union adds counts, except
    /// takes the right's from the left's, intersect takes the smaller. Of sets: `all` is false,
    /// and each row of the result is there once.
    Set {
        /// Which.
        operation: SetOperation,
        /// Whether rows keep their counts.
        all: bool,
        /// On the left.
        left: Box<Relation>,
        /// On the right.
        right: Box<Relation>,
    },
    /// The first `limit` rows by the keys and, where these are equal, by the whole row; the order
    /// itself shows only where results are printed.
    Top(Box<Relation>, Vec<OrderKey>, Option<u64>),
}

impl Relation {
    /// Whether it can be seen from the operators that a row that has come never leaves: then its
    /// insertions are the relation itself.
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
    /// On the left.
    pub left: Relation,
    /// On the right.
    pub right: Relation,
    /// Which rows without a partner stay.
    pub kind: JoinKind,
    /// Pairs of expressions, over the left's and over the right's columns, that must be equal and
    /// not null.
    pub equal: Vec<(Expression, Expression)>,
    /// What must be true besides, over the columns of both.
    pub residual: Option<Expression>,
    /// How many columns the left has.
    pub left_columns: usize,
    /// How many columns the right has.
    pub right_columns: usize,
}

/// Which part of a stream is a relation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Window {
    /// All that has come.
    Unbounded,
    /// By time, in nanoseconds.
    Range {
        /// How far back; at least 1.
        length_ns: u64,
        /// How often it moves, at least 1; `None` at every instant.
        slide_ns: Option<u64>,
    },
    /// The last rows for each value of some columns (of none: the last rows).
    Rows {
        /// By which columns.
        by: Vec<usize>,
        /// How many; may be 0.
        rows: u64,
    },
}

/// One key of an order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OrderKey {
    /// By what.
    pub expression: Expression,
    /// The greatest first.
    pub descending: bool,
}

/// An aggregate over the rows of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Aggregate {
    /// Which.
    pub function: AggregateFunction,
    /// Of what; `None` for `count(*)`. Nulls do not count.
    pub argument: Option<Expression>,
    /// Whether equal values count once.
    pub distinct: bool,
}

/// The aggregates. Over no values that are not null each is null, but counts are 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum AggregateFunction {
    /// How many.
    Count,
    /// The sum: of integers an integer (null where it overflows), of floats a float.
    Sum,
    /// The mean, a float.
    Average,
    /// The smallest.
    Minimum,
    /// The greatest.
    Maximum,
    /// The variance of all values (divided by their number), a float.
    Variance,
    /// Its square root.
    StandardDeviation,
    /// `percentile(x, p)`: the smallest value such that at least `p` per cent of the values are
    /// not greater.
    Percentile(f64),
    /// `top_k(x, k)`: the k values that are there most often, with their counts, as a
    /// [text](crate::aggregate::frequent::to_text).
    MostFrequent(u16),
    /// `approx_count_distinct(x, precision)`: [about](crate::aggregate::distinct) how many different
    /// values; `distinct` makes no difference. The text of a part is its registers.
    ApproximateDistinct(Precision, Stage),
    /// `histogram(x)`, `histogram(x, width)`: how many values are in each bucket, as a
    /// [text](Buckets::text). That of a part is [another](Buckets::part).
    Histogram(Buckets, Stage),
}

/// Who computes an aggregate of which the parts can be put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// One who has all values: the result.
    Whole,
    /// One who has some of the values: a text that says what they come to; null where there are
    /// none.
    Part,
    /// One who has the texts of all parts, in place of the values: the result. A text that is not
    /// one of a part counts as null.
    Merge,
}

/// An expression over the columns of a row. Evaluation never fails: what has no value is null.
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
    /// Whether a text is like a pattern.
    Like(Box<Expression>, Box<Expression>),
    /// A value as another type; null where it has no such value.
    Cast(Box<Expression>, Type),
    /// The value of the first condition that is true.
    Case(Vec<(Expression, Expression)>, Option<Box<Expression>>),
    /// A function of its arguments.
    Call(Function, Vec<Expression>),
}

/// The functions. Each is null where an argument is, but [`Coalesce`](Self::Coalesce).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Function {
    /// `lower(text)`.
    Lower,
    /// `upper(text)`.
    Upper,
    /// `length(text)`: in characters.
    Length,
    /// `substring(text, from, length)`: from 1 on; the length may be left out.
    Substring,
    /// `position(part, text)`: from 1 on, 0 where it is not there.
    Position,
    /// `starts_with(text, part)`.
    StartsWith,
    /// `ends_with(text, part)`.
    EndsWith,
    /// `replace(text, part, by)`.
    Replace,
    /// `split_part(text, separator, n)`: the n-th part, from 1 on; empty where there is none.
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
    /// `coalesce(a, b, …)`: the first that is not null.
    Coalesce,
}
