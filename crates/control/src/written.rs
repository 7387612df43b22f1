//! Which files of a guest were written between two snapshots.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::client::{Client, ClientError};
use crate::endpoint::{Blocking, Endpoint, Query};

/// The files that were written between two snapshots.
pub const WRITTEN_FILES: Endpoint<Blocking, (), WrittenFilesQuery, (), WrittenFiles> =
    Endpoint::get(
        "/v1/stores/files",
        "the [files of the guest](#pools) that were written between two snapshots of a disk's \
         volume, or since a snapshot. 404 if no disk of the daemon uses the pool",
    );

/// Which snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WrittenFilesQuery {
    /// The pool's file or device.
    pub path: PathBuf,
    /// The volume.
    pub volume: String,
    /// The earlier snapshot.
    pub from: String,
    /// The later snapshot. Without one, now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

impl Query for WrittenFilesQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] =
        &[("path", "POOL"), ("volume", "NAME"), ("from", "SNAPSHOT"), ("to", "SNAPSHOT")];
}

/// What was written to files of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WrittenFiles {
    /// Whether all of the time is accounted for. Nothing is known of the time in which the daemon
    /// did not serve the disk, or served it without the layer `classify`.
    pub complete: bool,
    /// All bytes that the guest wrote, as far as they were counted.
    pub written_bytes: u64,
    /// Those of them of which the file is not known.
    pub unknown_bytes: u64,
    /// Those of them of files that are not listed, because others were written more.
    pub other_bytes: u64,
    /// The files, the most written ones first.
    pub files: Vec<WrittenFile>,
}

/// A file that was written, or other data of a file system.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct WrittenFile {
    /// The path from the root of its file system; empty for data that is in no file, such as a
    /// journal.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// What it is: `data`, `metadata`, `journal`, `swap`, `direct`, `directory` or `device`.
    pub kind: String,
    /// The control group that wrote it; `/` is the root group.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup: String,
    /// The guest's name of the device with the file system.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// The bytes that were written to it. What was written twice counts twice.
    pub bytes: u64,
}

impl Client {
    /// The files that were written between two snapshots, or since a snapshot.
    ///
    /// # Errors
    /// If there is no answer, no disk uses the pool, or it has no such snapshot.
    pub fn written_files(&self, query: &WrittenFilesQuery) -> Result<WrittenFiles, ClientError> {
        let path = query.path.canonicalize().unwrap_or_else(|_| query.path.clone());
        self.ask(&WRITTEN_FILES, &(), &WrittenFilesQuery { path, ..query.clone() }, &())
    }
}
