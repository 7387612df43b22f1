//! What the centre knows of its hosts.

use super::super::clock::Measurement;

/// Whether a host is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostState {
    /// It is not connected.
    #[default]
    Away,
    /// It is connected, and its clock is measured.
    Joining,
    /// It runs the fragments.
    Running,
    /// It runs them, but lags beyond the patience: nobody waits for it.
    Lagging,
    /// It is connected, and cannot run the fragments.
    Refusing,
}

impl HostState {
    /// The word for it.
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

/// A host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostStatus {
    /// Its name.
    pub name: String,
    /// Where it connected from last.
    pub address: String,
    /// The version of its software.
    pub version: String,
    /// Whether it is there.
    pub state: HostState,
    /// Since when it is connected, in nanoseconds since 1970; 0 where it is not.
    pub since_unix_ns: i64,
    /// Connections so far.
    pub connections: u64,
    /// Why it is away, or refuses.
    pub problem: Option<String>,
    /// How far what is known of it is behind the centre's clock, in nanoseconds; `None` where
    /// nothing is.
    pub lag_ns: Option<i64>,
    /// How far its clock is ahead, as measured last.
    pub clock: Option<Measurement>,
    /// What is added to its clock, in nanoseconds.
    pub correction_ns: i64,
    /// Events that its fragments have seen, since they run.
    pub events: u64,
    /// Rows that came.
    pub rows: u64,
    /// Bytes that came.
    pub bytes: u64,
    /// Events a second, over the last second or so.
    pub events_per_second: f64,
    /// Bytes a second, likewise.
    pub bytes_per_second: f64,
    /// Events that the host missed.
    pub dropped_events: u64,
    /// Rows that the host did not send.
    pub dropped_rows: u64,
    /// Rows and changes that came too late.
    pub late: u64,
}

/// One who was turned away before anybody knew who it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// When, in nanoseconds since 1970.
    pub unix_ns: i64,
    /// Where from.
    pub address: String,
    /// Why.
    pub reason: String,
}

/// All that the centre knows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CentreStatus {
    /// Up to when all is known, in nanoseconds since 1970; 0 at first.
    pub watermark_ns: i64,
    /// The hosts, by name.
    pub hosts: Vec<HostStatus>,
    /// How many were turned away.
    pub refused: u64,
    /// The last of them.
    pub refusals: Vec<Refusal>,
}
