//! The records of a stream.
//!
//! A stream begins with its magic number and version. Each record has its kind and length, its
//! payload, and a check: the BLAKE3 hash of the check before it and of the record. So a record
//! proves all before it: none is missing, changed or elsewhere.

use std::io::{self, Read, Write};

use super::TransferError;
use crate::catalogue::{is_name, is_size};
use crate::words::{WordReader, WordWriter};

const MAGIC: [u8; 8] = *b"FATHOMSS";
const VERSION: u32 = 1;
const PREFIX: usize = 16;
const HEAD: usize = 8;
/// The length of a check and of a digest, in bytes.
pub(super) const HASH: usize = 32;
/// The most bytes of a data record.
pub(super) const DATA_MAX: usize = 1 << 20;
/// The most bytes of a payload: an offset, and data.
pub(super) const PAYLOAD_MAX: usize = 8 + DATA_MAX;

/// The snapshot on which a stream is based.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamBase {
    /// Its name.
    pub name: String,
    /// When it was taken, in seconds since 1970.
    pub time_s: u64,
    /// Its size, in bytes.
    pub size: u64,
    /// The digest of its content.
    pub digest: [u8; HASH],
}

/// What is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beginning {
    /// The volume.
    pub volume: String,
    /// The snapshot.
    pub snapshot: String,
    /// When it was taken, in seconds since 1970.
    pub time_s: u64,
    /// Its size, in bytes.
    pub size: u64,
    /// The snapshot since which the stream has the changes; without one, it has everything.
    pub base: Option<StreamBase>,
}

/// A record of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamRecord<'a> {
    /// The first one.
    Begin(Beginning),
    /// Content, from this byte on.
    Data(u64, &'a [u8]),
    /// Zeroes: the first byte, and the length in bytes.
    Hole(u64, u64),
    /// The last one: the digest of the snapshot.
    End([u8; HASH]),
}

impl StreamRecord<'_> {
    fn encode(&self) -> (u8, Vec<u8>) {
        let mut out = WordWriter::default();
        let kind = match self {
            Self::Begin(beginning) => {
                out.text(&beginning.volume);
                out.text(&beginning.snapshot);
                out.u64(beginning.time_s);
                out.u64(beginning.size);
                out.u8(u8::from(beginning.base.is_some()));
                if let Some(base) = &beginning.base {
                    out.text(&base.name);
                    out.u64(base.time_s);
                    out.u64(base.size);
                    out.0.extend(base.digest);
                }
                1
            }
            Self::Data(offset, bytes) => {
                out.u64(*offset);
                out.0.extend(*bytes);
                2
            }
            Self::Hole(offset, length) => {
                out.u64(*offset);
                out.u64(*length);
                3
            }
            Self::End(digest) => {
                out.0.extend(digest);
                4
            }
        };
        (kind, out.0)
    }

    fn decode(kind: u8, payload: &[u8]) -> Option<StreamRecord<'_>> {
        let mut input = WordReader(payload);
        let record = match kind {
            1 => StreamRecord::Begin(decode_beginning(&mut input)?),
            2 => {
                let offset = input.u64()?;
                StreamRecord::Data(offset, std::mem::take(&mut input.0))
            }
            3 => StreamRecord::Hole(input.u64()?, input.u64()?),
            4 => StreamRecord::End(input.take(HASH)?.try_into().ok()?),
            _ => return None,
        };
        input.0.is_empty().then_some(record)
    }
}

fn decode_beginning(input: &mut WordReader<'_>) -> Option<Beginning> {
    let (volume, snapshot) = (input.text()?, input.text()?);
    let (time_s, size) = (input.u64()?, input.u64()?);
    let base = match input.u8()? {
        0 => None,
        1 => {
            let (name, time_s, size) = (input.text()?, input.u64()?, input.u64()?);
            let digest = input.take(HASH)?.try_into().ok()?;
            Some(StreamBase { name, time_s, size, digest })
        }
        _ => return None,
    };
    let is_sane = is_name(&volume)
        && is_name(&snapshot)
        && is_size(size)
        && base.as_ref().is_none_or(|base| is_name(&base.name) && is_size(base.size));
    is_sane.then_some(Beginning { volume, snapshot, time_s, size, base })
}

