//! Queries over a file of events.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read};
use std::path::PathBuf;
use std::time::Duration;

use fathom_cql::catalog::{Catalog, Column, StreamSchema};
use fathom_cql::plan::{Expression, OrderKey, Output, Plan, Relation};
use fathom_cql::{Diagnostic, ParseOptions, Planned, PlannedQuery, Value};

use crate::cluster::{Cluster, ClusterOptions, Loss};
use crate::engine::{self, Delta, Engine, EngineStatistics};
use crate::feed::{Feed, LateRows};
use crate::held::{HeldLimit, HeldLimitExceeded};
use crate::read::{Batch, Condition, ReadError, ReadOptions, ReadReport, Reader, WantedStream};
use crate::recording::{Item, RowReader};
use crate::schema::catalog;

/// The error of live events that stop without an end.
const CUT_OFF: &str = "the events are cut off: their sender has disappeared";

/// The name of the state that a [`ResultSink`] holds.
pub(crate) const RESULT: &str = "the result";

/// The most epochs that may wait for other processes.
const EPOCHS_AHEAD_MAX: usize = 16;
/// The number of steps in which time advances by one lateness, if the engine waits for late events.
/// Each step visits all waiting rows.
const LATENESS_STEPS: u64 = 8;
/// The number of batches between two measurements of the waiting rows.
const WAITING_CHECK_BATCHES: u64 = 64;
/// The number of batches of an epoch in a cluster. Each epoch costs messages. Larger epochs make
/// filters cheaper, but exchanges more expensive, because their data no longer fits into the cache.
const STEP_BATCHES: u64 = 2;

/// A request to run queries over a file.
#[derive(Clone, Debug)]
pub struct ReplayRequest {
    /// The queries.
    pub script: String,
    /// The values of the parameters (`$name`), by name.
    pub parameters: Vec<(String, Value)>,
    /// Whether to interpret the script as STREAM did: a `second` of a window is one unit of the
    /// input's time.
    pub stream_compatible: bool,
    /// The file; `-` is standard input.
    pub file: PathBuf,
    /// The options of the reader.
    pub read: ReadOptions,
    /// The longest time by which an event's instant may be earlier than that of an event before it,
    /// in nanoseconds. `None` is as long as the file needs, so that no event is dropped. For a
    /// pipe, which cannot be read twice, it is a second, and longer after an event has come late.
    pub lateness_ns: Option<u64>,
    /// The most rows, groups and values that may be held; `None` for no limit.
    pub held_max: Option<u64>,
    /// The processes that run the queries together, each over a file of its own; `None` to run them
    /// in this process alone.
    pub cluster: Option<ClusterOptions>,
}

/// The summary of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplaySummary {
    /// The report of the reader.
    pub read: ReadReport,
    /// The events that were dropped because they came late.
    pub late: u64,
    /// The lateness with which no event would have been dropped, in nanoseconds; 0 if none was
    /// late.
    pub late_ns: u64,
}

/// Receives the results of queries.
pub trait ResultSink {
    /// Announces a query. All queries are announced before the first result.
    ///
    /// # Errors
    /// If the results cannot be written.
    fn begin(&mut self, query: usize, columns: &[Column], is_stream: bool) -> io::Result<()>;

    /// Sets the order in which the rows of a relation are shown: the columns, each with whether the
    /// greatest values come first. Called after [`begin`](Self::begin), if there is an order.
    fn order(&mut self, query: usize, columns: &[(usize, bool)]) {
        let _ = (query, columns);
    }

    /// Changes the count of a row at an instant by `count`, which is negative if the row is
    /// deleted. The rows of a stream are never deleted. The instants of a query never decrease.
    ///
    /// # Errors
    /// See [`begin`](Self::begin).
    fn delta(&mut self, query: usize, time_ns: i64, count: i64, row: &[Value]) -> io::Result<()>;

    /// Changes the results of several queries in the same way, as [`delta`](Self::delta) does for
    /// one: a single call, because hundreds of queries may have the same result.
    ///
    /// # Errors
    /// See [`begin`](Self::begin).
    fn deltas(
        &mut self,
        queries: &[usize],
        time_ns: i64,
        count: i64,
        row: &[Value],
    ) -> io::Result<()> {
        queries.iter().try_for_each(|&query| self.delta(query, time_ns, count, row))
    }

