//! Carrying the load of disks elsewhere while their device is contended.

use crate::client::{Client, ClientError};
use crate::daemon::Done;
use crate::endpoint::{AnyEndpoint, AtOnce, Change, Endpoint, Query};
use serde::{Deserialize, Serialize};

/// The disks whose load can be carried elsewhere.
pub const OFFLOAD: Endpoint<AtOnce, (), OffloadQuery, (), OffloadReport> = Endpoint::get(
    "/v1/offload",
    "the disks whose load can be [carried elsewhere](offload.md), or one of them",
);

/// The last minutes of a disk's forecast.
pub const OFFLOAD_HISTORY: Endpoint<AtOnce, String, (), (), OffloadHistory> = Endpoint::get(
    "/v1/disks/{name}/offload",
    "what the model of the disk's device foresaw in each of the last 1,200 seconds with requests, \
     and what came. 409 if the disk has no layer `offload`",
);

/// Starts or stops the offload of a disk. A start waits until the log has been tried out.
pub const CHANGE_OFFLOAD: Endpoint<Change, String, (), OffloadRequest, OffloadAnswer> =
    Endpoint::post(
        "/v1/disks/{name}/offload",
        "the state after it; a start has tried the log out first, for 5 s at most. The body is \
         `{\"action\": \"start\"}` or `stop`, with `\"dry_run\": true` only to see what would be done. 409 if the disk has no layer `offload`",
    );

/// Removes a volume from a Valkey cluster.
pub const FORGET_VOLUME: Endpoint<Change, (String, String), (), (), Done> = Endpoint::delete(
    "/v1/clusters/{cluster}/volumes/{volume}",
    "a volume is removed from a [Valkey cluster](valkey.md) with all of its content. 409 if a disk \
     of this daemon uses it",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] =
    &[&OFFLOAD, &OFFLOAD_HISTORY, &CHANGE_OFFLOAD, &FORGET_VOLUME];

/// Which disks are reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OffloadQuery {
    /// Only this disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
}

impl Query for OffloadQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[("disk", "NAME")];
}

/// What is done with a disk's load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OffloadAction {
    /// The disk's load is carried elsewhere from now on.
    Start,
    /// The disk's load goes to the disk again, and what was carried is brought home.
    Stop,
}

/// A request to start or stop an offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OffloadRequest {
    /// What is to be done.
    pub action: OffloadAction,
    /// Whether only the answer is wanted: what would be done, and whether it is possible.
    #[serde(default)]
    pub dry_run: bool,
}

/// The state of a disk's offload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OffloadState {
    /// All requests go to the disk, and the log is empty.
    #[default]
    Resting,
    /// Requests are served elsewhere, as far as possible.
    Carrying,
    /// Requests go to the disk again, and what was carried is brought home.
    Returning,
}

impl OffloadState {
    /// The name in JSON and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Resting => "resting",
            Self::Carrying => "carrying",
            Self::Returning => "returning",
        }
    }
}

/// All disks with a layer `offload`, sampled at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OffloadReport {
    /// The time of the sample, by the host's monotonic clock, in nanoseconds: for intervals.
    pub time_ns: u64,
    /// The time of the sample, in nanoseconds since 1970: for display.
    pub unix_time_ns: u64,
    /// The disks.
    pub disks: Vec<OffloadDisk>,
}

/// A disk with a layer `offload`. Counts begin when the disk is served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OffloadDisk {
    /// The disk's name.
    pub disk: String,
    /// Its virtual machine; empty if it is unknown.
    pub vm: String,
    /// What happens now.
    pub state: OffloadState,
    /// What is carried: `reads`, `writes` or `both`.
    pub carries: String,
    /// Why the load is carried: `hand`, `forecast`, or empty.
    pub by: String,
    /// Since when the disk has its state, in nanoseconds since 1970; 0 if it is unknown.
    pub since_unix_time_ns: u64,
    /// How often the load has been carried.
    pub starts: u64,
    /// Bytes of the log in use: changes that are not at home.
    pub log_used_bytes: u64,
    /// Bytes of the log.
    pub log_size_bytes: u64,
    /// Bytes of the copies of blocks that are read often.
    pub copies_used_bytes: u64,
    /// The most bytes of such copies.
    pub copies_size_bytes: u64,
    /// Changes that went to the log.
    pub carried: u64,
    /// Reads that were served from copies.
    pub hits: u64,
    /// Changes that went straight home while the log was not empty.
    pub bypassed: u64,
    /// Copies that had to be dropped because their content was wrong or unreadable.
    pub damaged: u64,
    /// The error after which the log takes no changes; empty if there is none.
    pub failure: String,
    /// What the model of the disk's device says; `None` if the device is not observed.
    pub forecast: Option<OffloadForecast>,
}

