//! Traces of `vscsiStats` as published by `CloudPhysics`: binary records of requests.
//!
//! Little-endian. The high byte of the version distinguishes the two kinds of records:
//!
//! ```text
//!      0       4        8        12      14       16               24               32      40
//!   1  │ number │ length │ parts  │ SCSI  │ version│ block          │ time           │
//!      0       2        4        8       12       16               24               32      40
//!   2  │ SCSI  │ version│ number │ length │ parts  │ block          │ time           │ latency│
//! ```
//!
//! The length is in bytes, the block in units of 512 bytes, and the times are in microseconds.

use std::borrow::Cow;

use super::columns::EventColumns;
use super::formats::Head;
use super::intern::Texts;
use super::records::{RecordFormat, RecordReader, number};
use super::request::{TracedOperation, TracedRequest, TracedRequests};
use super::source::ByteSource;
use super::{Batch, Reader, TimeUnit, instant};

/// The kinds of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VscsiVersion {
    /// 32 bytes.
    One,
    /// 40 bytes.
    Two,
}

impl VscsiVersion {
    fn size(self) -> usize {
        match self {
            Self::One => 32,
            Self::Two => 40,
        }
    }

    /// Whether a record has this version.
    fn is(self, record: &[u8]) -> bool {
        match self {
            Self::One => record.get(15) == Some(&1),
            Self::Two => record.get(3) == Some(&2),
        }
    }
}

/// The version of the records of a file that begins with `head`.
pub fn version(head: &[u8]) -> Option<VscsiVersion> {
    let all = |version: VscsiVersion| {
        let mut records = head.chunks_exact(version.size()).take(16).peekable();
        records.peek().is_some() && records.all(|record| version.is(record))
    };
    [VscsiVersion::Two, VscsiVersion::One].into_iter().find(|&version| all(version))
}

/// The state of the format's reader.
struct Vscsi {
    version: VscsiVersion,
    requests: TracedRequests,
}

/// A reader of this format, which a file with this head has.
pub fn reader(
    name: &str,
    head: &Head<'_>,
    source: ByteSource,
    columns: EventColumns,
) -> Box<dyn Reader> {
    let version = version(head.bytes).unwrap_or(VscsiVersion::One);
    let format = Vscsi { version, requests: TracedRequests::new(columns) };
    Box::new(RecordReader::new(name, source, format))
}

/// A SCSI command, if it is an operation on the disk's data.
fn operation(command: u16) -> Option<TracedOperation> {
    match command {
        0x08 | 0x28 | 0xa8 | 0x88 => Some(TracedOperation::Read),
        0x0a | 0x2a | 0xaa | 0x8a => Some(TracedOperation::Write),
        0x35 | 0x91 => Some(TracedOperation::Flush),
        0x42 => Some(TracedOperation::Discard),
        0x41 | 0x93 => Some(TracedOperation::WriteZeroes),
        _ => None,
    }
}

impl RecordFormat for Vscsi {
    fn size(&self) -> usize {
        self.version.size()
    }

    fn record(
        &mut self,
        record: &[u8],
        texts: &mut Texts,
        batch: &mut Batch,
    ) -> Result<(), String> {
        if !self.version.is(record) {
            return Err("it has another version".into());
        }
        let (length_at, command_at) = match self.version {
            VscsiVersion::One => (4, 12),
            VscsiVersion::Two => (8, 0),
        };
        let length = number::<4>(record, length_at);
        let command = number::<2>(record, command_at) as u16;
        let sector =
            i64::try_from(number::<8>(record, 16)).map_err(|_| "its block is out of range")?;
        let time_ns = i64::try_from(number::<8>(record, 24))
            .ok()
            .and_then(|time| instant(time, TimeUnit::Microseconds))
            .ok_or("its time is out of range")?;
        // Other commands, such as inquiries, do not concern data.
        let Some(operation) = operation(command) else { return Ok(()) };
        let sectors = (sector, length.div_ceil(512) as i64);
        let request = TracedRequest { time_ns, operation, sectors, disk: Cow::Borrowed(b"") };
        self.requests.add(&request, texts, batch)
    }
}
