//! Subqueries in expressions.
//!
//! Each subquery is joined with the rows whose expressions use it. Its value is a column of the
//! join:
//!
//! - `(select …)`, which has at most one row: an outer join without a condition, so that the value
//!   is null where there is no row.
//! - `exists (select …)`: the same join, with a relation that has one row while the query has rows.
//! - `x in (select …)`: an outer join with the distinct values, of which at most one is equal. To
//!   distinguish null from false, a second join shows whether there are values, and whether null is
//!   among them.
//!
//! So no join duplicates a row. If a condition excludes the rows without a partner, the join is an
//! inner one.
//!
//! Until the joins are made, an [`Expression::Column`] from [`FIRST`] on is a placeholder for a
//! column of a join.

use std::collections::VecDeque;
use std::rc::Rc;

use crate::ast::{self, BinaryOperator, ExpressionKind, JoinKind, SetOperation, UnaryOperator};
use crate::plan::{Aggregate, AggregateFunction, Expression, Function, Join, Relation, Window};
use crate::span::{Diagnostic, Span};
use crate::value::{Type, Value};

use super::expressions::Expressions;
use super::from::{cast_columns, whole, windowed};
use super::node::{Growing, Node};
use super::scope::{Column, Scope};
use super::select::columns;
use super::types::{Typed, kind_name, unify};
use super::walk::{combine, each_column, map_columns, negate_if};
use super::{Planner, TOO_LARGE, check_height, fold};

/// The placeholder for the column of the first join.
const FIRST: usize = usize::MAX / 2;

/// The most subqueries of a selection.
const SUBQUERIES_MAX: usize = 64;

/// The values that are already joined with the rows: relations of at most one row, and their
/// columns.
pub(super) type JoinedValues = Vec<(Relation, usize)>;

/// A relation of one column that will be joined.
#[derive(Debug)]
struct Waiting {
    node: Node,
    /// The expression over the row that its value must equal.
    equal: Option<Expression>,
    /// Whether its value is never null.
    certain: bool,
}

/// The subqueries in the expressions of one part of a query.
#[derive(Debug, Default)]
pub(super) struct Subqueries {
    planned: Vec<(*const ast::Query, Node)>,
    waiting: Vec<Waiting>,
    /// The values that need not be joined again.
    pub(super) joined: JoinedValues,
}

impl Planner<'_> {
    /// Plans the subqueries in some expressions over the columns of a scope.
    pub(super) fn subqueries<'e>(
        &mut self,
        scope: &Scope,
        expressions: impl Iterator<Item = &'e ast::Expression>,
    ) -> Result<Subqueries, Diagnostic> {
        let mut planned = Vec::new();
        let mut here = None;
        let mut open: Vec<&ast::Expression> = expressions.collect();
        open.reverse();
        while let Some(next) = open.pop() {
            open.extend(parts(next).into_iter().rev());
            let (ExpressionKind::InQuery { query, .. }
            | ExpressionKind::Exists(query)
            | ExpressionKind::Query(query)) = &next.kind
            else {
                continue;
            };
            if planned.len() >= SUBQUERIES_MAX {
                return Err(Diagnostic::new(query.span, TOO_LARGE));
            }
            let here = here.get_or_insert_with(|| Rc::new(scope.clone()));
            let outer = self.outer.replace(Rc::clone(here));
            let body = self.nested(query.span, |planner| planner.query(query))?;
            self.outer = outer;
            planned.push((std::ptr::from_ref(&**query), windowed(body, None, whole(query.span))?));
        }
        Ok(Subqueries { planned, ..Subqueries::default() })
    }
}

impl Subqueries {
    /// Whether there are no subqueries.
    pub(super) fn is_empty(&self) -> bool {
        self.planned.is_empty()
    }

    /// The placeholder for the column of a relation that will be joined, or the column if it is
    /// already joined.
    fn value(&mut self, node: Node, equal: Option<Expression>, certain: bool) -> Expression {
        let known =
            self.joined.iter().find(|(known, _)| equal.is_none() && *known == node.relation);
        if let Some((_, column)) = known {
            return Expression::Column(*column);
        }
        let same = |known: &Waiting| known.equal == equal && known.node.relation == node.relation;
        let at = self.waiting.iter().position(same).unwrap_or_else(|| {
            self.waiting.push(Waiting { node, equal, certain });
            self.waiting.len() - 1
        });
        Expression::Column(FIRST + at)
    }

