//! Problems of a back end that last longer than one request.

use std::fmt;

/// A problem of a back end that an operator has to know. The set is closed: status, metrics and log
/// match it in full. The text of [`Display`](fmt::Display) includes the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendProblem {
    /// Writes that had been acknowledged may be lost: the kernel could not write them to the
    /// store, or could not make them durable. The disk only reads until the operator recovers it.
    WritesLost {
        /// The `errno` that the kernel reported.
        errno: i32,
        /// Whether the loss was recorded before this daemon started.
        earlier: bool,
    },
    /// The loss of writes could not be recorded with the store: a later daemon will not know about
    /// it.
    LossNotRecorded,
    /// The file has been deleted. Its data is lost when the disk is closed.
    Deleted {
        /// A path to the file that is valid while the disk is open.
        path: String,
    },
    /// Another process has truncated the file. Reads beyond its end fail.
    CutShort {
        /// The length of the file, in bytes.
        length: u64,
        /// The size of the disk, in bytes.
        capacity: u64,
    },
    /// Another daemon has opened the store since. All requests fail.
    TakenOver {
        /// What was found.
        text: String,
    },
    /// The store does not answer, or not enough of its copies do. Requests wait, and fail in the end.
    Unreachable {
        /// The last error.
        text: String,
    },
    /// The store has other content than was written. Reads of it fail.
    ContentWrong {
        /// What was found.
        text: String,
    },
}

impl BackendProblem {
    /// A short name of the kind.
    pub fn name(&self) -> &'static str {
        match self {
            Self::WritesLost { .. } => "writes-lost",
            Self::LossNotRecorded => "loss-not-recorded",
            Self::Deleted { .. } => "deleted",
            Self::CutShort { .. } => "cut-short",
            Self::TakenOver { .. } => "taken-over",
            Self::Unreachable { .. } => "unreachable",
            Self::ContentWrong { .. } => "content-wrong",
        }
    }
}

impl fmt::Display for BackendProblem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WritesLost { errno, earlier } => {
                let error = std::io::Error::from_raw_os_error(*errno);
                let when = if *earlier { " while an earlier daemon served the disk" } else { "" };
                write!(
                    formatter,
                    "acknowledged writes may be lost ({error}){when}; the disk takes no more \
                     writes: repair the store, then use `fathom disk recover`"
                )
            }
            Self::LossNotRecorded => formatter.write_str(
                "the loss could not be recorded beside the image; check the guest's file systems \
                 before the daemon is restarted",
            ),
            Self::Deleted { path } => write!(
                formatter,
                "its file was deleted and is lost when the disk is closed; stop the guest and copy \
                 the file from {path}"
            ),
            Self::CutShort { length, capacity } => write!(
                formatter,
                "its file was truncated to {length} bytes, and had {capacity}; reads beyond the end \
                 fail: stop the guest and restore the file"
            ),
            Self::TakenOver { text } => write!(
                formatter,
                "{text}: the store refuses this daemon; stop the one that is wrong, then start the other again"
            ),
            Self::Unreachable { text } => {
                write!(
                    formatter,
                    "the store does not carry out requests ({text}): repair its hosts, or the way to them"
                )
            }
            Self::ContentWrong { text } => write!(
                formatter,
                "{text}: reads of it fail; restore the node that has lost or changed it"
            ),
        }
    }
}
