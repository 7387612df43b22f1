//! The header: the clock, and the streams with their columns.

use std::io;

use fathom_cql::Type;
use fathom_cql::catalog::StreamSchema;

use super::bytes::{ByteCursor, MalformedBytes};
use super::checksum::Sum;
use super::{COLUMNS_MAX, HEADER, MAGIC, SCHEMA_MAX, STREAMS_MAX, VERSION, VERSION_SINGLE};

/// The clock of a recording's times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u16)]
pub enum Clock {
    /// Nanoseconds of an unknown clock.
    #[default]
    Unknown = 0,
    /// Nanoseconds of the host's `CLOCK_MONOTONIC`.
    Monotonic = 1,
}

/// A column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedColumn {
    /// The column's name.
    pub name: String,
    /// The type of its values.
    pub kind: Type,
    /// Whether it holds times, in nanoseconds of the recording's clock.
    pub is_time: bool,
}

/// A stream of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedStream {
    /// The name.
    pub name: String,
    /// The columns.
    pub columns: Vec<RecordedColumn>,
}

/// The metadata of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The clock of the times.
    pub clock: Clock,
    /// The nanoseconds to add to a time to get the time since 1970, as of the recording's start; 0
    /// if unknown.
    pub wall_offset_ns: i64,
    /// The streams, at least one. Blocks of rows have the position of their stream.
    pub streams: Vec<RecordedStream>,
}

fn number(kind: Type) -> u8 {
    match kind {
        Type::Boolean => 1,
        Type::Integer => 2,
        Type::Float => 3,
        Type::Text => 4,
    }
}

fn kind(number: u8) -> Result<Type, MalformedBytes> {
    match number {
        1 => Ok(Type::Boolean),
        2 => Ok(Type::Integer),
        3 => Ok(Type::Float),
        4 => Ok(Type::Text),
        _ => Err(MalformedBytes("a column of an unknown type")),
    }
}

impl RecordedStream {
    fn new(schema: &StreamSchema) -> Self {
        let column = |column: &fathom_cql::catalog::Column| RecordedColumn {
            name: column.name.clone(),
            kind: column.kind,
            is_time: column.kind == Type::Integer
                && crate::schema::is_time(&schema.name, &column.name),
        };
        Self { name: schema.name.clone(), columns: schema.columns.iter().map(column).collect() }
    }

    /// The stream's schema.
    pub fn schema(&self) -> StreamSchema {
        let columns: Vec<(&str, Type)> =
            self.columns.iter().map(|column| (column.name.as_str(), column.kind)).collect();
        StreamSchema::new(&self.name, &columns)
    }

    fn put(&self, out: &mut Vec<u8>) -> io::Result<()> {
        if self.columns.len() > COLUMNS_MAX {
            return Err(invalid("a recorded stream has at most 256 columns"));
        }
        let name = |out: &mut Vec<u8>, name: &str| {
            let length = u8::try_from(name.len()).map_err(|_| invalid("a name is too long"))?;
            out.push(length);
            out.extend_from_slice(name.as_bytes());
            Ok::<_, io::Error>(())
        };
        name(out, &self.name)?;
        out.extend_from_slice(&(self.columns.len() as u16).to_le_bytes());
        for column in &self.columns {
            out.extend_from_slice(&[number(column.kind), u8::from(column.is_time)]);
            name(out, &column.name)?;
        }
        Ok(())
    }

    fn get(input: &mut ByteCursor<'_>) -> Result<Self, MalformedBytes> {
        let name = |input: &mut ByteCursor<'_>| {
            let length = usize::from(input.byte()?);
            let text = std::str::from_utf8(input.take(length)?);
            text.map(str::to_owned).map_err(|_| MalformedBytes("a name is not UTF-8"))
        };
        let of_stream = name(input)?;
        let count = input.fixed::<2>()? as usize;
        if count > COLUMNS_MAX {
            return Err(MalformedBytes("there are too many columns"));
        }
        let mut columns: Vec<RecordedColumn> = Vec::with_capacity(count);
        for _ in 0..count {
            let kind = kind(input.byte()?)?;
            let is_time = input.byte()? & 1 == 1 && kind == Type::Integer;
            let name = name(input)?;
            if columns.iter().any(|other| other.name.eq_ignore_ascii_case(&name)) {
                return Err(MalformedBytes("two columns have the same name"));
            }
            columns.push(RecordedColumn { name, kind, is_time });
        }
        Ok(Self { name: of_stream, columns })
    }
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message.to_owned())
}

impl Header {
    /// The header of a recording of a stream.
    pub fn new(schema: &StreamSchema, clock: Clock, wall_offset_ns: i64) -> Self {
        Self::of_streams(std::slice::from_ref(schema), clock, wall_offset_ns)
    }

    /// The header of a recording of several streams.
    pub fn of_streams(schemas: &[StreamSchema], clock: Clock, wall_offset_ns: i64) -> Self {
        let streams = schemas.iter().map(RecordedStream::new).collect();
        Self { clock, wall_offset_ns, streams }
    }

    /// The header of a recording of one of the streams.
    ///
    /// # Panics
    /// If there is no such stream.
    #[must_use]
    pub fn only(&self, stream: usize) -> Self {
        Self { streams: vec![self.streams[stream].clone()], ..*self }
    }

