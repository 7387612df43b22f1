//! How long what guests write lives.

use serde::{Deserialize, Serialize};

use crate::Histogram;
use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Blocking, Endpoint, Query};

/// How long what guests write lives.
pub const LIFETIMES: Endpoint<Blocking, (), LifetimesQuery, (), LifetimesReport> = Endpoint::get(
    "/v1/lifetimes",
    "the [lifetimes](#lifetimes) of what guests write, of all disks with the layer `lifetimes`, or of one",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&LIFETIMES];

/// Whose lifetimes are listed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LifetimesQuery {
    /// Only the disk with this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
}

impl Query for LifetimesQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[("disk", "NAME")];
}

/// How long what guests write lives.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LifetimesReport {
    /// The time of the report, by the host's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// The time of the report, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// The disks with the layer `lifetimes`, by name.
    pub disks: Vec<DiskLifetimes>,
}

/// The lifetimes of a disk's content since the layer `lifetimes` was added.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskLifetimes {
    /// The disk.
    pub disk: String,
    /// Its virtual machine; may be empty.
    pub vm: String,
    /// The time of the first write, by the host's monotonic clock, in nanoseconds: nothing can have
    /// lived for longer on the disk.
    pub begun_ns: u64,
    /// The share of all blocks that are followed, from 0 to 1. All numbers of bytes are for all
    /// blocks, and estimates if the share is less than 1.
    pub share: f64,
    /// The number of blocks that are followed.
    pub blocks: u64,
    /// The number of files with such blocks.
    pub files: u64,
    /// The bytes that live.
    pub living_bytes: u64,
    /// The groups, that of the disk first.
    pub groups: Vec<LifetimesGroup>,
}

/// What the blocks of a group have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupedBy {
    /// The disk.
    #[default]
    Disk,
    /// The kind of data.
    Kind,
    /// The control group that is charged.
    Container,
    /// The ending of the file's name.
    Ending,
}

/// The lifetimes of a group's blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LifetimesGroup {
    /// What the blocks have in common.
    pub by: GroupedBy,
    /// The kind, the path of the control group, or the ending. Empty if it is unknown, or if there
    /// is none; `*` for those beyond the first 64.
    pub name: String,
    /// The bytes that were written.
    pub born_bytes: u64,
    /// The bytes that were written again in the same place.
    pub overwritten_bytes: u64,
    /// The bytes whose file became shorter.
    pub truncated_bytes: u64,
    /// The bytes whose file was deleted.
    pub deleted_bytes: u64,
    /// The bytes that the guest discarded.
    pub discarded_bytes: u64,
    /// The bytes that were written for another file: they had died at an unknown time before.
    pub reused_bytes: u64,
    /// The lifetimes in nanoseconds, each counted with its bytes.
    pub lifetimes: Histogram,
    /// The lifetimes that overwritten blocks alone show, counted likewise.
    pub naive_lifetimes: Histogram,
}

impl Client {
    /// The lifetimes of what guests write, of all disks with the layer `lifetimes`, or of the disk
    /// with this name.
    ///
    /// # Errors
    /// When there is no answer, no such disk, or no such layer.
    pub fn lifetimes(&self, disk: Option<&str>) -> Result<LifetimesReport, ClientError> {
        let query = LifetimesQuery { disk: disk.map(str::to_owned) };
        self.ask(&LIFETIMES, &(), &query, &())
    }
}
