//! The queries that the daemon keeps: `[[query]]`.
//!
//! - `read`: the table, and which kind of action it names.
//! - `action`: the kinds of action.
//! - `command`: requests to the control interface in which values of a row stand.
//! - `check`: what a reader of one table cannot see: whether the query can be run, and whether the
//!   action fits its result.

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
use fathom_monitor::{QueryError, io_stream};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::HELD_MAX;

pub use action::{
    ActionDefinition, CommandDefinition, LogDefinition, MetricDefinition, MetricKind, On, Period,
    RateLimit, WebhookDefinition,
};
pub(super) use check::{check_queries, load_files};
pub(crate) use command::{Command, json};
pub(super) use read::query;

/// The most queries that are kept.
pub const QUERIES_MAX: usize = 64;
/// The longest text of a query, in bytes.
pub const QUERY_LENGTH_MAX: usize = 64 << 10;
/// The stream that kept queries are about.
const STREAM: &str = "IOstream";

/// A query that the daemon keeps, and what is done with its results.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QueryDefinition {
    /// The name: unique within the daemon.
    pub name: String,
    /// The query in CQL.
    #[serde(rename = "cql")]
    pub text: String,
    /// The file that the text is from, where it is from one.
    pub file: Option<PathBuf>,
    /// Whether the query may keep more and more.
    pub unbounded_allowed: bool,
    /// The most rows, groups and values that it may hold.
    pub held_max: NonZeroU64,
    /// What is done, as it was written, until `action` is made of it.
    #[serde(rename = "action")]
    pub(crate) written: Option<Map<String, Value>>,
    /// What is done.
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

/// A query that can be run.
#[derive(Clone, Debug)]
pub(crate) struct PreparedQuery {
    /// The query.
    pub script: Script,
    /// The columns of its result.
    pub columns: Vec<Column>,
    /// Whether its rows never go.
    pub is_stream: bool,
}

/// Why a query cannot be kept.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// Something about a place in its text.
    At(Diagnostic),
    /// Something about all of it, and the remedy.
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
        if !script.schema().name.eq_ignore_ascii_case(STREAM) {
            let message = format!("it is about the stream `{}`", script.schema().name);
            return Err(Unfit::Whole(message, "ask about IOstream: the disks give no other"));
        }
        if script.schema().columns != io_stream().columns {
            let message = "it declares the columns of IOstream again".to_owned();
            return Err(Unfit::Whole(
                message,
                "leave out the declaration: the disks' events have all",
            ));
        }
        let [query] = script.queries() else {
            let message = format!("the script has {} queries", script.queries().len());
            let remedy = "keep one, and give each of the others a [[query]] of its own";
            return Err(Unfit::Whole(message, remedy));
        };
        if let (Some(growing), false) = (query.unbounded.first(), definition.unbounded_allowed) {
            let mut growing = growing.clone();
            let other = "add `unbounded_allowed = true` where that is wanted";
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

    /// The place of a column; names do not depend on case.
    pub fn column(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|column| column.name.eq_ignore_ascii_case(name))
    }
}

#[cfg(test)]
mod tests;
