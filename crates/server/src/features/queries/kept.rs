//! A kept query, and its counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use fathom_control::{Client, QueryState, QueryStatus, ResultKind};
use fathom_cql::Value;
use fathom_monitor::EngineStatistics;
use parking_lot::Mutex;

use super::action::Action;
use crate::daemon::unix_time_ns;
use crate::features::queries::definition::{ActionDefinition, PreparedQuery, QueryDefinition};

/// The longest kept text of an error, in bytes.
const ERROR_LENGTH_MAX: usize = 1024;

/// A change of a query's result.
#[derive(Clone, Debug)]
pub struct ResultChange {
    /// The instant, in nanoseconds.
    pub time_ns: u64,
    /// The number of insertions of the row, or, if negative, of deletions.
    pub count: i64,
    /// The row.
    pub row: Arc<[Value]>,
}

/// A kept query and its action.
pub(super) struct Kept {
    pub definition: QueryDefinition,
    pub prepared: PreparedQuery,
    pub counts: Arc<QueryCounts>,
    pub action: Action,
}

/// The counts of a query.
#[derive(Default)]
pub(super) struct QueryCounts {
    state: AtomicU8,
    pub events: AtomicU64,
    pub events_dropped: AtomicU64,
    pub events_late: AtomicU64,
    pub operators: AtomicU64,
    pub held: AtomicU64,
    pub results: AtomicU64,
    pub results_gone: AtomicU64,
    pub acted: AtomicU64,
    pub suppressed: AtomicU64,
    pub lost: AtomicU64,
    failures: AtomicU64,
    last_error: Mutex<Option<(String, u64)>>,
}

/// Adds to a count.
pub(super) fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}

impl QueryCounts {
    /// Counts a failure and keeps its text.
    pub fn fail(&self, error: &str) {
        add(&self.failures, 1);
        let mut text = error.to_owned();
        if text.len() > ERROR_LENGTH_MAX {
            let end = (0..=ERROR_LENGTH_MAX).rev().find(|at| text.is_char_boundary(*at));
            text.truncate(end.unwrap_or(0));
        }
        let mut last = self.last_error.lock();
        *last = Some((text, unix_time_ns()));
    }

    pub fn set_state(&self, state: QueryState) {
        let number = match state {
            QueryState::Waiting => 0,
            QueryState::Running => 1,
            QueryState::Failed => 2,
        };
        self.state.store(number, Ordering::Relaxed);
    }

    fn state(&self) -> QueryState {
        match self.state.load(Ordering::Relaxed) {
            0 => QueryState::Waiting,
            1 => QueryState::Running,
            _ => QueryState::Failed,
        }
    }
}

impl Kept {
    /// A query that has not read any event.
    ///
    /// # Errors
    /// If its action cannot be started, or if it cannot be prepared.
    pub fn new(definition: &QueryDefinition, client: &Client) -> Result<Self, String> {
        let prepared = PreparedQuery::new(definition).map_err(|unfit| unfit.to_string())?;
        let counts = Arc::new(QueryCounts::default());
        let action = Action::start(definition, &prepared, &counts, client)?;
        Ok(Self { definition: definition.clone(), prepared, counts, action })
    }

    /// Logs the warnings of the query's plan.
    pub fn warn(&self) {
        let (name, text) = (&self.definition.name, &self.definition.text);
        for remark in self.prepared.script.queries().iter().flat_map(|plan| &plan.warnings) {
            // Only the first line, without the excerpt: an event of the log is one line.
            let place = remark.render(text);
            let place = place.lines().next().unwrap_or_default();
            let help = remark.render_help().map_or_else(String::new, |help| format!("; {help}"));
            tracing::warn!("query {name}: {place}{help}");
        }
    }

    /// Counts changes of the result, and passes them to the action.
    pub fn take(&self, changes: &[ResultChange]) {
        let (mut inserted, mut deleted) = (0_u64, 0_u64);
        for change in changes {
            let count = change.count.unsigned_abs();
            let sum = if change.count > 0 { &mut inserted } else { &mut deleted };
            *sum = sum.saturating_add(count);
        }
        add(&self.counts.results, inserted);
        add(&self.counts.results_gone, deleted);
        self.action.take(changes);
    }

    /// Stores the counts of the query's engine.
    pub fn note(&self, statistics: EngineStatistics) {
        let counts = &self.counts;
        counts.events.store(statistics.events, Ordering::Relaxed);
        counts.events_late.store(statistics.late, Ordering::Relaxed);
        counts.operators.store(statistics.operators as u64, Ordering::Relaxed);
    }

    /// Marks the query as failed: it reads no more events, and its result is unknown.
    pub fn fail(&self, error: &str) {
        self.counts.set_state(QueryState::Failed);
        self.action.forget_rows();
        self.counts.fail(error);
    }

    /// Whether the query has failed.
    pub fn has_failed(&self) -> bool {
        self.counts.state() == QueryState::Failed
    }

    /// The status of the query.
    pub fn status(&self) -> QueryStatus {
        let (definition, counts) = (&self.definition, &self.counts);
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let last = counts.last_error.lock().clone();
        let (last_error, last_error_unix_time_ns) = last.unzip();
        let (action, target) = describe(&definition.action);
        let limit = definition.action.limit();
        let (series, series_left_out) = self.action.series_counts();
        QueryStatus {
            name: definition.name.clone(),
            text: definition.text.clone(),
            result: if self.prepared.is_stream { ResultKind::Stream } else { ResultKind::Relation },
            columns: self.prepared.columns.iter().map(|column| column.name.clone()).collect(),
            action: action.into(),
            target,
            on: definition.action.on().name().into(),
            limit: limit.map(|limit| limit.to_string()).unwrap_or_default(),
            state: counts.state(),
            operators: of(&counts.operators),
            held: of(&counts.held),
            events: of(&counts.events),
            events_dropped: of(&counts.events_dropped),
            events_late: of(&counts.events_late),
            results: of(&counts.results),
            results_gone: of(&counts.results_gone),
            acted: of(&counts.acted),
            suppressed: of(&counts.suppressed),
            lost: of(&counts.lost),
            failures: of(&counts.failures),
            series,
            series_left_out,
            last_error,
            last_error_unix_time_ns: last_error_unix_time_ns.unwrap_or(0),
        }
    }
}

/// The type and the target of an action.
fn describe(action: &ActionDefinition) -> (&'static str, String) {
    match action {
        ActionDefinition::Log(log) => ("log", log.level.name().into()),
        ActionDefinition::Metric(metric) => ("metric", metric.name.clone()),
        ActionDefinition::Webhook(webhook) => ("webhook", webhook.url.clone()),
        ActionDefinition::Command(command) => ("command", command.request.clone()),
    }
}
