//! Colours, on terminals only and never with `NO_COLOR` set.
use std::io::{self, IsTerminal};

/// Something works.
pub const GOOD: &str = "32";
/// Something works, but.
pub const SOSO: &str = "33";
/// Something does not work.
pub const BAD: &str = "31;1";
/// Less important.
pub const DIM: &str = "2";

/// Whether to colour.
#[derive(Clone, Copy, Debug)]
pub struct Style(bool);

impl Style {
    /// No colours.
    #[cfg(test)]
    pub const PLAIN: Self = Self(false);

    /// As fits standard output.
    pub fn stdout() -> Self {
        Self(io::stdout().is_terminal() && allowed())
    }

    /// As fits standard error.
    pub fn stderr() -> Self {
        Self(io::stderr().is_terminal() && allowed())
    }

    /// The text in a colour, or as it is.
    pub fn paint(self, colour: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Whether the user lets programs colour at all.
pub fn allowed() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}
