//! The daemon as a whole: what it is, what happened in it.

use serde::{Deserialize, Serialize};

use crate::problem::Problem;

/// An answer that says no more than that it was done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// One sentence for people; may be empty.
    pub message: String,
}

/// What a daemon is and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonInfo {
    /// The daemon's version.
    pub version: String,
    /// The version of this interface.
    pub interface: u32,
    /// The daemon's process.
    pub process_id: u32,
    /// When it started, in nanoseconds since 1970.
    pub started_unix_time_ns: u64,
    /// How long it took from its start until every disk was served, in microseconds.
    pub ready_us: u64,
    /// What it is doing.
    pub state: DaemonState,
    /// The configuration file, where there is one.
    pub configuration: Option<String>,
    /// The TCP address of `/metrics`, where there is one.
    pub metrics_address: Option<String>,
    /// How many disks it serves.
    pub disks: u64,
    /// Threads that failed by a bug of the daemon's; each is in the log.
    pub failed_threads: u64,
    /// What does not work now and concerns no single disk.
    #[serde(default)]
    pub problems: Vec<Problem>,
    /// The NBD listeners.
    pub listeners: Vec<ListenerStatus>,
}

/// What a daemon is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DaemonState {
    /// It serves.
    Running,
    /// It completes what is in flight and ends.
    Stopping,
}

/// One NBD listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerStatus {
    /// Where it listens: `unix:/path` or `host:port`.
    pub address: String,
    /// The exports that clients may ask for.
    pub exports: Vec<String>,
    /// `certificate`, `psk`, or `none`.
    pub tls: String,
    /// Connections now.
    pub connections: u64,
    /// Connections accepted since the start.
    pub connections_total: u64,
    /// Connections closed at once, for there were too many.
    pub refused: u64,
    /// Clients that broke the protocol, were too slow, or were not let in.
    pub protocol_errors: u64,
    /// Why it does not work, where it does not.
    pub problem: Option<String>,
}

/// The events of a daemon, from one number on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventList {
    /// In order of occurrence.
    pub events: Vec<DaemonEvent>,
    /// Ask for what comes after this number next.
    pub last: u64,
    /// How many events after the number asked for are kept no more.
    pub lost: u64,
}

/// Something that happened: a line of the daemon's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonEvent {
    /// Counts up from 1.
    pub sequence: u64,
    /// When, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// How grave.
    pub level: EventLevel,
    /// The disk that it is about, where it is about one.
    pub disk: Option<String>,
    /// What happened, with its circumstances.
    pub message: String,
    /// How many events of the same cause were left out before this one.
    pub left_out: u64,
}

/// How grave an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventLevel {
    /// For developers.
    Debug,
    /// In the course of things.
    Info,
    /// Refused or degraded; the rest goes on.
    Warning,
    /// Something does not work.
    Error,
}

/// What reading the configuration again has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReloadReport {
    /// What was done, a sentence each.
    pub changed: Vec<String>,
    /// What is different in the file and cannot be changed while the daemon runs, with the remedy.
    pub refused: Vec<String>,
}
