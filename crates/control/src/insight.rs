//! The state of guests' introspection, and the known meaning of their requests.

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Blocking, Endpoint, Query};
use serde::{Deserialize, Serialize};

/// The slowest recent requests.
pub const SLOW: Endpoint<Blocking, (), SlowQuery, (), SlowReport> = Endpoint::get(
    "/v1/slow",
    "the slowest requests of the last one to two minutes, of all disks or of one",
);

/// The guests whose memory is read.
pub const GUESTS: Endpoint<Blocking, (), (), (), GuestList> = Endpoint::get(
    "/v1/guests",
    "the guests whose memory is read, and the state of the introspection",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&SLOW, &GUESTS];

/// Which slow requests are reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SlowQuery {
    /// Only those of this disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The most requests of each disk; all by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<usize>,
}

impl Query for SlowQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[("disk", "NAME"), ("count", "N")];
}

/// The state of a guest's introspection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InsightState {
    /// The disk has no layer `classify`.
    Off,
    /// No guest runs on the disk.
    #[default]
    NoGuest,
    /// A guest runs. The search for its kernel has not begun.
    Waiting,
    /// The search for the guest's kernel has begun, and has not found it yet.
    Searching,
    /// The guest's kernel is known, and the meaning of requests can be determined.
    Attached,
    /// The meaning of requests cannot be determined. The disk works without it.
    Blind,
}

impl InsightState {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::NoGuest => "no-guest",
            Self::Waiting => "waiting",
            Self::Searching => "searching",
            Self::Attached => "attached",
            Self::Blind => "blind",
        }
    }
}

/// The state of the introspection of a disk's guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InsightStatus {
    /// The state.
    pub state: InsightState,
    /// The reason for the state, as a message for an operator; may be empty.
    pub reason: String,
    /// The kernel's release; empty if it is unknown.
    pub release: String,
    /// The duration of the last search for a kernel, in nanoseconds.
    pub search_ns: u64,
    /// The number of kernels found since the guest was connected: a reboot or a kexec starts
    /// another.
    pub kernels: u64,
    /// The number of requests examined, on all disks of the guest.
    pub requests: u64,
    /// The number of examined requests that did not match the kernel's structures.
    pub mismatches: u64,
    /// The number of modules that were loaded when the kernel was read.
    pub modules: u64,
}

/// A sample of all guests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestList {
    /// The time of the sample, by the host's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// The time of the sample, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// The guests, in the order in which they connected.
    pub guests: Vec<GuestInfo>,
}

/// One guest: the VMM of one or more disks, with the same memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestInfo {
    /// The guest's number. Each new guest of a daemon has the next number.
    pub number: u64,
    /// The virtual machine of the guest's disks; may be empty.
    pub vm: String,
    /// The names of the guest's disks.
    pub disks: Vec<String>,
    /// The size of the guest's memory, in bytes.
    pub memory_bytes: u64,
    /// The state of the guest's introspection.
    pub insight: InsightStatus,
    /// The kernel's counters; `None` if no kernel is known.
    pub counters: Option<GuestCounters>,
    /// The stops of the guest by its interceptor since its kernel was found; absent if it is not
    /// intercepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stops: Option<u64>,
    /// The hooks of the interceptor.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<HookInfo>,
}

/// A hook of a guest's interceptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HookInfo {
    /// What it is for.
    pub of: HookKind,
    /// The stops of the guest there.
    pub stops: u64,
    /// How often the interceptor has taken it away because the guest stopped too often.
    pub removals: u64,
    /// Whether it is away.
    pub is_away: bool,
    /// The time until it is put back, in nanoseconds; 0 if it is in place.
    pub away_ns: u64,
}

/// What a hook of an interceptor is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HookKind {
    /// The writers of pages.
    Writers,
    /// System calls.
    Calls,
    /// A kind of a newer daemon.
    #[default]
    #[serde(other)]
    Unknown,
}

impl HookKind {
    /// The name in JSON and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Writers => "writers",
            Self::Calls => "calls",
            Self::Unknown => "unknown",
        }
    }
}

/// A guest kernel's counters of its memory, in bytes; 0 if a counter cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestCounters {
    /// Dirty pages: data of files that has to be written.
    pub dirty_bytes: u64,
    /// Data of files that is being written.
    pub writeback_bytes: u64,
    /// Data of files in memory.
    pub file_bytes: u64,
    /// Free memory.
    pub free_bytes: u64,
    /// The memory that the kernel manages.
    pub total_bytes: u64,
}

