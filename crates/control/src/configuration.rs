//! How a running daemon differs from its configuration file.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::client::{Client, ClientError};
use crate::daemon::ReloadReport;
use crate::definition::DiskDefinition;
use crate::endpoint::{AnyEndpoint, Blocking, Change, Endpoint};

/// How the running disks differ from the configuration file. The file and the records are read.
pub const CONFIGURATION: Endpoint<Blocking, (), (), (), ConfigurationReport> = Endpoint::get(
    "/v1/configuration",
    "how the running disks [differ](state.md) from the configuration file as it is now",
);

/// Brings disks back to what the configuration file said when it was read last.
pub const REVERT: Endpoint<Change, (), (), RevertRequest, ReloadReport> = Endpoint::post(
    "/v1/configuration/revert",
    "a disk, or without `disk` all, are brought back to what the file said when it was read last. \
     409 if the disk has no change in use",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&CONFIGURATION, &REVERT];

/// The differences between the configuration file and the running daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConfigurationReport {
    /// The path of the configuration file, if there is one. Without a file, the flags of the
    /// daemon take its place.
    pub file: Option<String>,
    /// Why the file cannot be read now; the differences are then those from the file as it was read
    /// last. Empty if it can be read.
    #[serde(default)]
    pub file_problem: String,
    /// The folder of the records of changes in use.
    pub folder: String,
    /// Why no change in use can be recorded now; empty if it can.
    #[serde(default)]
    pub folder_problem: String,
    /// The disks that differ, in order of name.
    pub disks: Vec<Deviation>,
    /// The changes that were set aside, because the file was edited or should apply.
    pub set_aside: Vec<SetAside>,
    /// The records that cannot be used: the disk, as far as it is known, and the reason. These
    /// disks are not served.
    #[serde(default)]
    pub damaged: Vec<(String, String)>,
}

/// How a disk differs from the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviationKind {
    /// It is served, and the file does not have it.
    Added,
    /// Its definition is another one.
    Changed,
    /// The file has it, and it was removed.
    Removed,
}

impl DeviationKind {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Changed => "changed",
            Self::Removed => "removed",
        }
    }
}

/// A disk that differs from the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Deviation {
    /// The disk's name.
    pub disk: String,
    /// How it differs.
    pub kind: DeviationKind,
    /// Whether the next start serves it as it is now.
    pub lasting: bool,
    /// The keys that differ, for a disk that is changed.
    #[serde(default)]
    pub keys: Vec<KeyDeviation>,
    /// The definition of the running disk.
    #[serde(default)]
    pub definition: Option<DiskDefinition>,
}

/// A key with another value than in the file. `null` stands for an absent key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeyDeviation {
    /// The key.
    pub key: String,
    /// The value in the file.
    pub file: Value,
    /// The value of the running disk.
    pub running: Value,
}

/// A change in use that does not apply any more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SetAside {
    /// The disk's name.
    pub disk: String,
    /// The path of the record.
    pub record: String,
    /// What the disk was; `None` if it was removed.
    pub definition: Option<DiskDefinition>,
}

/// A request to go back to the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RevertRequest {
    /// The disk; all disks if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Whether a disk that was added is removed even while a VMM or an NBD client uses it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

impl Client {
    /// How the running daemon differs from its configuration file.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn configuration(&self) -> Result<ConfigurationReport, ClientError> {
        self.ask(&CONFIGURATION, &(), &(), &())
    }

    /// Brings a disk, or all, back to what the configuration file says.
    ///
    /// # Errors
    /// When there is no answer, or the disk has no change in use.
    pub fn revert(&self, request: &RevertRequest) -> Result<ReloadReport, ClientError> {
        self.ask(&REVERT, &(), &(), request)
    }
}
