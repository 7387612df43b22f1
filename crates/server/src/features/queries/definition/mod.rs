//! The kept queries: `[[query]]`.
//!
//! - `read`: the table, and the kind of its action.
//! - `action`: the kinds of action.
//! - `command`: requests to the control interface that contain values of a row.
//! - `check`: checks that the query can be run, and that the action fits its result.

mod action;
mod check;
mod command;
mod read;

use std::fmt;
use std::num::NonZeroU64;
use std::path::PathBuf;

use fathom_cql::catalog::Column;
use fathom_cql::plan::Output;
use fathom_cql::{Diagnostic, ParseOptions};
use fathom_monitor::replay::Script;
use fathom_monitor::{QueryError, streams};
use serde::Deserialize;
use serde_json::{Map, Value};

pub use action::{
    ActionDefinition, CommandDefinition, MetricDefinition, MetricKind, On, RateLimit,
    WebhookDefinition,
};
#[cfg(test)]
pub(crate) use action::{LogDefinition, Period};
pub(crate) use command::{Command, json};

use crate::configuration::HELD_MAX;

/// The most kept queries.
pub const QUERIES_MAX: usize = 64;
/// The longest text of a query, in bytes.
pub const QUERY_LENGTH_MAX: usize = 64 << 10;
/// The remedy of a query that reads a stream of its own.
const NO_OTHER: &str = "use IOstream or Changes: there is no other stream";

/// A kept query, and the action on its results.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QueryDefinition {
    /// The name: unique within the daemon.
    pub name: String,
    /// The query in CQL.
    #[serde(rename = "cql")]
    pub text: String,
    /// The file of the text, if it is in a file.
    pub file: Option<PathBuf>,
    /// Whether the query's state may grow without a limit.
    pub unbounded_allowed: bool,
    /// The most rows, groups and values that it may hold.
    pub held_max: NonZeroU64,
    /// The table of the action, until `action` is made from it.
    #[serde(rename = "action")]
    pub(crate) written: Option<Map<String, Value>>,
    /// The action.
    #[serde(skip)]
    pub action: ActionDefinition,
}

impl Default for QueryDefinition {
    fn default() -> Self {
        Self {
            name: String::new(),
            text: String::new(),
            file: None,
            unbounded_allowed: false,
            held_max: HELD_MAX,
            written: None,
            action: ActionDefinition::default(),
        }
    }
}

/// A query that is ready to run.
#[derive(Clone, Debug)]
pub(crate) struct PreparedQuery {
    /// The query.
    pub script: Script,
    /// The columns of its result.
    pub columns: Vec<Column>,
    /// Whether its result is a stream, whose rows are never deleted.
    pub is_stream: bool,
}

/// Why a query cannot be kept.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// A problem at a place in its text.
    At(Diagnostic),
    /// A problem of the whole query, and the remedy.
    Whole(String, &'static str),
}

impl fmt::Display for Unfit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(diagnostic) => diagnostic.fmt(formatter),
            Self::Whole(message, _) => formatter.write_str(message),
        }
    }
}

impl PreparedQuery {
    /// Prepares the query of a definition.
    pub fn new(definition: &QueryDefinition) -> Result<Self, Unfit> {
        let script =
            Script::prepare(&definition.text, &[], ParseOptions::default()).map_err(|error| {
                match error {
                    QueryError::Script(mut diagnostics) if !diagnostics.is_empty() => {
                        Unfit::At(diagnostics.swap_remove(0))
                    }
                    other => {
                        Unfit::Whole(other.to_string(), "see docs/queries.md for the language")
                    }
                }
            })?;
        let known = streams();
        for stream in script.streams() {
            let name = &stream.schema.name;
            let Some(known) = known.iter().find(|it| it.name.eq_ignore_ascii_case(name)) else {
                let message = format!("it reads the stream `{name}`");
                return Err(Unfit::Whole(message, NO_OTHER));
            };
            if known.columns != stream.schema.columns {
                let message = format!("it declares the columns of {} again", known.name);
                return Err(Unfit::Whole(
                    message,
                    "remove the declaration: the stream is declared already",
                ));
            }
        }
        let [query] = script.queries() else {
            let message = format!("the script has {} queries", script.queries().len());
            let remedy = "keep one, and put each of the others in a separate [[query]]";
            return Err(Unfit::Whole(message, remedy));
        };
        if let (Some(growing), false) = (query.unbounded.first(), definition.unbounded_allowed) {
            let mut growing = growing.clone();
            let other = "add `unbounded_allowed = true` if that is intended";
            growing.help = Some(match growing.help {
                Some(help) => format!("{help}, or {other}"),
                None => other.to_owned(),
            });
            return Err(Unfit::At(growing));
        }
        let columns = query.plan.columns.clone();
        let is_stream = matches!(query.plan.output, Output::Stream(_));
        Ok(Self { script, columns, is_stream })
    }

    /// The index of a column. The case of the name does not matter.
    pub fn column(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|column| column.name.eq_ignore_ascii_case(name))
    }
}

#[cfg(test)]
mod tests;
