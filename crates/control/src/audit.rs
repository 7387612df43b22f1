//! Who has changed what over the control interface.

use serde::{Deserialize, Serialize};

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Blocking, Endpoint, Query};

/// The changes that were requested, and by whom.
pub const AUDIT: Endpoint<Blocking, (), AuditQuery, (), AuditReport> = Endpoint::get(
    "/v1/audit",
    "the last N (100 by default, up to 10,000) [requests that change something](#who-changed-what), and who sent them; with `after`, those that ended after that time",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&AUDIT];

/// The most entries of an answer.
pub const AUDIT_ENTRIES_MAX: u64 = 10_000;

/// Which entries are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AuditQuery {
    /// The most entries; the last ones.
    pub count: u64,
    /// Only those that ended later than this time, in nanoseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
}

impl Default for AuditQuery {
    fn default() -> Self {
        Self { count: 100, after: None }
    }
}

impl Query for AuditQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[("count", "N"), ("after", "NS")];
}

/// The requests that change something.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AuditReport {
    /// The file that has them.
    pub path: String,
    /// Why entries are missing from now on; empty if none are.
    pub problem: String,
    /// The entries that could not be written since the daemon began.
    pub lost: u64,
    /// The lines of the file that cannot be read.
    pub unreadable: u64,
    /// The entries, the oldest first.
    pub entries: Vec<AuditEntry>,
}

/// A request that changes something, or the start or the end of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AuditEntry {
    /// When it ended, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// How long it took, in microseconds.
    pub duration_us: u64,
    /// The number of the user who sent it; `None` if the daemon itself or a signal is the cause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_id: Option<u32>,
    /// The name of that user; empty if it has none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// The number of the process that sent it, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process_id: Option<u32>,
    /// The command of that process, as it names itself; empty if it is not known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub command: String,
    /// The method and the path: `POST /v1/disks`. For what is no request: `start`, `stop`, or the
    /// name of the signal.
    pub request: String,
    /// The body of the request, shortened to 4 KiB; empty without one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub body: String,
    /// The HTTP status of the answer; `None` if the client did not wait for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Why it was refused or failed; empty if it was not.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
}

impl Client {
    /// The last entries of the audit log.
    ///
    /// # Errors
    /// When there is no answer, or the log cannot be read.
    pub fn audit(&self, query: AuditQuery) -> Result<AuditReport, ClientError> {
        self.ask(&AUDIT, &(), &query, &())
    }
}
