//! Places in a query's text, and diagnostics about them.

use std::fmt;
use std::ops::Range;

/// A part of a text, in bytes from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Span {
    /// The first byte.
    pub start: u32,
    /// The end, after the last byte.
    pub end: u32,
}

impl Span {
    /// The span from the start of `self` to the end of `other`.
    #[must_use]
    pub fn to(self, other: Self) -> Self {
        Self { start: self.start, end: other.end.max(self.end) }
    }

    /// The span as a range of bytes.
    pub fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }
}

/// An error or a warning, and the place in the text that it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The place in the text.
    pub span: Span,
    /// The problem: one sentence without a full stop.
    pub message: String,
    /// The optional remedy: one sentence without a full stop.
    pub help: Option<String>,
}

impl Diagnostic {
    /// A message about a place.
    pub fn new(span: Span, message: impl Into<String>) -> Self {
        Self { span, message: message.into(), help: None }
    }

    /// Adds a remedy.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Diagnostic {}
