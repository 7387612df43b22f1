//! Lines out of bytes, without a copy of each.

use std::io::{self, Read};
use std::ops::Range;

use memchr::memchr;

use super::source::Source;

/// The longest line, and the longest record of several lines.
pub const LONGEST: usize = 64 << 10;
/// What is read at once.
const BUFFER: usize = 256 << 10;

/// A buffer over the input, at the start of a line.
pub struct Lines {
    source: Source,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Between `start` and here there is no quote.
    plain: usize,
    ended: bool,
    number: u64,
}

/// Where a line ends, in bytes from the start of the first that is not consumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Here, and there the next line begins.
    Line {
        /// Behind the last byte, without the end of line.
        length: usize,
        /// Behind the end of line.
        next: usize,
    },
    /// It is too long.
    TooLong,
    /// There are no more lines.
    Input,
    /// Nobody knows without waiting.
    Wait,
}

impl Lines {
    /// The lines of `source`.
    pub fn new(source: Source) -> Self {
        let buffer = vec![0; BUFFER];
        Self { source, buffer, start: 0, end: 0, plain: 0, ended: false, number: 0 }
    }

    /// How many lines have been consumed.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Finds the end of the line that the byte `from` is in. Only `wait` allows it to read.
    pub fn find(&mut self, from: usize, wait: bool) -> io::Result<End> {
        let mut searched = from;
        loop {
            let held = &self.buffer[self.start..self.end];
            if let Some(at) = memchr(b'\n', &held[searched.min(held.len())..]) {
                let mut length = searched + at;
                let next = length + 1;
                if length > LONGEST {
                    return Ok(End::TooLong);
                }
                if length > 0 && held[length - 1] == b'\r' {
                    length -= 1;
                }
                return Ok(End::Line { length, next });
            }
            if held.len() > LONGEST {
                return Ok(End::TooLong);
            }
            if self.ended {
                return Ok(if held.len() > from {
                    End::Line { length: held.len(), next: held.len() }
                } else {
                    End::Input
                });
            }
            if !wait {
                return Ok(End::Wait);
            }
            searched = searched.max(held.len());
            self.fill()?;
        }
    }

    /// Bytes from the start of the first line that is not consumed.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.buffer[self.start..self.end][range]
    }

    /// Whether there is a quote among the first `length` bytes. All that are held are searched at
    /// once, as there are mostly none.
    pub fn has_quote(&mut self, length: usize) -> bool {
        let end = self.start + length;
        if self.plain < end {
            self.plain = self.plain.max(self.start);
            let held = &self.buffer[self.plain..self.end];
            self.plain += memchr(b'"', held).unwrap_or(held.len());
        }
        self.plain < end
    }

    /// Goes on behind `length` bytes, which are so many lines.
    pub fn consume(&mut self, length: usize, lines: u64) {
        self.start = (self.start + length).min(self.end);
        self.number += lines;
    }

    /// Goes on behind the line, however long it is.
    pub fn skip(&mut self) -> io::Result<()> {
        self.number += 1;
        loop {
            if let Some(at) = memchr(b'\n', &self.buffer[self.start..self.end]) {
                self.start += at + 1;
                return Ok(());
            }
            self.start = self.end;
            if self.ended {
                return Ok(());
            }
            self.fill()?;
        }
    }

    fn fill(&mut self) -> io::Result<()> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.plain = self.plain.saturating_sub(self.start);
        self.start = 0;
        let read = read_some(&mut self.source, &mut self.buffer[self.end..])?;
        self.end += read;
        self.ended = read == 0;
        Ok(())
    }
}

/// Reads at least a byte, unless there is none.
pub fn read_some(source: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match source.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Reads until `buffer` is full or the input ends.
pub fn read_full(source: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut held = 0;
    while held < buffer.len() {
        match read_some(source, &mut buffer[held..])? {
            0 => break,
            read => held += read,
        }
    }
    Ok(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_are_found_wherever_they_are() {
        let mut text = Vec::new();
        for number in 0..40_000 {
            let quote = if number % 977 < 3 { "\"" } else { "" };
            text.extend_from_slice(format!("{number},{quote}some text of a line\n").as_bytes());
        }
        let expected: Vec<bool> =
            text.split(|&byte| byte == b'\n').map(|line| line.contains(&b'"')).collect();
        let mut lines = Lines::new(Box::new(io::Cursor::new(text)));
        for (number, has) in expected[..40_000].iter().enumerate() {
            let Ok(End::Line { length, next }) = lines.find(0, true) else { panic!("a line") };
            assert_eq!(lines.has_quote(length), *has, "line {number}");
            lines.consume(next, 1);
        }
    }

    fn lines(text: &[u8]) -> Lines {
        Lines::new(Box::new(io::Cursor::new(text.to_vec())))
    }

    fn all(text: &[u8]) -> Vec<String> {
        let mut lines = lines(text);
        let mut found = Vec::new();
        loop {
            match lines.find(0, true).unwrap() {
                End::Line { length, next } => {
                    found.push(String::from_utf8_lossy(lines.bytes(0..length)).into_owned());
                    lines.consume(next, 1);
                }
                End::TooLong => {
                    found.push("too long".into());
                    lines.skip().unwrap();
                }
                _ => return found,
            }
        }
    }

    #[test]
    fn ends_of_lines() {
        assert_eq!(all(b"a\nb\r\n\nc"), ["a", "b", "", "c"]);
        assert_eq!(all(b""), Vec::<String>::new());
        assert_eq!(all(b"\n"), [""]);
    }

    #[test]
    fn long_lines_are_reported_and_passed_over() {
        let mut text = b"a\n".to_vec();
        text.extend(vec![b'x'; 10 * LONGEST]);
        text.extend(b"\nb\n");
        text.extend(vec![b'x'; LONGEST + 1]);
        assert_eq!(all(&text), ["a", "too long", "b", "too long"]);
        let longest = vec![b'x'; LONGEST];
        assert_eq!(all(&longest)[0].len(), LONGEST);
    }

    #[test]
    fn a_line_is_not_waited_for_unless_allowed() {
        let mut lines = lines(b"a\nb");
        assert_eq!(lines.find(0, false).unwrap(), End::Wait);
        assert_eq!(lines.find(0, true).unwrap(), End::Line { length: 1, next: 2 });
        lines.consume(2, 1);
        assert_eq!(lines.find(0, false).unwrap(), End::Wait);
        assert_eq!(lines.find(0, true).unwrap(), End::Line { length: 1, next: 1 });
        lines.consume(1, 1);
        assert_eq!((lines.find(0, true).unwrap(), lines.number()), (End::Input, 2));
    }
}
