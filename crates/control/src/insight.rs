//! What is known of guests and of what their requests mean.

use serde::{Deserialize, Serialize};

/// How far a guest has been understood.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InsightState {
    /// The disk is not to find out what requests mean.
    Off,
    /// No guest runs on the disk.
    #[default]
    NoGuest,
    /// A guest runs, and nobody has looked at it yet.
    Waiting,
    /// Its kernel is looked for, and not found yet.
    Searching,
    /// Its kernel is known, and its requests are understood.
    Attached,
    /// Its requests cannot be understood; the disk goes on without.
    Blind,
}

impl InsightState {
    /// The word for it.
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

/// How far the guest of a disk has been understood.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InsightStatus {
    /// How far.
    pub state: InsightState,
    /// Why it is no further, in words for an operator; may be empty.
    pub reason: String,
    /// The kernel's release; empty where none is known.
    pub release: String,
    /// How long the last search for a kernel took, in nanoseconds.
    pub search_ns: u64,
    /// Kernels found since the guest was connected: a reboot or a kexec brings another.
    pub kernels: u64,
    /// Requests that were looked at, on all disks of the guest.
    pub requests: u64,
    /// Requests of those that did not lie in the kernel's structures as they should.
    pub mismatches: u64,
    /// Kernel modules that were read.
    pub modules: u64,
}

/// All guests at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestList {
    /// When, by the host's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// When, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// In the order in which they came.
    pub guests: Vec<GuestInfo>,
}

/// One guest: the VMM of one or more disks, with the same memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestInfo {
    /// Counts guests up while the daemon runs.
    pub number: u64,
    /// The virtual machine that its disks belong to; may be empty.
    pub vm: String,
    /// Its disks.
    pub disks: Vec<String>,
    /// Its memory, in bytes.
    pub memory_bytes: u64,
    /// How far it has been understood.
    pub insight: InsightStatus,
    /// What its kernel counts; `None` where there is none.
    pub counters: Option<GuestCounters>,
}

/// What a guest's kernel counts of its memory, in bytes; 0 where that cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestCounters {
    /// Data of files that is yet to be written.
    pub dirty_bytes: u64,
    /// Data that is being written.
    pub writeback_bytes: u64,
    /// Data of files in memory.
    pub file_bytes: u64,
    /// Memory that nothing uses.
    pub free_bytes: u64,
    /// Memory that the kernel manages.
    pub total_bytes: u64,
}

/// What is known of some bytes. Texts are empty and numbers 0 where nothing is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FactsStatus {
    /// `unknown`, `data`, `metadata`, `journal`, `swap`, `direct`, `directory` or `device`.
    pub kind: String,
    /// Where that was learnt: `none`, `flags`, `page`, `bio`, `calls` or `application`.
    pub source: String,
    /// How sure it is: `none`, `likely` or `sure`.
    pub confidence: String,
    /// The lifetime that the application expects of what it writes (`RWH_WRITE_LIFE_…`).
    #[serde(skip_serializing_if = "is_zero")]
    pub write_hint: u64,
    /// The file's number in its file system.
    #[serde(skip_serializing_if = "is_zero")]
    pub inode: u64,
    /// Its size in bytes.
    #[serde(skip_serializing_if = "is_zero")]
    pub file_size_bytes: u64,
    /// Its owner, a user number of the guest.
    #[serde(skip_serializing_if = "is_zero")]
    pub owner: u64,
    /// Its path from the root of its file system.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// The type of the file system.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub file_system: String,
    /// The block device that it names itself by.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// The path of the control group that is charged.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup: String,
    /// The command of the process.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub process: String,
    /// Its number.
    #[serde(skip_serializing_if = "is_zero")]
    pub process_id: u64,
}

/// The slowest requests of disks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlowReport {
    /// When, by the host's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// When, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// The disks, in order of name.
    pub disks: Vec<DiskSlow>,
}

/// The slowest requests of one disk in the last minute or two, the slowest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskSlow {
    /// The disk's name.
    pub name: String,
    /// The virtual machine that it belongs to; may be empty.
    pub vm: String,
    /// The requests.
    pub requests: Vec<SlowRequest>,
}

/// A request that was slow, and where its time went.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SlowRequest {
    /// Its number, as in events and logs.
    pub id: u64,
    /// The queue that it came through.
    pub queue: u64,
    /// `read`, `write`, `flush` and so on.
    pub operation: String,
    /// Where its range begins, in bytes.
    pub offset: u64,
    /// How long its range is, in bytes.
    pub length: u64,
    /// When it came, by the host's monotonic clock, in nanoseconds.
    pub start_ns: u64,
    /// When it came, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// How long it took, in nanoseconds.
    pub latency_ns: u64,
    /// How much of that it spent in layers on its way down, where that is known.
    pub layers_down_ns: Option<u64>,
    /// How much in the back end.
    pub backend_ns: Option<u64>,
    /// How much in layers on its way back.
    pub layers_up_ns: Option<u64>,
    /// Requests that were under way in the same queue when it came.
    pub ahead: u64,
    /// Why it failed; empty where it succeeded.
    pub error: String,
    /// The I/O class, where there is one.
    pub class: Option<u8>,
    /// The guest's I/O priority; 0 is none.
    pub io_priority: u16,
    /// How the guest's kernel marked it: `meta`, `prio`, `sync`, `read-ahead`, `swap`, `fua`,
    /// `flush`, `background`.
    pub flags: Vec<String>,
    /// What is known of most of its bytes.
    pub facts: FactsStatus,
    /// What is known part by part, in order, where that is not the same for all: the first 16.
    pub parts: Vec<PartStatus>,
    /// How many parts were left out.
    pub parts_left_out: u64,
}

/// What is known of a part of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PartStatus {
    /// Where it begins, in bytes from the start of the request.
    pub offset: u64,
    /// How long it is, in bytes.
    pub length: u64,
    /// What is known.
    pub facts: FactsStatus,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}
