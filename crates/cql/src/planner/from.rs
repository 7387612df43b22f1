//! `from` and `where`: windows and joins.

use crate::ast::{
    self, BinaryOperator, Identifier, JoinKind, TableReference, ToStream, WindowKind,
};
use crate::plan::{Expression, Stream, Window};
use crate::span::{Diagnostic, Span};
use crate::value::Type;

use super::expressions::Expressions;
use super::node::{Body, Facts, Growing, Node, StreamNode, equality};
use super::scope::{Column, Scope, Source, suggest};
use super::subqueries::{self, JoinedValues, require_windows};
use super::walk::{combine, conjuncts, each_column, map_columns};
use super::{Planner, TOO_LARGE};

/// The most sources in a `from` that are separated by commas.
const SOURCES_MAX: usize = 64;

/// A source in `from`, or several joined ones.
struct Item {
    node: Node,
    sources: Vec<Source>,
}

impl Planner<'_> {
    /// The filtered rows of a selection, and the names of their columns.
    ///
    /// The relation may have further columns at the end, those of subqueries.
    pub(super) fn sources(
        &mut self,
        select: &ast::Select,
    ) -> Result<(Node, Scope, JoinedValues), Diagnostic> {
        if select.from.len() > SOURCES_MAX {
            return Err(Diagnostic::new(select.span, TOO_LARGE));
        }
        let mut nodes = Vec::with_capacity(select.from.len());
        let mut scope = Scope { sources: Vec::new(), outer: self.outer.clone() };
        let mut width = 0;
        for reference in &select.from {
            let item = self.item(reference)?;
            add_sources(&mut scope.sources, item.sources, width)?;
            width += item.node.width();
            nodes.push(item.node);
        }
        let mut subqueries = self.subqueries(&scope, select.selection.iter())?;
        let (conditions, with_subqueries) = match &select.selection {
            None => (Vec::new(), Vec::new()),
            Some(selection) => {
                let help = "write conditions on aggregates in `having`";
                let mut rows = Expressions::new(&scope, self.parameters, &[], help);
                rows.subqueries = Some(&mut subqueries);
                let condition = rows.filter(selection)?;
                self.warnings.append(&mut rows.warnings);
                let parts = conjuncts(condition.expression).into_iter();
                parts.partition(|part| !subqueries::has_subquery(part))
            }
        };
        let node = join_all(nodes, conditions)
            .ok_or_else(|| Diagnostic::new(select.span, "there is nothing to select from"))?;
        if !subqueries.is_empty() {
            require_windows(&scope)?;
        }
        let (node, joined) = subqueries.join(node, with_subqueries, &mut [], select.span)?;
        Ok((node, scope, joined))
    }

    fn item(&mut self, reference: &TableReference) -> Result<Item, Diagnostic> {
        match reference {
            TableReference::Named { name, window, alias } => {
                self.named(name, window.as_ref(), alias.as_ref())
            }
            TableReference::Subquery { query, window, alias } => {
                let body = self.nested(query.span, |planner| planner.query(query))?;
                let alias = alias.as_ref();
                let name = alias.map_or("the subquery", |alias| &alias.text);
                let place = Growing {
                    span: window.as_ref().map_or(query.span, |window| window.span),
                    name: name.to_owned(),
                };
                let unwindowed = unwindowed(&body, window.as_ref(), query.span, "(select …)");
                let node = windowed(body, window.as_ref(), place)?;
                let source = Source {
                    alias: alias.map(|alias| alias.text.clone()),
                    stream: None,
                    span: alias.map_or(query.span, |alias| alias.span),
                    first: 0,
                    columns: node.columns.clone(),
                    unwindowed,
                };
                Ok(Item { node, sources: vec![source] })
            }
            TableReference::Join { left, right, kind, on, span } => {
                self.nested(*span, |planner| planner.join(left, right, *kind, on.as_ref()))
            }
        }
    }

    fn join(
        &mut self,
        left: &TableReference,
        right: &TableReference,
        kind: JoinKind,
        on: Option<&ast::Expression>,
    ) -> Result<Item, Diagnostic> {
        let left = self.item(left)?;
        let right = self.item(right)?;
        let mut scope = Scope { sources: left.sources, outer: self.outer.clone() };
        add_sources(&mut scope.sources, right.sources, left.node.width())?;
        let conditions = match on {
            None => Vec::new(),
            Some(on) => {
                let help = "write conditions on aggregates in `having`";
                let mut rows = Expressions::new(&scope, self.parameters, &[], help);
                let condition = rows.condition(on)?;
                self.warnings.append(&mut rows.warnings);
                conjuncts(condition.expression)
            }
        };
        let node = left.node.join(right.node, kind, conditions);
        Ok(Item { node, sources: scope.sources })
    }

    fn named(
        &mut self,
        name: &Identifier,
        window: Option<&ast::Window>,
        alias: Option<&Identifier>,
    ) -> Result<Item, Diagnostic> {
        let body = self.input(name)?;
        let place = Growing {
            span: window.map_or(name.span, |window| window.span),
            name: name.text.clone(),
        };
        let unwindowed = unwindowed(&body, window, name.span, &name.text);
        let node = windowed(body, window, place)?;
        let source = Source {
            alias: Some(alias.unwrap_or(name).text.clone()),
            stream: alias.map(|_| name.text.clone()),
            span: alias.map_or(name.span, |alias| alias.span),
            first: 0,
            columns: node.columns.clone(),
            unwindowed,
        };
        Ok(Item { node, sources: vec![source] })
    }

    /// A stream or a view by its name.
    fn input(&mut self, name: &Identifier) -> Result<Body, Diagnostic> {
        let text = &name.text;
        if let Some(view) = self.views.iter().find(|view| view.name.eq_ignore_ascii_case(text)) {
            self.spent += view.body.facts().operators;
            if self.spent > super::OPERATORS_MAX {
                return Err(Diagnostic::new(name.span, TOO_LARGE));
            }
            return Ok(view.body.clone());
        }
        if let Some(at) = self.catalog.find(text) {
            let schema = &self.catalog.streams[at];
            let column = |(at, column): (usize, &crate::catalog::Column)| {
                let aliases = schema.aliases.iter().filter(|(alias, of)| {
                    of.eq_ignore_ascii_case(&column.name) && schema.find(alias) == Some(at)
                });
                let is = |(of, _): &&(String, _)| of.eq_ignore_ascii_case(&column.name);
                let values = schema.values.iter().find(is);
                Column {
                    name: column.name.clone(),
                    aliases: aliases.map(|(alias, _)| alias.clone()).collect(),
                    kind: Some(column.kind),
                    values: values.map(|(_, values)| values.clone().into()),
                }
            };
            let columns = schema.columns.iter().enumerate().map(column).collect();
            let facts = Facts { operators: 1, depth: 1, ..Facts::default() };
            return Ok(Body::Stream(StreamNode { stream: Stream::Source(at), columns, facts }));
        }
        let diagnostic = Diagnostic::new(name.span, format!("there is no stream or view `{text}`"));
        let is = |known: &&str| known.eq_ignore_ascii_case(text);
        if self.current.as_deref().as_ref().is_some_and(is) {
            return Err(diagnostic.help("a view cannot use itself"));
        }
        if self.later.iter().filter_map(super::name).any(|later| later.eq_ignore_ascii_case(text)) {
            return Err(diagnostic.help("it is defined later: move its definition before its use"));
        }
        let views = self.views.iter().map(|view| view.name.as_str());
        let streams = self.catalog.streams.iter().map(|stream| stream.name.as_str());
        Err(suggest(diagnostic, text, streams.chain(views)))
    }
}