fn prefix() -> [u8; PREFIX] {
    let mut prefix = [0; PREFIX];
    prefix[..8].copy_from_slice(&MAGIC);
    prefix[8..12].copy_from_slice(&VERSION.to_le_bytes());
    prefix
}

fn head(kind: u8, length: usize) -> [u8; HEAD] {
    let mut head = [kind, 0, 0, 0, 0, 0, 0, 0];
    head[4..].copy_from_slice(&(length as u32).to_le_bytes());
    head
}

fn check(before: &[u8; HASH], head: &[u8; HEAD], payload: &[u8]) -> [u8; HASH] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(before).update(head).update(payload);
    *hasher.finalize().as_bytes()
}

/// A stream of these kinds and payloads.
pub(super) fn seal(records: &[(u8, &[u8])]) -> Vec<u8> {
    let mut out = prefix().to_vec();
    let mut last = *blake3::hash(&out).as_bytes();
    for (kind, payload) in records {
        let head = head(*kind, payload.len());
        last = check(&last, &head, payload);
        out.extend(head);
        out.extend(*payload);
        out.extend(last);
    }
    out
}

/// Writes a stream.
pub(super) struct RecordWriter<W> {
    out: W,
    check: [u8; HASH],
}

impl<W: Write> RecordWriter<W> {
    pub(super) fn new(mut out: W) -> io::Result<Self> {
        out.write_all(&prefix())?;
        Ok(Self { out, check: *blake3::hash(&prefix()).as_bytes() })
    }

