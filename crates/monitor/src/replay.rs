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
use crate::feed::Feed;
use crate::held::{HeldLimit, TooMuchHeld};
use crate::io_stream;
use crate::read::{Batch, Condition, ReadError, ReadOptions, ReadReport, Reader};
use crate::recording::{Item, RowReader};

/// Why live events end without an end.
const CUT_OFF: &str = "the events are cut off: who tells them is gone";

/// What a [`ResultSink`] holds.
pub(crate) const RESULT: &str = "the result";

/// So many batches may wait for other processes.
const AHEAD_MAX: usize = 16;
/// While the engine waits for late events, time goes on in so many steps for as long as it waits:
/// each step looks at all the rows that wait.
const LATENESS_STEPS: u64 = 8;
/// The rows that wait are measured each time so many batches have been read.
const WAITING_CHECK_BATCHES: u64 = 64;
/// In a cluster a turn is for so many batches, as it costs messages: with more of them a filter costs
/// less, and what is exchanged more, as it leaves the cache.
const STEP_BATCHES: u64 = 2;

/// What is asked of a file.
#[derive(Clone, Debug)]
pub struct ReplayRequest {
    /// The queries.
    pub script: String,
    /// The values of `$name`.
    pub parameters: Vec<(String, Value)>,
    /// Whether the script is to be understood as STREAM did: a `second` of a window is one unit of
    /// time of the input.
    pub stream_compatible: bool,
    /// The file; `-` is standard input.
    pub file: PathBuf,
    /// How it is to be read.
    pub read: ReadOptions,
    /// How much later than an event with a later instant an event may come, in nanoseconds. `None`
    /// is as much as the file needs, so that no event is lost. A pipe, which cannot be read twice, is
    /// waited for a second, and longer once an event has come too late.
    pub lateness_ns: Option<u64>,
    /// How many rows, groups and values may be held at most; `None` for any number.
    pub held_max: Option<u64>,
    /// The processes that answer together, each for a file of its own; `None` where this one does
    /// alone.
    pub cluster: Option<ClusterOptions>,
}

/// What a replay was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplaySummary {
    /// What was read.
    pub read: ReadReport,
    /// The events that came too late to count.
    pub late: u64,
    /// The lateness with which all of them would have counted, in nanoseconds; 0 where none was late.
    pub late_ns: u64,
}

/// Who wants results.
pub trait ResultSink {
    /// There is a query; all are told before the first result.
    ///
    /// # Errors
    /// When the results cannot be written.
    fn begin(&mut self, query: usize, columns: &[Column], is_stream: bool) -> io::Result<()>;

    /// The rows of a relation are to be shown in the order of these columns, in which the greatest
    /// come first where that is said. Told behind [`begin`](Self::begin), where there is an order.
    fn order(&mut self, query: usize, columns: &[(usize, bool)]) {
        let _ = (query, columns);
    }

    /// At an instant a row came `count` times (went, below 0). A stream's rows never go. Instants
    /// do not go back within a query.
    ///
    /// # Errors
    /// See [`begin`](Self::begin).
    fn delta(&mut self, query: usize, time_ns: i64, count: i64, row: &[Value]) -> io::Result<()>;

    /// All results so far are to be seen now. Called where events are live.
    ///
    /// # Errors
    /// See [`begin`](Self::begin).
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// How many rows are kept until the end.
    fn held(&self) -> usize {
        0
    }
}

/// Why a query has no result.
#[derive(Debug)]
pub enum QueryError {
    /// Something is wrong with the script.
    Script(Vec<Diagnostic>),
    /// Something is wrong with the request but its script.
    Request(String),
    /// The events cannot be read.
    Read(ReadError),
    /// The results cannot be written.
    Write(io::Error),
    /// Another process, with which this one answers, is not there any more.
    Lost(Loss),
    /// The queries hold more than they may.
    Held(TooMuchHeld),
}

impl fmt::Display for QueryError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Script(all) => {
                let texts: Vec<String> = all.iter().map(ToString::to_string).collect();
                formatter.write_str(&texts.join("; "))
            }
            Self::Request(what) => formatter.write_str(what),
            Self::Read(error) => error.fmt(formatter),
            Self::Write(error) => write!(formatter, "cannot write the results: {error}"),
            Self::Lost(loss) => loss.fmt(formatter),
            Self::Held(too_much) => too_much.fmt(formatter),
        }
    }
}

impl std::error::Error for QueryError {}

impl From<ReadError> for QueryError {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

impl From<TooMuchHeld> for QueryError {
    fn from(too_much: TooMuchHeld) -> Self {
        Self::Held(too_much)
    }
}

impl From<io::Error> for QueryError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

/// Runs a script's queries over a file, and tells `sink` what they give. Time ends with the last
/// event.
///
/// # Errors
/// When something is wrong with the script, the file cannot be read or the results cannot be
/// written.
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
    let wanted = script.wanted();
    let mut feed =
        Feed::open(&request.file, &script.schema, wanted, &options, request.lateness_ns)?;
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
    /// The plans of the queries, over rows of the wanted columns.
    plans: Vec<Plan>,
    wanted: Vec<bool>,
    source: usize,
    schema: StreamSchema,
    held_max: Option<u64>,
}

