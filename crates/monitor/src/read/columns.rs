//! Fields: their conversion to values, and the columns that formats other than CSV fill.

use fathom_cql::catalog::StreamSchema;
use fathom_cql::{Row, Type, Value};

use super::intern::Texts;
use super::{TimeUnit, nulls, shown};
use crate::schema::kind_of;

/// The longest field, in bytes. A path has at most 4,096 bytes.
pub const FIELD_MAX: usize = 8 << 10;

/// The position of a column in a row, which has only the wanted columns; `None` if the column is
/// not wanted.
pub fn place(wanted: &[bool], column: usize) -> Option<usize> {
    wanted.get(column)?.then(|| width(&wanted[..column]))
}

/// The number of wanted columns.
pub fn width(wanted: &[bool]) -> usize {
    wanted.iter().filter(|&&wanted| wanted).count()
}

/// Parses a decimal integer of 64 bits.
#[inline]
pub fn integer(bytes: &[u8]) -> Option<i64> {
    let (negative, digits) = match bytes {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        _ => (false, bytes),
    };
    if digits.is_empty() {
        return None;
    }
    if digits.len() <= 18 {
        let value = small(digits)?;
        return Some(if negative { -value } else { value });
    }
    let mut value = 0_i64;
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        // The value is negative, because the least integer has no positive counterpart.
        value = value.checked_mul(10)?.checked_sub(i64::from(digit))?;
    }
    if negative { Some(value) } else { value.checked_neg() }
}

/// The value of at most 18 digits.
fn small(digits: &[u8]) -> Option<i64> {
    let (first, last) = match digits.split_last_chunk() {
        Some((first, last)) => (first, Some(eight(*last)?)),
        None => (digits, None),
    };
    let mut value = 0_i64;
    for &byte in first {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value * 10 + i64::from(digit);
    }
    Some(last.map_or(value, |last| value * 100_000_000 + last))
}

/// The value of eight digits, which is computed for all of them at once.
fn eight(digits: [u8; 8]) -> Option<i64> {
    // The first digit is the lowest byte.
    let word = u64::from_le_bytes(digits);
    let values = word.wrapping_sub(each(b'0'));
    // Bytes below '0' set the highest bit of the difference, others that are not digits that of the
    // sum.
    if (values | word.wrapping_add(each(0x7f - b'9'))) & each(0x80) != 0 {
        return None;
    }
    // Neighbours become one number of twice the bits: ten times the first, plus the second.
    let pairs = values.wrapping_mul((10 << 8) + 1) >> 8 & 0x00ff_00ff_00ff_00ff;
    let fours = pairs.wrapping_mul((100 << 16) + 1) >> 16 & 0x0000_ffff_0000_ffff;
    Some((fours.wrapping_mul((10_000 << 32) + 1) >> 32) as i64)
}

