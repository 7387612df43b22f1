//! Splits bytes into lines without copying them.

use std::io::{self, Read};
use std::ops::Range;

use memchr::memchr;

use super::source::ByteSource;

/// The longest line, and the longest record of several lines, in bytes.
pub const LINE_MAX: usize = 64 << 10;
/// The length of the buffer, in bytes.
const BUFFER: usize = 256 << 10;

/// A buffer of the input that begins at the start of a line.
pub struct Lines {
    source: ByteSource,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// There is no quote between `start` and this position.
    plain: usize,
    ended: bool,
    number: u64,
}

/// The end of a line, in bytes from the current position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The line ends.
    Line {
        /// The length of the line without its end-of-line characters.
        length: usize,
        /// The beginning of the next line.
        next: usize,
    },
    /// The line is too long.
    TooLong,
    /// The input has no more lines.
    Input,
    /// The end is not in the buffer, and waiting is not allowed.
    Wait,
}

impl Lines {
    /// Splits the bytes of `source` into lines.
    pub fn new(source: ByteSource) -> Self {
        let buffer = vec![0; BUFFER];
        Self { source, buffer, start: 0, end: 0, plain: 0, ended: false, number: 0 }
    }

    /// The number of lines consumed.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Finds the end of the line that contains the byte `from`. Reads from the input only if `wait`
    /// is true.
    pub fn find(&mut self, from: usize, wait: bool) -> io::Result<End> {
        let mut searched = from;
        loop {
            let held = &self.buffer[self.start..self.end];
            if let Some(at) = memchr(b'\n', &held[searched.min(held.len())..]) {
                let mut length = searched + at;
                let next = length + 1;
                if length > LINE_MAX {
                    return Ok(End::TooLong);
                }
                if length > 0 && held[length - 1] == b'\r' {
                    length -= 1;
                }
                return Ok(End::Line { length, next });
            }
            if held.len() > LINE_MAX {
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

    /// Bytes, by their distance from the current position.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.buffer[self.start..self.end][range]
    }

    /// Whether there is a quote among the first `length` bytes. Searches the whole buffer in one
    /// step, because most files have no quotes.
    pub fn has_quote(&mut self, length: usize) -> bool {
        let end = self.start + length;
        if self.plain < end {
            self.plain = self.plain.max(self.start);
            let held = &self.buffer[self.plain..self.end];
            self.plain += memchr(b'"', held).unwrap_or(held.len());
        }
        self.plain < end
    }

    /// Advances by `length` bytes, which contain `lines` lines.
    pub fn consume(&mut self, length: usize, lines: u64) {
        self.start = (self.start + length).min(self.end);
        self.number += lines;
    }

    /// Advances to the next line, even if the current one is too long.
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

/// Reads at least one byte, unless the input has ended.
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
    fn long_lines_are_reported_and_skipped() {
        let mut text = b"a\n".to_vec();
        text.extend(vec![b'x'; 10 * LINE_MAX]);
        text.extend(b"\nb\n");
        text.extend(vec![b'x'; LINE_MAX + 1]);
        assert_eq!(all(&text), ["a", "too long", "b", "too long"]);
        let longest = vec![b'x'; LINE_MAX];
        assert_eq!(all(&longest)[0].len(), LINE_MAX);
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
