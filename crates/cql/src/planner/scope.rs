//! Scopes: the columns that are visible at a place.

use std::rc::Rc;

use crate::ast::Identifier;
use crate::foreign;
use crate::likeness::distance;
use crate::span::{Diagnostic, Span};
use crate::value::Type;

use super::node::Growing;

/// A column of a relation during planning.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Column {
    /// The name.
    pub(super) name: String,
    /// Other names.
    pub(super) aliases: Vec<String>,
    /// The type; `None` if all values are null.
    pub(super) kind: Option<Type>,
    /// All possible values, if they are known.
    pub(super) values: Option<Rc<[String]>>,
}

impl Column {
    /// A column with one name.
    pub(super) fn new(name: impl Into<String>, kind: Option<Type>) -> Self {
        Self { name: name.into(), aliases: Vec::new(), kind, values: None }
    }

    fn is(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name)
    }

    fn has_alias(&self, name: &str) -> bool {
        self.aliases.iter().any(|other| other.eq_ignore_ascii_case(name))
    }

    /// Whether the column has a name, as its own or as an alias.
    pub(super) fn has_name(&self, name: &str) -> bool {
        self.is(name) || self.has_alias(name)
    }
}

/// One source in `from`.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// The name that qualifies its columns.
    pub(super) alias: Option<String>,
    /// The name of the stream or view, if it has an alias.
    pub(super) stream: Option<String>,
    /// The place of the name in the text.
    pub(super) span: Span,
    /// The position of its first column.
    pub(super) first: usize,
    /// Its columns.
    pub(super) columns: Vec<Column>,
    /// The place for a window, if the source is a stream without one.
    pub(super) unwindowed: Option<Growing>,
}

impl Source {
    /// The positions of the columns with a name, or else of those with this alias.
    fn positions(&self, name: &str) -> Vec<usize> {
        let by = |test: &dyn Fn(&Column) -> bool| -> Vec<usize> {
            let all = self.columns.iter().enumerate();
            all.filter(|(_, column)| test(column)).map(|(at, _)| at).collect()
        };
        let named = by(&|column| column.is(name));
        if named.is_empty() { by(&|column| column.has_alias(name)) } else { named }
    }

    fn is(&self, name: &str) -> bool {
        self.alias.as_ref().is_some_and(|alias| alias.eq_ignore_ascii_case(name))
    }
}

/// The sources that are visible at a place.
#[derive(Clone, Debug, Default)]
pub(super) struct Scope {
    /// The sources in the order of their columns.
    pub(super) sources: Vec<Source>,
    /// The scope of the place that contains the query, if the query is in an expression.
    pub(super) outer: Option<Rc<Self>>,
}

/// Why a name is not a column.
#[derive(Debug)]
pub(super) enum NotFound {
    /// There is no column with this name.
    Unknown(Diagnostic),
    /// There are several columns with this name, or the qualifier is wrong.
    Wrong(Diagnostic),
}

impl From<NotFound> for Diagnostic {
    fn from(not_found: NotFound) -> Self {
        match not_found {
            NotFound::Unknown(diagnostic) | NotFound::Wrong(diagnostic) => diagnostic,
        }
    }
}

impl Scope {
    /// The scope of a selection from one relation.
    pub(super) fn of(columns: &[Column]) -> Self {
        let source = Source {
            alias: None,
            stream: None,
            span: Span::default(),
            first: 0,
            columns: columns.to_vec(),
            unwindowed: None,
        };
        Self { sources: vec![source], outer: None }
    }

    /// All columns with their positions.
    pub(super) fn columns(&self) -> impl Iterator<Item = (usize, &Column)> {
        self.sources.iter().flat_map(|source| {
            source.columns.iter().enumerate().map(|(at, column)| (source.first + at, column))
        })
    }

    /// The source of a qualifier: an alias, or the name of a stream that occurs once.
    pub(super) fn source(&self, qualifier: &Identifier) -> Result<&Source, Diagnostic> {
        let name = &qualifier.text;
        if let Some(source) = self.sources.iter().find(|source| source.is(name)) {
            return Ok(source);
        }
        let is_stream = |source: &&Source| {
            source.stream.as_ref().is_some_and(|stream| stream.eq_ignore_ascii_case(name))
        };
        let mut streams = self.sources.iter().filter(is_stream);
        match (streams.next(), streams.next()) {
            (Some(source), None) => Ok(source),
            (Some(_), Some(_)) => {
                let message = format!("`{name}` is the name of several sources");
                Err(Diagnostic::new(qualifier.span, message).help("use the alias"))
            }
            (None, _) => {
                let message = format!("there is no source `{name}` in this `from`");
                let names = self.sources.iter().filter_map(|source| source.alias.as_deref());
                Err(suggest(Diagnostic::new(qualifier.span, message), name, names))
            }
        }
    }

