//! Colours; used on terminals only, and not if `NO_COLOR` is set.
use std::io::{self, IsTerminal};

/// The colour of success.
pub const GOOD: &str = "32";
/// The colour of warnings.
pub const WARNING: &str = "33";
/// The colour of failures.
pub const BAD: &str = "31;1";
/// The colour of less important text.
pub const DIM: &str = "2";

/// What follows the escape character in the sequences of [`Style::paint`].
pub const SEQUENCES: [&str; 5] = ["[0m", "[2m", "[31;1m", "[32m", "[33m"];

/// Whether colours are used.
#[derive(Clone, Copy, Debug)]
pub struct Style(bool);

impl Style {
    /// No colours.
    #[cfg(test)]
    pub const PLAIN: Self = Self(false);

    /// The style for standard output.
    pub fn stdout() -> Self {
        Self(io::stdout().is_terminal() && allowed())
    }

    /// The style for standard error.
    pub fn stderr() -> Self {
        Self(io::stderr().is_terminal() && allowed())
    }

    /// The text in a colour, or unchanged if colours are not used.
    pub fn paint(self, colour: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Whether the environment allows colours.
pub fn allowed() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}
