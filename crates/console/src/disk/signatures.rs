//! The content of a disk or partition by its signature.
use fathom_image::Signature;

/// The number of bytes at the start that [`recognise`] examines.
pub const LENGTH: usize = 72 << 10;

/// The content of a volume that starts with `bytes`; `None` if unknown.
pub fn recognise(bytes: &[u8]) -> Option<&'static str> {
    Signature::at_start(bytes).map(|found| found.0)
}
