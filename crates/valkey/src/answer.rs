//! The bounds of nodes' answers. The crate `redis` keeps an answer until it is complete, however
//! long it is, so that the bytes of a node are examined before it has them: where each answer ends,
//! how long it is, and of how many values it consists.

use std::fmt;

/// The longest answer, in bytes: that to `CLUSTER SLOTS`, if each slot has other nodes than the
/// one before it. A script returns 70 KB.
const LENGTH_MAX: usize = 4 << 20;
/// The most values in an answer, which take more memory than bytes of the connection.
const VALUES_MAX: usize = 256 << 10;
/// The longest line, in bytes: an error, a text, or the length of what follows.
const LINE_MAX: usize = 64 << 10;
/// The most levels of arrays in arrays.
const DEPTH_MAX: usize = 16;
/// The longest number, in bytes.
const NUMBER_LENGTH_MAX: usize = 24;

/// What no answer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerDefect {
    /// More bytes, values, or levels than the longest answer.
    Excess,
    /// It is not one of the protocol RESP.
    Syntax,
}

impl fmt::Display for AnswerDefect {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Excess => "a node sends more than an answer can have",
            Self::Syntax => "a node's answer has no syntax of Valkey",
        })
    }
}

impl std::error::Error for AnswerDefect {}

/// Where in a value the next byte is.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// At its first byte.
    Begin,
    /// In its first line.
    Line { kind: u8, length: usize, has_return: bool },
    /// In the bytes of a text, of which these are left, with the end of the line.
    Text(usize),
}

/// Follows the bytes of a connection.
#[derive(Debug)]
pub(crate) struct AnswerBounds {
    place: Place,
    /// The values that are missing at each level of the current answer.
    missing: Vec<usize>,
    /// The number in the current line.
    number: Vec<u8>,
    /// The bytes and the values that the current answer has, or has announced.
    length: usize,
    values: usize,
}

impl Default for AnswerBounds {
    fn default() -> Self {
        Self { place: Place::Begin, missing: Vec::new(), number: Vec::new(), length: 0, values: 0 }
    }
}