    /// Joins the used relations with rows, and filters the rows by conditions. Replaces the
    /// placeholders in the conditions and the other expressions. Returns the node, and the columns
    /// of the joined values.
    pub(super) fn join(
        self,
        mut rows: Node,
        mut conditions: Vec<Expression>,
        others: &mut [Expression],
        span: Span,
    ) -> Result<(Node, JoinedValues), Diagnostic> {
        let Self { waiting, mut joined, .. } = self;
        let mut waiting = VecDeque::from(waiting);
        let mut here = FIRST;
        while let Some(Waiting { node, equal, certain }) = waiting.pop_front() {
            let later = waiting.iter_mut().filter_map(|later| later.equal.as_mut());
            let column = rows.width();
            let mut is_used = false;
            for expression in conditions.iter_mut().chain(others.iter_mut()).chain(later) {
                is_used |= uses(expression, &|other| other == here);
                map_columns(expression, &|other| if other == here { column } else { other });
            }
            here += 1;
            if !is_used {
                continue;
            }
            let mut on = Vec::new();
            if let Some(operand) = equal {
                let value = Box::new(Expression::Column(column));
                on.push(Expression::Binary(BinaryOperator::Equal, Box::new(operand), value));
            } else {
                joined.push((node.relation.clone(), column));
            }
            let mut kind = JoinKind::Left;
            if conditions.iter().any(|condition| is_false_if_null(condition, column)) {
                kind = JoinKind::Inner;
                if certain {
                    conditions.retain(|condition| *condition != is_not_null(column));
                }
                let (ready, rest) =
                    conditions.into_iter().partition(|condition| !has_subquery(condition));
                conditions = rest;
                on.extend::<Vec<_>>(ready);
            }
            rows = rows.join(node, kind, on);
            check_height(&rows.facts, span)?;
        }
        for condition in conditions {
            rows = rows.filter(condition);
        }
        Ok((rows, joined))
    }
}

impl Expressions<'_> {
    /// The relation of a subquery, or an error if none is allowed here.
    fn subquery(&self, query: &ast::Query) -> Result<Node, Diagnostic> {
        let planned = self.subqueries.iter().flat_map(|subqueries| &subqueries.planned);
        let mut same = planned.filter(|(known, _)| std::ptr::eq(*known, query));
        same.next().map(|(_, node)| node.clone()).ok_or_else(|| {
            let message = "a subquery is not allowed here";
            let help = "it is allowed in `where`, in `having` and in selected expressions, but not \
                        in an aggregate; elsewhere put it into `from`, and join with it";
            Diagnostic::new(query.span, message).help(help)
        })
    }

    /// The placeholder for the column of a relation that will be joined.
    fn joined(&mut self, node: Node, equal: Option<Expression>, certain: bool) -> Expression {
        match &mut self.subqueries {
            Some(subqueries) => subqueries.value(node, equal, certain),
            None => Expression::Literal(Value::Null),
        }
    }

    /// `(select …)`.
    pub(super) fn only_value(&mut self, query: &ast::Query) -> Result<Typed, Diagnostic> {
        let node = self.subquery(query)?;
        let kind = only_column(&node, query.span)?;
        if !has_at_most_one_row(&node.relation) {
            let message = "this subquery may have more than one row";
            let help = "an aggregate without `group by`, a query with `limit 1` and a stream \
                        `[rows 1]` have at most one row";
            return Err(Diagnostic::new(query.span, message).help(help));
        }
        Ok(Typed::new(self.joined(node, None, false), kind, 0))
    }

    /// `exists (select …)`.
    pub(super) fn exists(
        &mut self,
        query: &ast::Query,
        negated: bool,
    ) -> Result<Typed, Diagnostic> {
        let node = self.subquery(query)?;
        let always = Expression::Literal(Value::Boolean(true));
        let any = node.project(vec![always], vec![Column::new("", Some(Type::Boolean))]).distinct();
        let test = negate_if(!negated, fold::is_null(self.joined(any, None, true)));
        Ok(Typed::new(test, Some(Type::Boolean), 1))
    }

    /// `x in (select …)`. If `filters` is set, the result is false instead of null.
    pub(super) fn in_query(
        &mut self,
        operand: &ast::Expression,
        query: &ast::Query,
        negated: bool,
        filters: bool,
    ) -> Result<Typed, Diagnostic> {
        let value = self.plan(operand)?;
        let node = self.subquery(query)?;
        let of = only_column(&node, query.span)?;
        let Ok(kind) = unify(value.kind, of) else {
            let message = format!(
                "`in` needs values of the same type, not {} and {}",
                value.kind_name(),
                kind_name(of)
            );
            return Err(Diagnostic::new(operand.span.to(query.span), message));
        };
        let size = 2 * value.size + 8;
        let typed = |test| Ok(Typed::new(test, Some(Type::Boolean), size));
        let value = value.fit(kind);
        let node = cast_columns(node, &[kind]);
        let partner = self.joined(node.clone().distinct(), Some(value.clone()), true);
        let is_found = negate(fold::is_null(partner.clone()));
        if filters && !negated {
            return typed(is_found);
        }
        // Null if there are no values, otherwise whether there is a null.
        let columns = vec![Column::new("", Some(Type::Boolean))];
        let is_null = Expression::IsNull(Box::new(Expression::Column(0)));
        let function = AggregateFunction::Maximum;
        let argument = Some(Expression::Column(0));
        let nulls = node.project(vec![is_null], columns.clone()).distinct().aggregate(
            Vec::new(),
            vec![Aggregate { function, argument, distinct: false }],
            columns,
        );
        let nulls = self.joined(nulls, None, true);
        let is_empty = fold::is_null(nulls.clone());
        if filters {
            let all = vec![negate(nulls), negate(fold::is_null(value)), fold::is_null(partner)];
            return typed(combine(
                BinaryOperator::Or,
                vec![is_empty, combine(BinaryOperator::And, all)],
            ));
        }
        let constant = |value| Expression::Literal(value);
        let is_unknown = fold::binary(BinaryOperator::Or, nulls, fold::is_null(value));
        let branches = vec![
            (is_empty, constant(Value::Boolean(false))),
            (is_found, constant(Value::Boolean(true))),
            (is_unknown, constant(Value::Null)),
        ];
        let otherwise = Some(Box::new(constant(Value::Boolean(false))));
        typed(negate_if(negated, Expression::Case(branches, otherwise)))
    }
}