    pub(super) fn write(&mut self, record: &StreamRecord<'_>) -> io::Result<()> {
        let (kind, payload) = record.encode();
        let head = head(kind, payload.len());
        self.check = check(&self.check, &head, &payload);
        self.out.write_all(&head)?;
        self.out.write_all(&payload)?;
        self.out.write_all(&self.check)
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Reads a stream, which may have any content. It takes memory for one record.
pub struct RecordReader<R> {
    input: R,
    check: [u8; HASH],
    payload: Vec<u8>,
    /// What a record may have next: the first byte, and the size of the snapshot.
    at: u64,
    size: Option<u64>,
}

fn read(input: &mut impl Read, bytes: &mut [u8]) -> Result<(), TransferError> {
    input.read_exact(bytes).map_err(|error| {
        let is_end = error.kind() == io::ErrorKind::UnexpectedEof;
        if is_end { TransferError::CutOff } else { TransferError::Stream(error) }
    })
}

impl<R: Read> RecordReader<R> {
    /// Reads the beginning of a stream.
    ///
    /// # Errors
    /// If it is none that this program can read.
    pub fn new(mut input: R) -> Result<Self, TransferError> {
        let mut found = [0; PREFIX];
        read(&mut input, &mut found)?;
        if found[..8] != MAGIC {
            return Err(TransferError::Unsound("it is no snapshot of Fathom"));
        }
        if found != prefix() {
            let mut version = [0; 4];
            version.copy_from_slice(&found[8..12]);
            return Err(TransferError::Newer(u32::from_le_bytes(version)));
        }
        let check = *blake3::hash(&found).as_bytes();
        Ok(Self { input, check, payload: Vec::new(), at: 0, size: None })
    }

    /// The next record. The first one begins, those with content are in order and within the size,
    /// and nothing follows the last one.
    ///
    /// # Errors
    /// If the stream ends, or is no sound one.
    pub fn next(&mut self) -> Result<StreamRecord<'_>, TransferError> {
        let mut found = [0; HEAD];
        read(&mut self.input, &mut found)?;
        let [kind, _, _, _, length @ ..] = found;
        let length = u32::from_le_bytes(length) as usize;
        if length > PAYLOAD_MAX || found != head(kind, length) {
            return Err(TransferError::Unsound("a record has no sound length"));
        }
        self.payload.resize(length, 0);
        read(&mut self.input, &mut self.payload)?;
        let mut found_check = [0; HASH];
        read(&mut self.input, &mut found_check)?;
        self.check = check(&self.check, &found, &self.payload);
        if self.check != found_check {
            return Err(TransferError::Unsound("a record has not its checksum"));
        }
        let record = StreamRecord::decode(kind, &self.payload)
            .ok_or(TransferError::Unsound("a record has no sound content"))?;
        let (first, length) = match &record {
            StreamRecord::Begin(beginning) if self.size.is_none() => {
                self.size = Some(beginning.size);
                return Ok(record);
            }
            StreamRecord::Begin(_) => return Err(TransferError::Unsound("it begins twice")),
            StreamRecord::Data(first, bytes) => (*first, bytes.len() as u64),
            StreamRecord::Hole(first, length) => (*first, *length),
            StreamRecord::End(_) if self.size.is_none() => {
                return Err(TransferError::Unsound("it does not begin"));
            }
            StreamRecord::End(_) => {
                return match self.input.read(&mut [0]) {
                    Ok(0) => Ok(record),
                    Ok(_) => Err(TransferError::Unsound("something follows its end")),
                    Err(error) => Err(TransferError::Stream(error)),
                };
            }
        };
        let end = first.checked_add(length).filter(|end| Some(*end) <= self.size);
        match end {
            Some(end) if first >= self.at && length > 0 => {
                self.at = end;
                Ok(record)
            }
            _ => Err(TransferError::Unsound("a record is not in its place")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<StreamRecord<'static>> {
        let base = StreamBase { name: "a".into(), time_s: 5, size: 8192, digest: [7; HASH] };
        let beginning = Beginning {
            volume: "web".into(),
            snapshot: "b".into(),
            time_s: 9,
            size: 1 << 20,
            base: Some(base),
        };
        vec![
            StreamRecord::Begin(beginning),
            StreamRecord::Data(512, &[1; 1000]),
            StreamRecord::Hole(4096, 8192),
            StreamRecord::Data(20480, &[2; 512]),
            StreamRecord::End([3; HASH]),
        ]
    }

    fn stream(records: &[StreamRecord<'_>]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut writer = RecordWriter::new(&mut out).unwrap();
        for record in records {
            writer.write(record).unwrap();
        }
        out
    }

    /// Reads to the end record.
    fn read_all(bytes: &[u8]) -> Result<usize, TransferError> {
        let mut reader = RecordReader::new(bytes)?;
        let mut count = 1;
        while !matches!(reader.next()?, StreamRecord::End(_)) {
            count += 1;
        }
        Ok(count)
    }

    #[test]
    fn records_are_read_as_written() {
        let bytes = stream(&records());
        let mut reader = RecordReader::new(&bytes[..]).unwrap();
        for record in records() {
            assert_eq!(reader.next().unwrap(), record);
        }
        assert!(matches!(reader.next(), Err(TransferError::CutOff)));
    }

    #[test]
    fn a_stream_with_a_change_a_cut_or_another_order_is_refused() {
        let bytes = stream(&records());
        for length in 0..bytes.len() {
            assert!(matches!(read_all(&bytes[..length]), Err(TransferError::CutOff)), "{length}");
        }
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x10;
            assert!(read_all(&bytes).is_err(), "byte {at}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(read_all(&longer).is_err());
        // The same records, with right checks, in orders that make no sense.
        let [begin, one, hole, two, end] = records().try_into().unwrap();
        let beyond = StreamRecord::Data((1 << 20) - 100, &[1; 101]);
        for order in [
            vec![one.clone(), end.clone()],
            vec![end.clone()],
            vec![begin.clone(), begin.clone(), end.clone()],
            vec![begin.clone(), two.clone(), one.clone(), end.clone()],
            vec![begin.clone(), hole.clone(), hole.clone(), end.clone()],
            vec![begin.clone(), beyond, end.clone()],
            vec![begin.clone(), StreamRecord::Hole(u64::MAX, 2), end.clone()],
            vec![begin.clone(), StreamRecord::Data(0, &[]), end.clone()],
        ] {
            let found = read_all(&stream(&order));
            assert!(matches!(found, Err(TransferError::Unsound(_))), "{order:?}");
        }
        assert_eq!(read_all(&stream(&[begin, one, hole, two, end])).unwrap(), 5);
    }
}
