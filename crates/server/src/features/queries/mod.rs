//! The queries that the daemon keeps.
//!
//! While there are queries, a thread reads the disks' events, like any other listener, and runs all
//! queries over them. A query's results go to its action. Lines of the log and metrics are written
//! immediately. Webhooks and commands have a thread each, which receives rows through a bounded
//! queue. So disks never wait for queries, and queries never wait for servers.
//!
//! - `kept`: a query and its counts.
//! - `thread`: the thread that runs the queries.
//! - `action`: the actions on rows.

mod action;
pub(crate) mod definition;
pub(crate) mod feature;
mod kept;
pub(crate) mod metrics;
mod thread;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_control::{Client, ErrorCode, QueryList, ReloadReport};
use parking_lot::{Condvar, Mutex, MutexGuard};

pub(crate) use action::MetricSeries;
use kept::Kept;

use crate::configuration::Placed;
use crate::daemon::Daemon;
use crate::daemon::stack::refusal;
use crate::features::events::{FeedWaker, StreamSet};
use crate::features::queries::definition::QueryDefinition;

/// How long a change of the list waits until the queries' thread has applied it.
const APPLY_TIME_MAX: Duration = Duration::from_secs(1);

/// All kept queries.
#[derive(Default)]
pub(crate) struct Queries {
    state: Mutex<State>,
    /// Notified when the thread has applied a change.
    applied: Condvar,
}

#[derive(Default)]
struct State {
    kept: Vec<Arc<Kept>>,
    /// The version of the list, and the version that the thread has applied.
    version: u64,
    version_applied: u64,
    /// Whether the thread runs.
    running: bool,
    /// Wakes the thread.
    waker: Option<FeedWaker>,
    ending: bool,
}

impl Queries {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn kept(&self) -> Vec<Arc<Kept>> {
        self.state().kept.clone()
    }

    /// The status of all queries.
    pub fn list(&self) -> QueryList {
        QueryList { queries: self.kept().iter().map(|kept| kept.status()).collect() }
    }

    /// The series of all metrics.
    pub fn series(&self) -> Vec<MetricSeries> {
        self.kept().iter().filter_map(|kept| kept.action.series()).collect()
    }

    /// Replaces the list of queries, and reports the differences. An unchanged query continues
    /// without interruption; a changed or failed one is started again.
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
                        (Some(_), Some(_)) => "restarted",
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

    /// Replaces the list, and waits until the thread has applied it.
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
                    let error =
                        format!("the thread that runs the queries cannot be started: {error}");
                    for kept in next {
                        kept.fail(&error);
                    }
                    tracing::error!("{error}");
                }
            }
        }
        if let Some(waker) = state.waker.clone() {
            waker.wake();
        }
        let limit = APPLY_TIME_MAX;
        let waits = |state: &mut State| state.running && state.version_applied < state.version;
        self.applied.wait_while_for(&mut state, waits, limit);
    }

    /// The queries that the thread has to run, and their version; `None` if the thread has to end.
    fn wanted(&self) -> Option<(u64, Vec<Arc<Kept>>)> {
        let mut state = self.state();
        if state.kept.is_empty() {
            state.running = false;
            state.waker = None;
            state.version_applied = state.version;
            self.applied.notify_all();
            return None;
        }
        Some((state.version, state.kept.clone()))
    }

    /// The streams that the queries read.
    fn streams(&self) -> StreamSet {
        let kept = self.kept();
        let streams = kept.iter().flat_map(|kept| kept.prepared.script.streams());
        let names = streams.map(|stream| stream.schema.name.as_str());
        StreamSet::of(names).unwrap_or(StreamSet::ALL)
    }

    fn version(&self) -> u64 {
        self.state().version
    }

    /// The thread has a feed, and can be woken.
    fn set_waker(&self, waker: FeedWaker) {
        self.state().waker = Some(waker);
    }

    /// The thread runs this version of the list.
    fn set_applied(&self, version: u64) {
        self.state().version_applied = version;
        self.applied.notify_all();
    }

    /// The thread ended because of an error.
    fn failed(&self, error: &str) {
        let mut state = self.state();
        state.running = false;
        state.waker = None;
        if !state.ending {
            tracing::error!("all queries have failed: {error}");
            for kept in &state.kept {
                kept.fail(error);
            }
        }
        self.applied.notify_all();
    }

    /// Closes all actions, and waits up to `limit` until their waiting rows are sent. The events
    /// have ended already.
    pub fn end(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let kept = {
            let mut state = self.state();
            state.ending = true;
            let waits = |state: &mut State| state.running;
            self.applied.wait_while_for(&mut state, waits, limit);
            state.kept.clone()
        };
        for kept in &kept {
            kept.action.close();
        }
        for kept in &kept {
            kept.action.wait_closed(end);
        }
    }

    /// The daemon shuts down: errors from now on are not failures.
    pub fn begin_end(&self) {
        self.state().ending = true;
    }
}

/// The daemon's interface to the queries.
impl Daemon {
    /// The series of the queries' metrics.
    pub(crate) fn query_series(&self) -> Vec<MetricSeries> {
        self.part::<Queries>().series()
    }

    /// Keeps the queries of a configuration.
    pub(crate) fn keep_queries(
        self: &Arc<Self>,
        queries: &[Placed<QueryDefinition>],
    ) -> Result<(), fathom_control::ErrorBody> {
        let mut report = ReloadReport::default();
        self.part::<Queries>().set(self, queries, &mut report);
        match report.refused.first() {
            Some(refused) => Err(refusal(ErrorCode::Failed, refused.clone(), "")),
            None => Ok(()),
        }
    }
}