    /// The position of a stream, by its name in any case.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.streams.iter().position(|stream| stream.name.eq_ignore_ascii_case(name))
    }

    /// The columns of a stream; none if there is no such stream.
    pub fn columns(&self, stream: usize) -> &[RecordedColumn] {
        self.streams.get(stream).map_or(&[], |stream| &stream.columns)
    }

    /// The header's bytes. A recording of a single stream has the version that older programs read.
    ///
    /// # Errors
    /// If there are too many streams or columns, or their names are too long.
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        if self.streams.is_empty() || self.streams.len() > STREAMS_MAX {
            return Err(invalid("a recording has from 1 to 16 streams"));
        }
        let version = if self.streams.len() == 1 { VERSION_SINGLE } else { VERSION };
        let mut schema = Vec::new();
        if version == VERSION {
            schema.push(self.streams.len() as u8);
        }
        for stream in &self.streams {
            stream.put(&mut schema)?;
        }
        if schema.len() > SCHEMA_MAX {
            return Err(invalid("the names of the columns are too long"));
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&version.to_le_bytes());
        bytes.extend_from_slice(&(self.clock as u16).to_le_bytes());
        bytes.extend_from_slice(&(schema.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&self.wall_offset_ns.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        let sum = Sum::new().add(&bytes).add(&schema).value();
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes.extend_from_slice(&schema);
        Ok(bytes)
    }

    /// The number of bytes of a header after its fixed part.
    pub(super) fn rest(fixed: &[u8; HEADER]) -> Result<usize, String> {
        let mut input = ByteCursor::new(fixed, MAGIC.len());
        let read = |input: &mut ByteCursor<'_>| -> Result<(u64, usize), MalformedBytes> {
            let version = input.fixed::<2>()?;
            input.fixed::<2>()?;
            Ok((version, input.fixed::<4>()? as usize))
        };
        let (version, length) = read(&mut input).map_err(|wrong| wrong.to_string())?;
        if fixed[..MAGIC.len()] != MAGIC {
            return Err("this is not a recording".into());
        }
        if !(u64::from(VERSION_SINGLE)..=u64::from(VERSION)).contains(&version) {
            return Err(format!(
                "the recording has version {version}, only versions up to {VERSION} are supported"
            ));
        }
        if length > SCHEMA_MAX {
            return Err("the header is damaged".into());
        }
        Ok(length)
    }

    /// Decodes a header.
    pub(super) fn from_bytes(fixed: &[u8; HEADER], rest: &[u8]) -> Result<Self, MalformedBytes> {
        let (summed, sum) = fixed.split_at(HEADER - 4);
        if Sum::new().add(summed).add(rest).value().to_le_bytes() != sum {
            return Err(MalformedBytes("the header is damaged"));
        }
        let mut input = ByteCursor::new(fixed, MAGIC.len());
        let version = input.fixed::<2>()?;
        let clock = match input.fixed::<2>()? {
            1 => Clock::Monotonic,
            _ => Clock::Unknown,
        };
        input.fixed::<4>()?;
        let wall_offset_ns = input.fixed::<8>()? as i64;
        let mut input = ByteCursor::new(rest, 0);
        let count =
            if version == u64::from(VERSION_SINGLE) { 1 } else { usize::from(input.byte()?) };
        if !(1..=STREAMS_MAX).contains(&count) {
            return Err(MalformedBytes("it has no streams, or too many"));
        }
        let mut streams: Vec<RecordedStream> = Vec::with_capacity(count);
        for _ in 0..count {
            let stream = RecordedStream::get(&mut input)?;
            if streams.iter().any(|other| other.name.eq_ignore_ascii_case(&stream.name)) {
                return Err(MalformedBytes("two streams have the same name"));
            }
            streams.push(stream);
        }
        Ok(Self { clock, wall_offset_ns, streams })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io_stream;

    #[test]
    fn a_header_is_read_as_written_and_a_changed_one_is_rejected() {
        let header = Header::new(&io_stream(), Clock::Monotonic, -7);
        assert_eq!(header.columns(0).iter().filter(|column| column.is_time).count(), 3);
        let bytes = header.to_bytes().unwrap();
        let split = |bytes: &[u8]| -> Result<Header, String> {
            let fixed: [u8; HEADER] = bytes[..HEADER].try_into().unwrap();
            let length = Header::rest(&fixed)?;
            let rest = bytes.get(HEADER..HEADER + length).ok_or("cut")?;
            Header::from_bytes(&fixed, rest).map_err(|wrong| wrong.to_string())
        };
        let mut several = vec![io_stream(), io_stream()];
        several[1].name = "Other".into();
        let several = Header::of_streams(&several, Clock::Monotonic, -7);
        assert_eq!((several.find("other"), several.find("third")), (Some(1), None));
        assert_eq!(several.only(0), header);
        assert_eq!((bytes[8], several.to_bytes().unwrap()[8]), (1, 2));
        for header in [header, several] {
            let bytes = header.to_bytes().unwrap();
            assert_eq!(split(&bytes), Ok(header));
            for at in 0..bytes.len() {
                let mut changed = bytes.clone();
                changed[at] ^= 4;
                assert!(split(&changed).is_err(), "{at}");
            }
        }
    }

    #[test]
    fn streams_are_few_and_have_different_names() {
        let named = |name: &str| StreamSchema::new(name, &[("A", Type::Integer)]);
        let bytes =
            |schemas: &[StreamSchema]| Header::of_streams(schemas, Clock::Unknown, 0).to_bytes();
        let many: Vec<_> = (0..=STREAMS_MAX).map(|number| named(&number.to_string())).collect();
        assert!(bytes(&[]).is_err() && bytes(&many).is_err() && bytes(&many[1..]).is_ok());
        let twice = bytes(&[named("s"), named("S")]).unwrap();
        let fixed: [u8; HEADER] = twice[..HEADER].try_into().unwrap();
        let read = Header::from_bytes(&fixed, &twice[HEADER..]);
        assert_eq!(read, Err(MalformedBytes("two streams have the same name")));
    }
}
