//! The volume that hosts send to a centre, measured with the events of a file.

use std::path::Path;

use fathom_cql::catalog::Column;
use fathom_cql::plan::{Output, Plan};
use fathom_cql::{Type, Value};

use crate::engine::Engine;
use crate::feed::{Feed, LateRows};
use crate::read::{ReadOptions, ReadReport, WantedStream};
use crate::replay::{QueryError, Script};

/// The assumed length of a text whose length is unknown, in bytes.
pub const TEXT_BYTES: u64 = 16;

/// The bytes of the instant that is sent with each row.
const INSTANT_BYTES: u64 = 8;

/// The bytes of the count that is sent with each row of a relation.
const COUNT_BYTES: u64 = 1;

/// The volume that a fragment sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// The rows of a stream; for a relation, the inserted and the deleted rows.
    pub rows: u64,
    /// The bytes of these rows before compression.
    pub bytes: u64,
}

/// The traffic from a host to a centre.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The report of the reader.
    pub read: ReadReport,
    /// The events that were dropped because they came late.
    pub late: u64,
    /// The lateness with which no event would have been dropped, in nanoseconds.
    pub late_ns: u64,
    /// The bytes of all events with all columns, before compression.
    pub event_bytes: u64,
    /// The volume of each fragment.
    pub fragments: Vec<Sent>,
}

/// The bytes of a row with these columns, estimated from their types.
pub fn assumed_bytes(columns: &[Column]) -> u64 {
    let bytes = |column: &Column| match column.kind {
        Type::Boolean => 1,
        Type::Integer | Type::Float => 8,
        Type::Text => TEXT_BYTES,
    };
    columns.iter().map(bytes).sum()
}

/// The bytes that are sent with each row of a fragment in addition to its columns.
pub fn frame_bytes(fragment: &Plan) -> u64 {
    match fragment.output {
        Output::Stream(_) => INSTANT_BYTES,
        Output::Relation(_) => INSTANT_BYTES + COUNT_BYTES,
    }
}

fn bytes(row: &[Value]) -> u64 {
    let bytes = |value: &Value| match value {
        Value::Null | Value::Boolean(_) => 1,
        Value::Integer(_) | Value::Float(_) => 8,
        Value::Text(text) => text.len() as u64,
    };
    row.iter().map(bytes).sum()
}

/// Runs fragments over all events of a file, as one host does. The lateness is in nanoseconds and
/// has the meaning of [`ReplayRequest::lateness_ns`](crate::ReplayRequest::lateness_ns).
///
/// # Errors
/// If the events cannot be read.
pub fn measure(
    script: &Script,
    fragments: &[Plan],
    file: &Path,
    read: &ReadOptions,
    lateness_ns: Option<u64>,
) -> Result<Traffic, QueryError> {
    let all: Vec<WantedStream> =
        script.streams().iter().map(|stream| WantedStream::whole(&stream.schema)).collect();
    let mut feed = Feed::open(file, &all, read, lateness_ns)?;
    let mut engine = Engine::new(script.catalog().streams.len(), fragments);
    let frames: Vec<u64> = fragments.iter().map(frame_bytes).collect();
    let mut sent = vec![Sent::default(); fragments.len()];
    let mut advance = |engine: &mut Engine, time_ns| {
        engine.advance(time_ns, &mut |delta| {
            let rows = delta.count.unsigned_abs();
            for &fragment in delta.queries {
                sent[fragment].rows += rows;
                sent[fragment].bytes += rows * (frames[fragment] + bytes(delta.row));
            }
        });
    };
    let (mut latest_ns, mut event_bytes) = (0, 0);
    let mut row = Vec::new();
    while let Some(rows) = feed.next()? {
        for (at, &time_ns) in rows.times_ns.iter().enumerate() {
            row.clear();
            row.extend(rows.columns.iter().map(|column| column.value(at)));
            event_bytes += bytes(&row);
            engine.push(script.sources()[rows.stream], time_ns, &row);
        }
        latest_ns = latest_ns.max(rows.latest_ns);
        feed.check_waiting(engine.waiting())?;
        advance(&mut engine, latest_ns.saturating_sub(feed.lateness_ns()));
    }
    advance(&mut engine, latest_ns + 1);
    let LateRows { count: late, lateness_ns: late_ns } = feed.late();
    let read = feed.report().clone();
    Ok(Traffic { read, late, late_ns, event_bytes, fragments: sent })
}
