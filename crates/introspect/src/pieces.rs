//! The memory of a request, consumed piece by piece.

/// The most pieces of memory of a request that are examined.
const PIECES_MAX: usize = 2048;

/// The pieces of memory of a request, divided at the ends of bios.
pub(crate) struct Pieces<I> {
    inner: I,
    left: Option<(u64, u64)>,
    count: usize,
}

impl<I: Iterator<Item = (u64, u64)>> Pieces<I> {
    /// The pieces of a request, in order.
    pub fn new(inner: I) -> Self {
        Self { inner, left: None, count: 0 }
    }

    /// The next piece, or its first `length_max` bytes.
    pub fn next(&mut self, length_max: u64) -> Option<(u64, u64)> {
        let (address, length) = match self.left.take() {
            Some(left) => left,
            None if self.count < PIECES_MAX => {
                self.count += 1;
                self.inner.next().filter(|(_, length)| *length > 0)?
            }
            None => return None,
        };
        let count = length.min(length_max);
        if count < length {
            self.left = Some((address.wrapping_add(count), length - count));
        }
        Some((address, count))
    }

    /// Skips `length` bytes.
    pub fn skip(&mut self, mut length: u64) {
        while length > 0 {
            let Some((_, count)) = self.next(length) else { break };
            length -= count;
        }
    }
}
