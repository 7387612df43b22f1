//! Plans `select`, with groups, order and set operations.

use crate::ast::{self, ExpressionKind, OrderItem, SelectItem, SetExpression, ToStream};
use crate::plan::{Expression, OrderKey};
use crate::span::{Diagnostic, Span};
use crate::value::{Type, Value};

use super::calls::is_aggregate;
use super::expressions::{Expressions, Groups};
use super::from::{cast_columns, whole, windowed};
use super::node::{Body, Node};
use super::scope::{Column, Scope};
use super::subqueries::{parts, require_windows};
use super::types::{Typed, kind_name, unify};
use super::walk::conjuncts;
use super::{Planner, TOO_LARGE, check_height};

const NO_AGGREGATE: &str = "select the aggregate, and order by its name";

/// A relation with the keys of its order. The columns after the first `visible` ones are only for
/// these keys.
struct Ordered {
    node: Node,
    keys: Vec<OrderKey>,
    visible: usize,
}

impl Planner<'_> {
    /// A query. Without `Istream` and the like it is a relation.
    pub(super) fn query(&mut self, query: &ast::Query) -> Result<Body, Diagnostic> {
        let plain = query.order_by.is_empty() && query.limit.is_none();
        let body = match &query.body {
            SetExpression::Query(inner) if plain => {
                self.nested(inner.span, |planner| planner.query(inner))?
            }
            body => {
                let ordered = match body {
                    SetExpression::Select(select) => self.select(select, &query.order_by)?,
                    other => {
                        let node = self.set(other)?;
                        self.order(node, &query.order_by)?
                    }
                };
                let Ordered { mut node, keys, visible } = ordered;
                self.note_order(query, &keys, visible);
                if !plain {
                    node = node.top(keys, query.limit);
                }
                if visible < node.width() {
                    let columns = node.columns[..visible].to_vec();
                    node = node.project((0..visible).map(Expression::Column).collect(), columns);
                }
                Body::Relation(node)
            }
        };
        check_height(body.facts(), query.span)?;
        let Some(how) = query.to_stream else { return Ok(body) };
        let node = windowed(body, None, whole(query.span))?;
        if how == ToStream::Deletions && node.facts.monotonic {
            let message = "no row ever leaves this relation: its Dstream is empty";
            self.warnings.push(Diagnostic::new(query.span, message));
        }
        Ok(Body::Stream(node.changes(how)))
    }

    /// Warns about an order by an expression that is not selected: the result is not shown in this
    /// order.
    fn note_order(&mut self, query: &ast::Query, keys: &[OrderKey], visible: usize) {
        if query.limit.is_some() && (self.nesting > 0 || self.current.is_some()) {
            // The rows of an inner query are not shown. There the order only chooses the first
            // rows.
            return;
        }
        let is_hidden =
            |key: &OrderKey| !matches!(key.expression, Expression::Column(at) if at < visible);
        let Some(at) = keys.iter().position(is_hidden) else { return };
        let message = match query.limit {
            Some(_) => {
                "this key chooses the first rows, but is not selected: they are not shown in its \
                 order"
            }
            None => "this key is not selected: the result is not shown in its order",
        };
        let span = query.order_by[at].expression.span;
        self.warnings.push(Diagnostic::new(span, message).help("select it too"));
    }

    /// The order of a relation by its columns.
    fn order(&mut self, node: Node, order_by: &[OrderItem]) -> Result<Ordered, Diagnostic> {
        let scope = Scope::of(&node.columns);
        let mut keys = Vec::with_capacity(order_by.len());
        for item in order_by {
            let expression = if let Some(at) = position(item, &node.columns)? {
                Expression::Column(at)
            } else {
                let mut rows = Expressions::new(&scope, self.parameters, &[], NO_AGGREGATE);
                let typed = rows.plan(&item.expression)?;
                self.warnings.append(&mut rows.warnings);
                typed.expression
            };
            keys.push(OrderKey { expression, descending: item.descending });
        }
        let visible = node.width();
        Ok(Ordered { node, keys, visible })
    }

    /// One selection, or several combined.
    fn set(&mut self, expression: &SetExpression) -> Result<Node, Diagnostic> {
        // Operations are nested on the left, and a chain may be long: this part is not recursive.
        let mut operations = Vec::new();
        let mut first = expression;
        while let SetExpression::Operation { operation, all, left, right, span } = first {
            operations.push((*operation, *all, right, *span));
            first = left;
        }
        let mut node = match first {
            SetExpression::Query(query) => {
                let body = self.nested(query.span, |planner| planner.query(query))?;
                windowed(body, None, whole(query.span))?
            }
            SetExpression::Select(select) => self.select(select, &[])?.node,
            SetExpression::Operation { span, .. } => return Err(Diagnostic::new(*span, TOO_LARGE)),
        };
        for (operation, all, right, span) in operations.into_iter().rev() {
            let right = self.nested(span, |planner| planner.set(right))?;
            let kinds = common_kinds(&node, &right, span)?;
            let left = cast_columns(node, &kinds);
            node = left.set(cast_columns(right, &kinds), operation, all);
            check_height(&node.facts, span)?;
        }
        Ok(node)
    }

    fn select(
        &mut self,
        select: &ast::Select,
        order_by: &[OrderItem],
    ) -> Result<Ordered, Diagnostic> {
        let (mut node, scope, joined) =
            self.nested(select.span, |planner| planner.sources(select))?;
        let aliases = aliases(select);
        let grouped = !select.group_by.is_empty()
            || select.having.is_some()
            || selected(select).any(has_aggregate)
            || order_by.iter().any(|item| has_aggregate(&item.expression));

        let mut groups = Groups::default();
        for expression in &select.group_by {
            let key = self.group_key(expression, select, &scope, &aliases)?;
            if groups.keys.iter().all(|known| known.expression != key.expression) {
                groups.keys.push(key);
            }
        }
        let mut subqueries = self.subqueries(&scope, selected(select).chain(&select.having))?;
        if !grouped {
            if !subqueries.is_empty() {
                require_windows(&scope)?;
            }
            subqueries.joined = joined;
        }
        let mut expressions = Expressions::new(&scope, self.parameters, &aliases, NO_AGGREGATE);
        expressions.subqueries = Some(&mut subqueries);
        if grouped {
            expressions.groups = Some(&mut groups);
        }

        let (values, columns) = items(&mut expressions, select, grouped)?;
        let having = select.having.as_ref().map(|having| expressions.filter(having));
        let having = having.transpose()?;
        let visible = values.len();
        let mut values: Vec<Expression> = values.into_iter().map(|item| item.expression).collect();
        let mut all_columns = columns;
        let mut keys = Vec::with_capacity(order_by.len());
        for item in order_by {
            let at = if let Some(at) = position(item, &all_columns[..visible])? {
                at
            } else {
                let key = expressions.plan(&item.expression)?;
                let known = values.iter().position(|value| *value == key.expression);
                if known.is_none() && select.distinct {
                    let message = "`select distinct` can be ordered by selected expressions only";
                    return Err(Diagnostic::new(item.expression.span, message));
                }
                known.unwrap_or_else(|| {
                    values.push(key.expression);
                    all_columns.push(Column::new("", key.kind));
                    values.len() - 1
                })
            };
            let expression = Expression::Column(at);
            keys.push(OrderKey { expression, descending: item.descending });
        }
        self.warnings.append(&mut expressions.warnings);

        if grouped {
            node = aggregate(node, groups, &scope);
        }
        let having = having.map_or_else(Vec::new, |having| conjuncts(having.expression));
        (node, _) = subqueries.join(node, having, &mut values, select.span)?;
        node = node.project(values, all_columns);
        if select.distinct {
            node = node.distinct();
        }
        Ok(Ordered { node, keys, visible })
    }

    /// A key of `group by`: an expression over rows, or a selected expression by its name or
    /// number.
    fn group_key(
        &mut self,
        expression: &ast::Expression,
        select: &ast::Select,
        scope: &Scope,
        aliases: &[(&str, &ast::Expression)],
    ) -> Result<Typed, Diagnostic> {
        let help = "aggregates are values of groups: they cannot be in `group by`";
        let mut rows = Expressions::new(scope, self.parameters, aliases, help);
        let key = match &expression.kind {
            ExpressionKind::Literal(Value::Integer(number)) => {
                let at = usize::try_from(*number).ok().and_then(|at| at.checked_sub(1));
                match at.and_then(|at| select.items.get(at)) {
                    Some(SelectItem::Expression { expression, .. }) => rows.plan(expression)?,
                    _ => return Err(no_position(expression.span, *number)),
                }
            }
            _ => rows.plan(expression)?,
        };
        self.warnings.append(&mut rows.warnings);
        Ok(key)
    }
}

