//! The daemon as a whole: its state and its events.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, AtOnce, Blocking, Change, Endpoint, Query, Waiting};
use crate::problem::Problem;

/// The daemon itself.
pub const DAEMON: Endpoint<AtOnce, (), (), (), DaemonInfo> = Endpoint::get(
    "/v1/daemon",
    "version, process, listeners, time to ready, the number of disks that are not served",
);

/// The lines of the daemon's log.
pub const EVENTS: Endpoint<Waiting, (), EventQuery, (), EventList> =
    Endpoint::get("/v1/events", "the lines of the daemon's [log](#events)");

/// Reads the configuration again.
pub const RELOAD: Endpoint<Change, (), ReloadQuery, (), ReloadReport> = Endpoint::post(
    "/v1/reload",
    "the changes, and those that were refused. With `force`, also disks and listeners in use are \
     removed that the file no longer has",
);

/// Ends the daemon.
pub const SHUTDOWN: Endpoint<AtOnce, (), (), (), Done> =
    Endpoint::post("/v1/shutdown", "before the daemon ends");

/// The page of metrics. It is a text, not JSON.
pub const METRICS: Endpoint<Blocking, (), (), (), MetricsPage> =
    Endpoint::get("/metrics", "[metrics.md](metrics.md), in Prometheus' text format");

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] =
    &[&DAEMON, &EVENTS, &RELOAD, &SHUTDOWN, &METRICS];

/// The answer of [`METRICS`], which is a text.
#[derive(Clone, Copy, Debug)]
pub enum MetricsPage {}

/// Which lines of the log are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EventQuery {
    /// Lines after this number.
    pub after: u64,
    /// How long to wait for a line if there is none yet, in milliseconds.
    pub wait_ms: u64,
}

impl Query for EventQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[("after", "N"), ("wait_ms", "T")];

    fn wait(&self) -> Duration {
        Duration::from_millis(self.wait_ms)
    }
}

/// How the configuration is read again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReloadQuery {
    /// Whether disks and listeners in use are removed, too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

impl Query for ReloadQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[("force", "true")];
}

/// The answer to a request that has no other result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// One sentence for the user; may be empty.
    pub message: String,
}

/// The identity and the state of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonInfo {
    /// The daemon's version.
    pub version: String,
    /// The version of this interface.
    pub interface: u32,
    /// The number of the daemon's process.
    pub process_id: u32,
    /// The time of the start, in nanoseconds since 1970.
    pub started_unix_time_ns: u64,
    /// The time from the start until every disk was served or had the reason why not, or until the
    /// start no longer waited for it, in microseconds; 0 before that.
    pub ready_us: u64,
    /// The state of the daemon.
    pub state: DaemonState,
    /// The path of the configuration file, if there is one.
    pub configuration: Option<String>,
    /// The TCP address of `/metrics`, if there is one.
    pub metrics_address: Option<String>,
    /// The number of disks that the daemon serves.
    pub disks: u64,
    /// The number of disks of the configuration that are not served. Those that are still being
    /// opened count.
    #[serde(default)]
    pub disks_unserved: u64,
    /// The number of threads that failed because of a bug in the daemon. Each failure is in the
    /// log.
    pub failed_threads: u64,
    /// The number of lines of the log that were dropped because nobody read standard error.
    #[serde(default)]
    pub log_lines_dropped: u64,
    /// The current problems that concern no single disk, and the disks that are not served.
    #[serde(default)]
    pub problems: Vec<Problem>,
    /// The NBD listeners.
    pub listeners: Vec<ListenerStatus>,
}

/// The state of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DaemonState {
    /// The daemon serves disks.
    Running,
    /// The daemon completes the requests in flight, and then ends.
    Stopping,
}

/// One NBD listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerStatus {
    /// The address: `unix:/path` or `host:port`.
    pub address: String,
    /// The exports that clients may request.
    pub exports: Vec<String>,
    /// `certificate`, `psk`, or `none`.
    pub tls: String,
    /// The number of current connections.
    pub connections: u64,
    /// The number of connections accepted since the start.
    pub connections_total: u64,
    /// The number of connections that were closed immediately because there were too many.
    pub refused: u64,
    /// The number of clients that violated the protocol, were too slow, or were not admitted.
    pub protocol_errors: u64,
    /// Why the listener does not work; `None` if it works.
    pub problem: Option<String>,
}

/// The events of a daemon after a given number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventList {
    /// The events, in the order of their occurrence.
    pub events: Vec<DaemonEvent>,
    /// The number of the last event: the next request asks for the events after it.
    pub last: u64,
    /// The number of events after the given number that are no longer kept.
    pub lost: u64,
}

/// An event: a line of the daemon's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonEvent {
    /// The number of the event; counts up from 1.
    pub sequence: u64,
    /// The time of the event, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// The severity of the event.
    pub level: EventLevel,
    /// The disk that the event concerns, if it concerns one.
    pub disk: Option<String>,
    /// A description of the event.
    pub message: String,
    /// The number of events of the same cause that were omitted before this one.
    pub left_out: u64,
}

/// The severity of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventLevel {
    /// Useful only to developers.
    Debug,
    /// Normal operation.
    Info,
    /// The daemon refused something or works in a degraded way; it continues.
    Warning,
    /// Something does not work.
    Error,
}

/// The result of reading the configuration again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReloadReport {
    /// The changes, one sentence each.
    pub changed: Vec<String>,
    /// The differences that cannot be applied while the daemon runs, each with the remedy.
    pub refused: Vec<String>,
}

impl Client {
    /// The daemon's version, state and listeners.
    ///
    /// # Errors
    /// When there is no answer; the same holds for all methods.
    pub fn daemon(&self) -> Result<DaemonInfo, ClientError> {
        self.ask(&DAEMON, &(), &(), &())
    }

    /// The daemon's events after number `after`. If there are none yet, waits for one for up to
    /// `wait`.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn events(&self, after: u64, wait: Duration) -> Result<EventList, ClientError> {
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        self.ask(&EVENTS, &(), &EventQuery { after, wait_ms }, &())
    }

    /// Makes the daemon read its configuration again.
    ///
    /// # Errors
    /// When there is no answer, or the configuration is invalid.
    pub fn reload(&self) -> Result<ReloadReport, ClientError> {
        self.ask(&RELOAD, &(), &ReloadQuery::default(), &())
    }

    /// Makes the daemon shut down. The answer arrives before the daemon ends.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn shutdown(&self) -> Result<Done, ClientError> {
        self.ask(&SHUTDOWN, &(), &(), &())
    }

    /// The metrics, in Prometheus' text format.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn metrics(&self) -> Result<String, ClientError> {
        let body = self.call(&METRICS, &(), &(), &())?;
        String::from_utf8(body).map_err(|error| ClientError::Unreadable(error.to_string()))
    }
}
