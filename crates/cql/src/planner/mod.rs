//! The planner: from scripts to plans. It resolves names, checks types and orders joins.

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::ast::{ColumnDeclaration, Declared, Identifier, Script, Statement, ToStream};
use crate::catalog::{self, Catalog, StreamSchema};
use crate::plan::{Output, Plan};
use crate::span::{Diagnostic, Span};
use crate::value::{Type, Value};

use self::from::cast_columns;
use self::node::{Body, Facts, Node};
use self::scope::{Column, Scope};
use self::types::{kind_name, unify};

mod calls;
mod expressions;
mod fold;
mod from;
mod node;
mod scope;
mod select;
mod subqueries;
mod types;
pub mod walk;

pub(crate) use self::calls::is_aggregate;
pub(crate) use self::types::symbol;
pub(crate) use self::walk::{combine, conjuncts, each_column, map_columns, sides};

/// The most operators of a plan.
const OPERATORS_MAX: usize = 4096;
/// The most operators on a path from the result to a source.
const DEPTH_MAX: usize = 256;
/// The most levels of nested queries.
const NESTING_MAX: usize = 48;
const TOO_LARGE: &str = "the query is too large";

/// The values of parameters (`$name`) by their names.
pub type Parameters = BTreeMap<String, Value>;

/// The plans of a script.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The streams, with those that the script declares.
    pub catalog: Catalog,
    /// The queries with results, in the order of the script.
    pub queries: Vec<PlannedQuery>,
    /// The stream that the script declares last, by its position in the catalogue.
    pub declared: Option<usize>,
}

/// A query and its plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedQuery {
    /// The plan.
    pub plan: Plan,
    /// The query's place in the text.
    pub span: Span,
    /// State that grows without bound, and why.
    pub unbounded: Vec<Diagnostic>,
    /// Probable mistakes in a valid query.
    pub warnings: Vec<Diagnostic>,
}

/// Plans the queries of a script over the streams of a catalogue.
///
/// # Errors
///
/// The first mistake, with its place.
pub fn plan_script(
    script: &Script,
    catalog: &Catalog,
    parameters: &Parameters,
) -> Result<Planned, Diagnostic> {
    let mut planner = Planner {
        catalog: catalog.clone(),
        parameters,
        views: Vec::new(),
        current: None,
        later: &[],
        spent: 0,
        nesting: 0,
        outer: None,
        warnings: Vec::new(),
        given: catalog.streams.len(),
        declared: None,
        used: false,
    };
    let mut queries = Vec::new();
    for (at, statement) in script.statements.iter().enumerate() {
        planner.later = &script.statements[at + 1..];
        planner.spent = 0;
        match statement {
            Statement::Query(query) => {
                planner.current = None;
                planner.used = true;
                let body = planner.query(query)?;
                let warnings = std::mem::take(&mut planner.warnings);
                queries.push(finish(body, query.span, warnings));
            }
            Statement::Stream { name, columns } => planner.stream(name, columns)?,
            Statement::View { name, columns, declared, query } => {
                planner.is_new(name)?;
                planner.current = Some(name.text.clone());
                let body = planner.query(query)?;
                let body = declare(body, name, columns, *declared, query)?;
                let warnings = std::mem::take(&mut planner.warnings);
                planner.views.push(View { name: name.text.clone(), body, warnings });
            }
        }
    }
    // The warnings of views are reported once, with the first query.
    if let Some(first) = queries.first_mut() {
        let views = planner.views.into_iter().flat_map(|view| view.warnings);
        first.warnings.splice(0..0, views);
    }
    Ok(Planned { catalog: planner.catalog, queries, declared: planner.declared })
}

/// The name that a statement defines.
fn name(statement: &Statement) -> Option<&str> {
    match statement {
        Statement::Query(_) => None,
        Statement::View { name, .. } | Statement::Stream { name, .. } => Some(&name.text),
    }
}

/// A query with a name.
struct View {
    name: String,
    body: Body,
    warnings: Vec<Diagnostic>,
}

/// The state of planning.
struct Planner<'a> {
    catalog: Catalog,
    parameters: &'a Parameters,
    views: Vec<View>,
    /// The view that is being defined.
    current: Option<String>,
    /// The statements after the current one.
    later: &'a [Statement],
    /// The number of operators of the views that the statement uses.
    spent: usize,
    /// The levels of nested queries around the current place.
    nesting: usize,
    /// The scope of the place that contains the query, if the query is in an expression.
    outer: Option<Rc<Scope>>,
    warnings: Vec<Diagnostic>,
    /// The number of streams that the script did not declare.
    given: usize,
    /// The stream that the script declared last.
    declared: Option<usize>,
    /// Whether a query has been planned.
    used: bool,
}

