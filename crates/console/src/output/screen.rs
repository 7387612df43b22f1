//! What gets to a terminal. Texts of guests, peers and files are in most of what commands print,
//! and may have sequences that command a terminal. All output goes through here, where they lose
//! them.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Stdout, Write};

use fathom_failure::text::{harmless, is_harmful};

use super::style;

/// A text whose only control sequences are those of [`Style::paint`](style::Style::paint).
pub fn safe(text: &str) -> Cow<'_, str> {
    if !text.contains(is_harmful) {
        return text.into();
    }
    let mut pieces = text.split('\x1b');
    let mut safe = harmless(pieces.next().unwrap_or_default()).into_owned();
    for piece in pieces {
        let is_own = style::SEQUENCES.iter().any(|own| piece.starts_with(own));
        safe.push(if is_own { '\x1b' } else { '\u{fffd}' });
        safe.push_str(&harmless(piece));
    }
    safe.into()
}

/// Prints to standard error, without the end of a line.
#[expect(clippy::print_stderr, reason = "only this module prints there")]
pub fn print_note(text: &str) {
    eprint!("{}", safe(text));
}

/// Prints over the current line of the terminal on standard error.
#[expect(clippy::print_stderr, reason = "see `print_note`")]
pub fn print_over(text: &str) {
    eprint!("\r\x1b[K{}", safe(text));
}

/// Prints a line to standard error.
macro_rules! note {
    ($($part:tt)*) => {
        $crate::output::screen::print_note(&(format!($($part)*) + "\n"))
    };
}

/// Standard output for data of others, such as CSV: as it is for a file or a pipe, and without
/// control characters for a terminal.
pub struct DataOutput<W> {
    output: W,
    is_terminal: bool,
    /// The beginning of a character whose end has not been written yet.
    begun: Vec<u8>,
}

impl DataOutput<Stdout> {
    /// Standard output.
    pub fn stdout() -> Self {
        let is_terminal = io::stdout().is_terminal();
        Self { output: io::stdout(), is_terminal, begun: Vec::new() }
    }
}

impl<W: Write> Write for DataOutput<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.is_terminal {
            return self.output.write(bytes);
        }
        self.begun.extend_from_slice(bytes);
        let mut rest = self.begun.as_slice();
        while !rest.is_empty() {
            let (valid, invalid) = match std::str::from_utf8(rest) {
                Ok(text) => (text.len(), 0),
                Err(error) => match error.error_len() {
                    Some(length) => (error.valid_up_to(), length),
                    None if error.valid_up_to() == 0 => break,
                    None => (error.valid_up_to(), 0),
                },
            };
            let text = String::from_utf8_lossy(&rest[..valid + invalid]);
            self.output.write_all(harmless(&text).as_bytes())?;
            rest = &rest[valid + invalid..];
        }
        self.begun = rest.to_vec();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_sequences_get_to_a_terminal() {
        let own = format!("{} ü\n\tb", "\x1b[31;1merror:\x1b[0m");
        assert_eq!(safe(&own), own);
        assert_eq!(
            safe("a\x1b[2J\x1b]0;x\x07\x1b[8mb\u{9b}2J"),
            "a\u{fffd}[2J\u{fffd}]0;x\u{fffd}\u{fffd}[8mb\u{fffd}2J"
        );
        assert_eq!(safe("\x1b"), "\u{fffd}");
    }

    #[test]
    fn data_is_cleaned_for_a_terminal_alone() {
        let text = "/srv/ä\x1b[2J\u{9b}日\n".as_bytes();
        for length in 1..text.len() {
            for (is_terminal, expected) in
                [(true, "/srv/ä\u{fffd}[2J\u{fffd}日\n".as_bytes()), (false, text)]
            {
                let mut output = DataOutput { output: Vec::new(), is_terminal, begun: Vec::new() };
                for part in text.chunks(length) {
                    output.write_all(part).unwrap();
                }
                assert_eq!(output.output, expected, "{length} {is_terminal}");
            }
        }
        let mut output = DataOutput { output: Vec::new(), is_terminal: true, begun: Vec::new() };
        output.write_all(b"a\xffb\xc3").unwrap();
        assert_eq!(output.output, "a\u{fffd}b".as_bytes());
    }
}