    /// Makes all results so far visible. Called if events are live.
    ///
    /// # Errors
    /// See [`begin`](Self::begin).
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// The number of rows that are kept until the end.
    fn held(&self) -> usize {
        0
    }
}

/// Why a query has no result.
#[derive(Debug)]
pub enum QueryError {
    /// Errors in the script.
    Script(Vec<Diagnostic>),
    /// An error in the request, apart from its script.
    Request(String),
    /// The events cannot be read.
    Read(ReadError),
    /// The results cannot be written.
    Write(io::Error),
    /// The connection to another process of the cluster is lost.
    Lost(Loss),
    /// The queries hold more than their limit.
    Held(HeldLimitExceeded),
}

impl fmt::Display for QueryError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Script(all) => {
                let texts: Vec<String> = all.iter().map(ToString::to_string).collect();
                formatter.write_str(&texts.join("; "))
            }
            Self::Request(message) => formatter.write_str(message),
            Self::Read(error) => error.fmt(formatter),
            Self::Write(error) => write!(formatter, "cannot write the results: {error}"),
            Self::Lost(loss) => loss.fmt(formatter),
            Self::Held(exceeded) => exceeded.fmt(formatter),
        }
    }
}

impl std::error::Error for QueryError {}

impl From<ReadError> for QueryError {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

impl From<HeldLimitExceeded> for QueryError {
    fn from(exceeded: HeldLimitExceeded) -> Self {
        Self::Held(exceeded)
    }
}

impl From<io::Error> for QueryError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

/// Runs a script's queries over a file and passes the results to `sink`. Time ends with the last
/// event.
///
/// # Errors
/// If the script is invalid, the file cannot be read, the results cannot be written, or the queries
/// exceed a limit.
pub fn replay(
    request: &ReplayRequest,
    sink: &mut dyn ResultSink,
) -> Result<ReplaySummary, QueryError> {
    let script = Script::prepare(
        &request.script,
        &request.parameters,
        ParseOptions {
            stream_compat: request.stream_compatible,
            time_unit_ns: request.read.time_unit.nanoseconds().unsigned_abs(),
        },
    )?
    .with_held_max(request.held_max);
    let options = ReadOptions { conditions: script.conditions(), ..request.read.clone() };
    let mut feed = Feed::open(&request.file, script.streams(), &options, request.lateness_ns)?;
    let engine = match &request.cluster {
        None => script.engine(),
        Some(cluster) => script.engine_in(cluster)?,
    };
    script.run_feed(engine, &mut feed, sink)
}

/// A script that is ready to run.
#[derive(Clone, Debug)]
pub struct Script {
    planned: Planned,
    /// The plans of the queries, over rows of the wanted columns of `streams`.
    plans: Vec<Plan>,
    /// The streams that the queries read. The stream of I/O events, or the one that the script
    /// declares, is first.
    streams: Vec<WantedStream>,
    /// Their positions in the catalogue.
    sources: Vec<usize>,
    held_max: Option<u64>,
}

impl Script {
    /// Parses and plans a script over the streams of events.
    ///
    /// # Errors
    /// The script's errors.
    pub fn prepare(
        text: &str,
        parameters: &[(String, Value)],
        options: ParseOptions,
    ) -> Result<Self, QueryError> {
        let wrong = |diagnostic| QueryError::Script(vec![diagnostic]);
        let script = fathom_cql::parse(text, &options).map_err(wrong)?;
        let catalog = catalog();
        let parameters = parameters.iter().cloned().collect();
        let planned = fathom_cql::plan_script(&script, &catalog, &parameters).map_err(wrong)?;
        if planned.queries.is_empty() {
            return Err(QueryError::Request(
                "the script has no query whose results are wanted".into(),
            ));
        }
        let mut plans: Vec<Plan> = planned.queries.iter().map(|query| query.plan.clone()).collect();
        // If the script declares a stream of its own, a file without several streams holds events
        // of that stream.
        let first = planned.declared.unwrap_or(0);
        let mut sources: Vec<usize> = fathom_cql::sources(&plans).into_iter().collect();
        match sources.iter().position(|source| *source == first) {
            Some(at) => sources[..=at].rotate_right(1),
            None if sources.is_empty() => sources.push(first),
            None => {}
        }
        let columns = fathom_cql::prune(&mut plans, &planned.catalog);
        let streams = sources.iter().map(|&source| {
            let schema = planned.catalog.streams[source].clone();
            let used = columns.get(source).map_or(&[][..], Vec::as_slice);
            let columns = (0..schema.columns.len()).map(|column| used.contains(&column)).collect();
            WantedStream { schema, columns }
        });
        let streams = streams.collect();
        fathom_cql::place_sources(&mut plans, &sources);
        Ok(Self { planned, plans, streams, sources, held_max: None })
    }

