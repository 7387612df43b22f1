//! What differs between two snapshots of a pool, in parts of bounded length; and snapshots as
//! streams.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fathom_store::{ChangeCursor, ChangedExtent, Pool, PoolError};
use serde::{Deserialize, Serialize};

use crate::client::{Client, ClientError};
use crate::endpoint::{Blocking, Endpoint, Query};
use crate::stream::AnswerStream;

/// What differs between two snapshots.
pub const DIFFERENCE: Endpoint<Blocking, (), DifferenceQuery, (), DifferencePart> = Endpoint::get(
    "/v1/stores/difference",
    "[what has changed](#pools) between two snapshots of a volume, or since a snapshot: a part of it. \
     404 if no disk of the daemon uses the pool",
);

/// A snapshot as a stream, in the format of `docs/store.md`.
pub const SNAPSHOT_STREAM: Endpoint<Blocking, (), SnapshotStreamQuery, (), SnapshotStream> =
    Endpoint::get(
        "/v1/stores/stream",
        "a snapshot, or what has changed since another one, as a [stream](store.md#streams) for \
         `fathom snapshot receive`. 404 if no disk of the daemon uses the pool",
    )
    .with_content();

/// The answer of [`SNAPSHOT_STREAM`], which is a stream of bytes.
#[derive(Clone, Copy, Debug)]
pub enum SnapshotStream {}

/// What is sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SnapshotStreamQuery {
    /// The pool's file or device.
    pub path: PathBuf,
    /// The volume.
    pub volume: String,
    /// The snapshot.
    pub snapshot: String,
    /// The snapshot since which changes are sent. Without one, everything is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

impl Query for SnapshotStreamQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] =
        &[("path", "POOL"), ("volume", "NAME"), ("snapshot", "NAME"), ("from", "SNAPSHOT")];
}

/// The most extents of a part, about.
const EXTENTS_MAX: usize = 8192;
/// The time that is spent on a part, about.
const PART_TIME: Duration = Duration::from_millis(500);

/// What is compared, and from where on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DifferenceQuery {
    /// The pool's file or device.
    pub path: PathBuf,
    /// The volume.
    pub volume: String,
    /// The earlier snapshot. Without one, everything that is there has changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The later snapshot. Without one, the volume now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Whether changed parts that are holes now are told from the others, which takes longer.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub holes: bool,
    /// Where the part begins, in bytes: `next_byte` of the part before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<u64>,
}

impl Query for DifferenceQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[
        ("path", "POOL"),
        ("volume", "NAME"),
        ("from", "SNAPSHOT"),
        ("to", "SNAPSHOT"),
        ("holes", "true"),
        ("at", "BYTE"),
    ];
}

/// A part of what differs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DifferencePart {
    /// The number of the earlier snapshot in its pool, and that of the later one or the volume. No
    /// other snapshot ever has it: parts of one comparison have the same numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_number: Option<u32>,
    /// See `from_number`.
    pub to_number: u32,
    /// The size of the later one, in bytes.
    pub size_bytes: u64,
    /// Where the next part begins, in bytes; none behind the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_byte: Option<u64>,
    /// What has changed, in order.
    pub extents: Vec<DifferenceExtent>,
}

/// Bytes that have changed, perhaps only some of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DifferenceExtent {
    /// The first byte.
    pub offset: u64,
    /// The length, in bytes.
    pub length: u64,
    /// Whether they are zeroes now, and take no space. Only known if it was asked for.
    pub hole: bool,
}

impl DifferencePart {
    /// Finds the part of a query in an open pool.
    ///
    /// # Errors
    /// If there is no such snapshot, or a map cannot be read.
    pub fn of(pool: &Pool, query: &DifferenceQuery) -> Result<Self, PoolError> {
        let number = |name: &Option<String>| pool.number_of(&query.volume, name.as_deref());
        let from = query.from.is_some().then(|| number(&query.from)).transpose()?;
        let to = number(&query.to)?;
        let difference = match from {
            Some(from) if !query.holes => pool.changes(from, to)?,
            _ => pool.difference(from, to)?,
        };
        let mut cursor = ChangeCursor::open(&difference, query.at.unwrap_or(0))?;
        let (begun, mut changes) = (Instant::now(), Vec::new());
        while !cursor.is_done() && changes.len() < EXTENTS_MAX && begun.elapsed() < PART_TIME {
            cursor.step(&mut changes)?;
        }
        let extent = |ChangedExtent { offset, length, is_hole }| DifferenceExtent {
            offset,
            length,
            hole: is_hole,
        };
        Ok(Self {
            from_number: from,
            to_number: to,
            size_bytes: difference.capacity(),
            next_byte: (!cursor.is_done()).then_some(cursor.at()),
            extents: changes.into_iter().map(extent).collect(),
        })
    }
}

impl Client {
    /// A part of what differs between two snapshots in a pool that a disk of the daemon uses.
    ///
    /// # Errors
    /// When there is no answer, or no such snapshot.
    pub fn difference(&self, query: &DifferenceQuery) -> Result<DifferencePart, ClientError> {
        let path: &Path = &query.path;
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        self.ask(&DIFFERENCE, &(), &DifferenceQuery { path, ..query.clone() }, &())
    }

    /// A snapshot in a pool that a disk of the daemon uses, as a stream.
    ///
    /// # Errors
    /// When there is no answer, or no such snapshot. Reading the stream fails if it breaks.
    pub fn snapshot_stream(
        &self,
        query: &SnapshotStreamQuery,
    ) -> Result<AnswerStream, ClientError> {
        let path = query.path.canonicalize().unwrap_or_else(|_| query.path.clone());
        self.stream(&SNAPSHOT_STREAM, &(), &SnapshotStreamQuery { path, ..query.clone() })
    }
}
