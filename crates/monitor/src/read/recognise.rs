//! Recognises the format of a file by its content.

use std::io::{Cursor, Read};

use super::columns::EventColumns;
use super::csv::{self, Csv};
use super::formats::{FORMATS, Head};
use super::lines::{LINE_MAX, Lines, read_full, read_some};
use super::source::{self, ByteSource};
use super::{Batch, ReadError, ReadOptions, ReadReport, Reader, WantedStream, trace_formats};
use crate::recording::{self, Clock, Header, Recording, RowReader};
use crate::{io_stream, streams};

/// The number of bytes that are examined, if the file has them.
const HEAD: usize = 128;
/// The mark of bzip2's first block, after `BZh` and a digit.
const BZIP2_BLOCK: &[u8] = b"\x31\x41\x59\x26\x53\x59";
/// Other compressed formats: the first bytes, the format's name, and the command that decompresses
/// it.
const COMPRESSED: [(&[u8], &str, &str); 4] = [
    (b"\x1f\x8b", "gzip", "gzip -dc"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"),
    (b"\xfd7zXZ\0", "xz", "xz -dc"),
    (b"\x04\x22\x4d\x18", "lz4", "lz4 -dc"),
];

/// The beginning of a file, including its first line that is not blank.
struct Beginning {
    bytes: Vec<u8>,
    /// Whether it is the whole file.
    is_whole: bool,
}

impl Beginning {
    fn head(&self) -> Head<'_> {
        let line = first_line(&self.bytes, true);
        Head { bytes: &self.bytes, is_whole: self.is_whole, line }
    }
}

/// The beginning of a file, and a source of the whole file.
fn begin(name: &str, mut source: ByteSource) -> Result<(Beginning, ByteSource), ReadError> {
    let failed = |error| ReadError::io(name, &error);
    let mut head = vec![0; LINE_MAX + 1024];
    let mut held = read_full(&mut source, &mut head[..HEAD]).map_err(failed)?;
    let mut is_whole = held < HEAD;
    while !is_whole && held < head.len() && first_line(&head[..held], false).is_none() {
        match read_some(&mut source, &mut head[held..]).map_err(failed)? {
            0 => is_whole = true,
            read => held += read,
        }
    }
    head.truncate(held);
    let all = Box::new(Cursor::new(head.clone()).chain(source));
    Ok((Beginning { bytes: head, is_whole }, all))
}

/// The first line that is not blank. A line without an end counts only if the file has ended.
fn first_line(head: &[u8], ended: bool) -> Option<&[u8]> {
    let mut rest = head;
    while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
        let line = &rest[..end];
        if !line.trim_ascii().is_empty() {
            return Some(line.strip_suffix(b"\r").unwrap_or(line));
        }
        rest = &rest[end + 1..];
    }
    (ended && !rest.trim_ascii().is_empty()).then_some(rest)
}

/// The reader of all columns of a stream of a file, and the header that describes them.
pub fn whole(
    name: &str,
    source: ByteSource,
    stream: Option<&str>,
    options: &ReadOptions,
) -> Result<(Box<dyn Reader>, Header), ReadError> {
    let (beginning, source) = begin(name, source)?;
    if beginning.bytes.starts_with(&recording::MAGIC) {
        let recording = Recording::open(name, source)?;
        let header = recording.header();
        let Some(stream) = stream.map_or(Some(0), |stream| header.find(stream)) else {
            let names: Vec<&str> = header.streams.iter().map(|it| it.name.as_str()).collect();
            let message = format!("{name} has no stream {:?}", stream.unwrap_or_default());
            return Err(ReadError::new(message).advise(format!("it has {}", names.join(", "))));
        };
        let header = header.only(stream);
        return Ok((Box::new(RowReader::whole(recording, stream)), header));
    }
    let schema = match stream {
        Some(stream) => match streams().into_iter().find(|it| it.name.eq_ignore_ascii_case(stream))
        {
            Some(schema) => schema,
            None => return Err(ReadError::new(format!("there is no stream {stream:?}"))),
        },
        None => io_stream(),
    };
    let reader = reader(name, source, &[WantedStream::whole(&schema)], options)?;
    Ok((reader, Header::new(&schema, Clock::Unknown, 0)))
}