    /// Limits the rows, groups and values that the queries may hold while they run. Queries that
    /// exceed the limit end with an error.
    #[must_use]
    pub fn with_held_max(self, most: Option<u64>) -> Self {
        Self { held_max: most, ..self }
    }

    /// A new limit on their state.
    pub(crate) fn held_limit(&self) -> HeldLimit {
        HeldLimit::new(self.held_max)
    }

    /// The queries, in their order.
    pub fn queries(&self) -> &[PlannedQuery] {
        &self.planned.queries
    }

    /// The catalogue of streams.
    pub fn catalog(&self) -> &Catalog {
        &self.planned.catalog
    }

    /// The positions in the catalogue of [`streams`](Self::streams).
    pub fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// The streams that the queries read, at least one, each with the columns that the queries
    /// need. Rows have the needed columns only. The stream of I/O events, or the one that the
    /// script declares, is first, if it is read.
    pub fn streams(&self) -> &[WantedStream] {
        &self.streams
    }

    /// The first of [`streams`](Self::streams).
    pub fn schema(&self) -> &StreamSchema {
        &self.streams[0].schema
    }

    /// For each column of the first stream whether the queries need it.
    pub fn wanted(&self) -> &[bool] {
        &self.streams[0].columns
    }

    /// Conditions that rows of interest to the queries meet, so that readers can drop other rows of
    /// the first stream; see [`ReadOptions::conditions`].
    pub fn conditions(&self) -> Option<Vec<Condition>> {
        let [only] = &self.streams[..] else { return None };
        // Conditions number the columns as the schema does; plans number the wanted columns only.
        let wanted = only.columns.iter().enumerate().filter(|(_, wanted)| **wanted);
        let columns: Vec<usize> = wanted.map(|(column, _)| column).collect();
        let mut conditions = engine::conditions(&self.plans, 0)?;
        for (column, _) in conditions.iter_mut().flatten() {
            *column = *columns.get(*column)?;
        }
        Some(conditions)
    }

    /// A new engine for the queries. Its sources are [`streams`](Self::streams); rows have the
    /// wanted columns.
    pub fn engine(&self) -> Engine {
        Engine::new(self.streams.len(), &self.plans)
    }

    /// The same for one process of a cluster. Waits for the other processes.
    fn engine_in(&self, cluster: &ClusterOptions) -> Result<Engine, QueryError> {
        let cluster = Cluster::join(cluster, &self.plans, &mut |_| true)
            .map_err(|error| QueryError::Request(error.to_string()))?;
        Ok(Engine::in_cluster(cluster, self.streams.len(), &self.plans))
    }

    /// Runs the queries over all events of a reader. After each batch, time advances to the latest
    /// instant so far minus the lateness (in nanoseconds). It ends with the last event.
    ///
    /// # Errors
    /// If the events cannot be read, the results cannot be written, or the queries exceed their
    /// limit.
    pub fn run(
        &self,
        reader: &mut dyn Reader,
        lateness_ns: u64,
        sink: &mut dyn ResultSink,
    ) -> Result<ReplaySummary, QueryError> {
        self.run_feed(self.engine(), &mut Feed::within(Box::new(reader), lateness_ns), sink)
    }