fn negate(expression: Expression) -> Expression {
    negate_if(true, expression)
}

/// The type of the only column of a relation.
fn only_column(node: &Node, span: Span) -> Result<Option<Type>, Diagnostic> {
    match &node.columns[..] {
        [column] => Ok(column.kind),
        all => {
            let message = format!("this subquery has {}, not one", columns(all.len()));
            Err(Diagnostic::new(span, message))
        }
    }
}

/// Whether the operators of a relation guarantee that it never has more than one row.
fn has_at_most_one_row(relation: &Relation) -> bool {
    match relation {
        Relation::Window(window, _) => {
            matches!(window, Window::Rows { by, rows } if by.is_empty() && *rows <= 1)
        }
        Relation::Given(_) => false,
        Relation::Top(_, _, Some(limit)) if *limit <= 1 => true,
        Relation::Filter(of, _)
        | Relation::Project(of, _)
        | Relation::Distinct(of)
        | Relation::Top(of, ..) => has_at_most_one_row(of),
        Relation::Join(join) => {
            has_at_most_one_row(&join.left)
                && match join.kind {
                    JoinKind::Full => false,
                    JoinKind::Right => has_at_most_one_row(&join.right),
                    JoinKind::Inner | JoinKind::Left => {
                        has_at_most_one_row(&join.right) || has_at_most_one_partner(join)
                    }
                }
        }
        Relation::Aggregate(of, keys, _) => {
            keys.iter().all(|key| matches!(key, Expression::Literal(_))) || has_at_most_one_row(of)
        }
        Relation::Set { operation, left, right, .. } => match operation {
            SetOperation::Union => false,
            SetOperation::Except => has_at_most_one_row(left),
            SetOperation::Intersect => has_at_most_one_row(left) || has_at_most_one_row(right),
        },
    }
}

