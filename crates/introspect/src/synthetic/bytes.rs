//! Little numbers in little-endian order.

/// Bytes that grow.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bytes(pub Vec<u8>);

impl Bytes {
    /// Two more.
    pub fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Four more.
    pub fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Eight more.
    pub fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
}
