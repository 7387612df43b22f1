//! The dirty pages of guests.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::InsightStatus;
use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Endpoint, Query, Waiting};

/// The dirty pages of guests.
pub const DIRTY: Endpoint<Waiting, (), DirtyQuery, (), DirtyReport> = Endpoint::get(
    "/v1/dirty",
    "the [dirty pages](#dirty-pages) of all guests or of one, by device, and the N files with the \
     most of them",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&DIRTY];

/// Whose dirty pages are counted, and what beside them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DirtyQuery {
    /// Only the guest with this name, this number or a disk of this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest: Option<String>,
    /// The number of files to list of each guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<usize>,
    /// Whether the pages that processes have changed through mappings are counted.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mapped: bool,
    /// The stride with which the marks in page tables are counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tables: Option<u64>,
    /// The interval in which written pages are counted, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub written_ms: Option<u64>,
}

impl Query for DirtyQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[
        ("guest", "NAME"),
        ("files", "N"),
        ("mapped", "true"),
        ("tables", "STRIDE"),
        ("written_ms", "T"),
    ];

    fn wait(&self) -> Duration {
        Duration::from_millis(self.written_ms.unwrap_or(0))
    }
}

/// What is counted beside the dirty pages of guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirtyRequest {
    /// The number of files to list of each guest.
    pub files: Option<usize>,
    /// Whether the pages that processes have changed through mappings are counted.
    pub mapped: bool,
    /// The stride with which the marks in page tables are counted.
    pub tables: Option<u64>,
    /// The interval in which written pages are counted, in milliseconds.
    pub written_ms: Option<u64>,
}

/// A count of the dirty pages of guests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirtyReport {
    /// The time of the count, by the host's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// The time of the count, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// The guests, in the order in which they connected.
    pub guests: Vec<GuestDirty>,
}

/// The dirty pages of one guest: data in its memory that it has not written yet. A number that is
/// not known is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestDirty {
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
    /// The dirty pages, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_bytes: Option<u64>,
    /// The pages that are being written, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writeback_bytes: Option<u64>,
    /// `Dirty` of the guest's `/proc/meminfo`, in bytes: without the pages that each processor
    /// counts by itself before it adds them to the common counter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shown_dirty_bytes: Option<u64>,
    /// `Writeback` of the guest's `/proc/meminfo`, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shown_writeback_bytes: Option<u64>,
    /// The time of this count, in nanoseconds.
    pub count_ns: u64,
    /// The dirty pages by device of the guest: devices with dirty pages, and devices on Fathom's
    /// disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<DeviceDirty>>,
    /// The pages of files that processes have changed through mappings, if they were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mapped: Option<MappedDirty>,
    /// The pages that programs have written by the marks in page tables, if they were requested;
    /// also for guests that are not understood.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tables: Option<TablesDirty>,
    /// The pages that were written in an interval, if they were requested; also for guests that are
    /// not understood.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub written: Option<WrittenDirty>,
    /// The files with dirty pages, if they were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<FilesDirty>,
}

/// The dirty pages for one device of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceDirty {
    /// The guest kernel's name of the device: a disk with its partitions, a logical volume, or a
    /// file system with several devices (`btrfs-1`).
    pub name: String,
    /// Dirty pages, in bytes.
    pub dirty_bytes: u64,
    /// Pages that are being written, in bytes.
    pub writeback_bytes: u64,
    /// The disks of this daemon that the device lies on.
    pub disks: Vec<String>,
    /// Whether the device also lies on disks of another kind, or on disks that are not known yet
    /// because they have had no request.
    pub lies_elsewhere: bool,
}

/// The pages of files that processes of a guest have changed through mappings. The guest's kernel
/// counts them as dirty like others when they are changed first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MappedDirty {
    /// The pages that the guest's page tables mark as written, in bytes.
    pub marked_bytes: u64,
    /// Those of them that the guest's kernel does not count as dirty, in bytes.
    pub unknown_bytes: u64,
    /// The number of processes that were examined.
    pub processes: u64,
    /// Whether all mappings were examined. Otherwise the guest changed them meanwhile, or there are
    /// too many.
    pub is_whole: bool,
    /// The time of this count, in nanoseconds.
    pub count_ns: u64,
}