/// A word of eight equal bytes.
pub const fn each(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// Parses an integer that is not negative.
pub fn count(bytes: &[u8]) -> Option<i64> {
    integer(bytes).filter(|&value| value >= 0)
}

/// The value of a field, or an error. An empty field is null, unless it is a quoted text.
pub fn value(
    field: &[u8],
    quoted: bool,
    kind: Type,
    name: &str,
    texts: &mut Texts,
) -> Result<Value, String> {
    if field.is_empty() && !(quoted && kind == Type::Text) {
        return Ok(Value::Null);
    }
    if field.len() > FIELD_MAX {
        return Err(format!("{name} has {} bytes, more than {FIELD_MAX}", field.len()));
    }
    let value = match kind {
        Type::Text => return Ok(texts.value(field)),
        Type::Integer => integer(field.trim_ascii()).map(Value::Integer),
        Type::Float => {
            let text = std::str::from_utf8(field).ok();
            text.and_then(|text| text.trim().parse().ok()).map(Value::Float)
        }
        Type::Boolean => match field.trim_ascii() {
            b"1" => Some(true),
            b"0" => Some(false),
            word if word.eq_ignore_ascii_case(b"true") => Some(true),
            word if word.eq_ignore_ascii_case(b"false") => Some(false),
            _ => None,
        }
        .map(Value::Boolean),
    };
    value.ok_or_else(|| format!("{name} is {}, which is not of type {kind}", shown(field)))
}

/// The positions of the columns of I/O events that traces can fill; `None` for those that are not
/// wanted.
#[derive(Clone, Debug)]
pub struct EventColumns {
    width: usize,
    unit: TimeUnit,
    columns: [Option<usize>; EventColumn::Flags as usize + 1],
}

/// A column that traces can fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the columns'")]
pub enum EventColumn {
    Time,
    Type,
    Operation,
    Request,
    Sector,
    Size,
    VDisk,
    Process,
    ProcessId,
    Error,
    Flags,
}

/// The names, in the order of [`EventColumn`].
const NAMES: [&str; EventColumn::Flags as usize + 1] = [
    "BlktapTS",
    "Type",
    "IOOp",
    "ReqId",
    "Sector",
    "Size",
    "VDisk",
    "Process",
    "ProcessId",
    "Error",
    "Flags",
];

impl EventColumns {
    /// Finds the columns in a schema.
    pub fn new(schema: &StreamSchema, wanted: &[bool], unit: TimeUnit) -> Self {
        let columns = NAMES.map(|name| {
            // A script's own stream may have a column with this name and another type.
            let column =
                schema.find(name).filter(|&c| Some(schema.columns[c].kind) == kind_of(name));
            column.and_then(|column| place(wanted, column))
        });
        Self { width: width(wanted), unit, columns }
    }

    /// A row that has only its time.
    pub fn row(&self, time_ns: i64) -> Row {
        let mut row = nulls(self.width);
        if let Some(column) = self.columns[EventColumn::Time as usize] {
            row[column] = Value::Integer(time_ns / self.unit.nanoseconds());
        }
        row
    }

    /// Fills a column with a value of its type.
    pub fn value(&self, row: &mut Row, column: EventColumn, value: Value) {
        if let Some(column) = self.columns[column as usize] {
            row[column] = value;
        }
    }

    /// Fills a column with an integer.
    pub fn integer(&self, row: &mut Row, column: EventColumn, value: i64) {
        if let Some(column) = self.columns[column as usize] {
            row[column] = Value::Integer(value);
        }
    }

    /// Fills a column with a text.
    pub fn text(&self, row: &mut Row, column: EventColumn, value: &[u8], texts: &mut Texts) {
        if let Some(column) = self.columns[column as usize] {
            row[column] = texts.value(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_of_traces_are_columns_of_events() {
        let kinds = NAMES.map(kind_of);
        let texts = [
            EventColumn::Type,
            EventColumn::Operation,
            EventColumn::VDisk,
            EventColumn::Process,
            EventColumn::Error,
        ];
        let expected = |column| if texts.contains(&column) { Type::Text } else { Type::Integer };
        for column in [
            EventColumn::Time,
            EventColumn::Type,
            EventColumn::Operation,
            EventColumn::Request,
            EventColumn::Sector,
            EventColumn::Size,
            EventColumn::VDisk,
            EventColumn::Process,
            EventColumn::ProcessId,
            EventColumn::Error,
            EventColumn::Flags,
        ] {
            assert_eq!(kinds[column as usize], Some(expected(column)), "{column:?}");
        }
    }

    #[test]
    fn integers_have_64_bits() {
        for good in [0, 1, -1, 999_999_999_999_999_999, i64::MAX, i64::MIN, i64::MIN + 1] {
            assert_eq!(integer(good.to_string().as_bytes()), Some(good));
        }
        for digits in 1..=19 {
            let number: i64 = "1029384756473829105"[..digits].parse().unwrap();
            let text = number.to_string();
            assert_eq!(integer(text.as_bytes()), Some(number));
            assert_eq!(integer(format!("-{text}").as_bytes()), Some(-number));
            for at in 0..digits {
                for byte in 0..=255_u8 {
                    let mut bytes = text.clone().into_bytes();
                    bytes[at] = byte;
                    let is_sign = at == 0 && digits > 1 && b"+-".contains(&byte);
                    let expected = byte.is_ascii_digit() || is_sign;
                    assert_eq!(integer(&bytes).is_some(), expected, "{at} of {bytes:?}");
                }
            }
        }
        assert_eq!(integer(b"+0000000000000000000000000007"), Some(7));
        for bad in ["", "-", "+", "1.0", " 1", "9223372036854775808", "-9223372036854775809", "1-"]
        {
            assert_eq!(integer(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!((count(b"-1"), count(b"1")), (None, Some(1)));
    }

    #[test]
    fn fields_become_values() {
        let mut texts = Texts::new();
        let mut of = |field: &str, quoted, kind| {
            value(field.as_bytes(), quoted, kind, "X", &mut texts).map_err(|text| text.len() > 5)
        };
        assert_eq!(of("", false, Type::Text), Ok(Value::Null));
        assert_eq!(of("", true, Type::Text), Ok(Value::text("")));
        assert_eq!(of("", true, Type::Integer), Ok(Value::Null));
        assert_eq!(of(" 7 ", false, Type::Integer), Ok(Value::Integer(7)));
        assert_eq!(of("1e3", false, Type::Float), Ok(Value::Float(1000.0)));
        assert_eq!(of("TRUE", false, Type::Boolean), Ok(Value::Boolean(true)));
        assert_eq!(of("yes", false, Type::Boolean), Err(true));
        assert_eq!(of("seven", false, Type::Integer), Err(true));
        assert_eq!(of(&"x".repeat(FIELD_MAX + 1), false, Type::Text), Err(true));
    }
}
