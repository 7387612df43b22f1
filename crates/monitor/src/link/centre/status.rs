//! The status of a centre and its hosts.

use super::super::clock::Measurement;

/// The state of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostState {
    /// Not connected.
    #[default]
    Away,
    /// Connected; its clock is being measured.
    Joining,
    /// It runs the fragments.
    Running,
    /// It runs the fragments, but lags by more than the patience: the centre does not wait for it.
    Lagging,
    /// Connected, but it cannot run the fragments.
    Refusing,
}

impl HostState {
    /// The state's name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Away => "away",
            Self::Joining => "joining",
            Self::Running => "running",
            Self::Lagging => "lagging",
            Self::Refusing => "refusing",
        }
    }
}

/// The status of a host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostStatus {
    /// The host's name.
    pub name: String,
    /// The address of the last connection.
    pub address: String,
    /// The version of its software.
    pub version: String,
    /// The host's state.
    pub state: HostState,
    /// The time of the connection, in nanoseconds since 1970; 0 if not connected.
    pub since_unix_ns: i64,
    /// The number of connections so far.
    pub connections: u64,
    /// Why the host is not connected, or refuses the fragments.
    pub problem: Option<String>,
    /// How far the host's watermark is behind the centre's clock, in nanoseconds; `None` without a
    /// watermark or a connection.
    pub lag_ns: Option<i64>,
    /// The best recent measurement of the host's clock.
    pub clock: Option<Measurement>,
    /// The correction of the host's clock, in nanoseconds.
    pub correction_ns: i64,
    /// The number of events that the fragments have processed since they run.
    pub events: u64,
    /// The number of rows received.
    pub rows: u64,
    /// The number of bytes received.
    pub bytes: u64,
    /// Events per second, over about the last second.
    pub events_per_second: f64,
    /// Bytes per second, over about the last second.
    pub bytes_per_second: f64,
    /// The number of events that are missing at the host's fragments.
    pub dropped_events: u64,
    /// The number of rows that the host did not send.
    pub dropped_rows: u64,
    /// The number of late rows and changes.
    pub late: u64,
}

/// A connection that was refused before its host was identified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The time, in nanoseconds since 1970.
    pub unix_ns: i64,
    /// The address of the other side.
    pub address: String,
    /// The reason.
    pub reason: String,
}

/// The status of a centre.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CentreStatus {
    /// All results before this instant have been reported; in nanoseconds since 1970, 0 at first.
    pub watermark_ns: i64,
    /// The hosts, by name.
    pub hosts: Vec<HostStatus>,
    /// The number of refused connections.
    pub refused: u64,
    /// The last refused connections.
    pub refusals: Vec<Refusal>,
}
