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

use super::columns::{EventColumn, EventColumns};
use super::intern::Texts;
use super::lines::read_some;
use super::source::ByteSource;
use super::{BATCH_ROWS, Batch, ReadError, ReadReport, Reader, Tally, TimeUnit, instant};

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

/// A reader of such records.
pub struct Vscsi {
    source: ByteSource,
    version: VscsiVersion,
    columns: EventColumns,
    texts: Texts,
    tally: Tally,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    ended: bool,
    requests: i64,
}

/// The letter of a SCSI command, if it is an operation on the disk's data.
fn operation(command: u16) -> Option<&'static [u8]> {
    match command {
        0x08 | 0x28 | 0xa8 | 0x88 => Some(b"r"),
        0x0a | 0x2a | 0xaa | 0x8a => Some(b"w"),
        0x35 | 0x91 => Some(b"f"),
        0x42 => Some(b"d"),
        0x41 | 0x93 => Some(b"z"),
        _ => None,
    }
}

fn number<const N: usize>(record: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes[..N].copy_from_slice(&record[at..at + N]);
    u64::from_le_bytes(bytes)
}

impl Vscsi {
    /// Reads records of a version.
    pub fn new(
        name: &str,
        source: ByteSource,
        version: VscsiVersion,
        columns: EventColumns,
    ) -> Self {
        Self {
            source,
            version,
            columns,
            texts: Texts::new(),
            tally: Tally::new(name),
            buffer: vec![0; version.size() * BATCH_ROWS],
            start: 0,
            end: 0,
            ended: false,
            requests: 0,
        }
    }

    fn record(&mut self, batch: &mut Batch) -> Result<(), String> {
        use EventColumn::{Operation, Request, Sector, Size, Type};
        let record = &self.buffer[self.start..self.start + self.version.size()];
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
        let (columns, texts) = (&self.columns, &mut self.texts);
        let mut row = columns.row(time_ns);
        columns.text(&mut row, Type, b"Q", texts);
        columns.text(&mut row, Operation, operation, texts);
        columns.integer(&mut row, Request, self.requests);
        columns.integer(&mut row, Sector, sector);
        columns.integer(&mut row, Size, length.div_ceil(512) as i64);
        self.requests += 1;
        batch.push(time_ns, row);
        Ok(())
    }
}

impl Reader for Vscsi {
    fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError> {
        batch.clear();
        while batch.len() < BATCH_ROWS {
            if self.end - self.start >= self.version.size() {
                self.tally.lines += 1;
                if let Err(message) = self.record(batch) {
                    let message = format!("record: {message}");
                    self.tally.bad(self.tally.lines, &message)?;
                }
                self.start += self.version.size();
                continue;
            }
            if !batch.is_empty() || self.ended {
                break;
            }
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let read = read_some(&mut self.source, &mut self.buffer[self.end..])
                .map_err(|error| self.tally.io(&error))?;
            self.end += read;
            self.ended = read == 0;
            if self.ended && self.end > 0 {
                self.tally.lines += 1;
                self.tally.bad(self.tally.lines, "record: the last one is cut off")?;
            }
        }
        self.tally.batch(batch)
    }

    fn report(&self) -> &ReadReport {
        &self.tally.report
    }
}
