//! The link to a centre that answers queries over many hosts.

use serde::{Deserialize, Serialize};

/// What a daemon knows of its centre.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MonitorStatus {
    /// Where the centre listens.
    pub address: String,
    /// The name that this host has there.
    pub name: String,
    /// Whether the connection is encrypted.
    pub tls: bool,
    /// `away`, `connected`, or `running` once the centre's fragments run.
    pub state: String,
    /// Since when it is connected, in nanoseconds since 1970; 0 while it is away.
    pub since_unix_time_ns: u64,
    /// Why it was away last, or runs nothing.
    pub problem: Option<String>,
    /// The fragments that run.
    pub fragments: u64,
    /// What is added to this host's clock for the centre's, in nanoseconds.
    pub correction_ns: i64,
    /// Connections so far.
    pub connections: u64,
    /// Events that the fragments have seen, since they run.
    pub events: u64,
    /// Bytes that were sent.
    pub sent_bytes: u64,
    /// Bytes that wait for the centre.
    pub waiting_bytes: u64,
    /// Events that the fragments did not see.
    pub dropped_events: u64,
    /// Rows that were not sent, because the centre was away or slow.
    pub dropped_rows: u64,
}
