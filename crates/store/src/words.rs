//! Numbers and texts in a row, little-endian.

use fathom_persistence::bytes::{u32_at, u64_at};

/// Appends numbers and texts.
#[derive(Default)]
pub(crate) struct WordWriter(pub(crate) Vec<u8>);

impl WordWriter {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// A text of at most 255 bytes.
    pub(crate) fn text(&mut self, text: &str) {
        debug_assert!(text.len() <= 255, "names are checked");
        self.u8(text.len() as u8);
        self.0.extend(text.as_bytes());
    }
}

/// Takes them from the beginning of bytes that may have any content.
pub(crate) struct WordReader<'a>(pub(crate) &'a [u8]);

impl<'a> WordReader<'a> {
    pub(crate) fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, left) = self.0.split_at_checked(length)?;
        self.0 = left;
        Some(taken)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take(4).map(|bytes| u32_at(bytes, 0))
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take(8).map(|bytes| u64_at(bytes, 0))
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        let length = self.u8()?;
        String::from_utf8(self.take(usize::from(length))?.to_vec()).ok()
    }

    /// `count` things, of which each takes at least one byte.
    pub(crate) fn list<T>(
        &mut self,
        count: u32,
        mut each: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        if count as usize > self.0.len() {
            return None;
        }
        (0..count).map(|_| each(self)).collect()
    }
}
