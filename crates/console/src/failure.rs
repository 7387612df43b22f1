//! Failures of commands: the reason, and what to do next.
use std::{fmt, io, path::Path, process::ExitCode};

use fathom_control::ClientError;
use fathom_monitor::read::ReadError;

use crate::output::style::{self, Style};

/// Exit status of a command that failed.
pub const FAILED: u8 = 1;
/// Exit status for an invalid command line.
pub const USAGE: u8 = 2;

/// Why a command failed, and its exit status.
#[derive(Debug)]
pub struct Failure {
    failure: fathom_failure::Failure,
    code: u8,
}

/// The result of a command.
pub type CommandResult<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure with no advice yet.
    pub fn new(message: impl Into<String>) -> Self {
        fathom_failure::Failure::new(message).into()
    }

    /// An invalid command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { code: USAGE, ..Self::new(message) }
    }

    /// A failed system call on a path; `doing` is a verb.
    pub fn io(doing: &str, path: &Path, error: &io::Error) -> Self {
        let failure = Self::new(format!("cannot {doing} {}: {}", path.display(), reason(error)));
        match error.kind() {
            io::ErrorKind::PermissionDenied => {
                failure.advise("check the permissions, or try again as root")
            }
            io::ErrorKind::StorageFull => failure.advise("make room on that file system"),
            _ => failure,
        }
    }

    /// Adds what to do next.
    #[must_use]
    pub fn advise(self, remedy: impl Into<String>) -> Self {
        Self { failure: self.failure.advise(remedy), ..self }
    }

    /// Puts what has failed in front of the message.
    #[must_use]
    pub fn about(self, subject: &str) -> Self {
        Self { failure: self.failure.about(subject), ..self }
    }

    /// Prints the failure to standard error.
    pub fn report(&self) -> ExitCode {
        let (style, failure) = (Style::stderr(), &self.failure);
        note!("{} {}", style.paint(style::BAD, "error:"), failure.message);
        if !failure.remedy.is_empty() {
            note!("  {} {}", style.paint(style::DIM, "→"), failure.remedy);
        }
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure.fmt(formatter)
    }
}

impl std::error::Error for Failure {}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        fathom_failure::Failure::from(error).into()
    }
}

impl From<fathom_failure::Failure> for Failure {
    fn from(failure: fathom_failure::Failure) -> Self {
        Self { failure, code: FAILED }
    }
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        let failure = Self::new(error.to_string());
        match error.help() {
            Some(help) => failure.advise(help),
            None => failure,
        }
    }
}

/// An error's text without Rust's `(os error N)`.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}