/// Whether a row of the left operand has at most one partner: the right operand's rows are
/// distinct, and all of their columns must equal something.
fn has_at_most_one_partner(join: &Join) -> bool {
    let mut right = &join.right;
    let mut fixed: Vec<&Expression> = join.equal.iter().map(|(_, right)| right).collect();
    while let Relation::Filter(of, predicate) = right {
        right = of;
        if let Expression::Binary(BinaryOperator::Equal, one, other) = predicate {
            fixed.extend(
                [(one, other), (other, one)]
                    .iter()
                    .filter_map(|(value, column)| (!uses(value, &|_| true)).then_some(&***column)),
            );
        }
    }
    let is_fixed = |column| fixed.contains(&&Expression::Column(column));
    matches!(right, Relation::Distinct(_)) && (0..join.right_columns).all(is_fixed)
}

/// Checks that all streams have windows. When a subquery changes, earlier rows may have to be
/// evaluated again: the query must define which rows.
pub(super) fn require_windows(scope: &Scope) -> Result<(), Diagnostic> {
    match scope.sources.iter().find_map(|source| source.unwindowed.as_ref()) {
        None => Ok(()),
        Some(Growing { span, name }) => {
            let message = format!("in a query with a subquery the stream `{name}` needs a window");
            let help = format!(
                "`{name} [now]` holds each row at its instant, `{name} [unbounded]` all rows so far"
            );
            Err(Diagnostic::new(*span, message).help(help))
        }
    }
}

/// The operands of an expression.
pub(super) fn parts(expression: &ast::Expression) -> Vec<&ast::Expression> {
    match &expression.kind {
        ExpressionKind::Literal(_)
        | ExpressionKind::Column { .. }
        | ExpressionKind::Parameter(_)
        | ExpressionKind::Exists(_)
        | ExpressionKind::Query(_) => Vec::new(),
        ExpressionKind::Unary(_, operand)
        | ExpressionKind::IsNull { operand, .. }
        | ExpressionKind::InQuery { operand, .. }
        | ExpressionKind::Cast(operand, _) => vec![operand],
        ExpressionKind::Binary(_, left, right)
        | ExpressionKind::Like { operand: left, pattern: right, .. } => vec![left, right],
        ExpressionKind::Between { operand, low, high, .. } => vec![operand, low, high],
        ExpressionKind::In { operand, list, .. } => {
            std::iter::once(&**operand).chain(list).collect()
        }
        ExpressionKind::Call { arguments, .. } => arguments.iter().collect(),
        ExpressionKind::Case { operand, branches, otherwise } => {
            let branches = branches.iter().flat_map(|(when, then)| [when, then]);
            operand.as_deref().into_iter().chain(branches).chain(otherwise.as_deref()).collect()
        }
    }
}

fn uses(expression: &Expression, is: &dyn Fn(usize) -> bool) -> bool {
    let mut uses = false;
    each_column(expression, &mut |column| uses |= is(column));
    uses
}

/// Whether an expression uses a placeholder.
pub(super) fn has_subquery(expression: &Expression) -> bool {
    uses(expression, &|column| column >= FIRST)
}

/// An expression that tests whether a column is not null.
fn is_not_null(column: usize) -> Expression {
    negate(Expression::IsNull(Box::new(Expression::Column(column))))
}

/// Whether a condition cannot be true if a column is null.
fn is_false_if_null(condition: &Expression, column: usize) -> bool {
    let is = |condition: &Expression| is_false_if_null(condition, column);
    match condition {
        Expression::Binary(BinaryOperator::And, left, right) => is(left) || is(right),
        Expression::Binary(BinaryOperator::Or, left, right) => is(left) && is(right),
        Expression::Unary(UnaryOperator::Not, operand) => match &**operand {
            Expression::IsNull(operand) => is_null_if_null(operand, column),
            other => is_null_if_null(other, column),
        },
        other => is_null_if_null(other, column),
    }
}

/// Whether an expression is null if a column is null.
fn is_null_if_null(expression: &Expression, column: usize) -> bool {
    let is = |expression: &Expression| is_null_if_null(expression, column);
    match expression {
        Expression::Column(other) => *other == column,
        Expression::Binary(BinaryOperator::And | BinaryOperator::Or, left, right) => {
            is(left) && is(right)
        }
        Expression::Binary(_, left, right) | Expression::Like(left, right) => is(left) || is(right),
        Expression::Unary(_, operand) | Expression::Cast(operand, _) => is(operand),
        Expression::Call(Function::Coalesce, arguments) => arguments.iter().all(is),
        Expression::Call(_, arguments) => arguments.iter().any(is),
        Expression::Literal(_) | Expression::IsNull(_) | Expression::Case(..) => false,
    }
}
