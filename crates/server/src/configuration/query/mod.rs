//! The queries that the daemon keeps: `[[query]]`.
//!
//! - `read`: the tables.
//! - `command`: requests to the control interface in which values of a row stand.
//! - `check`: what a reader of one table cannot see: whether the query can be run, and whether the
//!   action fits its result.

mod check;
mod command;
mod read;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use fathom_cql::catalog::Column;
use fathom_cql::plan::Output;
use fathom_cql::{Diagnostic, ParseOptions};
use fathom_monitor::replay::Script;
use fathom_monitor::{HELD_MAX, QueryError, io_stream};
use serde_json::Value;

use super::LogLevel;

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
#[derive(Clone, Debug, PartialEq)]
pub struct QueryDefinition {
    /// The name: unique within the daemon.
    pub name: String,
    /// The query in CQL.
    pub text: String,
    /// The file that the text is from, where it is from one.
    pub file: Option<PathBuf>,
    /// Whether the query may keep more and more.
    pub unbounded_allowed: bool,
    /// The most rows, groups and values that it may hold.
    pub held_max: u64,
    /// What is done.
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
            action: ActionDefinition::default(),
        }
    }
}

/// What is done with the changes of a query's result.
#[derive(Clone, Debug, PartialEq)]
pub struct ActionDefinition {
    /// What it is.
    pub kind: ActionKind,
    /// For which changes.
    pub on: On,
    /// How often at most.
    pub limit: Option<RateLimit>,
}

impl Default for ActionDefinition {
    fn default() -> Self {
        Self { kind: ActionKind::Log(LogLevel::Info), on: On::Insert, limit: None }
    }
}

/// The kinds of action.
#[derive(Clone, Debug, PartialEq)]
pub enum ActionKind {
    /// A line in the daemon's log, at this level.
    Log(LogLevel),
    /// Series of a metric.
    Metric(MetricDefinition),
    /// Rows sent to an HTTP server.
    Webhook(WebhookDefinition),
    /// A request to the control interface.
    Command(CommandDefinition),
}

/// A metric of a query's result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricDefinition {
    /// The metric's name.
    pub name: String,
    /// The type.
    pub kind: MetricKind,
    /// The column that has the value; without one rows are counted.
    pub value: Option<String>,
    /// The columns that become labels; all but that of the value where it says nothing.
    pub labels: Option<Vec<String>>,
    /// What it is about, in words.
    pub help: String,
    /// The most series.
    pub series_max: usize,
}

/// The types of a metric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MetricKind {
    /// What the relation holds now.
    #[default]
    Gauge,
    /// What has come, added up.
    Counter,
}

/// An HTTP server that is told of changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WebhookDefinition {
    /// Where.
    pub url: String,
    /// How long one attempt may take.
    pub timeout: Duration,
}

/// A request to the control interface, in which values of a row are put in.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CommandDefinition {
    /// The method and the path: `PATCH /v1/disks/{VDisk}`.
    pub request: String,
    /// The body.
    pub body: Option<Value>,
}

/// The changes that an action is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum On {
    /// Rows that come.
    #[default]
    Insert,
    /// Rows that go.
    Delete,
    /// Both.
    Both,
}

impl On {
    /// The word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Insert => "insert",
            Self::Delete => "delete",
            Self::Both => "both",
        }
    }
}

/// How often something may happen: `10/minute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// So many times.
    pub count: u32,
    /// In this time.
    pub period: Period,
}

/// A time that limits are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Period {
    /// A second.
    Second,
    /// A minute.
    Minute,
    /// An hour.
    Hour,
}

impl Period {
    const ALL: [(&'static str, Self); 3] =
        [("second", Self::Second), ("minute", Self::Minute), ("hour", Self::Hour)];

    /// Its length.
    pub fn nanoseconds(self) -> u64 {
        match self {
            Self::Second => 1_000_000_000,
            Self::Minute => 60_000_000_000,
            Self::Hour => 3_600_000_000_000,
        }
    }
}

impl RateLimit {
    /// Reads `10/minute`.
    pub fn parse(text: &str) -> Option<Self> {
        let (count, period) = text.split_once('/')?;
        let count = count.trim().parse().ok().filter(|count| (1..=1_000_000).contains(count))?;
        let (_, period) = Period::ALL.into_iter().find(|(word, _)| *word == period.trim())?;
        Some(Self { count, period })
    }
}

impl fmt::Display for RateLimit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Period::ALL.into_iter().find(|(_, period)| *period == self.period);
        write!(formatter, "{}/{}", self.count, word.map_or("", |(word, _)| word))
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
