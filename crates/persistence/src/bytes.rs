//! Little-endian numbers in a block. Offsets are constants, and callers check the block's length.

/// The number of 16 bits at `at`.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

/// The number of 32 bits at `at`.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

/// The number of 64 bits at `at`.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// The `LENGTH` bytes at `at`; zeroes if they are not all within `bytes`. A block whose checksum
/// was verified has them all.
pub fn array<const LENGTH: usize>(bytes: &[u8], at: usize) -> [u8; LENGTH] {
    let mut array = [0; LENGTH];
    if let Some(source) = bytes.get(at..at + LENGTH) {
        array.copy_from_slice(source);
    }
    array
}

/// Copies `value` to `at`.
///
/// # Panics
/// If it does not lie within `bytes`.
pub fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}
