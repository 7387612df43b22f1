//! Making a guest write its dirty data.

use std::fmt;

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Change, Endpoint};
use serde::{Deserialize, Serialize};

/// Makes a guest write its dirty data.
pub const FLUSH_GUEST: Endpoint<Change, String, (), FlushRequest, FlushReport> = Endpoint::post(
    "/v1/guests/{vm}/flush",
    "when the guest has [written its dirty \
     data](shared-disks.md#making-a-guest-write-its-dirty-data). 422 if the configuration does not \
     allow it",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&FLUSH_GUEST];

/// A way to make a guest write its dirty data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlushWay {
    /// The key combination of the kernel's emergency sync, sent by QEMU (QMP).
    Sysrq,
    /// The kernel's `vm.dirty_expire_centisecs` is lowered in the guest's memory for a short time.
    Tunables,
    /// The QEMU guest agent runs `sync`.
    Agent,
    /// QEMU's memory balloon takes memory from the guest for a short time.
    Balloon,
}

impl FlushWay {
    /// All ways.
    pub const ALL: [Self; 4] = [Self::Sysrq, Self::Tunables, Self::Agent, Self::Balloon];

    /// The name in JSON and in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sysrq => "sysrq",
            Self::Tunables => "tunables",
            Self::Agent => "agent",
            Self::Balloon => "balloon",
        }
    }
}

impl fmt::Display for FlushWay {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A request to make a guest write its dirty data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FlushRequest {
    /// The way; without it the first one in the configuration.
    pub by: Option<FlushWay>,
}

/// The result of a flush. Sizes are the guest kernel's own counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlushReport {
    /// The virtual machine.
    pub vm: String,
    /// The way.
    pub by: FlushWay,
    /// Whether the dirty data was written before the time limit.
    pub is_complete: bool,
    /// Data of files that was dirty or being written before, in bytes; `None` if it is unknown.
    pub dirty_before_bytes: Option<u64>,
    /// The same afterwards; new data may be dirty.
    pub dirty_after_bytes: Option<u64>,
    /// The number of bytes that the guest wrote to its disks meanwhile.
    pub written_bytes: u64,
    /// The time from the beginning to the guest's first completed write, in nanoseconds; `None` if
    /// there was none.
    pub first_write_ns: Option<u64>,
    /// The time to its last completed write.
    pub last_write_ns: Option<u64>,
    /// The time to the end, in nanoseconds.
    pub time_ns: u64,
}

impl Client {
    /// Makes the guest of `vm` write its dirty data, and waits for it.
    ///
    /// # Errors
    /// When there is no answer, no guest of this name, or no way that the configuration allows.
    pub fn flush_guest(&self, vm: &str, by: Option<FlushWay>) -> Result<FlushReport, ClientError> {
        self.ask(&FLUSH_GUEST, &vm.to_owned(), &(), &FlushRequest { by })
    }
}