/// The types of the columns of two relations that are combined.
fn common_kinds(left: &Node, right: &Node, span: Span) -> Result<Vec<Option<Type>>, Diagnostic> {
    if left.width() != right.width() {
        let (left, right) = (columns(left.width()), columns(right.width()));
        let message = format!("the left side has {left} and the right side {right}");
        return Err(Diagnostic::new(span, message));
    }
    let mut kinds = Vec::with_capacity(left.width());
    for (at, (one, other)) in left.columns.iter().zip(&right.columns).enumerate() {
        let Ok(kind) = unify(one.kind, other.kind) else {
            let message = format!(
                "column {} is {} on the left and {} on the right",
                at + 1,
                kind_name(one.kind),
                kind_name(other.kind)
            );
            return Err(Diagnostic::new(span, message));
        };
        kinds.push(kind);
    }
    Ok(kinds)
}

/// The aggregation of a relation.
fn aggregate(node: Node, groups: Groups, scope: &Scope) -> Node {
    let mut columns = Vec::with_capacity(groups.keys.len() + groups.aggregates.len());
    for (at, key) in groups.keys.iter().enumerate() {
        let name = match key.expression {
            Expression::Column(position) => scope
                .columns()
                .find(|(at, _)| *at == position)
                .map_or_else(String::new, |(_, column)| column.name.clone()),
            _ => format!("key{}", at + 1),
        };
        columns.push(Column::new(name, key.kind));
    }
    columns.extend(groups.aggregates.iter().map(|(_, kind)| Column::new("", *kind)));
    let keys = groups.keys.into_iter().map(|key| key.expression).collect();
    let aggregates = groups.aggregates.into_iter().map(|(aggregate, _)| aggregate).collect();
    node.aggregate(keys, aggregates, columns)
}