/// A reader whose batches belong to a stream other than the first wanted one.
struct OfStream {
    reader: Box<dyn Reader>,
    stream: usize,
}

impl Reader for OfStream {
    fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError> {
        batch.reuse_for(self.stream);
        self.reader.next_batch(batch)
    }

    fn report(&self) -> &ReadReport {
        self.reader.report()
    }
}

/// The stream of a file that has a single one: the first wanted stream whose columns the line of a
/// CSV file names, else that of I/O events or of the script's own.
fn single<'w>(
    name: &str,
    wanted: &'w [WantedStream],
    line: Option<&[u8]>,
) -> Result<(usize, &'w WantedStream), ReadError> {
    let is_named =
        |stream: &&WantedStream| line.is_some_and(|line| csv::is_header(line, &stream.schema));
    let has_requests = |stream: &&WantedStream| {
        let known = fathom_insight::stream::position(&stream.schema.name);
        known.is_none_or(|known| known == 0)
    };
    let chosen = wanted.iter().find(is_named).or_else(|| wanted.iter().find(has_requests));
    let place = |chosen| wanted.iter().position(|it| std::ptr::eq(it, chosen));
    let found = chosen.and_then(|chosen| Some((place(chosen)?, chosen)));
    found.ok_or_else(|| {
        let names: Vec<&str> = wanted.iter().map(|it| it.schema.name.as_str()).collect();
        ReadError::new(format!("{name} has no rows of the stream {}", names.join(", "))).advise(
            "query a recording of `fathom record`, or CSV whose first line names its columns",
        )
    })
}

/// The reader of a file.
pub fn reader(
    name: &str,
    source: ByteSource,
    wanted: &[WantedStream],
    options: &ReadOptions,
) -> Result<Box<dyn Reader>, ReadError> {
    let (mut beginning, mut source) = begin(name, source)?;
    if beginning.bytes.starts_with(&recording::MAGIC) {
        return Ok(Box::new(RowReader::new(name, source, wanted, options)?));
    }
    if beginning.bytes.starts_with(b"BZh") && beginning.bytes.get(4..10) == Some(BZIP2_BLOCK) {
        source = source::bzip2(name, source)?;
        (beginning, source) = begin(name, source)?;
    }
    for (magic, format, program) in COMPRESSED {
        if beginning.bytes.starts_with(magic) {
            return Err(ReadError::new(format!("{name} is compressed by {format}"))
                .advise(format!("decompress it: {program} FILE | fathom query --replay - …")));
        }
    }
    let head = beginning.head();
    let (stream, of) = single(name, wanted, head.line)?;
    let reader = of_single(name, source, &head, of, options)?;
    Ok(if stream == 0 { reader } else { Box::new(OfStream { reader, stream }) })
}

/// The reader of a file of a single stream.
fn of_single(
    name: &str,
    source: ByteSource,
    head: &Head<'_>,
    WantedStream { schema, columns: wanted }: &WantedStream,
    options: &ReadOptions,
) -> Result<Box<dyn Reader>, ReadError> {
    if head.line.is_some_and(|line| csv::is_header(line, schema)) {
        return Ok(Box::new(Csv::new(name, Lines::new(source), schema, wanted, options)?));
    }
    if let Some(format) = FORMATS.iter().find(|format| (format.is)(head)) {
        let columns = EventColumns::new(schema, wanted, options.time_unit);
        return Ok((format.open)(name, head, source, columns));
    }
    if head.line.is_none() {
        return Err(ReadError::new(format!("{name} is empty")));
    }
    let traces: Vec<&str> = trace_formats().collect();
    Err(ReadError::new(format!("the format of {name} is unknown")).advise(format!(
        "supported formats are recordings, CSV whose first line names columns, and traces of {}",
        traces.join(", ")
    )))
}
