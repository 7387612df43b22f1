//! The queries that the daemon keeps.

use serde::{Deserialize, Serialize};

/// All queries that the daemon keeps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueryList {
    /// In the order of the configuration.
    pub queries: Vec<QueryStatus>,
}

/// A query that the daemon keeps, and what has come of it.
///
/// Counts are from when the query was taken up, as it stands now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueryStatus {
    /// Its name.
    pub name: String,
    /// The query in CQL.
    pub text: String,
    /// Whether its result is a stream or a relation.
    pub result: ResultKind,
    /// The columns of its result.
    pub columns: Vec<String>,
    /// What is done: `log`, `metric`, `webhook` or `command`.
    pub action: String,
    /// With what: the level, the metric's name, the URL, method and path.
    pub target: String,
    /// The changes that the action is for: `insert`, `delete` or `both`.
    pub on: String,
    /// The limit of the action as it is written, such as `10/minute`; empty where there is none.
    pub limit: String,
    /// How it is.
    pub state: QueryState,
    /// Operators of the dataflow that runs it.
    pub operators: u64,
    /// Rows, groups and values that its operators hold, as of a second ago.
    pub held: u64,
    /// Events that it has seen.
    pub events: u64,
    /// Events that it has not seen, because they came faster than they were read.
    pub events_dropped: u64,
    /// Events that came when their instant was over. They do not count.
    pub events_late: u64,
    /// Rows that have come into the result.
    pub results: u64,
    /// Rows of a relation that have left it again.
    pub results_gone: u64,
    /// Changes of the result for which the action was carried out.
    pub acted: u64,
    /// Changes that the limit left out.
    pub suppressed: u64,
    /// Changes for which the action was not carried out although it should have been: there was no
    /// room for them, or every attempt failed.
    pub lost: u64,
    /// Attempts that failed.
    pub failures: u64,
    /// Series of a metric.
    pub series: u64,
    /// Rows that no series of a metric shows, because there are too many.
    pub series_left_out: u64,
    /// The failure that was last, where there was one.
    pub last_error: Option<String>,
    /// When it was, in nanoseconds since 1970; 0 where there was none.
    pub last_error_unix_time_ns: u64,
}

/// What a query gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResultKind {
    /// Rows that come.
    #[default]
    Stream,
    /// Rows that come and go.
    Relation,
}

/// How a query is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueryState {
    /// It does not see events yet.
    #[default]
    Waiting,
    /// It sees events.
    Running,
    /// It has failed and sees events no more: `last_error` says why.
    Failed,
}
