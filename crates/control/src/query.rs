//! The status of the daemon's kept queries.

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, AtOnce, Endpoint};
use serde::{Deserialize, Serialize};

/// The kept queries of the daemon.
pub const QUERIES: Endpoint<AtOnce, (), (), (), QueryList> =
    Endpoint::get("/v1/queries", "the status of the daemon's kept queries");

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&QUERIES];

/// The kept queries of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueryList {
    /// The queries, in the order of the configuration.
    pub queries: Vec<QueryStatus>,
}

/// The status of a kept query.
///
/// All counts begin when the query was added or last changed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueryStatus {
    /// The name of the query.
    pub name: String,
    /// The query in CQL.
    pub text: String,
    /// Whether the result is a stream or a relation.
    pub result: ResultKind,
    /// The columns of the result.
    pub columns: Vec<String>,
    /// The kind of the action: `log`, `metric`, `webhook` or `command`.
    pub action: String,
    /// The target of the action: the level, the metric's name, the URL, or the method and path.
    pub target: String,
    /// The changes that cause the action: `insert`, `delete` or `both`.
    pub on: String,
    /// The limit of the action in its written form, such as `10/minute`; empty if there is none.
    pub limit: String,
    /// The state of the query.
    pub state: QueryState,
    /// The number of operators in the query's dataflow.
    pub operators: u64,
    /// The number of rows, groups and values that the operators hold, at most a second old.
    pub held: u64,
    /// The number of events that the query has processed.
    pub events: u64,
    /// The number of events that were dropped because they came faster than they were read.
    pub events_dropped: u64,
    /// The number of late events: their instant had already been processed. They do not count.
    pub events_late: u64,
    /// The number of rows inserted into the result.
    pub results: u64,
    /// The number of rows deleted from a relation.
    pub results_gone: u64,
    /// The number of changes of the result for which the action was carried out.
    pub acted: u64,
    /// The number of changes that exceeded the action's limit.
    pub suppressed: u64,
    /// The number of changes for which the action was not carried out, within its limit: there was
    /// no room for them, or every attempt failed.
    pub lost: u64,
    /// The number of failed attempts.
    pub failures: u64,
    /// The number of series of a metric.
    pub series: u64,
    /// The number of rows without a series of a metric, because there are too many.
    pub series_left_out: u64,
    /// The last error, if there was one.
    pub last_error: Option<String>,
    /// The time of the last error, in nanoseconds since 1970; 0 if there was none.
    pub last_error_unix_time_ns: u64,
}

/// The kind of a query's result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResultKind {
    /// Rows that are only inserted.
    #[default]
    Stream,
    /// Rows that are inserted and deleted.
    Relation,
}

/// The state of a query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueryState {
    /// The query does not receive events yet.
    #[default]
    Waiting,
    /// The query processes events.
    Running,
    /// The query has failed and processes no more events. `last_error` has the reason.
    Failed,
}

impl Client {
    /// The daemon's standing queries.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn queries(&self) -> Result<QueryList, ClientError> {
        self.ask(&QUERIES, &(), &(), &())
    }
}
