//! The logs that fio writes with `write_iolog` and reads with `read_iolog`.
//!
//! ```text
//! fio version 3 iolog                fio version 2 iolog
//! 0 /dev/sda add                     /dev/sda add
//! 25 /dev/sda open                   /dev/sda open
//! 310 /dev/sda read 8192 4096        /dev/sda read 8192 4096
//! ```
//!
//! The first line has the version. A line of version 3 begins with the time in microseconds. In
//! version 2 only the action `wait` has a time, which passes in microseconds before the next line.
//! Offsets and lengths are in bytes. A file is a disk.

use std::borrow::Cow;

use super::columns::{EventColumns, count};
use super::intern::Texts;
use super::lines::Lines;
use super::request::{TracedOperation, TracedRequest, TracedRequests, sectors_of};
use super::text::{LineFormat, LineReader};
use super::{Batch, LAST_TIME_NS, TimeUnit, instant, shown};

/// The version of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IologVersion {
    /// Without times.
    Two,
    /// With a time in each line.
    Three,
}

/// The version that a line declares.
pub fn version(line: &[u8]) -> Option<IologVersion> {
    match line.trim_ascii() {
        b"fio version 2 iolog" => Some(IologVersion::Two),
        b"fio version 3 iolog" => Some(IologVersion::Three),
        _ => None,
    }
}

/// The state of the format's reader.
pub struct Iolog {
    version: IologVersion,
    /// The sum of the waits of version 2.
    time_ns: i64,
    requests: TracedRequests,
}

/// A reader of this format.
pub fn reader(name: &str, lines: Lines, columns: EventColumns) -> LineReader<Iolog> {
    let requests = TracedRequests::new(columns);
    LineReader::new(name, lines, Iolog { version: IologVersion::Two, time_ns: 0, requests })
}

/// A time in microseconds, in nanoseconds.
fn microseconds(field: &[u8]) -> Result<i64, String> {
    count(field)
        .and_then(|time| instant(time, TimeUnit::Microseconds))
        .ok_or_else(|| format!("the time is {}", shown(field)))
}

impl LineFormat for Iolog {
    fn line(&mut self, line: &[u8], texts: &mut Texts, batch: &mut Batch) -> Result<(), String> {
        if let Some(version) = version(line) {
            self.version = version;
            return Ok(());
        }
        let words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let words: Vec<&[u8]> = words.take(6).collect();
        let (time_ns, words) = match (self.version, &words[..]) {
            (IologVersion::Three, [time, words @ ..]) => (microseconds(time)?, words),
            (_, words) => (self.time_ns, words),
        };
        let (disk, action, range) = match words {
            // The files are known from the requests.
            [_, b"add" | b"open" | b"close"] => return Ok(()),
            [disk, action, offset, length] => (*disk, *action, [*offset, *length]),
            _ => return Err(format!("not a line of an iolog: {}", shown(line))),
        };
        let operation = match (self.version, action) {
            (_, b"read") => TracedOperation::Read,
            (_, b"write") => TracedOperation::Write,
            (_, b"sync" | b"datasync") => TracedOperation::Flush,
            (_, b"trim") => TracedOperation::Discard,
            (IologVersion::Two, b"wait") => {
                self.time_ns =
                    self.time_ns.saturating_add(microseconds(range[0])?).min(LAST_TIME_NS);
                return Ok(());
            }
            (_, other) => return Err(format!("the action is {}", shown(other))),
        };
        let [offset, length] =
            range.map(|field| count(field).ok_or_else(|| format!("the range is {}", shown(field))));
        let sectors = match operation {
            TracedOperation::Flush => (0, 0),
            _ => sectors_of(offset?, length?).ok_or("the range is too long")?,
        };
        let request = TracedRequest { time_ns, operation, sectors, disk: Cow::Borrowed(disk) };
        self.requests.add(&request, texts, batch)
    }
}
