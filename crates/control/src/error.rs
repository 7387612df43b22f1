//! How the daemon says no.

use serde::{Deserialize, Serialize};

/// The body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReply {
    /// What went wrong.
    pub error: ErrorBody,
}

/// What went wrong, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// For programs.
    pub code: ErrorCode,
    /// For people: one sentence.
    pub message: String,
    /// What to do next; may be empty.
    pub remedy: String,
}

/// The kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The request itself is wrong: unreadable, or a definition that cannot be.
    Invalid,
    /// There is no such disk or path.
    NotFound,
    /// Something is in the way: a disk of that name, a socket in use.
    Conflict,
    /// The image's content looks like another format than raw, and nothing says that it is raw.
    ForeignFormat,
    /// The disk or daemon cannot do this.
    Unsupported,
    /// The operating system refused.
    Failed,
    /// The daemon is shutting down.
    ShuttingDown,
    /// A code of a newer daemon.
    #[serde(other)]
    Unknown,
}

impl ErrorCode {
    /// The HTTP status that carries the code.
    pub fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::NotFound => 404,
            Self::Conflict | Self::ForeignFormat => 409,
            Self::Unsupported => 422,
            Self::Failed | Self::Unknown => 500,
            Self::ShuttingDown => 503,
        }
    }
}

impl std::fmt::Display for ErrorBody {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.message)?;
        if !self.remedy.is_empty() {
            write!(formatter, "\n  → {}", self.remedy)?;
        }
        Ok(())
    }
}

impl std::error::Error for ErrorBody {}
