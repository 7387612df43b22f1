//! States in which something does not work, until somebody or something mends it.

use serde::{Deserialize, Serialize};

/// Something that does not work now. It is logged when it begins and when it ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// For programs.
    pub kind: ProblemKind,
    /// For people: one sentence, with what to do where that is known.
    pub message: String,
    /// What to do next; may be empty.
    #[serde(default)]
    pub remedy: String,
    /// The disk of which the daemon itself has this problem, because it does not serve it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Since when it is known, in nanoseconds since 1970.
    pub since_unix_time_ns: u64,
}

/// The kinds of problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProblemKind {
    /// Writes that had been acknowledged may be lost; the disk takes no more writes.
    WritesLost,
    /// The loss of writes could not be recorded for a later daemon.
    LossNotRecorded,
    /// The image was deleted while it is served.
    Deleted,
    /// The image is shorter than the disk.
    CutShort,
    /// Writes fail because the file system of the image is full.
    Full,
    /// Writes wait because the file system of the image is full.
    WaitingForRoom,
    /// Requests fail with I/O errors.
    IoErrors,
    /// The storage does not answer: requests in flight do not come back.
    NotAnswering,
    /// A layer says what does not work in it, such as a log volume that fails, or a log from which
    /// nothing goes home.
    LayerFailed,
    /// The disk is being removed, but its requests in flight do not come back.
    Leaving,
    /// A queue's thread failed by a bug of the daemon's.
    QueueFailed,
    /// The last VMM that connected could not be served.
    VmmRefused,
    /// A guest uses its disk, but nothing that it writes to its memory arrives at the daemon.
    MemoryNotShared,
    /// A disk of the configuration is not served.
    NotServed,
    /// A listener is closed.
    ListenerClosed,
    /// There is no link to the centre of `[monitor]`, or the centre's queries do not run.
    MonitorLink,
    /// A thread of the daemon failed, which is a bug.
    ThreadFailed,
    /// A kind of a newer daemon.
    #[serde(other)]
    Unknown,
}

impl ProblemKind {
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
            Self::Leaving => "leaving",
            Self::QueueFailed => "queue-failed",
            Self::VmmRefused => "vmm-refused",
            Self::MemoryNotShared => "memory-not-shared",
            Self::NotServed => "not-served",
            Self::ListenerClosed => "listener-closed",
            Self::MonitorLink => "monitor-link",
            Self::ThreadFailed => "thread-failed",
            Self::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_called_the_same_everywhere() {
        for kind in [ProblemKind::WritesLost, ProblemKind::IoErrors, ProblemKind::VmmRefused] {
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(json, format!("{:?}", kind.name()));
        }
        let newer: ProblemKind = serde_json::from_str("\"something-new\"").unwrap();
        assert_eq!(newer, ProblemKind::Unknown);
    }
}
