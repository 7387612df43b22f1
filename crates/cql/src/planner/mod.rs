//! From scripts to plans: names resolved, types checked, joins arranged.

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

pub(crate) use self::types::symbol;
pub(crate) use self::walk::{combine, conjuncts, each_column, map_columns, sides};

/// How many operators a plan may have.
const LARGEST: usize = 4096;
/// How many operators may be on top of each other.
const HIGHEST: usize = 256;
/// How deep queries may be in each other.
const DEEPEST: usize = 48;
const TOO_LARGE: &str = "the query is too large";

/// The values of parameters (`$name`) by their names.
pub type Parameters = BTreeMap<String, Value>;

/// The plans of a script.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The streams, with those that the script declares.
    pub catalog: Catalog,
    /// The queries whose results are wanted, in their order.
    pub queries: Vec<PlannedQuery>,
    /// The stream that the script declares last, by its position in the catalogue.
    pub declared: Option<usize>,
}

/// A query and its plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedQuery {
    /// The plan.
    pub plan: Plan,
    /// Where the query is.
    pub span: Span,
    /// State that grows without bound, and why.
    pub unbounded: Vec<Diagnostic>,
    /// What is odd, though it can be done.
    pub warnings: Vec<Diagnostic>,
}

/// Plans the queries of a script over the streams of a catalogue.
///
/// # Errors
///
/// The first thing that is wrong, with its place.
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
        around: None,
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
    // What is odd in a view is told once, with the first query.
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

/// What is known so far.
struct Planner<'a> {
    catalog: Catalog,
    parameters: &'a Parameters,
    views: Vec<View>,
    /// The view that is being defined.
    current: Option<String>,
    /// What is defined behind the statement.
    later: &'a [Statement],
    /// How many operators views have brought into the statement.
    spent: usize,
    /// How deep the place is in queries.
    nesting: usize,
    /// What the place sees in which the query is, where that is an expression.
    around: Option<Rc<Scope>>,
    warnings: Vec<Diagnostic>,
    /// How many streams there are that no script declared.
    given: usize,
    /// The stream that the script declared last.
    declared: Option<usize>,
    /// Whether a query has been planned.
    used: bool,
}

impl Planner<'_> {
    /// Does something that is one level deeper.
    fn nested<T>(
        &mut self,
        span: Span,
        plan: impl FnOnce(&mut Self) -> Result<T, Diagnostic>,
    ) -> Result<T, Diagnostic> {
        if self.nesting >= DEEPEST {
            return Err(Diagnostic::new(span, "the query is too deep"));
        }
        self.nesting += 1;
        let planned = plan(self);
        self.nesting -= 1;
        planned
    }

    /// A name may be given once.
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

    /// The stream of the catalogue that a script declares again, before it uses it: with the columns
    /// that its input has.
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
            // Its other names and values stay those of the columns that it still has.
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
    if facts.operators > LARGEST || facts.depth > HIGHEST {
        return Err(Diagnostic::new(span, TOO_LARGE));
    }
    Ok(())
}

/// Columns have different names.
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

/// Gives a view's columns the names and types that it is declared with.
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
        if !column.answers(text) {
            column.also.clear();
        }
        column.name.clone_from(text);
        kinds.push(declared.kind.or(column.kind));
    }
    Ok(over_relation(body, |node| cast_columns(node, &kinds)))
}

/// Whether declared columns are the first of a query's, by their names.
fn begins(columns: &[Column], declared: &[ColumnDeclaration]) -> bool {
    columns.iter().zip(declared).all(|(column, declared)| column.answers(&declared.name.text))
}

/// The first columns only.
fn shorten(body: Body, count: usize) -> Body {
    over_relation(body, |node| {
        let columns = node.columns.iter().take(count).cloned().collect();
        node.project((0..count).map(crate::plan::Expression::Column).collect(), columns)
    })
}

/// Changes each row of what a query gives.
fn over_relation(body: Body, change: impl FnOnce(Node) -> Node) -> Body {
    match body {
        Body::Relation(node) => Body::Relation(change(node)),
        Body::Stream(stream) => Body::Stream(stream.change(change)),
    }
}

/// The plan of a query whose results are wanted.
fn finish(body: Body, span: Span, warnings: Vec<Diagnostic>) -> PlannedQuery {
    let body = match body {
        Body::Relation(node) if node.facts.monotonic => {
            Body::Stream(node.changes(ToStream::Insertions))
        }
        Body::Relation(mut node) => {
            node.facts.keep("the result holds all of it");
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
