//! Problems of a back end that last longer than one request.

use std::fmt;

/// A problem of a back end that an operator has to know. The set is closed: status, metrics and log
/// match it in full.
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
    /// The store does not answer, or not enough of its copies do. Requests wait, and fail in the
    /// end.
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

impl BackendProblem {
    /// The problem, as a sentence.
    pub fn message(&self) -> String {
        match self {
            Self::WritesLost { errno, earlier } => {
                let error = std::io::Error::from_raw_os_error(*errno);
                let when = if *earlier { " while an earlier daemon served the disk" } else { "" };
                format!(
                    "acknowledged writes may be lost ({error}){when}; the disk takes no more writes"
                )
            }
            Self::LossNotRecorded => "the loss could not be recorded beside the image".into(),
            Self::Deleted { .. } => {
                "its file was deleted and is lost when the disk is closed".into()
            }
            Self::CutShort { length, capacity } => format!(
                "its file was truncated to {length} bytes, and had {capacity}; reads beyond the end fail"
            ),
            Self::TakenOver { text } => format!("{text}: the store refuses this daemon"),
            Self::Unreachable { text } => format!("the store does not carry out requests ({text})"),
            Self::ContentWrong { text } => format!("{text}: reads of it fail"),
        }
    }

    /// What the operator can do.
    pub fn remedy(&self) -> String {
        match self {
            Self::WritesLost { .. } => "repair the store, then use `fathom disk recover`".into(),
            Self::LossNotRecorded => {
                "check the guest's file systems before the daemon is restarted".into()
            }
            Self::Deleted { path } => format!("stop the guest and copy the file from {path}"),
            Self::CutShort { .. } => "stop the guest and restore the file".into(),
            Self::TakenOver { .. } => {
                "stop the one that is wrong, then start the other again".into()
            }
            Self::Unreachable { .. } => "repair its hosts, or the way to them".into(),
            Self::ContentWrong { .. } => "restore the node that has lost or changed it".into(),
        }
    }
}

/// The message and the remedy.
impl fmt::Display for BackendProblem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.message(), self.remedy())
    }
}