/// The selected expressions, and the columns of their values.
fn items(
    expressions: &mut Expressions<'_>,
    select: &ast::Select,
    grouped: bool,
) -> Result<(Vec<Typed>, Vec<Column>), Diagnostic> {
    let mut values = Vec::new();
    let mut columns: Vec<Column> = Vec::new();
    for item in &select.items {
        let star = match item {
            SelectItem::All(span) => {
                let all = expressions.scope.columns();
                Some((*span, all.map(|(at, column)| (at, column.clone())).collect::<Vec<_>>()))
            }
            SelectItem::AllOf(qualifier) => {
                let source = expressions.scope.source(qualifier)?;
                let all = source.columns.iter().cloned().enumerate();
                let all = all.map(|(at, column)| (source.first + at, column)).collect();
                Some((qualifier.span, all))
            }
            SelectItem::Expression { expression, alias } => {
                let value = expressions.plan(expression)?;
                columns.push(match alias {
                    Some(alias) => {
                        let is = |(at, _): &(usize, &Column)| {
                            !grouped && value.expression == Expression::Column(*at)
                        };
                        let known = expressions.scope.columns().find(is);
                        let values = known.and_then(|(_, column)| column.values.clone());
                        Column { values, ..Column::new(&alias.text, value.kind) }
                    }
                    None => named_after(expression, value.kind, expressions.scope, &columns),
                });
                values.push(value);
                None
            }
        };
        if let Some((span, all)) = star {
            if grouped {
                let message = "`*` cannot be selected from groups";
                let help = "select expressions of `group by`, and aggregates";
                return Err(Diagnostic::new(span, message).help(help));
            }
            for (at, column) in all {
                values.push(Typed::new(Expression::Column(at), column.kind, 0));
                columns.push(column);
            }
        }
    }
    Ok((values, columns))
}

