//! The move of a disk to another store while it is used.

use std::path::PathBuf;

use fathom_options::Bytes;
use serde::{Deserialize, Serialize};

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Change, Endpoint};

/// Begins to move a disk.
pub const MOVE_DISK: Endpoint<Change, String, (), MoveRequest, MoveStatus> = Endpoint::post(
    "/v1/disks/{name}/move",
    "the disk begins to [move](moving.md) to another image or volume. `moving` of the disk's \
     status shows how far it is. 409 if it moves already",
);

/// Ends the move of a disk.
pub const CANCEL_MOVE: Endpoint<Change, String, (), (), MoveStatus> = Endpoint::delete(
    "/v1/disks/{name}/move",
    "the disk stays where it is, and the target is removed. A move that has failed is forgotten. \
     404 if there is no move",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&MOVE_DISK, &CANCEL_MOVE];

/// Where a disk moves, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MoveRequest {
    /// A raw image that is made, or a block device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// A name for a block device that no other disk has, as in the disk's definition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// A pool of the block store, in which the volume is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<PathBuf>,
    /// The name of the new volume; the disk's name if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// Whether the host's page cache is bypassed; as now if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct: Option<bool>,
    /// The most bytes per second that are copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed: Option<Bytes>,
    /// Whether the copy does not wait for idle time of the devices.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub urgent: bool,
    /// Whether the content of a block device may be lost that is none of Fathom's.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub overwrite: bool,
}

/// How far a move is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MovePhase {
    /// The target is filled.
    #[default]
    Copying,
    /// The disk changes over to the target.
    ChangingOver,
    /// The disk is at the target.
    Moved,
    /// The disk stays where it was, because the move has failed.
    Failed,
    /// The disk stays where it was, because somebody has ended the move.
    Cancelled,
}

impl MovePhase {
    /// Whether the move has ended, in whatever way.
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Moved | Self::Failed | Self::Cancelled)
    }

    /// The phase in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Copying => "copying",
            Self::ChangingOver => "changing over",
            Self::Moved => "moved",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The move of a disk: the one in progress, or the last one since the daemon started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveStatus {
    /// The disk.
    pub disk: String,
    /// Where its content was at the beginning: a path, or a volume and its pool.
    pub from: String,
    /// Where it is to be.
    pub to: String,
    /// How far the move is.
    pub phase: MovePhase,
    /// The bytes of the disk.
    pub total_bytes: u64,
    /// The bytes that are not copied yet, or have changed since.
    pub left_bytes: u64,
    /// The bytes of data that were written to the target, those included that changed meanwhile.
    pub copied_bytes: u64,
    /// For how long each write of the guest is held, so that the copy keeps up, in nanoseconds.
    pub brake_ns: u64,
    /// When it began, in nanoseconds since 1970. After a restart of the daemon, it begins again.
    pub begun_unix_time_ns: u64,
    /// How long it took, or has taken so far, in nanoseconds.
    pub took_ns: u64,
    /// For how long the disk served no requests when it changed over, in nanoseconds; 0 before.
    pub pause_ns: u64,
    /// What has become of it, or why it does not get further; may be empty.
    pub message: String,
    /// What the user can do next; may be empty.
    pub remedy: String,
}

impl Client {
    /// Begins to move a disk. Returns when the copy has begun.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, or the disk cannot move there.
    pub fn move_disk(&self, name: &str, request: &MoveRequest) -> Result<MoveStatus, ClientError> {
        self.ask(&MOVE_DISK, &name.to_owned(), &(), request)
    }

    /// Ends the move of a disk, or forgets one that has failed.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, or no move.
    pub fn cancel_move(&self, name: &str) -> Result<MoveStatus, ClientError> {
        self.ask(&CANCEL_MOVE, &name.to_owned(), &(), &())
    }
}
