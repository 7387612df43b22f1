//! Copies and encryption of guests' files.

use serde::{Deserialize, Serialize};

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Blocking, Endpoint, Query};

/// Copies and encryption of guests' files.
pub const PATTERNS: Endpoint<Blocking, (), PatternsQuery, (), PatternsReport> = Endpoint::get(
    "/v1/patterns",
    "the [copies and encrypted files](#patterns) of all disks with the layer `patterns`, or of one",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&PATTERNS];

/// Whose patterns are listed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PatternsQuery {
    /// Only the disk with this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
}

impl Query for PatternsQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[("disk", "NAME")];
}

/// Copies and encryption of guests' files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PatternsReport {
    /// The time of the report, by the host's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// The time of the report, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// The disks with the layer `patterns`, by name.
    pub disks: Vec<DiskPatterns>,
}

/// What the layer `patterns` of a disk has found since it was added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskPatterns {
    /// The disk.
    pub disk: String,
    /// Its virtual machine; may be empty.
    pub vm: String,
    /// The bytes of files whose content was examined.
    pub examined_bytes: u64,
    /// The bytes of files that the guest encrypts or compresses itself, which were not examined.
    pub transformed_bytes: u64,
    /// The number of copies.
    pub copies_count: u64,
    /// The bytes of all copies.
    pub copied_bytes: u64,
    /// The number of encrypted files.
    pub encrypted_count: u64,
    /// The number of files with random content that nothing else says to be encrypted.
    pub random_count: u64,
    /// The memory of the layer, in bytes.
    pub memory_bytes: u64,
    /// Who encrypts many files now.
    pub in_progress: Vec<EncryptionState>,
    /// The last files that are encrypted or have random content, the newest first: at most 256.
    pub encrypted: Vec<EncryptedFile>,
    /// The last copies, the newest first: at most 256.
    pub copies: Vec<CopiedFile>,
}

/// A file of a pattern. Unknown texts are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PatternFile {
    /// The path from the root of the file system.
    pub path: String,
    /// The type of the file system.
    pub file_system: String,
    /// The name that the guest's kernel gives the block device of the file system.
    pub device: String,
    /// The file's inode number.
    pub inode: u64,
    /// The size in bytes, when it was written.
    pub size: u64,
}

/// A process of a pattern.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PatternProcess {
    /// The process number; 0 if it is unknown, or if several processes have the same command.
    pub process_id: u64,
    /// The command; empty if unknown.
    pub command: String,
    /// The start, in nanoseconds since the guest's boot; 0 if unknown.
    pub start_ns: u64,
    /// The path of the control group; empty if unknown.
    pub cgroup: String,
}

/// Many files are encrypted by one process, or in one control group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EncryptionState {
    /// Who encrypts.
    #[serde(flatten)]
    pub process: PatternProcess,
    /// The time of the first file, by the host's monotonic clock, in nanoseconds.
    pub begun_ns: u64,
    /// The time of the last file.
    pub last_ns: u64,
    /// The number of files.
    pub files: u64,
    /// The bytes that were written into these files.
    pub bytes: u64,
    /// The paths of the first files.
    pub paths: Vec<String>,
}

/// A file that was encrypted, or has random content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EncryptedFile {
    /// The time, by the host's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// The file.
    #[serde(flatten)]
    pub file: PatternFile,
    /// Why it is considered encrypted: `format`, `overwritten`, `converted` or `name`; empty if it
    /// only has random content.
    pub evidence: String,
    /// The path of the file that was encrypted; empty if unknown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub source_path: String,
    /// Who wrote it.
    pub by: PatternProcess,
}

/// A copy of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CopiedFile {
    /// The time of the first page, by the host's monotonic clock, in nanoseconds.
    pub begun_ns: u64,
    /// The time of the last page.
    pub last_ns: u64,
    /// The file that was written.
    pub target: PatternFile,
    /// The file that had the content before.
    pub source: PatternFile,
    /// The bytes that were copied.
    pub bytes: u64,
    /// `call` if a system call has copied it; empty if only the content says so.
    pub evidence: String,
    /// Who wrote the target, or read the source.
    pub by: PatternProcess,
}

impl Client {
    /// The patterns of all disks with the layer `patterns`, or of the disk with this name.
    ///
    /// # Errors
    /// When there is no answer, no such disk, or no such layer.
    pub fn patterns(&self, disk: Option<&str>) -> Result<PatternsReport, ClientError> {
        let query = PatternsQuery { disk: disk.map(str::to_owned) };
        self.ask(&PATTERNS, &(), &query, &())
    }
}
