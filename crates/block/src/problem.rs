//! What can be wrong with a back end for longer than one request.

use std::fmt;

/// A state of a back end that an operator has to know of. The set is closed: status, metrics and
/// log match it in full. The text of [`Display`](fmt::Display) says what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendProblem {
    /// Writes that had been acknowledged may be lost: the kernel could not write them to the
    /// store, or could not make them durable. The disk only reads until the operator recovers it.
    WritesLost {
        /// The `errno` of the report.
        errno: i32,
        /// Whether the report is of an earlier opening of the store, before this daemon's start.
        earlier: bool,
    },
    /// The loss of writes could not be recorded beside the store: a later daemon will not know
    /// of it.
    LossNotRecorded,
    /// The file has no name any more: what it holds is gone as soon as the disk is closed.
    Deleted {
        /// A path that leads to the file as long as the disk is open.
        path: String,
    },
    /// The file was made shorter by somebody else. Reads beyond its end fail.
    CutShort {
        /// The length of the file, in bytes.
        length: u64,
        /// The size of the disk, in bytes.
        capacity: u64,
    },
}

impl BackendProblem {
    /// The name used in metrics and the control interface.
    pub fn name(&self) -> &'static str {
        match self {
            Self::WritesLost { .. } => "writes-lost",
            Self::LossNotRecorded => "loss-not-recorded",
            Self::Deleted { .. } => "deleted",
            Self::CutShort { .. } => "cut-short",
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
                     writes: mend the store, then use `fathom disk recover`"
                )
            }
            Self::LossNotRecorded => formatter.write_str(
                "the loss could not be recorded beside the image; check the guest's file systems \
                 before the daemon is restarted",
            ),
            Self::Deleted { path } => write!(
                formatter,
                "the image was deleted and is lost when the disk is closed; stop the guest and \
                 copy the image from {path}"
            ),
            Self::CutShort { length, capacity } => write!(
                formatter,
                "the image was cut to {length} bytes, the disk has {capacity}; reads beyond the \
                 end fail: stop the guest and restore the image"
            ),
        }
    }
}
