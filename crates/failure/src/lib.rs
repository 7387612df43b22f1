//! Why something could not be done, and what the user can do next.
//!
//! Read [`Failure`] first. The crate must not know what fails.
//!
//! A [`Failure`] is what a component passes up when its callers only show it. It has a message
//! and a remedy as two texts, which nobody takes apart or mends. An error that callers match on has
//! a type of its own; [`Failing`] adds its remedy, and `?` makes a failure of it. Such a type
//! leaves the remedy empty if only its caller knows what helps. One whose remedy names something
//! that only the caller knows, such as the disk, does not implement [`Failing`]: it has a function
//! that takes the name and returns the failure.
//!
//! What another party has written gets into a message by [`text::foreign`], and to a terminal by
//! [`text::harmless`].

#![forbid(unsafe_code)]

pub mod text;

use std::error::Error;
use std::fmt;
use std::io;

/// An error with a type to match on. Its text is the message alone.
pub trait Failing: Error + Send + Sync + 'static {
    /// What the user can do next; may be empty.
    fn remedy(&self) -> String;
}

/// Why something could not be done.
#[derive(Debug, Default)]
pub struct Failure {
    /// What is wrong: a clause without a period.
    pub message: String,
    /// What the user can do next; may be empty.
    pub remedy: String,
    reason: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    /// A failure without a remedy.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::default() }
    }

    /// Sets what the user can do next.
    #[must_use]
    pub fn advise(self, remedy: impl Into<String>) -> Self {
        Self { remedy: remedy.into(), ..self }
    }

    /// Sets what the user can do next if there is nothing yet.
    #[must_use]
    pub fn advise_else(self, remedy: impl Into<String>) -> Self {
        if self.remedy.is_empty() { self.advise(remedy) } else { self }
    }

    /// Puts what has failed in front of the message.
    #[must_use]
    pub fn about(self, subject: impl fmt::Display) -> Self {
        Self { message: format!("{subject}: {}", self.message), ..self }
    }

    /// Keeps the error of which the failure was made.
    #[must_use]
    pub fn because(self, reason: impl Error + Send + Sync + 'static) -> Self {
        Self { reason: Some(Box::new(reason)), ..self }
    }

    /// The error of which the failure was made, if it has this type.
    pub fn reason<R: Error + 'static>(&self) -> Option<&R> {
        self.reason.as_deref()?.downcast_ref()
    }
}

/// The message; with `{:#}` the remedy, too, for logs.
impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)?;
        if formatter.alternate() && !self.remedy.is_empty() {
            write!(formatter, "; {}", self.remedy)?;
        }
        Ok(())
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // The message has the text of the reason.
        self.reason.as_deref()?.source()
    }
}

impl<E: Failing> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(error.to_string()).advise(error.remedy()).because(error)
    }
}

/// The failure that an error of the operating system carries, or one without a remedy.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        error.downcast().unwrap_or_else(|error| Self::new(error.to_string()).because(error))
    }
}

/// For traits that have only errors of the operating system.
impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        Self::other(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Full(u32);

    impl fmt::Display for Full {
        fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(formatter, "{} bytes are missing; all else fits", self.0)
        }
    }

    impl Error for Full {}

    impl Failing for Full {
        fn remedy(&self) -> String {
            "make space".into()
        }
    }

    fn fail() -> Result<(), Failure> {
        Err(Full(7))?;
        Ok(())
    }

    #[test]
    fn a_failure_has_the_message_and_the_remedy_of_its_reason() {
        let failure = fail().unwrap_err().about("x.img");
        assert_eq!(failure.to_string(), "x.img: 7 bytes are missing; all else fits");
        assert_eq!(failure.remedy, "make space");
        assert_eq!(failure.reason(), Some(&Full(7)));
        assert!(failure.reason::<io::Error>().is_none());
        assert!(format!("{failure:#}").ends_with("fits; make space"));
        assert_eq!(failure.advise_else("give up").remedy, "make space");
        assert_eq!(Failure::new("no").advise_else("give up").remedy, "give up");
    }

    #[test]
    fn an_error_of_the_operating_system_carries_a_failure() {
        let error = io::Error::from(fail().unwrap_err());
        let failure = Failure::from(error);
        assert_eq!((failure.remedy.as_str(), failure.reason()), ("make space", Some(&Full(7))));
        let failure = Failure::from(io::Error::from(io::ErrorKind::TimedOut));
        let kind = failure.reason::<io::Error>().map(io::Error::kind);
        assert_eq!((kind, failure.remedy.as_str()), (Some(io::ErrorKind::TimedOut), ""));
        assert_eq!(failure.message, "timed out");
    }
}
