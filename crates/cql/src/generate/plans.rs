//! Random plans.

use std::num::NonZeroU64;

use super::{Generator, catalog};
use crate::aggregate::distinct::Precision;
use crate::aggregate::histogram::Buckets;
use crate::ast::{JoinKind, SetOperation, ToStream};
use crate::catalog::Column;
use crate::plan::{
    Aggregate, AggregateFunction, Expression, Join, OrderKey, Output, Plan, Relation, Stage,
    Stream, Window,
};
use crate::value::Type;

/// The most columns of a relation.
const COLUMNS_MAX: usize = 6;

/// The known properties of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) kind: Type,
}

impl Generator {
    /// A plan over the streams of random cases. It has at most four operators from the result to a
    /// window, not counting projections to fewer columns.
    pub fn plan(&mut self) -> Plan {
        let depth = 1 + self.below(4);
        let (output, kinds) = match self.below(20) {
            0 => {
                let (stream, kinds) = self.stream(0);
                (Output::Stream(stream), kinds)
            }
            1..=8 => {
                let (stream, kinds) = self.derived(depth);
                (Output::Stream(stream), kinds)
            }
            _ => {
                let (relation, kinds) = self.relation(depth);
                (Output::Relation(relation), kinds)
            }
        };
        let named = |(position, kind): (usize, &Kind)| Column {
            name: format!("C{position}"),
            kind: kind.kind,
        };
        Plan { output, columns: kinds.iter().enumerate().map(named).collect() }
    }

    fn stream(&mut self, depth: usize) -> (Stream, Vec<Kind>) {
        if depth > 0 && self.chance(60) {
            return self.derived(depth);
        }
        let source = self.below(2);
        let columns = &catalog().streams[source].columns;
        let known = |column: &Column| Kind { kind: column.kind };
        let kinds = columns.iter().map(known).collect();
        (Stream::Source(source), kinds)
    }

    fn derived(&mut self, depth: usize) -> (Stream, Vec<Kind>) {
        let (relation, kinds) = self.relation(depth.saturating_sub(1));
        let to_stream = self.one_of(&[
            ToStream::Insertions,
            ToStream::Insertions,
            ToStream::Deletions,
            ToStream::Whole,
        ]);
        (Stream::Of(to_stream, Box::new(relation)), kinds)
    }

    fn relation(&mut self, depth: usize) -> (Relation, Vec<Kind>) {
        if depth == 0 {
            return self.windowed(0);
        }
        match self.below(14) {
            0..=2 => self.windowed(depth),
            3 => {
                let (of, kinds) = self.relation(depth - 1);
                let predicate = self.condition(&kinds);
                (Relation::Filter(Box::new(of), predicate), kinds)
            }
            4 => {
                let (of, kinds) = self.relation(depth - 1);
                let count = 1 + self.below(3);
                let expressions = (0..count).map(|_| self.any(&kinds)).collect();
                project(of, expressions, &kinds)
            }
            5..=7 => self.join(depth),
            8..=9 => self.aggregated(depth),
            10 => {
                let (of, kinds) = self.relation(depth - 1);
                (Relation::Distinct(Box::new(of)), kinds)
            }
            11..=12 => self.combined(depth),
            _ => {
                let (of, kinds) = self.relation(depth - 1);
                let keys = (0..self.below(3)).map(|_| OrderKey {
                    expression: self.any(&kinds),
                    descending: self.chance(50),
                });
                let keys = keys.collect();
                let limit = self.chance(90).then(|| self.few(4));
                (Relation::Top(Box::new(of), keys, limit), kinds)
            }
        }
    }

