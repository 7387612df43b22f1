//! What becomes of a log that was refused.

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Change, Endpoint};
use serde::{Deserialize, Serialize};

/// Decides about a log that was refused.
pub const DECIDE_LOG: Endpoint<Change, String, (), LogRequest, LogAnswer> = Endpoint::post(
    "/v1/disks/{name}/log",
    "the log of a disk that is [not served](#disks-that-are-not-served) is kept or discarded, and \
     the disk is tried again. 409 if it is served",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&DECIDE_LOG];

/// What the operator decides about a refused log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogDecision {
    /// Its changes belong to the disk's image.
    Keep,
    /// Its changes may be lost: the image is used as it is.
    Discard,
}

/// A request to decide about the log of a disk that is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogRequest {
    /// What becomes of its changes.
    pub decision: LogDecision,
}

/// What has become of a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogAnswer {
    /// The disk's name.
    pub disk: String,
    /// What was decided.
    pub decision: LogDecision,
    /// Whether there was a log. Without one, only the mark of the image was removed.
    pub found: bool,
    /// The number of records of changes that are kept or lost.
    pub records: u64,
    /// Their length in the log, in bytes.
    pub bytes: u64,
    /// When the first of them was written, in nanoseconds since 1970; 0 if that is not known.
    pub first_unix_time_ns: u64,
    /// When the last of them was written, in nanoseconds since 1970; 0 if that is not known.
    pub last_unix_time_ns: u64,
    /// Whether a daemon serves the disk now.
    pub served: bool,
    /// Why the daemon that was asked does not serve it; empty if it does, or if none was asked.
    pub message: String,
    /// What to do about that; may be empty.
    pub remedy: String,
}

impl Client {
    /// Decides about the log of a disk that is not served because its log was refused. Then tries
    /// to serve the disk at once.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, the disk is served, or the log cannot be
    /// settled so.
    pub fn decide_log(&self, name: &str, decision: LogDecision) -> Result<LogAnswer, ClientError> {
        self.ask(&DECIDE_LOG, &name.to_owned(), &(), &LogRequest { decision })
    }
}