    /// The position and type of a column.
    pub(super) fn find(
        &self,
        qualifier: Option<&Identifier>,
        name: &Identifier,
    ) -> Result<(usize, Option<Type>), NotFound> {
        self.find_here(qualifier, name).map_err(|not_found| {
            let is_unknown = match qualifier {
                Some(qualifier) => self.source(qualifier).is_err(),
                None => matches!(not_found, NotFound::Unknown(_)),
            };
            if !is_unknown || !self.is_in_outer(qualifier, name) {
                return not_found;
            }
            let full = qualifier.map_or(String::new(), |qualifier| format!("{}.", qualifier.text));
            let message = format!("a subquery cannot use `{full}{}` of the outer query", name.text);
            let span = qualifier.map_or(name.span, |qualifier| qualifier.span.to(name.span));
            let help = "put the subquery into `from`, and join with it";
            NotFound::Unknown(Diagnostic::new(span, message).help(help))
        })
    }

    /// Whether a query that contains this one has a column.
    fn is_in_outer(&self, qualifier: Option<&Identifier>, name: &Identifier) -> bool {
        let mut outer = &self.outer;
        while let Some(scope) = outer {
            if scope.find_here(qualifier, name).is_ok() {
                return true;
            }
            outer = &scope.outer;
        }
        false
    }

    fn find_here(
        &self,
        qualifier: Option<&Identifier>,
        name: &Identifier,
    ) -> Result<(usize, Option<Type>), NotFound> {
        let of = match qualifier {
            Some(qualifier) => Some(self.source(qualifier).map_err(NotFound::Wrong)?),
            None => None,
        };
        let sources: Vec<&Source> = match of {
            Some(source) => vec![source],
            None => self.sources.iter().collect(),
        };
        let mut found = Vec::new();
        for source in &sources {
            found.extend(source.positions(&name.text).into_iter().map(|at| (*source, at)));
        }
        // A column's own name has priority over an alias of another column.
        if found.iter().any(|(source, at)| source.columns[*at].is(&name.text)) {
            found.retain(|(source, at)| source.columns[*at].is(&name.text));
        }
        match found[..] {
            [(source, at)] => Ok((source.first + at, source.columns[at].kind)),
            [] => {
                let message = match of {
                    Some(source) => format!(
                        "`{}` has no column `{}`",
                        source.alias.as_deref().unwrap_or("this"),
                        name.text
                    ),
                    None => format!("there is no column `{}`", name.text),
                };
                let names = sources
                    .iter()
                    .flat_map(|source| source.columns.iter().map(|column| column.name.as_str()));
                let diagnostic = Diagnostic::new(name.span, message);
                if let Some(help) = foreign::column(&name.text) {
                    return Err(NotFound::Unknown(diagnostic.help(help)));
                }
                Err(NotFound::Unknown(suggest(diagnostic, &name.text, names)))
            }
            _ => {
                let message = format!("`{}` is the name of several columns", name.text);
                let mut names: Vec<String> = Vec::new();
                for (source, at) in &found {
                    if let Some(alias) = &source.alias {
                        let full = format!("`{alias}.{}`", source.columns[*at].name);
                        if !names.contains(&full) {
                            names.push(full);
                        }
                    }
                }
                let diagnostic = Diagnostic::new(name.span, message);
                Err(NotFound::Wrong(if names.len() > 1 {
                    names.truncate(4);
                    diagnostic.help(format!("write {}", names.join(" or ")))
                } else {
                    diagnostic.help("give the columns different names with `as`")
                }))
            }
        }
    }
}

/// Adds "did you mean …" if a known name is similar.
pub(super) fn suggest<'a>(
    diagnostic: Diagnostic,
    name: &str,
    known: impl Iterator<Item = &'a str>,
) -> Diagnostic {
    let limit = (name.chars().count() / 3).max(1);
    let best = known
        .map(|candidate| (distance(name, candidate), candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance);
    match best {
        Some((_, candidate)) => diagnostic.help(format!("did you mean `{candidate}`?")),
        None => diagnostic,
    }
}