/// The response times of a disk at its device, as they are and as a model foresees them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OffloadForecast {
    /// The devices beneath the disk.
    pub devices: Vec<String>,
    /// `learning`, `calm`, `foreseen` or `contended`.
    pub state: String,
    /// Requests of the disk that arrive in a second.
    pub arrivals_per_second: f64,
    /// The device's parallelism, as fitted; 0 if it is unknown.
    pub parallelism: f64,
    /// The mean response time in the last window, in nanoseconds.
    pub observed_mean_ns: u64,
    /// The 90th percentile in the last window, in nanoseconds.
    pub observed_p90_ns: u64,
    /// The mean response time with a tenth more requests, by the model, in nanoseconds.
    pub predicted_mean_ns: u64,
    /// The 90th percentile with a tenth more requests, by the model, in nanoseconds.
    pub predicted_p90_ns: u64,
    /// The mean response time at low load, in nanoseconds; 0 if it is unknown.
    pub low_mean_ns: u64,
    /// The 90th percentile at low load, in nanoseconds; 0 if it is unknown.
    pub low_p90_ns: u64,
    /// The model's relative error, as a part of one.
    pub error: f64,
    /// Whether a peak is foreseen or observed.
    pub is_peak: bool,
    /// What says so: `model` or `observed`.
    pub source: String,
}

/// What a model foresaw of a disk's device in a second, and what came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OffloadSample {
    /// The time, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// Requests of the disk that arrived in a second.
    pub arrivals_per_second: f64,
    /// The mean response time, in nanoseconds.
    pub observed_mean_ns: u64,
    /// The 90th percentile, in nanoseconds.
    pub observed_p90_ns: u64,
    /// The mean with a tenth more requests, by the model, in nanoseconds; 0 if the model knows
    /// none.
    pub predicted_mean_ns: u64,
    /// The 90th percentile with a tenth more requests, by the model, in nanoseconds; 0 if the model
    /// knows none.
    pub predicted_p90_ns: u64,
    /// The 90th percentile at low load, in nanoseconds; 0 if it is unknown.
    pub low_p90_ns: u64,
    /// The model's relative error, as a part of one.
    pub error: f64,
    /// Whether a peak was foreseen or observed.
    pub is_peak: bool,
    /// Whether the disk was carried.
    pub is_carried: bool,
}

/// The last minutes of a disk's forecast.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OffloadHistory {
    /// The disk's name.
    pub disk: String,
    /// The devices beneath it.
    pub devices: Vec<String>,
    /// A sample of each second with requests, oldest first.
    pub samples: Vec<OffloadSample>,
}

/// The answer to a request to start or stop an offload.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OffloadAnswer {
    /// The disk as it is afterwards.
    pub disk: OffloadDisk,
    /// Whether anything has changed, or would change.
    pub is_changed: bool,
    /// Whether nothing was done, because only the answer was wanted.
    pub dry_run: bool,
}

impl Client {
    /// The disks whose load can be carried elsewhere, or only the disk `disk`.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn offload(&self, disk: Option<&str>) -> Result<OffloadReport, ClientError> {
        let query = OffloadQuery { disk: disk.map(str::to_owned) };
        self.ask(&OFFLOAD, &(), &query, &())
    }

    /// The last minutes of a disk's forecast.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, or the disk has no layer `offload`.
    pub fn offload_history(&self, disk: &str) -> Result<OffloadHistory, ClientError> {
        self.ask(&OFFLOAD_HISTORY, &disk.to_owned(), &(), &())
    }

    /// Removes a volume from a cluster.
    ///
    /// # Errors
    /// When there is no answer, no such cluster, or the volume is in use.
    pub fn forget_volume(&self, cluster: &str, volume: &str) -> Result<Done, ClientError> {
        self.ask(&FORGET_VOLUME, &(cluster.to_owned(), volume.to_owned()), &(), &())
    }

    /// Starts or stops the offload of a disk.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, or the disk has no layer `offload`.
    pub fn change_offload(
        &self,
        disk: &str,
        request: OffloadRequest,
    ) -> Result<OffloadAnswer, ClientError> {
        self.ask(&CHANGE_OFFLOAD, &disk.to_owned(), &(), &request)
    }
}
