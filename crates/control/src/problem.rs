//! Problems: states in which something does not work until it is repaired.

use serde::{Deserialize, Serialize};

/// A current problem. It is logged when it begins and when it ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The kind of the problem, for programs.
    pub kind: ProblemKind,
    /// The message for the user: one sentence.
    pub message: String,
    /// What the user can do next; may be empty.
    #[serde(default)]
    pub remedy: String,
    /// The layer that has the problem; empty if it is none of a layer.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub layer: String,
    /// What it is more exactly than the kind says, for programs; empty if the kind says all. A disk
    /// may have several problems of a kind, with different layers or causes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cause: String,
    /// For a problem of the daemon: the disk that it does not serve because of the problem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The time since which the problem is known, in nanoseconds since 1970.
    pub since_unix_time_ns: u64,
}

/// The kinds of problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProblemKind {
    /// Acknowledged writes may be lost. The disk accepts no more writes.
    WritesLost,
    /// The loss of writes could not be recorded for a later daemon.
    LossNotRecorded,
    /// The image was deleted while the disk is in use.
    Deleted,
    /// The image was made shorter than the disk.
    CutShort,
    /// Writes fail because the file system of the image is full.
    Full,
    /// Writes wait because the file system of the image is full.
    WaitingForRoom,
    /// Requests fail with I/O errors.
    IoErrors,
    /// The storage does not answer: requests in flight do not complete.
    NotAnswering,
    /// A layer reports a problem, such as a log volume that fails, or a log whose changes are not
    /// written back.
    LayerFailed,
    /// A log that may have changes of the disk's device has not been asked, because it does not
    /// answer.
    LogUnknown,
    /// The disk is being removed, but its requests in flight do not complete.
    Leaving,
    /// A queue's thread failed because of a bug in the daemon.
    QueueFailed,
    /// A queue carries out no requests until the guest resets its device: what the guest wrote to
    /// its ring was invalid.
    QueueInvalid,
    /// The last VMM that connected could not be served.
    VmmRefused,
    /// A guest uses its disk, but the guest's memory is not shared with the daemon.
    MemoryNotShared,
    /// A disk of the configuration is not served.
    NotServed,
    /// A listener is closed.
    ListenerClosed,
    /// There is no link to the centre of `[monitor]`, or the centre's queries do not run.
    MonitorLink,
    /// The folder of changes in use is not the one that the configuration had before.
    FolderReplaced,
    /// Many files of the guest are encrypted by one process, or in one container.
    EncryptionInProgress,
    /// A rule could not take its last snapshots.
    SnapshotFailed,
    /// Blocks or maps of a pool are damaged.
    PoolDamaged,
    /// A disk could not be moved, and stays where it was.
    MoveFailed,
    /// The file systems of a guest were frozen for a snapshot, and may still be.
    GuestFrozen,
    /// The interceptor of the guest has taken a hook away, because the guest stops too often at it.
    InterceptionPaused,
    /// Pages of a guest that its pager took away are damaged.
    PagerDamaged,
    /// Pages of a guest that its pager took away were there when they came back: another process
    /// has made them.
    PagerExisting,
    /// A guest's pager does not report, and pages are away.
    PagerSilent,
    /// A guest has more memory than its pager's limit, and no page leaves.
    PagerLimit,
    /// Changes are not in the audit log.
    AuditLost,
    /// A thread of the daemon failed because of a bug.
    ThreadFailed,
    /// A kind of a newer daemon.
    #[serde(other)]
    Unknown,
}

impl ProblemKind {
    /// All kinds that this version knows.
    pub const ALL: [Self; Self::Unknown as usize] = [
        Self::WritesLost,
        Self::LossNotRecorded,
        Self::Deleted,
        Self::CutShort,
        Self::Full,
        Self::WaitingForRoom,
        Self::IoErrors,
        Self::NotAnswering,
        Self::LayerFailed,
        Self::LogUnknown,
        Self::Leaving,
        Self::QueueFailed,
        Self::QueueInvalid,
        Self::VmmRefused,
        Self::MemoryNotShared,
        Self::NotServed,
        Self::ListenerClosed,
        Self::MonitorLink,
        Self::FolderReplaced,
        Self::EncryptionInProgress,
        Self::SnapshotFailed,
        Self::PoolDamaged,
        Self::MoveFailed,
        Self::GuestFrozen,
        Self::InterceptionPaused,
        Self::PagerDamaged,
        Self::PagerExisting,
        Self::PagerSilent,
        Self::PagerLimit,
        Self::AuditLost,
        Self::ThreadFailed,
    ];

    /// The name in JSON and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::WritesLost => "writes-lost",
            Self::LossNotRecorded => "loss-not-recorded",
            Self::Deleted => "deleted",
            Self::CutShort => "cut-short",
            Self::Full => "full",
            Self::WaitingForRoom => "waiting-for-room",
            Self::IoErrors => "io-errors",
            Self::NotAnswering => "not-answering",
            Self::LayerFailed => "layer-failed",
            Self::LogUnknown => "log-unknown",
            Self::Leaving => "leaving",
            Self::QueueFailed => "queue-failed",
            Self::QueueInvalid => "queue-invalid",
            Self::VmmRefused => "vmm-refused",
            Self::MemoryNotShared => "memory-not-shared",
            Self::NotServed => "not-served",
            Self::ListenerClosed => "listener-closed",
            Self::MonitorLink => "monitor-link",
            Self::FolderReplaced => "folder-replaced",
            Self::EncryptionInProgress => "encryption-in-progress",
            Self::SnapshotFailed => "snapshot-failed",
            Self::PoolDamaged => "pool-damaged",
            Self::MoveFailed => "move-failed",
            Self::GuestFrozen => "guest-frozen",
            Self::InterceptionPaused => "interception-paused",
            Self::PagerDamaged => "pager-damaged",
            Self::PagerExisting => "pager-existing",
            Self::PagerSilent => "pager-silent",
            Self::PagerLimit => "pager-limit",
            Self::AuditLost => "audit-lost",
            Self::ThreadFailed => "thread-failed",
            Self::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_has_the_same_name_in_json_and_metrics() {
        for (index, kind) in ProblemKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index, "each kind is in the list once");
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(json, format!("{:?}", kind.name()));
        }
        let newer: ProblemKind = serde_json::from_str("\"something-new\"").unwrap();
        assert_eq!(newer, ProblemKind::Unknown);
    }
}