/// The pages that the programs of a guest have written, by the marks in its page tables, including
/// private memory and pages that have been written to a disk since.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TablesDirty {
    /// The marked entries, in bytes of their pages, multiplied by the stride.
    pub marked_bytes: u64,
    /// The standard error of this number, in bytes, estimated from the sample. Absent if the sample
    /// has no page table, which says nothing about the rest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_bytes: Option<u64>,
    /// One page of so many was examined, from another one on each time.
    pub stride: u64,
    /// The number of page tables that were found.
    pub tables: u64,
    /// The number of pages of memory that were examined.
    pub examined: u64,
    /// Whether the whole sample was examined. Otherwise the time was over, and the numbers are
    /// those of a part of the memory.
    pub is_whole: bool,
    /// The time of this count, in nanoseconds.
    pub count_ns: u64,
}

/// The pages of a guest that were written in an interval, by the content of a sample of its pages,
/// and the bytes that its disks have read and written meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WrittenDirty {
    /// The interval, in nanoseconds.
    pub interval_ns: u64,
    /// The pages whose content has changed, in bytes: written by programs, by the kernel, or by
    /// disks whose data was read.
    pub changed_bytes: u64,
    /// The standard error of this number, in bytes, estimated from the sample.
    pub error_bytes: u64,
    /// The bytes that were read from the guest's disks. Absent if a disk has no tap, like the next
    /// two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<u64>,
    /// The bytes that were written to the guest's disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub written_bytes: Option<u64>,
    /// The changed bytes less those that were read and written: the growth of the data in memory
    /// that is not on the disks, private memory included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_bytes: Option<u64>,
    /// One page of so many is in the sample.
    pub stride: u64,
    /// The number of pages in the sample.
    pub examined: u64,
    /// Whether the whole sample was examined. Otherwise the time was over, and the numbers are
    /// those of a part of the memory.
    pub is_whole: bool,
    /// The time of both samples, in nanoseconds.
    pub count_ns: u64,
}

/// The files of a guest that have dirty pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FilesDirty {
    /// The files with the most dirty pages first.
    pub files: Vec<FileDirty>,
    /// The dirty pages of all files, including those that are not listed, in bytes.
    pub dirty_bytes: u64,
    /// Whether all files were found. Otherwise the guest changed its lists meanwhile, or there are
    /// too many files.
    pub is_whole: bool,
    /// The time of this count, in nanoseconds.
    pub count_ns: u64,
}

/// The dirty pages of one file. Unknown texts are empty, and unknown numbers 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FileDirty {
    /// `data`, `directory`, `metadata` or `device`.
    pub kind: String,
    /// The path from the root of the file system; empty for metadata and devices.
    pub path: String,
    /// The type of the file system.
    pub file_system: String,
    /// The name that the guest's kernel gives the block device of the file system (`s_id`).
    pub device: String,
    /// The file's inode number.
    pub inode: u64,
    /// The file's size, in bytes.
    pub file_size_bytes: u64,
    /// The file's dirty pages, in bytes.
    pub dirty_bytes: u64,
}

impl Client {
    /// Counts the dirty pages of all guests, or of the guest with this name, number or disk.
    ///
    /// # Errors
    /// When there is no answer, or no such guest.
    pub fn dirty(
        &self,
        guest: Option<&str>,
        request: DirtyRequest,
    ) -> Result<DirtyReport, ClientError> {
        let DirtyRequest { files, mapped, tables, written_ms } = request;
        let guest = guest.map(str::to_owned);
        self.ask(&DIRTY, &(), &DirtyQuery { guest, files, mapped, tables, written_ms }, &())
    }
}
