//! The devices beneath the disks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Histogram;
use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Blocking, Endpoint};

/// The devices beneath the disks. The search for them waits for file systems, for a limited time.
pub const DEVICES: Endpoint<Blocking, (), (), (), DeviceList> = Endpoint::get(
    "/v1/devices",
    "the [devices beneath the disks](shared-disks.md#the-devices-beneath), and their activity",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&DEVICES];

/// The devices beneath all disks, sampled at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceList {
    /// The time of the sample, by the host's monotonic clock, in nanoseconds: for intervals.
    pub time_ns: u64,
    /// The time of the sample, in nanoseconds since 1970: for display.
    pub unix_time_ns: u64,
    /// The devices, in order of kind and name.
    pub devices: Vec<DeviceStatus>,
}

/// A device beneath disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceStatus {
    /// Its name in `/sys/block`; the type of a network file system; the name of a model.
    pub name: String,
    /// `device`, `model`, `memory`, `network` or `unknown`.
    pub kind: String,
    /// Its size, in bytes; 0 if it is unknown.
    pub size_bytes: u64,
    /// Whether it rotates; null if that is unknown.
    pub rotational: Option<bool>,
    /// The disks whose image lies on it, at least in part.
    pub disks: Vec<String>,
    /// The disks whose log lies on it.
    pub logs: Vec<String>,
    /// The devices between the images and this one: partitions, logical volumes, loop devices.
    pub through: Vec<String>,
    /// Why the devices of its disks are not known, or not all of them; one text for each disk.
    pub problems: Vec<String>,
    /// The requests of its disks in flight. A disk without a tap is not counted.
    pub in_flight: u64,
    /// The disks with requests in flight, and how many.
    pub in_flight_of: BTreeMap<String, u64>,
    /// Its idle time; null if it is not observed, because no layer of its disks has background
    /// work.
    pub idle_time: Option<DeviceIdle>,
    /// The activity of all programs of the host; null if the kernel does not count it.
    pub host: Option<DeviceActivity>,
}

/// The idle time of a device, or of a set of devices beneath the same disks: the time in which no
/// guest has requests in flight. It is counted while a layer of its disks has background work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceIdle {
    /// The names of the devices.
    pub devices: Vec<String>,
    /// Whether no guest uses them now.
    pub is_idle: bool,
    /// The idle time, in nanoseconds.
    pub idle_ns: u64,
    /// The rest of the time, in nanoseconds.
    pub busy_ns: u64,
    /// The lengths of the idle periods that have ended, in nanoseconds.
    pub periods: Histogram,
}

/// What all programs of the host do with a device. The counts begin when the host boots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceActivity {
    /// Requests in flight.
    pub in_flight: u64,
    /// Completed reads. The kernel may have merged several into one.
    pub reads: u64,
    /// The bytes of these.
    pub read_bytes: u64,
    /// Completed writes.
    pub writes: u64,
    /// The bytes of these.
    pub written_bytes: u64,
    /// Completed discards.
    pub discards: u64,
    /// Completed flushes.
    pub flushes: u64,
    /// The time during which requests were in flight, in milliseconds.
    pub busy_ms: u64,
    /// Requests in flight, integrated over time, in milliseconds.
    pub depth_ms: u64,
}

impl DeviceList {
    /// The device of a kind with a name.
    pub fn device(&self, kind: &str, name: &str) -> Option<&DeviceStatus> {
        self.devices.iter().find(|device| device.kind == kind && device.name == name)
    }
}

impl DeviceActivity {
    /// The growth of the counts since the sample `before`. `in_flight` stays the current number.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            in_flight: self.in_flight,
            reads: self.reads.saturating_sub(before.reads),
            read_bytes: self.read_bytes.saturating_sub(before.read_bytes),
            writes: self.writes.saturating_sub(before.writes),
            written_bytes: self.written_bytes.saturating_sub(before.written_bytes),
            discards: self.discards.saturating_sub(before.discards),
            flushes: self.flushes.saturating_sub(before.flushes),
            busy_ms: self.busy_ms.saturating_sub(before.busy_ms),
            depth_ms: self.depth_ms.saturating_sub(before.depth_ms),
        }
    }
}

impl Client {
    /// The devices beneath the disks, and their activity.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn devices(&self) -> Result<DeviceList, ClientError> {
        self.ask(&DEVICES, &(), &(), &())
    }
}