impl Script {
    /// Parses and plans a script over the stream of events.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn prepare(
        text: &str,
        parameters: &[(String, Value)],
        options: ParseOptions,
    ) -> Result<Self, QueryError> {
        let wrong = |diagnostic| QueryError::Script(vec![diagnostic]);
        let script = fathom_cql::parse(text, &options).map_err(wrong)?;
        let catalog = Catalog { streams: vec![io_stream()] };
        let parameters = parameters.iter().cloned().collect();
        let planned = fathom_cql::plan_script(&script, &catalog, &parameters).map_err(wrong)?;
        if planned.queries.is_empty() {
            return Err(QueryError::Request(
                "the script has no query whose results are wanted".into(),
            ));
        }
        // A stream that the script declares itself is what the file holds.
        let source = planned.declared.unwrap_or(0);
        let schema = planned.catalog.streams[source].clone();
        let mut plans: Vec<Plan> = planned.queries.iter().map(|query| query.plan.clone()).collect();
        let columns = fathom_cql::prune(&mut plans, &planned.catalog);
        let used = columns.get(source).map_or(&[][..], Vec::as_slice);
        let wanted = (0..schema.columns.len()).map(|column| used.contains(&column)).collect();
        Ok(Self { planned, plans, wanted, source, schema, held_max: None })
    }

    /// Lets the queries hold so many rows, groups and values at most while they run. Beyond that
    /// they end with an error.
    #[must_use]
    pub fn with_held_max(self, most: Option<u64>) -> Self {
        Self { held_max: most, ..self }
    }

    /// What they may hold, of which nothing is held yet.
    pub(crate) fn held_limit(&self) -> HeldLimit {
        HeldLimit::new(self.held_max)
    }

    /// The queries, in their order.
    pub fn queries(&self) -> &[PlannedQuery] {
        &self.planned.queries
    }

    /// The streams.
    pub fn catalog(&self) -> &Catalog {
        &self.planned.catalog
    }

    /// Which stream of the catalogue events belong to.
    pub fn source(&self) -> usize {
        self.source
    }

    /// The stream that events belong to.
    pub fn schema(&self) -> &StreamSchema {
        &self.schema
    }

    /// Which columns of the stream the queries look at: rows are to have these.
    pub fn wanted(&self) -> &[bool] {
        &self.wanted
    }

    /// What is known of the rows that the queries look at, for readers to leave out others; see
    /// [`ReadOptions::conditions`].
    pub fn conditions(&self) -> Option<Vec<Condition>> {
        // By the position in the schema, where plans have it among the wanted columns.
        let wanted = self.wanted.iter().enumerate().filter(|(_, wanted)| **wanted);
        let columns: Vec<usize> = wanted.map(|(column, _)| column).collect();
        let mut conditions = engine::conditions(&self.plans, self.source)?;
        for (column, _) in conditions.iter_mut().flatten() {
            *column = *columns.get(*column)?;
        }
        Some(conditions)
    }

    /// An engine for the queries that has seen nothing yet, and the number of the source to which
    /// rows of the wanted columns are to be pushed.
    pub fn engine(&self) -> (Engine, usize) {
        (Engine::new(self.planned.catalog.streams.len(), &self.plans), self.source)
    }

    /// The same for one of several processes, which are waited for.
    fn engine_in(&self, cluster: &ClusterOptions) -> Result<(Engine, usize), QueryError> {
        let cluster = Cluster::join(cluster, &self.plans, &mut |_| true)
            .map_err(|error| QueryError::Request(error.to_string()))?;
        let sources = self.planned.catalog.streams.len();
        Ok((Engine::in_cluster(cluster, sources, &self.plans), self.source))
    }

    /// Runs the queries over all events of a reader. After each batch time goes on to the latest
    /// instant that was seen less the lateness; it ends with the last event.
    ///
    /// # Errors
    /// When the events cannot be read, the results cannot be written, or too much is held.
    pub fn run(
        &self,
        reader: &mut dyn Reader,
        lateness_ns: u64,
        sink: &mut dyn ResultSink,
    ) -> Result<ReplaySummary, QueryError> {
        self.run_feed(self.engine(), &mut Feed::within(Box::new(reader), lateness_ns), sink)
    }

    /// The same for what comes of a file.
    pub(crate) fn run_feed(
        &self,
        (mut engine, source): (Engine, usize),
        feed: &mut Feed<'_>,
        sink: &mut dyn ResultSink,
    ) -> Result<ReplaySummary, QueryError> {
        self.begin(sink)?;
        let (mut latest_ns, mut delivered_ns, mut batches) = (0, 0, 0_u64);
        // What has been told, of which some may wait for other processes.
        let mut told = VecDeque::new();
        let mut limit = self.held_limit();
        while let Some(rows) = feed.next()? {
            latest_ns = latest_ns.max(rows.latest_ns);
            engine.push_columns(source, rows.times_ns, rows.columns);
            engine.saw(rows.latest_ns);
            feed.came_late(engine.statistics().late_ns);
            batches += 1;
            if batches % WAITING_CHECK_BATCHES == 0 {
                feed.check_waiting(engine.waiting())?;
            }
            // Events of the latest instant may follow.
            let lateness_ns = feed.lateness_ns();
            let now_ns = latest_ns.saturating_sub(lateness_ns);
            let is_turn = if engine.is_in_cluster() {
                batches % STEP_BATCHES == 0
            } else {
                now_ns.saturating_sub(delivered_ns) >= lateness_ns / LATENESS_STEPS
            };
            if !is_turn {
                limit.check(&engine, &[(RESULT, sink.held())])?;
                continue;
            }
            delivered_ns = now_ns;
            deliver(&mut engine, now_ns, sink)?;
            limit.check(&engine, &[(RESULT, sink.held())])?;
            told.push_back(now_ns);
            loop {
                while told.front().is_some_and(|&told| told <= engine.ended_ns()) {
                    told.pop_front();
                }
                if told.len() < AHEAD_MAX {
                    break;
                }
                if let Some(loss) = engine.loss() {
                    return Err(QueryError::Lost(loss));
                }
                engine.wait(Duration::from_millis(1));
                deliver(&mut engine, now_ns, sink)?;
            }
        }
        let finished = handed_on(sink, |sink| engine.finish(latest_ns + 1, sink))?;
        finished.map_err(QueryError::Lost)?;
        Ok(ReplaySummary::new(feed.report(), &engine))
    }
}

