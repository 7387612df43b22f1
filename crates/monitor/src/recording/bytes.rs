//! Numbers as bytes: of fixed length, and as variable-length integers, short for small numbers.

use std::fmt;

/// An error in the bytes of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedBytes(pub &'static str);

impl fmt::Display for MalformedBytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.0)
    }
}

/// Appends a number as a variable-length integer: seven bits a byte, the low ones first.
pub fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Maps a signed number to an unsigned one that is small if the number is near 0.
pub fn zigzag(value: i64) -> u64 {
    (value << 1 ^ value >> 63) as u64
}

/// The inverse of [`zigzag`].
pub fn unzigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

/// A position in untrusted bytes.
#[derive(Clone, Copy, Debug)]
pub struct ByteCursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> ByteCursor<'a> {
    /// Begins at `at`, or at the end if the bytes end before.
    pub fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at: at.min(bytes.len()) }
    }

    /// The position.
    pub fn at(&self) -> usize {
        self.at
    }

    /// The number of bytes left.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next bytes.
    pub fn take(&mut self, length: usize) -> Result<&'a [u8], MalformedBytes> {
        if length > self.left() {
            return Err(MalformedBytes("a length exceeds the data"));
        }
        let taken = &self.bytes[self.at..self.at + length];
        self.at += length;
        Ok(taken)
    }

    /// The next byte.
    pub fn byte(&mut self) -> Result<u8, MalformedBytes> {
        self.take(1).map(|bytes| bytes[0])
    }

    /// The next number of fixed length.
    pub fn fixed<const N: usize>(&mut self) -> Result<u64, MalformedBytes> {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(self.take(N)?);
        Ok(u64::from_le_bytes(bytes))
    }

    /// The next variable-length integer.
    pub fn varint(&mut self) -> Result<u64, MalformedBytes> {
        // Most have one byte.
        match self.bytes.get(self.at) {
            Some(&byte) if byte < 0x80 => {
                self.at += 1;
                return Ok(u64::from(byte));
            }
            _ => {}
        }
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(MalformedBytes("a number has more than 64 bits"))
    }

    /// The next variable-length integer, as a length.
    pub fn length(&mut self) -> Result<usize, MalformedBytes> {
        usize::try_from(self.varint()?).map_err(|_| MalformedBytes("a length exceeds the data"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_they_were_written() {
        for value in [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), u64::MAX] {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            assert_eq!(ByteCursor::new(&bytes, 0).varint(), Ok(value));
            assert!(ByteCursor::new(&bytes[..bytes.len() - 1], 0).varint().is_err());
        }
        for value in [0, 1, -1, 63, -64, i64::MAX, i64::MIN] {
            assert_eq!(unzigzag(zigzag(value)), value);
        }
        assert_eq!(zigzag(-1), 1);
        assert!(ByteCursor::new(&[0xff; 9], 0).varint().is_err());
        assert!(ByteCursor::new(&[0xff; 10], 0).varint().is_err());
    }
}
