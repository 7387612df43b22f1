//! Queries over a file of events.

use std::fmt;
use std::io;
use std::path::PathBuf;

use fathom_cql::catalog::{Column, StreamSchema};
use fathom_cql::{Diagnostic, Row, Value};

use crate::io_stream;
use crate::read::{self, Batch, ReadError, ReadOptions, ReadReport, Reader};

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
    /// How much later than its instant an event may come; `None` leaves it to the engine.
    pub lateness_ns: Option<u64>,
}

/// What a replay was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplaySummary {
    /// What was read.
    pub read: ReadReport,
    /// The events that came too late to count.
    pub late: u64,
}

/// Who wants results.
pub trait ResultSink {
    /// There is a query; all are told before the first result.
    ///
    /// # Errors
    /// When the results cannot be written.
    fn begin(&mut self, query: usize, columns: &[Column], is_stream: bool) -> io::Result<()>;

    /// At an instant a row came `count` times (went, below 0). A stream's rows never go. Instants
    /// do not go back within a query.
    ///
    /// # Errors
    /// See [`begin`](Self::begin).
    fn delta(&mut self, query: usize, time_ns: i64, count: i64, row: &Row) -> io::Result<()>;
}

/// What runs the queries.
pub trait Engine {
    /// A row of an input came. Rows come in any order.
    fn push(&mut self, source: usize, time_ns: i64, row: Row);

    /// Nothing before `to_ns` comes any more: gives what is known then.
    ///
    /// # Errors
    /// When the results cannot be written.
    fn advance(&mut self, to_ns: i64, out: &mut dyn ResultSink) -> io::Result<()>;

    /// How many rows came after it was said that they would not.
    fn late(&self) -> u64 {
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
        }
    }
}

impl std::error::Error for QueryError {}

impl From<ReadError> for QueryError {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

impl From<io::Error> for QueryError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

/// Runs a script's queries over a file, and tells `sink` what they give.
///
/// # Errors
/// When something is wrong with the script, the file cannot be read or the results cannot be
/// written.
pub fn replay(
    request: &ReplayRequest,
    sink: &mut dyn ResultSink,
) -> Result<ReplaySummary, QueryError> {
    let Prepared { mut engine, source, schema, wanted } = prepare(request, sink)?;
    let mut reader = read::open(&request.file, &schema, &wanted, &request.read)?;
    let lateness = request.lateness_ns.unwrap_or(0);
    run(&mut *reader, &mut *engine, source, lateness, sink)
}

/// A script that is ready to run.
struct Prepared {
    engine: Box<dyn Engine>,
    /// The input that the file is.
    source: usize,
    schema: StreamSchema,
    /// The columns of it that the queries use.
    wanted: Vec<bool>,
}

/// Parses and plans the script, begins its queries at `sink`, and makes the engine for them.
///
/// TODO: the engine is to be plugged in here. Until then events are read and nothing comes out.
#[allow(clippy::unnecessary_wraps, reason = "scripts have errors")]
fn prepare(_request: &ReplayRequest, _sink: &mut dyn ResultSink) -> Result<Prepared, QueryError> {
    struct Unplugged;
    impl Engine for Unplugged {
        fn push(&mut self, _source: usize, _time_ns: i64, _row: Row) {}

        fn advance(&mut self, _to_ns: i64, _out: &mut dyn ResultSink) -> io::Result<()> {
            Ok(())
        }
    }
    let schema = io_stream();
    let wanted = vec![true; schema.columns.len()];
    Ok(Prepared { engine: Box::new(Unplugged), source: 0, schema, wanted })
}

/// Reads all events into an engine. After each batch its clock goes to the latest instant seen
/// less the lateness, at the end to the end of time.
///
/// # Errors
/// When the events cannot be read, or the results cannot be written.
pub fn run(
    reader: &mut dyn Reader,
    engine: &mut dyn Engine,
    source: usize,
    lateness_ns: u64,
    sink: &mut dyn ResultSink,
) -> Result<ReplaySummary, QueryError> {
    let lateness = i64::try_from(lateness_ns).unwrap_or(i64::MAX);
    let mut batch = Batch::default();
    let mut latest = 0;
    while reader.next_batch(&mut batch)? {
        for (&time_ns, row) in batch.times_ns.iter().zip(batch.rows.drain(..)) {
            latest = latest.max(time_ns);
            engine.push(source, time_ns, row);
        }
        // Events of the latest instant may follow.
        engine.advance(latest.saturating_sub(lateness), sink)?;
    }
    engine.advance(i64::MAX, sink)?;
    Ok(ReplaySummary { read: reader.report().clone(), late: engine.late() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Says each row that is due, once the clock has passed it.
    #[derive(Default)]
    struct Echo {
        rows: Vec<(i64, Row)>,
    }

    impl Engine for Echo {
        fn push(&mut self, source: usize, time_ns: i64, row: Row) {
            assert_eq!(source, 3);
            self.rows.push((time_ns, row));
        }

        fn advance(&mut self, to_ns: i64, out: &mut dyn ResultSink) -> io::Result<()> {
            self.rows.sort();
            let due = self.rows.partition_point(|(time, _)| *time < to_ns);
            self.rows.drain(..due).try_for_each(|(time, row)| out.delta(0, time, 1, &row))
        }
    }

    #[derive(Default)]
    struct Times(Vec<i64>);

    impl ResultSink for Times {
        fn begin(&mut self, _: usize, _: &[Column], _: bool) -> io::Result<()> {
            Ok(())
        }

        fn delta(&mut self, _: usize, time_ns: i64, _: i64, _: &Row) -> io::Result<()> {
            self.0.push(time_ns);
            Ok(())
        }
    }

    #[test]
    fn every_event_reaches_the_engine_and_the_clock_its_end() {
        let schema = io_stream();
        let wanted = vec![true; schema.columns.len()];
        let text = "BlktapTS,Type\n5,Q\n3,Q\n9,R\n9,R\n";
        let options = ReadOptions::default();
        let mut reader =
            read::from_bytes("test", text.as_bytes(), &schema, &wanted, &options).unwrap();
        let (mut engine, mut times) = (Echo::default(), Times::default());
        let summary = run(&mut *reader, &mut engine, 3, 0, &mut times).unwrap();
        assert_eq!(times.0, [3, 5, 9, 9]);
        assert_eq!((summary.read.events, summary.late), (4, 0));
    }
}