impl ReplaySummary {
    fn new(read: &ReadReport, engine: &Engine) -> Self {
        let EngineStatistics { late, late_ns, .. } = engine.statistics();
        Self { read: read.clone(), late, late_ns }
    }
}

/// The columns by which a plan's result is ordered, as far as they are part of it.
fn order(plan: &Plan) -> Vec<(usize, bool)> {
    let mut keys = &[][..];
    if let Output::Relation(relation) = &plan.output {
        let stays = |(at, value): (usize, &Expression)| *value == Expression::Column(at);
        let top = match relation {
            // Keys that are not selected are taken away last.
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
    /// Runs the queries over a live recording, one with moments, until it ends or `goes_on` says
    /// no: it is asked at each part. Time goes on with the moments less the lateness; at the end
    /// all that came is told.
    ///
    /// # Errors
    /// When the events cannot be read or are cut off, the results cannot be written, or too much is
    /// held.
    pub fn run_live<R: Read + Send>(
        &self,
        reader: &mut RowReader<R>,
        lateness_ns: u64,
        sink: &mut dyn ResultSink,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<ReplaySummary, QueryError> {
        self.begin(sink)?;
        let (mut engine, source) = self.engine();
        let mut limit = self.held_limit();
        let mut batch = Batch::default();
        let mut latest_ns = 0;
        while goes_on() {
            let cut_off = || ReadError::new(CUT_OFF);
            match reader.next_item(&mut batch)?.ok_or_else(cut_off)? {
                Item::Rows => {
                    latest_ns = latest_ns.max(batch.latest_ns);
                    let (times_ns, columns) = batch.take();
                    engine.push_columns(source, times_ns, columns);
                }
                Item::Moment(time_ns) => {
                    let time_ns = u64::try_from(time_ns).unwrap_or(0);
                    engine.saw(time_ns);
                    deliver(&mut engine, time_ns.saturating_sub(lateness_ns), sink)?;
                    sink.flush()?;
                }
                Item::Dropped { .. } => {}
                Item::End { .. } => {
                    deliver(&mut engine, u64::try_from(latest_ns).unwrap_or(0) + 1, sink)?;
                    break;
                }
            }
            limit.check(&engine, &[(RESULT, sink.held())])?;
        }
        Ok(ReplaySummary::new(reader.report(), &engine))
    }

    /// Tells a sink of all queries.
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

/// Ends all instants before one, and hands on what results.
pub(crate) fn deliver(
    engine: &mut Engine,
    time_ns: u64,
    sink: &mut dyn ResultSink,
) -> io::Result<()> {
    handed_on(sink, |sink| engine.advance(time_ns, sink))
}

/// Does what gives results, and hands these on.
fn handed_on<T>(
    sink: &mut dyn ResultSink,
    work: impl FnOnce(&mut dyn FnMut(Delta<'_>)) -> T,
) -> io::Result<T> {
    let mut written = Ok(());
    let done = work(&mut |delta| {
        if written.is_ok() {
            written = sink.delta(delta.query, delta.time_ns as i64, delta.count, delta.row);
        }
    });
    written.map(|()| done)
}

#[cfg(test)]
mod tests;