    fn windowed(&mut self, depth: usize) -> (Relation, Vec<Kind>) {
        let (stream, kinds) = self.stream(depth);
        let window = match self.below(10) {
            0..=2 => {
                let most = if self.chance(20) { 100 } else { 8 };
                Window::Range { length_ns: 1 + self.below(most) as u64, slide_ns: None }
            }
            3..=4 => Window::Range {
                length_ns: 1 + self.below(8) as u64,
                slide_ns: Some(1 + self.below(8) as u64),
            },
            5 => Window::Range { length_ns: 1, slide_ns: None },
            6..=7 => {
                let most = if self.chance(20) { 60 } else { 4 };
                Window::Rows { by: Vec::new(), rows: self.few(most) }
            }
            8 => {
                let count = 1 + self.below(2);
                let by = (0..count).map(|_| self.below(kinds.len())).collect();
                Window::Rows { by, rows: self.few(3) }
            }
            _ => Window::Unbounded,
        };
        (Relation::Window(window, Box::new(stream)), kinds)
    }

    /// A number up to `most`, rarely 0.
    fn few(&mut self, most: usize) -> u64 {
        if self.chance(6) { 0 } else { 1 + self.below(most) as u64 }
    }

    fn join(&mut self, depth: usize) -> (Relation, Vec<Kind>) {
        let (left, left_kinds) = self.relation(depth - 1);
        let (right, right_kinds) = if self.chance(15) {
            (left.clone(), left_kinds.clone())
        } else {
            let depth = self.below(depth);
            self.relation(depth)
        };
        let count = self.one_of(&[0, 1, 1, 1, 2]);
        let equal = (0..count).map(|_| self.equality(&left_kinds, &right_kinds)).collect();
        let kinds = [&left_kinds[..], &right_kinds[..]].concat();
        let residual = self.chance(25).then(|| self.condition(&kinds));
        let join = Join {
            left,
            right,
            kind: self.one_of(&[JoinKind::Inner, JoinKind::Left, JoinKind::Right, JoinKind::Full]),
            equal,
            residual,
            left_columns: left_kinds.len(),
            right_columns: right_kinds.len(),
        };
        let relation = Relation::Join(Box::new(join));
        if kinds.len() <= COLUMNS_MAX {
            return (relation, kinds);
        }
        let count = 2 + self.below(COLUMNS_MAX - 2);
        let columns = (0..count).map(|_| Expression::Column(self.below(kinds.len()))).collect();
        project(relation, columns, &kinds)
    }

    fn equality(&mut self, left: &[Kind], right: &[Kind]) -> (Expression, Expression) {
        let common = left.iter().map(|column| column.kind);
        let common: Vec<Type> =
            common.filter(|kind| right.iter().any(|column| column.kind == *kind)).collect();
        let kind = if common.is_empty() { self.kind_of(left) } else { self.one_of(&common) };
        let depth = usize::from(self.chance(10));
        (self.expression(kind, left, depth), self.expression(kind, right, depth))
    }

    fn aggregated(&mut self, depth: usize) -> (Relation, Vec<Kind>) {
        let (of, of_kinds) = self.relation(depth - 1);
        let count = self.one_of(&[0, 0, 1, 1, 1, 2]);
        let keys: Vec<Expression> = (0..count).map(|_| self.any(&of_kinds)).collect();
        let mut kinds: Vec<Kind> = keys.iter().map(|key| known(key, &of_kinds)).collect();
        let fewest = usize::from(keys.is_empty());
        let mut aggregates = Vec::new();
        for _ in 0..fewest + self.below(3) {
            let (aggregate, kind) = self.aggregate(&of_kinds);
            aggregates.push(aggregate);
            kinds.push(kind);
        }
        if kinds.is_empty() {
            return (Relation::Distinct(Box::new(of)), of_kinds);
        }
        (Relation::Aggregate(Box::new(of), keys, aggregates), kinds)
    }