/// Adds sources whose columns follow `width` other columns.
fn add_sources(to: &mut Vec<Source>, more: Vec<Source>, width: usize) -> Result<(), Diagnostic> {
    for mut source in more {
        if let Some(alias) = &source.alias {
            let same = |other: &Source| {
                other.alias.as_ref().is_some_and(|other| other.eq_ignore_ascii_case(alias))
            };
            if to.iter().any(same) {
                let message = format!("there are two sources `{alias}` in this `from`");
                let help = "give each another name with `as`";
                return Err(Diagnostic::new(source.span, message).help(help));
            }
        }
        source.first += width;
        to.push(source);
    }
    Ok(())
}

/// The place for a window, if the body is a stream and has no window.
fn unwindowed(
    body: &Body,
    window: Option<&ast::Window>,
    span: Span,
    name: &str,
) -> Option<Growing> {
    let is_stream = match body {
        Body::Stream(_) => true,
        Body::Relation(node) => node.relation.only_grows(),
    };
    (is_stream && window.is_none()).then(|| Growing { span, name: name.to_owned() })
}

/// A stream or relation as a relation, with an optional window.
pub(super) fn windowed(
    body: Body,
    window: Option<&ast::Window>,
    place: Growing,
) -> Result<Node, Diagnostic> {
    let stream = match (body, window) {
        (Body::Relation(node), None) => return Ok(node),
        (Body::Relation(node), Some(_)) => node.changes(ToStream::Insertions),
        (Body::Stream(stream), _) => stream,
    };
    let rows = |by: Vec<usize>, rows: u64| Window::Rows { by, rows };
    let window = match window.map(|window| &window.kind) {
        None | Some(WindowKind::Unbounded) => Window::Unbounded,
        Some(WindowKind::Now) => Window::Range { length_ns: 1, slide_ns: None },
        Some(WindowKind::Range { length_ns, slide_ns }) => Window::Range {
            length_ns: (*length_ns).max(1),
            slide_ns: slide_ns.map(|slide_ns| slide_ns.max(1)),
        },
        Some(WindowKind::Rows(count)) => rows(Vec::new(), *count),
        Some(WindowKind::Partition { by, rows: count }) => {
            let scope = Scope::of(&stream.columns);
            let mut columns = Vec::with_capacity(by.len());
            for name in by {
                let (column, _) = scope.find(None, name)?;
                if !columns.contains(&column) {
                    columns.push(column);
                }
            }
            rows(columns, *count)
        }
    };
    Ok(stream.window(window, place))
}

