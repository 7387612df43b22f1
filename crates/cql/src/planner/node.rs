//! Operators during planning: their results, and properties of their state.

use crate::ast::{BinaryOperator, JoinKind, SetOperation, ToStream};
use crate::plan::{
    Aggregate, AggregateFunction, Expression, Join, OrderKey, Relation, Stream, Window,
};
use crate::span::{Diagnostic, Span};
use crate::value::Type;

use super::scope::Column;
use super::walk::{combine, conjuncts, each_column, is_finite, map_columns, sides};

/// A part of a stream whose rows are never removed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Growing {
    /// The place of the window, or of the name if there is no window.
    pub(super) span: Span,
    /// The name of the stream.
    pub(super) name: String,
}

/// The known properties of an operator.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// Whether rows are never deleted.
    pub(super) monotonic: bool,
    /// The streams whose rows a copy of the relation would keep for ever.
    pub(super) growing: Vec<Growing>,
    /// State of this operator and of those below that grows without bound.
    pub(super) unbounded: Vec<Diagnostic>,
    /// The number of operators.
    pub(super) operators: usize,
    /// The number of operators from here to the farthest source.
    pub(super) depth: usize,
}

impl Facts {
    fn step(mut self) -> Self {
        self.operators += 1;
        self.depth += 1;
        self
    }

    fn report(&mut self, message: impl Fn(&str) -> String) {
        for growing in &self.growing {
            if self.unbounded.iter().all(|known| known.span != growing.span) {
                let help = format!(
                    "remove old rows with a window, as in `{} [range 60 seconds]`",
                    growing.name
                );
                let diagnostic = Diagnostic::new(growing.span, message(&growing.name)).help(help);
                self.unbounded.push(diagnostic);
            }
        }
    }

    /// Notes that the whole relation is kept.
    pub(super) fn keep(&mut self, why: &str) {
        self.report(|name| format!("keeps every row of `{name}` for ever: {why}"));
    }

    fn and(mut self, other: Self) -> Self {
        self.monotonic &= other.monotonic;
        for growing in other.growing {
            if !self.growing.contains(&growing) {
                self.growing.push(growing);
            }
        }
        for diagnostic in other.unbounded {
            if self.unbounded.iter().all(|known| known.span != diagnostic.span) {
                self.unbounded.push(diagnostic);
            }
        }
        self.operators += other.operators;
        self.depth = self.depth.max(other.depth);
        self.step()
    }
}

/// A relation.
#[derive(Clone, Debug)]
pub(super) struct Node {
    /// The operators.
    pub(super) relation: Relation,
    /// The columns.
    pub(super) columns: Vec<Column>,
    /// The known properties.
    pub(super) facts: Facts,
}

/// A stream.
#[derive(Clone, Debug)]
pub(super) struct StreamNode {
    /// The operators.
    pub(super) stream: Stream,
    /// The columns.
    pub(super) columns: Vec<Column>,
    /// The known properties.
    pub(super) facts: Facts,
}

/// The result of a query.
#[derive(Clone, Debug)]
pub(super) enum Body {
    /// Rows that arrive.
    Stream(StreamNode),
    /// Rows that are inserted and deleted.
    Relation(Node),
}

impl Body {
    /// The columns.
    pub(super) fn columns_mut(&mut self) -> &mut Vec<Column> {
        match self {
            Self::Stream(stream) => &mut stream.columns,
            Self::Relation(node) => &mut node.columns,
        }
    }

    /// The known properties.
    pub(super) fn facts(&self) -> &Facts {
        match self {
            Self::Stream(stream) => &stream.facts,
            Self::Relation(node) => &node.facts,
        }
    }
}

impl StreamNode {
    /// Changes the rows of the relation from which the stream is made.
    pub(super) fn change(self, change: impl FnOnce(Node) -> Node) -> Self {
        let Self { stream, columns, facts } = self;
        match stream {
            Stream::Of(how, relation) => {
                change(Node { relation: *relation, columns, facts }).changes(how)
            }
            Stream::Source(_) => {
                let place = Growing { span: Span::default(), name: String::new() };
                let node = Self { stream, columns, facts }.window(Window::Unbounded, place);
                change(node).changes(ToStream::Insertions)
            }
        }
    }

    /// A window over the stream.
    pub(super) fn window(self, window: Window, place: Growing) -> Node {
        let mut facts = self.facts.step();
        facts.monotonic = window == Window::Unbounded;
        facts.growing = Vec::new();
        match &window {
            Window::Unbounded => facts.growing.push(place),
            Window::Rows { by, rows } => {
                let many = |&column: &usize| self.columns[column].kind != Some(Type::Boolean);
                let names: Vec<&str> = by
                    .iter()
                    .filter(|by| many(by))
                    .map(|by| self.columns[*by].name.as_str())
                    .collect();
                if !names.is_empty() && *rows > 0 {
                    let message = format!(
                        "keeps {} for each {} ever seen",
                        if *rows == 1 { "a row".to_owned() } else { format!("{rows} rows") },
                        names.join(", ")
                    );
                    let help = "remove old rows with a window by time";
                    facts.unbounded.push(Diagnostic::new(place.span, message).help(help));
                }
            }
            Window::Range { .. } => {}
        }
        let relation = Relation::Window(window, Box::new(self.stream));
        Node { relation, columns: self.columns, facts }
    }
}

