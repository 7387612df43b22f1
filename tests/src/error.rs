//! The error type of the harness: a text for the reader of a failed test.

use std::fmt;

/// A failure, as a text.
pub struct Error {
    text: String,
    is_of_emulation: bool,
}

/// The result of all functions of the harness.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_of_emulation: false }
    }

    /// The same: QEMU's emulation of a processor has failed, whatever its devices do.
    #[must_use]
    pub(crate) fn of_emulation(self) -> Self {
        Self { is_of_emulation: true, ..self }
    }

    /// Whether QEMU's emulation of a processor has failed.
    pub(crate) fn is_of_emulation(&self) -> bool {
        self.is_of_emulation
    }
}

/// Runs a test, and once more if QEMU's emulation of a processor has failed: that says nothing
/// about the daemon.
///
/// # Errors
/// The test's.
pub fn despite_emulation(test: impl Fn() -> Result<()>) -> Result<()> {
    match test() {
        Err(error) if error.is_of_emulation => {
            println!("the test is run again: {error}");
            test()
        }
        ended => ended,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

/// As `Display`: a test that returns an error shows it with `Debug`.
impl fmt::Debug for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl std::error::Error for Error {}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::new(error.to_string())
    }
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self::new(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn only_a_failure_of_the_emulation_is_followed_by_one_more_try() {
        let runs = Cell::new(0);
        let fails_until = |count: u32, error: fn() -> Error| {
            runs.set(0);
            despite_emulation(|| {
                runs.set(runs.get() + 1);
                if runs.get() < count { Err(error()) } else { Ok(()) }
            })
        };
        let emulation = || Error::new("emulation").of_emulation();
        assert!(fails_until(2, emulation).is_ok());
        assert!(fails_until(3, emulation).is_err());
        assert!(fails_until(2, || Error::new("another")).is_err());
        assert_eq!(runs.get(), 1);
    }
}
