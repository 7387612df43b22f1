//! The header: the clock and the columns.

use std::io;

use fathom_cql::Type;
use fathom_cql::catalog::StreamSchema;

use super::bytes::{Input, Wrong};
use super::checksum::Sum;
use super::{COLUMNS_MAX, HEADER, MAGIC, SCHEMA_MAX, VERSION};

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

/// The metadata of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The clock of the times.
    pub clock: Clock,
    /// The nanoseconds to add to a time to get the time since 1970, as of the recording's start; 0
    /// if unknown.
    pub wall_offset_ns: i64,
    /// The name of the stream.
    pub stream: String,
    /// The columns.
    pub columns: Vec<RecordedColumn>,
}

fn number(kind: Type) -> u8 {
    match kind {
        Type::Boolean => 1,
        Type::Integer => 2,
        Type::Float => 3,
        Type::Text => 4,
    }
}

fn kind(number: u8) -> Result<Type, Wrong> {
    match number {
        1 => Ok(Type::Boolean),
        2 => Ok(Type::Integer),
        3 => Ok(Type::Float),
        4 => Ok(Type::Text),
        _ => Err(Wrong("a column of an unknown type")),
    }
}

impl Header {
    /// The header of a recording of a stream.
    pub fn new(schema: &StreamSchema, clock: Clock, wall_offset_ns: i64) -> Self {
        let column = |column: &fathom_cql::catalog::Column| RecordedColumn {
            name: column.name.clone(),
            kind: column.kind,
            is_time: column.kind == Type::Integer && crate::schema::is_time(&column.name),
        };
        Self {
            clock,
            wall_offset_ns,
            stream: schema.name.clone(),
            columns: schema.columns.iter().map(column).collect(),
        }
    }

    /// The header's bytes.
    ///
    /// # Errors
    /// If there are too many columns, or their names are too long.
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let invalid =
            |message: &str| io::Error::new(io::ErrorKind::InvalidInput, message.to_owned());
        if self.columns.len() > COLUMNS_MAX {
            return Err(invalid("a recording has at most 256 columns"));
        }
        let mut schema = Vec::new();
        let name = |schema: &mut Vec<u8>, name: &str| {
            let length = u8::try_from(name.len()).map_err(|_| invalid("a name is too long"))?;
            schema.push(length);
            schema.extend_from_slice(name.as_bytes());
            Ok::<_, io::Error>(())
        };
        name(&mut schema, &self.stream)?;
        schema.extend_from_slice(&(self.columns.len() as u16).to_le_bytes());
        for column in &self.columns {
            schema.extend_from_slice(&[number(column.kind), u8::from(column.is_time)]);
            name(&mut schema, &column.name)?;
        }
        if schema.len() > SCHEMA_MAX {
            return Err(invalid("the names of the columns are too long"));
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
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
        let mut input = Input::new(fixed, MAGIC.len());
        let read = |input: &mut Input<'_>| -> Result<(u64, usize), Wrong> {
            let version = input.fixed::<2>()?;
            input.fixed::<2>()?;
            Ok((version, input.fixed::<4>()? as usize))
        };
        let (version, length) = read(&mut input).map_err(|wrong| wrong.to_string())?;
        if fixed[..MAGIC.len()] != MAGIC {
            return Err("this is not a recording".into());
        }
        if version != u64::from(VERSION) {
            return Err(format!(
                "the recording has version {version}, only version {VERSION} is supported"
            ));
        }
        if length > SCHEMA_MAX {
            return Err("the header is damaged".into());
        }
        Ok(length)
    }

    /// Decodes a header.
    pub(super) fn from_bytes(fixed: &[u8; HEADER], rest: &[u8]) -> Result<Self, Wrong> {
        let (summed, sum) = fixed.split_at(HEADER - 4);
        if Sum::new().add(summed).add(rest).value().to_le_bytes() != sum {
            return Err(Wrong("the header is damaged"));
        }
        let mut input = Input::new(fixed, 10);
        let clock = match input.fixed::<2>()? {
            1 => Clock::Monotonic,
            _ => Clock::Unknown,
        };
        input.fixed::<4>()?;
        let wall_offset_ns = input.fixed::<8>()? as i64;
        let mut input = Input::new(rest, 0);
        let name = |input: &mut Input<'_>| {
            let length = usize::from(input.byte()?);
            let text = std::str::from_utf8(input.take(length)?);
            text.map(str::to_owned).map_err(|_| Wrong("a name is not UTF-8"))
        };
        let stream = name(&mut input)?;
        let count = input.fixed::<2>()? as usize;
        if count > COLUMNS_MAX {
            return Err(Wrong("there are too many columns"));
        }
        let mut columns: Vec<RecordedColumn> = Vec::with_capacity(count);
        for _ in 0..count {
            let kind = kind(input.byte()?)?;
            let is_time = input.byte()? & 1 == 1 && kind == Type::Integer;
            let name = name(&mut input)?;
            if columns.iter().any(|other| other.name.eq_ignore_ascii_case(&name)) {
                return Err(Wrong("two columns have the same name"));
            }
            columns.push(RecordedColumn { name, kind, is_time });
        }
        Ok(Self { clock, wall_offset_ns, stream, columns })
    }

    /// The stream's schema.
    pub fn schema(&self) -> StreamSchema {
        let columns: Vec<(&str, Type)> =
            self.columns.iter().map(|column| (column.name.as_str(), column.kind)).collect();
        StreamSchema::new(&self.stream, &columns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io_stream;

    #[test]
    fn a_header_is_read_as_written_and_a_changed_one_is_rejected() {
        let header = Header::new(&io_stream(), Clock::Monotonic, -7);
        assert_eq!(header.columns.iter().filter(|column| column.is_time).count(), 3);
        let bytes = header.to_bytes().unwrap();
        let split = |bytes: &[u8]| -> Result<Header, String> {
            let fixed: [u8; HEADER] = bytes[..HEADER].try_into().unwrap();
            let length = Header::rest(&fixed)?;
            let rest = bytes.get(HEADER..HEADER + length).ok_or("cut")?;
            Header::from_bytes(&fixed, rest).map_err(|wrong| wrong.to_string())
        };
        assert_eq!(split(&bytes), Ok(header));
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 4;
            assert!(split(&changed).is_err(), "{at}");
        }
    }
}
