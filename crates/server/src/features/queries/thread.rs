//! The thread that runs the queries.

use std::io::{Cursor, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Bytes;
use fathom_block::Clock;
use fathom_control::QueryState;
use fathom_monitor::read::{Batch, ReadError, ReadOptions, WantedStream};
use fathom_monitor::recording::{Item, RowReader};
use fathom_monitor::{Engine, HeldLimit, HeldLimitExceeded, give_way};

use super::Queries;
use super::kept::{Kept, ResultChange, add};
use crate::daemon::Daemon;
use crate::features::events::{EventFeed, StreamSet, follow};

/// How often results are computed while there are events, and while there are none.
const PULSE: Duration = Duration::from_millis(50);
const IDLE_PULSE: Duration = Duration::from_secs(1);

/// The remedy for a query that holds more than its limit.
const HELD_REMEDY: &str = "shorten its windows, select fewer rows or group by fewer columns, or raise its \
                           `held_max`, and reload";

/// A running query.
struct Running {
    kept: Arc<Kept>,
    /// `None` after a failure.
    engine: Option<Engine>,
    /// For each stream that is read the query's source, and the indexes of its columns among the
    /// columns that are read; `None` if the query does not read the stream.
    places: Vec<Option<(usize, Vec<usize>)>>,
    changes: Vec<ResultChange>,
    limit: HeldLimit,
}

/// Why reading ended.
enum Halt {
    /// The list of queries has changed.
    Changed,
    /// There are no more events.
    End,
}

/// Runs the queries until there are none, or until the events end.
pub(super) fn run(daemon: &Arc<Daemon>) {
    give_way();
    let queries = daemon.part::<Queries>();
    let _ended = Ended(queries);
    let mut feed = match follow(daemon, queries.streams(), PULSE, IDLE_PULSE) {
        Ok(feed) => feed,
        Err(refused) => return queries.failed(&refused.message),
    };
    queries.set_waker(feed.waker());
    let mut running: Vec<Running> = Vec::new();
    while let Some((version, kept)) = queries.wanted() {
        renew(&mut running, &kept);
        match serve(queries, version, &mut running, &mut feed) {
            Ok(Halt::Changed) => {}
            Ok(Halt::End) => return queries.failed("there are no more events"),
            Err(error) => return queries.failed(&error.to_string()),
        }
    }
}

/// Reports a panic of the thread.
struct Ended<'q>(&'q Queries);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed("their thread failed because of a bug");
        }
    }
}

/// Adapts the list to `kept`. Queries that run already continue.
fn renew(running: &mut Vec<Running>, kept: &[Arc<Kept>]) {
    let mut before = std::mem::take(running);
    for kept in kept {
        match before.iter().position(|old| Arc::ptr_eq(&old.kept, kept)) {
            Some(at) => running.push(before.swap_remove(at)),
            None => running.extend(Running::new(kept)),
        }
    }
}

/// The streams and columns that any of the queries reads.
fn wanted_of(running: &[Running]) -> Vec<WantedStream> {
    let mut wanted: Vec<WantedStream> = Vec::new();
    for of_query in running.iter().flat_map(|query| query.kept.prepared.script.streams()) {
        match wanted.iter_mut().find(|it| it.schema.name == of_query.schema.name) {
            Some(known) => {
                let both = known.columns.iter_mut().zip(&of_query.columns);
                both.for_each(|(any, of_query)| *any |= of_query);
            }
            None => wanted.push(of_query.clone()),
        }
    }
    wanted
}

/// Reads events until the list of queries changes or there are no more events.
fn serve(
    queries: &Queries,
    version: u64,
    running: &mut [Running],
    feed: &mut EventFeed,
) -> Result<Halt, ReadError> {
    let wanted = wanted_of(running);
    for query in running.iter_mut() {
        query.place(&wanted);
    }
    // All queries have streams of the daemon.
    let names = wanted.iter().map(|stream| stream.schema.name.as_str());
    feed.set_streams(StreamSet::of(names).unwrap_or(StreamSet::ALL));
    let mut reader = open(feed.header(), feed, &wanted)?;
    queries.set_applied(version);
    let mut batch = Batch::default();
    while let Some(item) = reader.next_item(&mut batch)? {
        match item {
            Item::Rows => {
                for query in running.iter_mut() {
                    query.push(&batch);
                }
            }
            Item::Moment(time_ns) => {
                let time_ns = u64::try_from(time_ns).unwrap_or(0);
                for query in running.iter_mut() {
                    query.advance(time_ns);
                }
                // Between two blocks, so that a new reader can take over.
                if queries.version() != version {
                    return Ok(Halt::Changed);
                }
            }
            Item::Dropped { count, .. } => {
                for query in running.iter() {
                    add(&query.kept.counts.events_dropped, count);
                }
            }
            Item::End { .. } => break,
        }
    }
    // All events before this instant have been read.
    let now_ns = Clock::System.now_ns();
    for query in running.iter_mut() {
        query.advance(now_ns);
    }
    Ok(Halt::End)
}

