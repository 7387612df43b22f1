//! Error answers of the daemon.

use fathom_failure::Failure;
use serde::{Deserialize, Serialize};

/// The body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReply {
    /// The error.
    pub error: ErrorBody,
}

/// An error, with a remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The kind of the error, for programs.
    pub code: ErrorCode,
    /// The message for the user: one sentence.
    pub message: String,
    /// What the user can do next; may be empty.
    pub remedy: String,
}

/// The kinds of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The request itself is invalid: unreadable, or with an impossible definition.
    Invalid,
    /// There is no disk or path of this name.
    NotFound,
    /// The request conflicts with the daemon's state: the disk's name exists, a socket is in use.
    Conflict,
    /// The image's content looks like a format other than raw, and the definition does not state
    /// that it is raw.
    ForeignFormat,
    /// The disk or the daemon does not support the request.
    Unsupported,
    /// The operating system reported an error.
    Failed,
    /// The socket is for those who only look.
    Forbidden,
    /// The daemon is shutting down.
    ShuttingDown,
    /// As many requests of this kind are in progress as there may be.
    Busy,
    /// A code of a newer daemon.
    #[serde(other)]
    Unknown,
}

impl ErrorCode {
    /// The codes that this version has.
    pub const ALL: [Self; 9] = [
        Self::Invalid,
        Self::NotFound,
        Self::Conflict,
        Self::ForeignFormat,
        Self::Unsupported,
        Self::Failed,
        Self::Forbidden,
        Self::Busy,
        Self::ShuttingDown,
    ];

    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::NotFound => "not-found",
            Self::Conflict => "conflict",
            Self::ForeignFormat => "foreign-format",
            Self::Unsupported => "unsupported",
            Self::Failed => "failed",
            Self::Forbidden => "forbidden",
            Self::ShuttingDown => "shutting-down",
            Self::Busy => "busy",
            Self::Unknown => "unknown",
        }
    }

    /// The HTTP status of an answer with this code.
    pub fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::Conflict | Self::ForeignFormat => 409,
            Self::Unsupported => 422,
            Self::Failed | Self::Unknown => 500,
            Self::ShuttingDown | Self::Busy => 503,
        }
    }
}

impl ErrorBody {
    /// The answer to a request that has failed.
    pub fn new(code: ErrorCode, failure: Failure) -> Self {
        Self { code, message: failure.message, remedy: failure.remedy }
    }
}

/// A failure of which programs need not know more.
impl From<Failure> for ErrorBody {
    fn from(failure: Failure) -> Self {
        Self::new(ErrorCode::Failed, failure)
    }
}

/// A failure that has been answered.
impl From<ErrorBody> for Failure {
    fn from(answer: ErrorBody) -> Self {
        Self::new(answer.message).advise(answer.remedy)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_has_one_name() {
        for code in ErrorCode::ALL {
            let json = serde_json::to_string(&code).unwrap();
            assert_eq!(json, format!("{:?}", code.name()));
        }
        let newer: ErrorCode = serde_json::from_str("\"something-new\"").unwrap();
        assert_eq!(newer, ErrorCode::Unknown);
    }
}