    /// The same for the rows of a feed.
    pub(crate) fn run_feed(
        &self,
        mut engine: Engine,
        feed: &mut Feed<'_>,
        sink: &mut dyn ResultSink,
    ) -> Result<ReplaySummary, QueryError> {
        self.begin(sink)?;
        let (mut latest_ns, mut delivered_ns, mut batches) = (0, 0, 0_u64);
        // The ends of the epochs that may still wait for other processes.
        let mut pending = VecDeque::new();
        let mut limit = self.held_limit();
        while let Some(rows) = feed.next()? {
            latest_ns = latest_ns.max(rows.latest_ns);
            engine.push_columns(rows.stream, rows.times_ns, rows.columns);
            engine.note_instant(rows.latest_ns);
            batches += 1;
            if batches % WAITING_CHECK_BATCHES == 0 {
                feed.check_waiting(engine.waiting())?;
            }
            // More events of the latest instant may follow.
            let lateness_ns = feed.lateness_ns();
            let now_ns = latest_ns.saturating_sub(lateness_ns);
            let is_due = if engine.is_in_cluster() {
                batches % STEP_BATCHES == 0
            } else {
                now_ns.saturating_sub(delivered_ns) >= lateness_ns / LATENESS_STEPS
            };
            if !is_due {
                limit.check(&engine, &[(RESULT, sink.held())])?;
                continue;
            }
            delivered_ns = now_ns;
            deliver_within(&mut limit, &mut engine, now_ns, sink)?;
            pending.push_back(now_ns);
            loop {
                while pending.front().is_some_and(|&end_ns| end_ns <= engine.ended_ns()) {
                    pending.pop_front();
                }
                if pending.len() < EPOCHS_AHEAD_MAX {
                    break;
                }
                if let Some(loss) = engine.loss() {
                    return Err(QueryError::Lost(loss));
                }
                engine.wait(Duration::from_millis(1));
                deliver(&mut engine, now_ns, sink)?;
            }
        }
        if !engine.is_in_cluster() {
            deliver_within(&mut limit, &mut engine, latest_ns + 1, sink)?;
        }
        let finished = pass_results(sink, |sink| engine.finish(latest_ns + 1, sink))?;
        finished.map_err(QueryError::Lost)?;
        Ok(ReplaySummary::new(feed.report(), &engine).with(feed.late()))
    }
}

impl ReplaySummary {
    fn new(read: &ReadReport, engine: &Engine) -> Self {
        let EngineStatistics { late, late_ns, .. } = engine.statistics();
        Self { read: read.clone(), late, late_ns }
    }