/// The known facts about some bytes of a request. Unknown texts are empty, and unknown numbers 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FactsStatus {
    /// `unknown`, `data`, `metadata`, `journal`, `swap`, `direct`, `directory` or `device`.
    pub kind: String,
    /// The source of the facts: `none`, `flags`, `page`, `bio`, `calls` or `application`.
    pub source: String,
    /// The confidence in the facts: `none`, `likely` or `sure`.
    pub confidence: String,
    /// The lifetime that the application expects of the written data (`RWH_WRITE_LIFE_…`).
    #[serde(skip_serializing_if = "is_zero")]
    pub write_hint: u64,
    /// The file's inode number.
    #[serde(skip_serializing_if = "is_zero")]
    pub inode: u64,
    /// The file's size, in bytes.
    #[serde(skip_serializing_if = "is_zero")]
    pub file_size_bytes: u64,
    /// The file's owner, a user number of the guest.
    #[serde(skip_serializing_if = "is_zero")]
    pub owner: u64,
    /// The file's path from the root of its file system.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// The type of the file system.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub file_system: String,
    /// The name of the block device that the guest's kernel gives the file system (`s_id`).
    #[serde(skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// The path of the control group to which the request is charged.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup: String,
    /// The command of the process.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub process: String,
    /// The number of the process.
    #[serde(skip_serializing_if = "is_zero")]
    pub process_id: u64,
    /// The start of the process, in nanoseconds since the guest's boot, to a hundredth of a second.
    #[serde(skip_serializing_if = "is_zero")]
    pub process_start_ns: u64,
    /// What the process has to do with the request: `submitter`, `waiter` or `writer`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub process_role: String,
    /// The database system of the data: `sqlite`, `innodb` or `postgresql`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub database_system: String,
    /// The part of the database: `table`, `index`, `log` or `other`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub database_part: String,
    /// The number of the table or index within its database.
    #[serde(skip_serializing_if = "is_zero")]
    pub database_index: u64,
}

/// A sample of the slowest requests of disks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlowReport {
    /// The time of the sample, by the host's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// The time of the sample, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// The disks, in order of name.
    pub disks: Vec<DiskSlow>,
}

/// The slowest requests of one disk in the last one to two minutes, the slowest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskSlow {
    /// The disk's name.
    pub name: String,
    /// The virtual machine that the disk belongs to; may be empty.
    pub vm: String,
    /// The requests.
    pub requests: Vec<SlowRequest>,
}

/// A slow request, and how its time was spent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SlowRequest {
    /// The number of the request, as in events and logs.
    pub id: u64,
    /// The queue of the request.
    pub queue: u64,
    /// `read`, `write`, `flush` and so on.
    pub operation: String,
    /// The offset of the request's range, in bytes.
    pub offset: u64,
    /// The length of the request's range, in bytes.
    pub length: u64,
    /// The time of arrival, by the host's monotonic clock, in nanoseconds.
    pub start_ns: u64,
    /// The time of arrival, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// The latency, in nanoseconds.
    pub latency_ns: u64,
    /// The part of the latency that the request spent in layers on its way down; `None` if it is
    /// unknown.
    pub layers_down_ns: Option<u64>,
    /// The part of the latency that the request spent in the back end; `None` if it is unknown.
    pub backend_ns: Option<u64>,
    /// The part of the latency that the request spent in layers on its way up; `None` if it is
    /// unknown.
    pub layers_up_ns: Option<u64>,
    /// The time for which layers have held the request back by their own rules, in nanoseconds; a
    /// part of `layers_down_ns`.
    pub held_ns: u64,
    /// The kind of the last such layer, for example `limit`; empty for none.
    pub held_by: String,
    /// Whether a cache had the data of a read: `hit`, `miss` or `part`; empty if no cache was
    /// asked.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cache_hit: String,
    /// The number of requests in flight in the same queue when the request arrived.
    pub ahead: u64,
    /// The error with which the request failed; empty if it succeeded.
    pub error: String,
    /// The I/O class; `None` if the request has none.
    pub class: Option<u8>,
    /// The guest's I/O priority; 0 if there is none.
    pub io_priority: u16,
    /// The flags that the guest's kernel gave the request: `meta`, `prio`, `sync`, `read-ahead`,
    /// `swap`, `fua`, `flush`, `background`.
    pub flags: Vec<String>,
    /// The facts about most of the request's bytes.
    pub facts: FactsStatus,
    /// The facts about each part, in order, if they differ between parts: the first 16 parts.
    pub parts: Vec<PartStatus>,
    /// The number of parts after the first 16.
    pub parts_left_out: u64,
}

/// The facts about a part of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PartStatus {
    /// The offset of the part, in bytes from the start of the request.
    pub offset: u64,
    /// The length of the part, in bytes.
    pub length: u64,
    /// The facts.
    pub facts: FactsStatus,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Client {
    /// The slowest recent requests, at most `count` of each disk, or only of the disk `disk`.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn slow(&self, disk: Option<&str>, count: usize) -> Result<SlowReport, ClientError> {
        let query = SlowQuery { disk: disk.map(str::to_owned), count: Some(count) };
        self.ask(&SLOW, &(), &query, &())
    }

    /// All guests, each with the state of its introspection.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn guests(&self) -> Result<GuestList, ClientError> {
        self.ask(&GUESTS, &(), &(), &())
    }
}