/// Joins sources. The next source is the first one that an equality links to the joined ones, or
/// else the first of the rest. Conditions are over the columns of all sources.
fn join_all(nodes: Vec<Node>, conditions: Vec<Expression>) -> Option<Node> {
    let mut firsts = Vec::with_capacity(nodes.len());
    let mut owner = Vec::new();
    for (at, node) in nodes.iter().enumerate() {
        firsts.push(owner.len());
        owner.extend(std::iter::repeat_n(at, node.width()));
    }
    let owners = |expression: &Expression| {
        let mut of = Vec::new();
        each_column(expression, &mut |column| {
            if !of.contains(&owner[column]) {
                of.push(owner[column]);
            }
        });
        of
    };
    let mut waiting: Vec<(Vec<usize>, Expression)> = Vec::new();
    let mut constant = Vec::new();
    let mut single: Vec<Vec<Expression>> = nodes.iter().map(|_| Vec::new()).collect();
    for mut condition in conditions {
        let of = owners(&condition);
        match of[..] {
            [] => constant.push(condition),
            [at] => {
                map_columns(&mut condition, &|column| column - firsts[at]);
                single[at].push(condition);
            }
            _ => waiting.push((of, condition)),
        }
    }
    let mut nodes: Vec<Option<Node>> = nodes
        .into_iter()
        .zip(single)
        .map(|(node, conditions)| Some(node.filter(combine(BinaryOperator::And, conditions))))
        .collect();

    // The original positions of the columns, in the order of the joins.
    let width = owner.len();
    let mut joined = vec![0];
    let mut all = nodes.first_mut()?.take()?;
    let mut written: Vec<usize> = (0..all.width()).collect();
    while joined.len() < nodes.len() {
        let linked = |&at: &usize| {
            let is_joined = |column: usize| joined.contains(&owner[column]);
            waiting.iter().any(|(of, condition)| {
                of.iter().all(|of| *of == at || joined.contains(of))
                    && equality(condition.clone(), &is_joined).is_ok()
            })
        };
        let mut rest = (0..nodes.len()).filter(|at| !joined.contains(at));
        let first = rest.clone().next()?;
        let next = rest.find(linked).unwrap_or(first);
        let node = nodes[next].take()?;
        joined.push(next);
        written.extend(firsts[next]..firsts[next] + node.width());
        let mut position = vec![0; width];
        for (at, column) in written.iter().enumerate() {
            position[*column] = at;
        }
        let mut now = Vec::new();
        let mut still = Vec::new();
        for (of, mut condition) in waiting {
            if of.iter().all(|of| joined.contains(of)) {
                map_columns(&mut condition, &|column| position[column]);
                now.push(condition);
            } else {
                still.push((of, condition));
            }
        }
        waiting = still;
        all = all.join(node, JoinKind::Inner, now);
    }
    all = all.filter(combine(BinaryOperator::And, constant));

    let mut position = vec![0; width];
    for (at, column) in written.iter().enumerate() {
        position[*column] = at;
    }
    let columns = position.iter().map(|at| all.columns[*at].clone()).collect();
    Some(all.project(position.into_iter().map(Expression::Column).collect(), columns))
}

/// Casts columns to their declared types, or to the common types of two relations.
pub(super) fn cast_columns(node: Node, kinds: &[Option<Type>]) -> Node {
    let mut expressions = Vec::with_capacity(kinds.len());
    let mut columns = node.columns.clone();
    for (at, kind) in kinds.iter().enumerate() {
        let column = Expression::Column(at);
        let cast = columns[at].kind == Some(Type::Integer) && *kind == Some(Type::Float);
        columns[at].kind = *kind;
        expressions.push(if cast {
            Expression::Cast(Box::new(column), Type::Float)
        } else {
            column
        });
    }
    node.project(expressions, columns)
}

/// The place of a query that is a stream and is used as a relation.
pub(super) fn whole(span: Span) -> Growing {
    Growing { span, name: "the subquery".to_owned() }
}