impl Node {
    /// The number of columns.
    pub(super) fn width(&self) -> usize {
        self.columns.len()
    }

    /// The relation's changes.
    pub(super) fn changes(self, how: ToStream) -> StreamNode {
        let mut facts = self.facts.step();
        if how == ToStream::Whole {
            facts.keep("Rstream gives all rows at each change");
        }
        facts.growing = Vec::new();
        let stream = Stream::Of(how, Box::new(self.relation));
        StreamNode { stream, columns: self.columns, facts }
    }

    /// The rows for which a predicate holds, tested as early as possible.
    pub(super) fn filter(self, predicate: Expression) -> Self {
        let parts = conjuncts(predicate);
        if parts.is_empty() {
            return self;
        }
        let facts = self.facts.step();
        let relation = match self.relation {
            join @ Relation::Join(_) => parts.into_iter().fold(join, push),
            other => push(other, combine(BinaryOperator::And, parts)),
        };
        Self { relation, columns: self.columns, facts }
    }

    /// One row for each row. There is no operator if the rows do not change.
    pub(super) fn project(self, expressions: Vec<Expression>, columns: Vec<Column>) -> Self {
        let same = expressions.len() == self.width()
            && expressions.iter().enumerate().all(|(at, e)| *e == Expression::Column(at));
        if same {
            return Self { columns, ..self };
        }
        let relation = Relation::Project(Box::new(self.relation), expressions);
        Self { relation, columns, facts: self.facts.step() }
    }

    /// The pairs of rows for which all conditions, over the columns of both, hold.
    pub(super) fn join(self, right: Self, kind: JoinKind, conditions: Vec<Expression>) -> Self {
        let (left_columns, right_columns) = (self.width(), right.width());
        let mut facts = self.facts.and(right.facts);
        facts.keep("rows to join with may arrive at any time");
        facts.monotonic &= kind == JoinKind::Inner;
        let mut columns = self.columns;
        columns.extend(right.columns);
        let mut join = Join {
            left: self.relation,
            right: right.relation,
            kind,
            equal: Vec::new(),
            residual: None,
            left_columns,
            right_columns,
        };
        for condition in conditions {
            join_condition(&mut join, condition);
        }
        Self { relation: Relation::Join(Box::new(join)), columns, facts }
    }

    /// One row for each group. `columns` are those of the keys and aggregates.
    pub(super) fn aggregate(
        self,
        keys: Vec<Expression>,
        aggregates: Vec<Aggregate>,
        columns: Vec<Column>,
    ) -> Self {
        let mut facts = self.facts.step();
        let insertions_only = facts.monotonic;
        let keeps_values = aggregates.iter().find(|aggregate| match aggregate.function {
            _ if aggregate.distinct => true,
            AggregateFunction::Minimum | AggregateFunction::Maximum => !insertions_only,
            AggregateFunction::Percentile(_) | AggregateFunction::MostFrequent(_) => true,
            _ => false,
        });
        if let Some(aggregate) = keeps_values {
            let why = match aggregate.function {
                _ if aggregate.distinct => "`distinct` compares with all values",
                AggregateFunction::Percentile(_) => "a percentile needs all values",
                AggregateFunction::MostFrequent(_) => "`top_k` counts every value",
                _ => "the next value is needed when a row leaves",
            };
            facts.keep(why);
        }
        let many: Vec<&str> = keys
            .iter()
            .zip(&columns)
            .filter(|(key, column)| !is_finite(key, column.kind))
            .map(|(_, column)| column.name.as_str())
            .collect();
        if many.is_empty() {
            facts.growing = Vec::new();
        } else {
            facts.report(|_| format!("keeps one entry for each {} ever seen", many.join(", ")));
        }
        facts.monotonic = false;
        let relation = Relation::Aggregate(Box::new(self.relation), keys, aggregates);
        Self { relation, columns, facts }
    }

    /// Each row once.
    pub(super) fn distinct(self) -> Self {
        let mut facts = self.facts.step();
        if self.columns.iter().all(|column| matches!(column.kind, None | Some(Type::Boolean))) {
            facts.growing = Vec::new();
        } else {
            facts.report(|_| "keeps one entry for each different row ever seen".to_owned());
        }
        let relation = Relation::Distinct(Box::new(self.relation));
        Self { relation, columns: self.columns, facts }
    }

