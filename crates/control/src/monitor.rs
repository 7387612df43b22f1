//! The link to a centre that answers queries over many hosts.

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, AtOnce, Endpoint};
use serde::{Deserialize, Serialize};

/// The link to the centre.
pub const MONITOR: Endpoint<AtOnce, (), (), (), MonitorStatus> = Endpoint::get(
    "/v1/monitor",
    "the [link to a centre](configuration.md#monitor); 404 without one",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&MONITOR];

/// The state of a daemon's link to its centre.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MonitorStatus {
    /// The address at which the centre listens.
    pub address: String,
    /// The name of this host at the centre.
    pub name: String,
    /// Whether the connection is encrypted.
    pub tls: bool,
    /// `away`, `connected`, or `running` once the centre's fragments run.
    pub state: String,
    /// The time of the connection, in nanoseconds since 1970; 0 while the state is `away`.
    pub since_unix_time_ns: u64,
    /// The last reason for the state `away`, or why no fragments run.
    pub problem: Option<String>,
    /// The number of fragments that run.
    pub fragments: u64,
    /// The correction that is added to this host's clock to get the centre's, in nanoseconds.
    pub correction_ns: i64,
    /// The number of connections so far.
    pub connections: u64,
    /// The number of events that the fragments have processed since they started.
    pub events: u64,
    /// The number of bytes sent.
    pub sent_bytes: u64,
    /// The number of bytes that wait for the centre.
    pub waiting_bytes: u64,
    /// The number of events that the fragments did not process.
    pub dropped_events: u64,
    /// The number of rows that were not sent, because the centre was away or slow.
    pub dropped_rows: u64,
}

impl Client {
    /// The state of the link to the centre.
    ///
    /// # Errors
    /// When there is no answer, or the daemon has no link to a centre.
    pub fn monitor(&self) -> Result<MonitorStatus, ClientError> {
        self.ask(&MONITOR, &(), &(), &())
    }
}
