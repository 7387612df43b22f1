//! Numbers in little-endian order.

/// A growing sequence of bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct ByteBuilder(pub Vec<u8>);

impl ByteBuilder {
    /// Appends two bytes.
    pub fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends four bytes.
    pub fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends eight bytes.
    pub fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
}