    /// The summary with rows that were dropped before the engine.
    fn with(self, dropped: LateRows) -> Self {
        let late_ns = self.late_ns.max(dropped.lateness_ns);
        Self { late: self.late + dropped.count, late_ns, ..self }
    }
}

/// The columns by which a plan's result is ordered, as far as the result contains them, each with
/// whether its order is descending.
fn order(plan: &Plan) -> Vec<(usize, bool)> {
    let mut keys = &[][..];
    if let Output::Relation(relation) = &plan.output {
        let stays = |(at, value): (usize, &Expression)| *value == Expression::Column(at);
        let top = match relation {
            // A projection that only removes the keys that are not selected is skipped.
            Relation::Project(of, values) if values.iter().enumerate().all(stays) => &**of,
            other => other,
        };
        if let Relation::Top(_, of_top, _) = top {
            keys = of_top;
        }
    }
    let column = |key: &OrderKey| match key.expression {
        Expression::Column(at) if at < plan.columns.len() => Some((at, key.descending)),
        _ => None,
    };
    keys.iter().map_while(column).collect()
}

impl Script {
    /// Runs the queries over a live recording, which has moments. Time advances to each moment
    /// minus the lateness (in nanoseconds). The run ends with the recording, or with the first
    /// moment that is not before `end_ns`: so it has read all events before this instant. At the
    /// end, and when the recording is cut off, all remaining rows are processed, except those from
    /// `end_ns` on.
    ///
    /// # Errors
    /// If the events cannot be read or are cut off, the results cannot be written, or the queries
    /// exceed their limit.
    pub fn run_live<R: Read + Send>(
        &self,
        reader: &mut RowReader<R>,
        lateness_ns: u64,
        sink: &mut dyn ResultSink,
        end_ns: Option<i64>,
    ) -> Result<ReplaySummary, QueryError> {
        self.begin(sink)?;
        let mut engine = self.engine();
        let mut limit = self.held_limit();
        let mut batch = Batch::default();
        let mut latest_ns = 0;
        let end_ns = end_ns.map_or(u64::MAX, instant_from);
        let last_ns = |latest_ns| instant_from(latest_ns).saturating_add(1).min(end_ns);
        loop {
            let cut_off = || ReadError::new(CUT_OFF);
            let item = match reader.next_item(&mut batch).and_then(|item| item.ok_or_else(cut_off))
            {
                Ok(item) => item,
                Err(error) => {
                    deliver_within(&mut limit, &mut engine, last_ns(latest_ns), sink)?;
                    return Err(error.into());
                }
            };
            match item {
                Item::Rows => {
                    latest_ns = latest_ns.max(batch.latest_ns);
                    let (times_ns, columns) = batch.take();
                    engine.push_columns(batch.stream, times_ns, columns);
                }
                Item::Moment(time_ns) => {
                    let time_ns = instant_from(time_ns);
                    engine.note_instant(time_ns.min(end_ns));
                    if time_ns >= end_ns {
                        deliver_within(&mut limit, &mut engine, end_ns, sink)?;
                        break;
                    }
                    let now_ns = time_ns.saturating_sub(lateness_ns);
                    deliver_within(&mut limit, &mut engine, now_ns, sink)?;
                    sink.flush()?;
                }
                Item::Dropped { .. } => {}
                Item::End { .. } => {
                    deliver_within(&mut limit, &mut engine, last_ns(latest_ns), sink)?;
                    break;
                }
            }
            limit.check(&engine, &[(RESULT, sink.held())])?;
        }
        Ok(ReplaySummary::new(reader.report(), &engine))
    }

    /// Announces all queries to a sink.
    pub(crate) fn begin(&self, sink: &mut dyn ResultSink) -> io::Result<()> {
        for (query, plan) in self.plans.iter().enumerate() {
            sink.begin(query, &plan.columns, matches!(plan.output, Output::Stream(_)))?;
            let order = order(plan);
            if !order.is_empty() {
                sink.order(query, &order);
            }
        }
        Ok(())
    }
}

/// An instant as the engine has it: negative ones are 0.
fn instant_from(time_ns: i64) -> u64 {
    u64::try_from(time_ns).unwrap_or(0)
}

/// Ends all instants before `time_ns`, and passes the results to a sink.
pub(crate) fn deliver(
    engine: &mut Engine,
    time_ns: u64,
    sink: &mut dyn ResultSink,
) -> io::Result<()> {
    pass_results(sink, |sink| engine.advance(time_ns, sink))
}

/// The same in steps, with the state measured after each that is long enough. At the end the state
/// is measured if it is due.
fn deliver_within(
    limit: &mut HeldLimit,
    engine: &mut Engine,
    time_ns: u64,
    sink: &mut dyn ResultSink,
) -> Result<(), QueryError> {
    let mut steps = limit.steps(engine, time_ns);
    while let Some(end_ns) = steps.next(limit) {
        deliver(engine, end_ns, sink)?;
        limit.check(engine, &[(RESULT, sink.held())])?;
    }
    Ok(())
}

/// Calls a function that produces results, and passes them to a sink.
fn pass_results<T>(
    sink: &mut dyn ResultSink,
    work: impl FnOnce(&mut dyn FnMut(Delta<'_>)) -> T,
) -> io::Result<T> {
    let mut written = Ok(());
    let done = work(&mut |delta| {
        if written.is_ok() {
            let Delta { queries, time_ns, count, row } = delta;
            written = match *queries {
                [query] => sink.delta(query, time_ns as i64, count, row),
                _ => sink.deltas(queries, time_ns as i64, count, row),
            };
        }
    });
    written.map(|()| done)
}

#[cfg(test)]
mod tests;