    /// Two relations of the same columns, combined.
    pub(super) fn set(self, right: Self, operation: SetOperation, all: bool) -> Self {
        let mut facts = self.facts.and(right.facts);
        if operation != SetOperation::Union || !all {
            facts.keep(match operation {
                SetOperation::Union => "`union` compares with all rows; `union all` does not",
                SetOperation::Except => "`except` compares with all rows",
                SetOperation::Intersect => "`intersect` compares with all rows",
            });
        }
        facts.monotonic &= operation != SetOperation::Except;
        let relation = Relation::Set {
            operation,
            all,
            left: Box::new(self.relation),
            right: Box::new(right.relation),
        };
        Self { relation, columns: self.columns, facts }
    }

    /// The first rows.
    pub(super) fn top(self, keys: Vec<OrderKey>, limit: Option<u64>) -> Self {
        let mut facts = self.facts.step();
        if limit.is_some() {
            if !facts.monotonic {
                facts.keep("the next row is needed when one of the first leaves");
            }
            facts.growing = Vec::new();
        }
        facts.monotonic = false;
        let relation = Relation::Top(Box::new(self.relation), keys, limit);
        Self { relation, columns: self.columns, facts }
    }
}

/// Puts a filter over a relation, below joins if that is valid.
fn push(relation: Relation, predicate: Expression) -> Relation {
    match relation {
        Relation::Join(mut join) => {
            let kind = join.kind;
            match sides(&predicate, join.left_columns) {
                (true, false) if matches!(kind, JoinKind::Inner | JoinKind::Left) => {
                    push_left(&mut join, predicate);
                }
                (false, true) if matches!(kind, JoinKind::Inner | JoinKind::Right) => {
                    push_right(&mut join, predicate);
                }
                (true, true) if kind == JoinKind::Inner => join_condition(&mut join, predicate),
                _ => return Relation::Filter(Box::new(Relation::Join(join)), predicate),
            }
            Relation::Join(join)
        }
        Relation::Filter(of, first) if goes_below(&of, &predicate) => {
            Relation::Filter(Box::new(push(*of, predicate)), first)
        }
        Relation::Filter(of, first) => {
            let mut parts = conjuncts(first);
            parts.extend(conjuncts(predicate));
            Relation::Filter(of, combine(BinaryOperator::And, parts))
        }
        other => Relation::Filter(Box::new(other), predicate),
    }
}

/// Whether a relation is a join, and a filter may go below it.
fn goes_below(relation: &Relation, predicate: &Expression) -> bool {
    let Relation::Join(join) = relation else { return false };
    match sides(predicate, join.left_columns) {
        (true, false) => matches!(join.kind, JoinKind::Inner | JoinKind::Left),
        (false, true) => matches!(join.kind, JoinKind::Inner | JoinKind::Right),
        (both, _) => both && join.kind == JoinKind::Inner,
    }
}

fn push_left(join: &mut Join, predicate: Expression) {
    let left = std::mem::replace(&mut join.left, placeholder());
    join.left = push(left, predicate);
}

fn push_right(join: &mut Join, mut predicate: Expression) {
    let left_columns = join.left_columns;
    map_columns(&mut predicate, &|column| column - left_columns);
    let right = std::mem::replace(&mut join.right, placeholder());
    join.right = push(right, predicate);
}

/// A placeholder while another relation is moved.
fn placeholder() -> Relation {
    Relation::Window(Window::Unbounded, Box::new(Stream::Source(0)))
}

/// Adds a condition to a join: below it, as an equality, or as a part of the residual condition.
fn join_condition(join: &mut Join, condition: Expression) {
    let left_columns = join.left_columns;
    match sides(&condition, left_columns) {
        (true, false) if matches!(join.kind, JoinKind::Inner | JoinKind::Right) => {
            push_left(join, condition);
        }
        (false, true) if matches!(join.kind, JoinKind::Inner | JoinKind::Left) => {
            push_right(join, condition);
        }
        _ => match equality(condition, &|column| column < left_columns) {
            Ok((left, mut right)) => {
                map_columns(&mut right, &|column| column - left_columns);
                join.equal.push((left, right));
            }
            Err(condition) => {
                let mut parts = join.residual.take().map_or_else(Vec::new, conjuncts);
                parts.push(condition);
                join.residual = Some(combine(BinaryOperator::And, parts));
            }
        },
    }
}

/// The sides of an equality, if one uses only columns for which `is_first` holds and the other only
/// other columns, and both use at least one. Otherwise returns the expression unchanged.
pub(super) fn equality(
    expression: Expression,
    is_first: &dyn Fn(usize) -> bool,
) -> Result<(Expression, Expression), Expression> {
    let Expression::Binary(BinaryOperator::Equal, left, right) = expression else {
        return Err(expression);
    };
    let uses = |expression: &Expression| {
        let (mut first, mut second) = (false, false);
        each_column(expression, &mut |column| {
            if is_first(column) {
                first = true;
            } else {
                second = true;
            }
        });
        (first, second)
    };
    match (uses(&left), uses(&right)) {
        ((true, false), (false, true)) => Ok((*left, *right)),
        ((false, true), (true, false)) => Ok((*right, *left)),
        _ => Err(Expression::Binary(BinaryOperator::Equal, left, right)),
    }
}
