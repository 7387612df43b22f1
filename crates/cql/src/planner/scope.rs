//! Names: which columns a place sees.

use std::rc::Rc;

use crate::ast::Identifier;
use crate::likeness::distance;
use crate::span::{Diagnostic, Span};
use crate::value::Type;

use super::node::Growing;

/// A column of a relation under planning.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Column {
    /// The name.
    pub(super) name: String,
    /// Other names.
    pub(super) also: Vec<String>,
    /// The type; `None` where all is null.
    pub(super) kind: Option<Type>,
    /// All values that there can be, where these are known.
    pub(super) values: Option<Rc<[String]>>,
}

impl Column {
    /// A column with one name.
    pub(super) fn new(name: impl Into<String>, kind: Option<Type>) -> Self {
        Self { name: name.into(), also: Vec::new(), kind, values: None }
    }

    fn is(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name)
    }

    fn is_also(&self, name: &str) -> bool {
        self.also.iter().any(|other| other.eq_ignore_ascii_case(name))
    }

    /// Whether a name is one of its own.
    pub(super) fn answers(&self, name: &str) -> bool {
        self.is(name) || self.is_also(name)
    }
}

/// One thing in `from`.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// The name by which it is qualified.
    pub(super) alias: Option<String>,
    /// The stream or view, where that is another name.
    pub(super) stream: Option<String>,
    /// Where the name is.
    pub(super) span: Span,
    /// The position of its first column.
    pub(super) first: usize,
    /// Its columns.
    pub(super) columns: Vec<Column>,
    /// The place where a window could be, of a stream that has none.
    pub(super) bare: Option<Growing>,
}

impl Source {
    /// The positions of the columns with a name, or else with it as another name.
    fn positions(&self, name: &str) -> Vec<usize> {
        let by = |test: &dyn Fn(&Column) -> bool| -> Vec<usize> {
            let all = self.columns.iter().enumerate();
            all.filter(|(_, column)| test(column)).map(|(at, _)| at).collect()
        };
        let named = by(&|column| column.is(name));
        if named.is_empty() { by(&|column| column.is_also(name)) } else { named }
    }

    fn is(&self, name: &str) -> bool {
        self.alias.as_ref().is_some_and(|alias| alias.eq_ignore_ascii_case(name))
    }
}

/// What a place sees.
#[derive(Clone, Debug, Default)]
pub(super) struct Scope {
    /// In the order of their columns.
    pub(super) sources: Vec<Source>,
    /// What the place around the query sees, where the query is in an expression.
    pub(super) around: Option<Rc<Self>>,
}

/// Why a name is no column.
#[derive(Debug)]
pub(super) enum NotFound {
    /// There is none of this name.
    Unknown(Diagnostic),
    /// There is more than one, or the qualifier is wrong.
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
    /// The scope of what selects from one relation.
    pub(super) fn of(columns: &[Column]) -> Self {
        let source = Source {
            alias: None,
            stream: None,
            span: Span::default(),
            first: 0,
            columns: columns.to_vec(),
            bare: None,
        };
        Self { sources: vec![source], around: None }
    }

    /// All columns with their positions.
    pub(super) fn columns(&self) -> impl Iterator<Item = (usize, &Column)> {
        self.sources.iter().flat_map(|source| {
            source.columns.iter().enumerate().map(|(at, column)| (source.first + at, column))
        })
    }

    /// The source of a qualifier: an alias, or the name of a stream that is used once.
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
                let message = format!("`{name}` is more than one of the sources here");
                Err(Diagnostic::new(qualifier.span, message).help("use the alias"))
            }
            (None, _) => {
                let message = format!("there is no `{name}` in this `from`");
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
            if !is_unknown || !self.is_around(qualifier, name) {
                return not_found;
            }
            let full = qualifier.map_or(String::new(), |qualifier| format!("{}.", qualifier.text));
            let message =
                format!("a subquery cannot look at `{full}{}` of the query around it", name.text);
            let span = qualifier.map_or(name.span, |qualifier| qualifier.span.to(name.span));
            let help = "put the subquery into `from`, and join with it";
            NotFound::Unknown(Diagnostic::new(span, message).help(help))
        })
    }

    /// Whether a query around this one has a column.
    fn is_around(&self, qualifier: Option<&Identifier>, name: &Identifier) -> bool {
        let mut around = &self.around;
        while let Some(scope) = around {
            if scope.find_here(qualifier, name).is_ok() {
                return true;
            }
            around = &scope.around;
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
        // A name goes before another name of a column elsewhere.
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
                Err(NotFound::Unknown(suggest(diagnostic, &name.text, names)))
            }
            _ => {
                let message = format!("`{}` is more than one column", name.text);
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
                    diagnostic.help(format!("say which: {}", names.join(" or ")))
                } else {
                    diagnostic.help("give the columns different names with `as`")
                }))
            }
        }
    }
}

/// Adds "did you mean …" where a known name is close.
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