impl AnswerBounds {
    /// Examines the next bytes.
    ///
    /// # Errors
    /// If they exceed what an answer can have, also if they only announce it.
    pub(crate) fn examine(&mut self, mut bytes: &[u8]) -> Result<(), AnswerDefect> {
        while let Some((&byte, rest)) = bytes.split_first() {
            match self.place {
                Place::Begin => {
                    self.add(1)?;
                    self.number.clear();
                    self.place = Place::Line { kind: byte, length: 0, has_return: false };
                    bytes = rest;
                }
                Place::Line { kind, length, has_return } => {
                    self.add(1)?;
                    bytes = rest;
                    if length >= LINE_MAX {
                        return Err(AnswerDefect::Excess);
                    }
                    if byte == b'\n' && has_return {
                        self.end_line(kind)?;
                        continue;
                    }
                    if is_counted(kind) && byte != b'\r' {
                        if self.number.len() >= NUMBER_LENGTH_MAX {
                            return Err(AnswerDefect::Syntax);
                        }
                        self.number.push(byte);
                    }
                    let has_return = byte == b'\r';
                    self.place = Place::Line { kind, length: length + 1, has_return };
                }
                Place::Text(left) => {
                    let step = left.min(bytes.len());
                    bytes = &bytes[step..];
                    if step == left {
                        self.end_value();
                    } else {
                        self.place = Place::Text(left - step);
                    }
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, length: usize) -> Result<(), AnswerDefect> {
        self.length = self.length.saturating_add(length);
        if self.length > LENGTH_MAX { Err(AnswerDefect::Excess) } else { Ok(()) }
    }

    /// The first line of a value has ended.
    fn end_line(&mut self, kind: u8) -> Result<(), AnswerDefect> {
        if !is_counted(kind) {
            if !b"+-:_,#(".contains(&kind) {
                return Err(AnswerDefect::Syntax);
            }
            self.end_value();
            return Ok(());
        }
        let number = std::str::from_utf8(&self.number).ok().and_then(|text| text.parse().ok());
        let number: i64 = number.ok_or(AnswerDefect::Syntax)?;
        let Ok(count) = usize::try_from(number) else {
            // A text, an array or a set may be absent.
            if !b"$*~>".contains(&kind) {
                return Err(AnswerDefect::Syntax);
            }
            self.end_value();
            return Ok(());
        };
        if matches!(kind, b'$' | b'=' | b'!') {
            let length = count.saturating_add(2);
            self.add(length)?;
            self.place = Place::Text(length);
            return Ok(());
        }
        let count = match kind {
            b'%' => count.saturating_mul(2),
            // Attributes are followed by their value.
            b'|' => count.saturating_mul(2).saturating_add(1),
            _ => count,
        };
        self.values = self.values.saturating_add(count);
        if self.values > VALUES_MAX || self.missing.len() >= DEPTH_MAX {
            return Err(AnswerDefect::Excess);
        }
        if count == 0 {
            self.end_value();
        } else {
            self.missing.push(count);
            self.place = Place::Begin;
        }
        Ok(())
    }

    /// A value has ended, and with it all that it is the last one of.
    fn end_value(&mut self) {
        self.place = Place::Begin;
        while let Some(missing) = self.missing.last_mut() {
            *missing -= 1;
            if *missing > 0 {
                return;
            }
            self.missing.pop();
        }
        (self.length, self.values) = (0, 0);
    }
}

/// Whether the first line of such a value is the length of what follows.
fn is_counted(kind: u8) -> bool {
    b"$=!*%~|>".contains(&kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examine(bytes: &[u8]) -> Result<bool, AnswerDefect> {
        let mut whole = AnswerBounds::default();
        let found = whole.examine(bytes);
        // Where bytes are divided makes no difference.
        let mut parts = AnswerBounds::default();
        let divided = bytes.chunks(3).try_for_each(|part| parts.examine(part));
        assert_eq!(found, divided);
        found.map(|()| matches!(whole.place, Place::Begin) && whole.missing.is_empty())
    }

    #[test]
    fn answers_end_where_they_end() {
        for answer in [
            "+OK\r\n",
            "-MOVED 5 10.0.0.1:6379\r\n",
            ":-12\r\n",
            "$-1\r\n",
            "$0\r\n\r\n",
            "$7\r\n\r\n$5\r\n*\r\n",
            "*0\r\n",
            "*-1\r\n",
            "*2\r\n*1\r\n$1\r\na\r\n:5\r\n",
            "%1\r\n+a\r\n*2\r\n:1\r\n:2\r\n",
            "|1\r\n+a\r\n:1\r\n+value\r\n",
            ">2\r\n+message\r\n+b\r\n",
            "+a\rb\r\n",
            "_\r\n#t\r\n,1.5\r\n(12\r\n=5\r\ntxt:a\r\n!5\r\nERR a\r\n~1\r\n:1\r\n",
        ] {
            assert_eq!(examine(answer.as_bytes()), Ok(true), "{answer:?}");
            for length in 0..answer.len() {
                assert!(examine(&answer.as_bytes()[..length]).is_ok(), "{answer:?} {length}");
            }
        }
        assert_eq!(examine(b"*2\r\n*1\r\n:1\r\n"), Ok(false));
        assert_eq!(examine(b"$3\r\nab"), Ok(false));
        for wrong in [
            "\r\n\r\n",
            "GET / HTTP/1.1\r\n",
            "$a\r\n",
            "%-1\r\n",
            "$99999999999999999999999999\r\n",
        ] {
            assert_eq!(examine(wrong.as_bytes()), Err(AnswerDefect::Syntax), "{wrong:?}");
        }
    }

    #[test]
    fn nothing_is_read_beyond_the_longest_answer() {
        // Announced is as much as sent.
        for excess in ["$1300000000\r\n", "*1300000000\r\n", "%9223372036854775807\r\n"] {
            assert_eq!(examine(excess.as_bytes()), Err(AnswerDefect::Excess), "{excess:?}");
        }
        let line = [b"-".to_vec(), vec![b'x'; LINE_MAX + 1]].concat();
        assert_eq!(examine(&line), Err(AnswerDefect::Excess));
        assert_eq!(examine(&b"*1\r\n".repeat(DEPTH_MAX + 1)), Err(AnswerDefect::Excess));
        let texts =
            format!("*3\r\n{}", format!("${}\r\n{}\r\n", 2 << 20, "x".repeat(2 << 20)).repeat(3));
        assert_eq!(examine(texts.as_bytes()), Err(AnswerDefect::Excess));
        let arrays =
            format!("*3\r\n{}", format!("*100000\r\n{}", ":1\r\n".repeat(100_000)).repeat(3));
        assert_eq!(examine(arrays.as_bytes()), Err(AnswerDefect::Excess));
        // Each answer begins anew.
        let many = format!("${}\r\n{}\r\n", 1 << 20, "x".repeat(1 << 20)).repeat(6);
        assert_eq!(examine(many.as_bytes()), Ok(true));
    }
}