/// The column of an expression without an alias.
fn named_after(
    expression: &ast::Expression,
    kind: Option<Type>,
    scope: &Scope,
    before: &[Column],
) -> Column {
    let name = match &expression.kind {
        ExpressionKind::Column { qualifier, name } => {
            if let Ok((position, _)) = scope.find(qualifier.as_ref(), name) {
                if let Some((_, column)) = scope.columns().find(|(at, _)| *at == position) {
                    return Column { kind, ..column.clone() };
                }
            }
            return Column::new(&name.text, kind);
        }
        ExpressionKind::Call { name, .. } => name.text.to_ascii_lowercase(),
        ExpressionKind::Query(query) => match only_item(query) {
            Some(name) => name,
            None => format!("column{}", before.len() + 1),
        },
        _ => format!("column{}", before.len() + 1),
    };
    let free = |name: &str| before.iter().all(|column| !column.has_name(name));
    if free(&name) {
        return Column::new(name, kind);
    }
    let mut number = 2;
    while !free(&format!("{name}{number}")) {
        number += 1;
    }
    Column::new(format!("{name}{number}"), kind)
}

/// The name of the only column of a query, if the text of the query defines it.
fn only_item(query: &ast::Query) -> Option<String> {
    let SetExpression::Select(select) = &query.body else { return None };
    let [SelectItem::Expression { expression, alias }] = &select.items[..] else { return None };
    match (alias, &expression.kind) {
        (Some(name), _) | (None, ExpressionKind::Column { name, .. }) => Some(name.text.clone()),
        (None, ExpressionKind::Call { name, .. }) => Some(name.text.to_ascii_lowercase()),
        _ => None,
    }
}

/// The selected expressions.
fn selected(select: &ast::Select) -> impl Iterator<Item = &ast::Expression> {
    select.items.iter().filter_map(|item| match item {
        SelectItem::Expression { expression, .. } => Some(expression),
        _ => None,
    })
}

/// The selected expressions that have an alias.
fn aliases(select: &ast::Select) -> Vec<(&str, &ast::Expression)> {
    let named = select.items.iter().filter_map(|item| match item {
        SelectItem::Expression { expression, alias: Some(alias) } => {
            Some((alias.text.as_str(), expression))
        }
        _ => None,
    });
    named.collect()
}

/// The selected column that a key of `order by` refers to, by its number or its name.
fn position(item: &OrderItem, columns: &[Column]) -> Result<Option<usize>, Diagnostic> {
    match &item.expression.kind {
        ExpressionKind::Literal(Value::Integer(number)) => {
            let at = usize::try_from(*number).ok().and_then(|at| at.checked_sub(1));
            match at.filter(|at| *at < columns.len()) {
                Some(at) => Ok(Some(at)),
                None => Err(no_position(item.expression.span, *number)),
            }
        }
        ExpressionKind::Column { qualifier: None, name } => {
            let is = |column: &Column| column.name.eq_ignore_ascii_case(&name.text);
            let mut found = columns.iter().enumerate().filter(|(_, column)| is(column));
            match (found.next(), found.next()) {
                (Some((at, _)), None) => Ok(Some(at)),
                _ => Ok(None),
            }
        }
        _ => Ok(None),
    }
}

fn no_position(span: Span, number: i64) -> Diagnostic {
    Diagnostic::new(span, format!("there is no selected expression number {number}"))
}

/// Whether a query selects only `*`, so that it has the columns of its source.
pub(super) fn is_all(query: &ast::Query) -> bool {
    match &query.body {
        SetExpression::Select(select) => matches!(select.items[..], [SelectItem::All(_)]),
        _ => false,
    }
}

/// A number of columns in words.
pub(super) fn columns(count: usize) -> String {
    if count == 1 { "1 column".to_owned() } else { format!("{count} columns") }
}

/// Whether there is an aggregate in an expression.
fn has_aggregate(expression: &ast::Expression) -> bool {
    let mut open = vec![expression];
    while let Some(next) = open.pop() {
        if matches!(&next.kind, ExpressionKind::Call { name, .. } if is_aggregate(&name.text)) {
            return true;
        }
        open.extend(parts(next));
    }
    false
}