    fn aggregate(&mut self, columns: &[Kind]) -> (Aggregate, Kind) {
        use AggregateFunction as Of;
        let percentage = self.one_of(&[0.0, 25.0, 50.0, 90.0, 99.0, 100.0]);
        // With few registers, even a few values share one.
        let bits = self.one_of(&[4, 4, 5, 6, 12, 16]);
        let precision = Precision::new(bits).unwrap_or_default();
        let wanted = 1 + self.below(3) as u16;
        let buckets = self.buckets();
        let function = self.one_of(&[
            Of::Count,
            Of::Count,
            Of::Sum,
            Of::Sum,
            Of::Average,
            Of::Minimum,
            Of::Maximum,
            Of::Variance,
            Of::StandardDeviation,
            Of::Percentile(percentage),
            Of::MostFrequent(wanted),
            Of::ApproximateDistinct(precision, Stage::Whole),
            Of::Histogram(buckets, Stage::Whole),
        ]);
        let distinct = self.chance(25);
        let argument = match function {
            Of::Count if !distinct && self.chance(50) => None,
            Of::Histogram(Buckets::Floats(_), _) => Some(self.expression(Type::Float, columns, 0)),
            Of::Histogram(Buckets::PowersOfTwo, _) if self.chance(30) => {
                Some(self.expression(Type::Float, columns, 0))
            }
            Of::Sum | Of::Average | Of::Variance | Of::StandardDeviation if self.chance(40) => {
                let depth = usize::from(self.chance(20));
                Some(self.expression(Type::Float, columns, depth))
            }
            Of::Sum | Of::Average | Of::Variance | Of::StandardDeviation | Of::Histogram(..) => {
                Some(self.integers(columns))
            }
            _ => Some(self.any(columns)),
        };
        let of = argument.as_ref().map(|argument| known(argument, columns));
        let kind = match (function, of) {
            (Of::Count | Of::ApproximateDistinct(..), _) | (_, None) => {
                Kind { kind: Type::Integer }
            }
            (Of::MostFrequent(_) | Of::Histogram(..), _) => Kind { kind: Type::Text },
            (Of::Average | Of::Variance | Of::StandardDeviation, _) => Kind { kind: Type::Float },
            (_, Some(kind)) => kind,
        };
        (Aggregate { function, argument, distinct }, kind)
    }

    fn buckets(&mut self) -> Buckets {
        let width = NonZeroU64::MIN.saturating_add(self.below(3) as u64);
        let floats = self.one_of(&[0.1, 0.25, 0.3, 1.0]);
        self.one_of(&[Buckets::PowersOfTwo, Buckets::Integers(width), Buckets::Floats(floats)])
    }

    /// An integer to sum.
    fn integers(&mut self, columns: &[Kind]) -> Expression {
        let depth = usize::from(self.chance(20));
        self.expression(Type::Integer, columns, depth)
    }

    fn combined(&mut self, depth: usize) -> (Relation, Vec<Kind>) {
        let (left, left_kinds) = self.relation(depth - 1);
        let right = if self.chance(30) {
            let predicate = self.condition(&left_kinds);
            Relation::Filter(Box::new(left.clone()), predicate)
        } else {
            let depth = self.below(depth);
            let (right, kinds) = self.relation(depth);
            let wanted = left_kinds.iter();
            let expressions = wanted.map(|of| self.expression(of.kind, &kinds, 0)).collect();
            project(right, expressions, &kinds).0
        };
        let relation = Relation::Set {
            operation: self.one_of(&[
                SetOperation::Union,
                SetOperation::Except,
                SetOperation::Intersect,
            ]),
            all: self.chance(50),
            left: Box::new(left),
            right: Box::new(right),
        };
        (relation, left_kinds)
    }
}

/// The known properties of an expression's values.
fn known(expression: &Expression, columns: &[Kind]) -> Kind {
    let kinds: Vec<_> = columns.iter().map(|column| Some(column.kind)).collect();
    let kind = crate::check::kind(expression, &kinds).ok().flatten().unwrap_or(Type::Integer);
    Kind { kind }
}

fn project(of: Relation, expressions: Vec<Expression>, columns: &[Kind]) -> (Relation, Vec<Kind>) {
    let kinds = expressions.iter().map(|expression| known(expression, columns)).collect();
    (Relation::Project(Box::new(of), expressions), kinds)
}
