//! The background work of the disks' layers.

use serde::{Deserialize, Serialize};

use crate::Histogram;
use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, AtOnce, Endpoint};

/// The background work on all devices.
pub const BACKGROUND: Endpoint<AtOnce, (), (), (), BackgroundList> = Endpoint::get(
    "/v1/background",
    "the [background work](shared-disks.md#background-work) of the disks' layers",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&BACKGROUND];

/// The background work on all devices, sampled at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackgroundList {
    /// The time of the sample, by the host's monotonic clock, in nanoseconds: for intervals.
    pub time_ns: u64,
    /// The time of the sample, in nanoseconds since 1970: for display.
    pub unix_time_ns: u64,
    /// The devices beneath disks with background work.
    pub devices: Vec<BackgroundDevice>,
}

/// A device, or a set of devices beneath the same disks, with background work. The counts begin
/// when its first disk with such work is served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackgroundDevice {
    /// The names of the devices.
    pub devices: Vec<String>,
    /// Whether no guest uses the device now.
    pub is_idle: bool,
    /// The guests' requests in flight at the device.
    pub in_flight: u64,
    /// The time without guests' requests in flight, in nanoseconds.
    pub idle_ns: u64,
    /// The time with guests' requests in flight, in nanoseconds.
    pub busy_ns: u64,
    /// The lengths of the idle periods that have ended, in nanoseconds.
    pub idle_periods: Histogram,
    /// The rule that predicts how long the device stays idle.
    pub predictor: String,
    /// The work that waits or runs.
    pub waiting: Vec<WaitingWork>,
    /// Steps of work that have begun.
    pub steps: u64,
    /// Steps among these that began because of their deadline.
    pub forced_steps: u64,
    /// The bytes of the steps.
    pub bytes: u64,
    /// The expected duration of a step, in nanoseconds.
    pub step_ns: u64,
    /// Idle time while work waited or ran, in nanoseconds.
    pub offered_ns: u64,
    /// The part of it during which a step ran, in nanoseconds.
    pub used_ns: u64,
    /// Guests' requests that came during a step.
    pub met_requests: u64,
    /// Steps during which a request came.
    pub met_steps: u64,
    /// How long these steps still took after the request came, in nanoseconds: requests were
    /// delayed by at most this long.
    pub met_ns: u64,
}

/// The background work of a layer in one queue of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WaitingWork {
    /// The disk's name.
    pub disk: String,
    /// The kind of the layer.
    pub layer: String,
    /// The bytes to move.
    pub bytes: u64,
    /// How long until all of it has to be done, in nanoseconds.
    pub deadline_in_ns: u64,
    /// Whether a step of it runs.
    pub is_running: bool,
}

impl Client {
    /// The background work of the disks' layers.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn background(&self) -> Result<BackgroundList, ClientError> {
        self.ask(&BACKGROUND, &(), &(), &())
    }
}