impl Planner<'_> {
    /// Plans a part that is one level deeper.
    fn nested<T>(
        &mut self,
        span: Span,
        plan: impl FnOnce(&mut Self) -> Result<T, Diagnostic>,
    ) -> Result<T, Diagnostic> {
        if self.nesting >= NESTING_MAX {
            return Err(Diagnostic::new(span, "the query is nested too deeply"));
        }
        self.nesting += 1;
        let planned = plan(self);
        self.nesting -= 1;
        planned
    }

    /// Checks that a name is not in use.
    fn is_new(&self, name: &Identifier) -> Result<(), Diagnostic> {
        let text = &name.text;
        let is_view = self.views.iter().any(|view| view.name.eq_ignore_ascii_case(text));
        if is_view || self.catalog.find(text).is_some() {
            let what = if is_view { "view" } else { "stream" };
            let message = format!("there is a {what} `{text}` already");
            return Err(Diagnostic::new(name.span, message).help("give it another name"));
        }
        Ok(())
    }

    /// The position of a stream of the catalogue that the script may declare again, with the
    /// columns that its input has. The script must do so before its first query or view.
    fn known(&self, name: &Identifier) -> Option<usize> {
        let known = self.catalog.find(&name.text)?;
        let is_given = known < self.given && self.declared != Some(known);
        (is_given && !self.used && self.views.is_empty()).then_some(known)
    }

    fn stream(
        &mut self,
        name: &Identifier,
        declared: &[ColumnDeclaration],
    ) -> Result<(), Diagnostic> {
        let known = self.known(name);
        if known.is_none() {
            self.is_new(name)?;
        }
        unique(declared)?;
        let mut columns = Vec::with_capacity(declared.len());
        for column in declared {
            let Some(kind) = column.kind else {
                let message = format!("column `{}` of a stream needs a type", column.name.text);
                let help = "boolean, integer, float or text";
                return Err(Diagnostic::new(column.name.span, message).help(help));
            };
            columns.push(catalog::Column { name: column.name.text.clone(), kind });
        }
        if let Some(known) = known {
            // The aliases and values of the remaining columns are kept.
            self.catalog.streams[known].columns = columns;
            self.declared = Some(known);
            return Ok(());
        }
        let (aliases, values) = (Vec::new(), Vec::new());
        let name = name.text.clone();
        self.declared = Some(self.catalog.streams.len());
        self.catalog.streams.push(StreamSchema { name, columns, aliases, values });
        Ok(())
    }
}

fn check_height(facts: &Facts, span: Span) -> Result<(), Diagnostic> {
    if facts.operators > OPERATORS_MAX || facts.depth > DEPTH_MAX {
        return Err(Diagnostic::new(span, TOO_LARGE));
    }
    Ok(())
}

/// Checks that all columns have different names.
fn unique(columns: &[ColumnDeclaration]) -> Result<(), Diagnostic> {
    for (at, column) in columns.iter().enumerate() {
        let text = &column.name.text;
        if columns[..at].iter().any(|other| other.name.text.eq_ignore_ascii_case(text)) {
            let message = format!("there are two columns `{text}`");
            return Err(Diagnostic::new(column.name.span, message));
        }
    }
    Ok(())
}

/// Gives the columns of a view their declared names and types.
fn declare(
    mut body: Body,
    name: &Identifier,
    declared: &[ColumnDeclaration],
    kind: Option<Declared>,
    query: &crate::ast::Query,
) -> Result<Body, Diagnostic> {
    if kind == Some(Declared::Relation) && matches!(body, Body::Stream(_)) {
        let message =
            format!("`{}` is declared as a relation, but its query gives a stream", name.text);
        return Err(Diagnostic::new(name.span, message).help("write `register stream`"));
    }
    if declared.is_empty() {
        return Ok(body);
    }
    unique(declared)?;
    let has = body.columns_mut().len();
    if has > declared.len() && select::is_all(query) && begins(body.columns_mut(), declared) {
        body = shorten(body, declared.len());
    } else if has != declared.len() {
        let message = format!(
            "`{}` is declared with {}, but its query gives {}",
            name.text,
            select::columns(declared.len()),
            select::columns(has)
        );
        return Err(Diagnostic::new(name.span, message));
    }
    let mut kinds = Vec::with_capacity(declared.len());
    for (column, declared) in body.columns_mut().iter_mut().zip(declared) {
        let text = &declared.name.text;
        if let Some(kind) = declared.kind {
            if unify(column.kind, Some(kind)) != Ok(Some(kind)) {
                let message = format!(
                    "column `{text}` is declared {kind}, but the query gives {}",
                    kind_name(column.kind)
                );
                let help =
                    format!("declare it {}, or use `cast(… as {kind})`", kind_name(column.kind));
                return Err(Diagnostic::new(declared.name.span, message).help(help));
            }
        }
        if !column.has_name(text) {
            column.aliases.clear();
        }
        column.name.clone_from(text);
        kinds.push(declared.kind.or(column.kind));
    }
    Ok(over_relation(body, |node| cast_columns(node, &kinds)))
}

/// Whether the declared columns are the first columns of a query, by name.
fn begins(columns: &[Column], declared: &[ColumnDeclaration]) -> bool {
    columns.iter().zip(declared).all(|(column, declared)| column.has_name(&declared.name.text))
}

/// Keeps the first `count` columns only.
fn shorten(body: Body, count: usize) -> Body {
    over_relation(body, |node| {
        let columns = node.columns.iter().take(count).cloned().collect();
        node.project((0..count).map(crate::plan::Expression::Column).collect(), columns)
    })
}

/// Changes each row of a query's result.
fn over_relation(body: Body, change: impl FnOnce(Node) -> Node) -> Body {
    match body {
        Body::Relation(node) => Body::Relation(change(node)),
        Body::Stream(stream) => Body::Stream(stream.change(change)),
    }
}

/// The plan of a query with results.
fn finish(body: Body, span: Span, warnings: Vec<Diagnostic>) -> PlannedQuery {
    let body = match body {
        Body::Relation(node) if node.facts.monotonic => {
            Body::Stream(node.changes(ToStream::Insertions))
        }
        Body::Relation(mut node) => {
            node.facts.keep("the result holds all rows");
            Body::Relation(node)
        }
        stream @ Body::Stream(_) => stream,
    };
    let (output, columns, facts) = match body {
        Body::Stream(node) => (Output::Stream(node.stream), node.columns, node.facts),
        Body::Relation(node) => (Output::Relation(node.relation), node.columns, node.facts),
    };
    let column = |column: Column| catalog::Column {
        name: column.name,
        kind: column.kind.unwrap_or(Type::Text),
    };
    let columns = columns.into_iter().map(column).collect();
    PlannedQuery { plan: Plan { output, columns }, span, unbounded: facts.unbounded, warnings }
}