type FeedReader<'f> = RowReader<std::io::Chain<Cursor<Bytes>, &'f mut EventFeed>>;

fn open<'f>(
    header: Bytes,
    feed: &'f mut EventFeed,
    wanted: &[WantedStream],
) -> Result<FeedReader<'f>, ReadError> {
    let source = Cursor::new(header).chain(feed);
    RowReader::new("the daemon", source, wanted, &ReadOptions::default())
}

impl Running {
    fn new(kept: &Arc<Kept>) -> Option<Self> {
        let made = catch_unwind(AssertUnwindSafe(|| kept.prepared.script.engine()));
        let Ok(engine) = made else {
            kept.fail("its engine cannot be made because of a bug");
            return None;
        };
        kept.note(engine.statistics());
        kept.counts.set_state(QueryState::Running);
        let limit = HeldLimit::new(Some(kept.definition.held_max.get()));
        let (kept, engine) = (Arc::clone(kept), Some(engine));
        Some(Self { kept, engine, places: Vec::new(), changes: Vec::new(), limit })
    }

    /// Finds the streams and columns of the query among those that are read.
    fn place(&mut self, read: &[WantedStream]) {
        let of_query = self.kept.prepared.script.streams();
        let place = |read: &WantedStream| {
            let source = of_query.iter().position(|it| it.schema.name == read.schema.name)?;
            let all = read.columns.iter().zip(&of_query[source].columns);
            let read = all.filter(|(is_read, _)| **is_read);
            let places = read.enumerate().filter(|(_, (_, is_wanted))| **is_wanted);
            Some((source, places.map(|(place, _)| place).collect()))
        };
        self.places = read.iter().map(place).collect();
    }

    fn push(&mut self, batch: &Batch) {
        self.guarded(|query, engine| {
            let Some(Some((source, places))) = query.places.get(batch.stream) else {
                return Ok(());
            };
            let time = |&time_ns: &i64| u64::try_from(time_ns).unwrap_or(0);
            let times_ns = batch.times_ns.iter().map(time).collect();
            let column = |&at: &usize| batch.columns.get(at).cloned();
            engine.push_columns(*source, times_ns, places.iter().filter_map(column).collect());
            query.check(engine)
        });
    }

    fn advance(&mut self, time_ns: u64) {
        self.guarded(|query, engine| {
            let mut steps = query.limit.steps(engine, time_ns);
            while let Some(end_ns) = steps.next(&query.limit) {
                query.changes.clear();
                engine.advance(end_ns, &mut |delta| {
                    let (time_ns, count, row) = (delta.time_ns, delta.count, delta.row.into());
                    query.changes.push(ResultChange { time_ns, count, row });
                });
                if !query.changes.is_empty() {
                    query.kept.take(&query.changes);
                }
                query.kept.note(engine.statistics());
                query.check(engine)?;
            }
            Ok(())
        });
    }

    /// Checks the size of the query's state, if a check is due.
    fn check(&mut self, engine: &Engine) -> Result<(), HeldLimitExceeded> {
        let checked = self.limit.check(engine, &[]);
        self.kept.counts.held.store(self.limit.held(), Ordering::Relaxed);
        checked
    }

    /// Runs `work` with the engine. A panic, or state beyond the limit, ends only this query.
    fn guarded(
        &mut self,
        work: impl FnOnce(&mut Self, &mut Engine) -> Result<(), HeldLimitExceeded>,
    ) {
        let Some(mut engine) = self.engine.take() else { return };
        match catch_unwind(AssertUnwindSafe(|| work(self, &mut engine))) {
            Ok(Ok(())) => {
                self.engine = Some(engine);
                return;
            }
            Ok(Err(exceeded)) => {
                let name = &self.kept.definition.name;
                tracing::error!("query {name}: stopped: {exceeded}");
                self.kept.fail(&format!("{exceeded}: {HELD_REMEDY}"));
            }
            Err(_) => self.kept.fail("it failed because of a bug: see the log"),
        }
        self.changes = Vec::new();
        // Dropping the engine may panic again.
        let _ = catch_unwind(AssertUnwindSafe(move || drop(engine)));
    }
}
