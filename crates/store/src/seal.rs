//! Keyed codes: only the pool can have written what has the right code.
//!
//! Recovery looks for headers among the blocks of guests, who can write any content. They cannot
//! write a header, because they do not know the key.

use std::fmt;

/// The key of a pool, drawn at random when it is made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key(pub(crate) [u8; 32]);

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Key")
    }
}

/// The first half of a keyed BLAKE3 hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) [u8; 16]);

impl Key {
    /// The code of `bytes`.
    pub(crate) fn code(&self, bytes: &[u8]) -> Code {
        let hash = blake3::keyed_hash(&self.0, bytes);
        let mut code = [0; 16];
        code.copy_from_slice(&hash.as_bytes()[..16]);
        Code(code)
    }
}
