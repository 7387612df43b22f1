//! The queries that the daemon keeps.
//!
//! While there is one, a thread reads the disks' events, as any other listener does, and runs all
//! queries over them. What comes of a query goes to its action: a line in the log and a metric are
//! done at once; webhooks and commands have a thread each, which is given rows through a bounded
//! queue. So nobody waits for anybody: not a disk for the queries, not a query for a server.
//!
//! - `kept`: a query and its counts.
//! - `thread`: what feeds the queries.
//! - `action`: what is done with rows.

mod action;
mod kept;
mod thread;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fathom_control::{Client, ErrorCode, QueryList, ReloadReport};

pub(crate) use action::MetricSeries;
use kept::Kept;

use crate::configuration::{Placed, QueryDefinition};
use crate::daemon::Daemon;
use crate::events::Nudge;
use crate::wiring::refusal;

/// How long a change waits until the queries' thread has taken it up.
const TAKE_UP_TIME_MAX: Duration = Duration::from_secs(1);

/// All queries that are kept.
#[derive(Default)]
pub(crate) struct Queries {
    state: Mutex<State>,
    /// Notified when the thread has taken up a change.
    taken_up: Condvar,
}

#[derive(Default)]
struct State {
    kept: Vec<Arc<Kept>>,
    /// Counts changes of the list, and which of them the thread has seen.
    version: u64,
    version_seen: u64,
    /// Whether the thread runs.
    running: bool,
    /// For the thread's attention.
    nudge: Option<Nudge>,
    ending: bool,
}

impl Queries {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self) -> Vec<Arc<Kept>> {
        self.state().kept.clone()
    }

    /// The queries, and what has come of them.
    pub fn list(&self) -> QueryList {
        QueryList { queries: self.kept().iter().map(|kept| kept.status()).collect() }
    }

    /// The series of metrics.
    pub fn series(&self) -> Vec<MetricSeries> {
        self.kept().iter().filter_map(|kept| kept.action.series()).collect()
    }

    /// Keeps these queries from now on, and says what has changed. A query that is as before goes
    /// on undisturbed; one that is another, or has failed, begins anew.
    pub fn set(
        &self,
        daemon: &Arc<Daemon>,
        wanted: &[Placed<QueryDefinition>],
        report: &mut ReloadReport,
    ) {
        let before = self.kept();
        let client = Client::new(daemon.control_socket());
        let mut next = Vec::new();
        for Placed { definition, .. } in wanted {
            let name = &definition.name;
            let old = before.iter().find(|kept| kept.definition.name == *name);
            let same = old.filter(|kept| kept.definition == *definition);
            if let Some(same) = same.filter(|kept| !kept.has_failed()) {
                next.push(Arc::clone(same));
                continue;
            }
            match Kept::new(definition, &client) {
                Ok(kept) => {
                    kept.warn();
                    next.push(Arc::new(kept));
                    let how = match (old, same) {
                        (None, _) => "added",
                        (Some(_), None) => "changed",
                        (Some(_), Some(_)) => "begun anew",
                    };
                    report.changed.push(format!("the query {name:?} was {how}"));
                }
                Err(error) => {
                    report.refused.push(format!("the query {name:?} cannot be kept: {error}"));
                    next.extend(old.cloned());
                }
            }
        }
        for kept in &before {
            let name = &kept.definition.name;
            if !next.iter().any(|other| other.definition.name == *name) {
                report.changed.push(format!("the query {name:?} was removed"));
            }
        }
        let same = before.len() == next.len()
            && before.iter().zip(&next).all(|(one, other)| Arc::ptr_eq(one, other));
        if !same {
            self.put(daemon, &next);
        }
        for kept in before.iter().filter(|old| !next.iter().any(|new| Arc::ptr_eq(old, new))) {
            kept.action.close();
        }
    }

    /// Puts the list in place, and waits until the thread has taken it up.
    fn put(&self, daemon: &Arc<Daemon>, next: &[Arc<Kept>]) {
        let mut state = self.state();
        if state.ending {
            return;
        }
        state.kept = next.to_vec();
        state.version += 1;
        if !state.running && !next.is_empty() {
            let daemon = Arc::clone(daemon);
            let thread = std::thread::Builder::new().name("queries".into());
            match thread.spawn(move || thread::run(&daemon)) {
                Ok(_) => state.running = true,
                Err(error) => {
                    let error = format!("no thread runs the queries: {error}");
                    for kept in next {
                        kept.fail(&error);
                    }
                    tracing::error!("{error}");
                }
            }
        }
        if let Some(nudge) = state.nudge.clone() {
            nudge.give();
        }
        let limit = TAKE_UP_TIME_MAX;
        let waits = |state: &mut State| state.running && state.version_seen < state.version;
        drop(self.taken_up.wait_timeout_while(state, limit, waits));
    }

    /// What the thread is to run, and as which version; `None` when it is to end.
    fn wanted(&self) -> Option<(u64, Vec<Arc<Kept>>)> {
        let mut state = self.state();
        if state.kept.is_empty() {
            state.running = false;
            state.nudge = None;
            state.version_seen = state.version;
            self.taken_up.notify_all();
            return None;
        }
        Some((state.version, state.kept.clone()))
    }

    fn version(&self) -> u64 {
        self.state().version
    }

    /// The thread has a feed, and can be nudged.
    fn set_nudge(&self, nudge: Nudge) {
        self.state().nudge = Some(nudge);
    }

    /// The thread sees events for this version of the list.
    fn seen(&self, version: u64) {
        self.state().version_seen = version;
        self.taken_up.notify_all();
    }

    /// The thread ends before it was to.
    fn failed(&self, error: &str) {
        let mut state = self.state();
        state.running = false;
        state.nudge = None;
        if !state.ending {
            tracing::error!("no query runs any more: {error}");
            for kept in &state.kept {
                kept.fail(error);
            }
        }
        self.taken_up.notify_all();
    }

    /// Has what is queued sent, but waits no longer than `limit` for it. The events have ended.
    pub fn end(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let kept = {
            let mut state = self.state();
            state.ending = true;
            let waits = |state: &mut State| state.running;
            let state = self
                .taken_up
                .wait_timeout_while(state, limit, waits)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            state.kept.clone()
        };
        for kept in &kept {
            kept.action.close();
        }
        for kept in &kept {
            kept.action.wait_closed(end);
        }
    }

    /// The daemon ends: nothing that fails from here on is a failure.
    pub fn begin_end(&self) {
        self.state().ending = true;
    }
}

/// What the queries need of the daemon.
impl Daemon {
    /// The queries that are kept, and what has come of them.
    pub(crate) fn query_list(&self) -> QueryList {
        self.queries().list()
    }

    /// The series of the queries' metrics.
    pub(crate) fn query_series(&self) -> Vec<MetricSeries> {
        self.queries().series()
    }

    /// Keeps the queries of a configuration from now on.
    pub(crate) fn keep_queries(
        self: &Arc<Self>,
        queries: &[Placed<QueryDefinition>],
    ) -> Result<(), fathom_control::ErrorBody> {
        let mut report = ReloadReport::default();
        self.queries().set(self, queries, &mut report);
        match report.refused.first() {
            Some(refused) => Err(refusal(ErrorCode::Failed, refused.clone(), "")),
            None => Ok(()),
        }
    }
}
