//! The processes of guests.

use serde::{Deserialize, Serialize};

use crate::InsightStatus;
use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Blocking, Endpoint, Query};

/// The processes of guests.
pub const PROCESSES: Endpoint<Blocking, (), ProcessesQuery, (), ProcessesReport> = Endpoint::get(
    "/v1/processes",
    "the [processes](#processes) of all guests or of one: what each has read and written, and what \
     it waits for",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&PROCESSES];

/// Whose processes are listed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessesQuery {
    /// Only the guest with this name, this number or a disk of this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest: Option<String>,
}

impl Query for ProcessesQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[("guest", "NAME")];
}

/// The processes of guests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessesReport {
    /// The time of the report, by the host's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// The time of the report, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// The guests, in the order in which they connected.
    pub guests: Vec<GuestProcesses>,
}

/// The processes of one guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestProcesses {
    /// The guest's number. Each new guest of a daemon has the next number.
    pub number: u64,
    /// The virtual machine of the guest's disks; may be empty.
    pub vm: String,
    /// The names of the guest's disks.
    pub disks: Vec<String>,
    /// The state of the guest's introspection.
    pub insight: InsightStatus,
    /// The time since the guest's boot, in nanoseconds, to about a second; absent if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uptime_ns: Option<u64>,
    /// The time that it took to read the processes, in nanoseconds.
    pub count_ns: u64,
    /// Whether all processes were read. Otherwise the guest changed its lists meanwhile, or there
    /// are too many.
    pub is_whole: bool,
    /// The processes, in the order of their start.
    pub processes: Vec<ProcessInfo>,
}

/// A process of a guest. A number that is not known is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessInfo {
    /// The process number.
    pub process_id: u64,
    /// The number of its parent; 0 if it has none.
    pub parent_id: u64,
    /// The command, at most 15 bytes.
    pub command: String,
    /// The start, in nanoseconds since the guest's boot. Number and start identify a process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_ns: Option<u64>,
    /// The path of its control group; empty if unknown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup: String,
    /// Whether it is a thread of the guest's kernel.
    pub is_kernel: bool,
    /// The number of its threads.
    pub threads: u64,
    /// The bytes that the guest's kernel has read from disks for it and for its children that have
    /// ended, also from disks that are not Fathom's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<u64>,
    /// The bytes that it and its children that have ended have made dirty, and those that they have
    /// written by direct I/O.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirtied_bytes: Option<u64>,
    /// The dirty bytes that it and its children that have ended have removed, by truncating or
    /// deleting files, before they were written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cancelled_bytes: Option<u64>,
    /// The system calls about files in which its threads wait.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<CallInfo>,
}

/// A system call in which a thread waits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CallInfo {
    /// The thread's number.
    pub thread_id: u64,
    /// The name of the call.
    pub call: String,
    /// The file that the call is about; absent for `sync`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<CallFile>,
    /// The file from which a call copies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<CallFile>,
    /// Whether the thread waits for a device or a lock of the kernel, rather than for an event or a
    /// time.
    pub is_uninterruptible: bool,
}

/// A file of a system call. Unknown texts are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CallFile {
    /// The path from the root of the file system.
    pub path: String,
    /// The type of the file system.
    pub file_system: String,
    /// The name that the guest's kernel gives the block device of the file system (`s_id`), or that
    /// of the device that is the file.
    pub device: String,
    /// The file's inode number; 0 if unknown.
    pub inode: u64,
}

impl Client {
    /// The processes of all guests, or of the guest with this name, number or disk.
    ///
    /// # Errors
    /// When there is no answer, or no such guest.
    pub fn processes(&self, guest: Option<&str>) -> Result<ProcessesReport, ClientError> {
        let query = ProcessesQuery { guest: guest.map(str::to_owned) };
        self.ask(&PROCESSES, &(), &query, &())
    }
}
