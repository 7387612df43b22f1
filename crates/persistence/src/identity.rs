//! Which store it is.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};

/// The identity of a store, drawn at random when it is made. Copies of a store have the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity(pub [u8; 16]);

impl Identity {
    /// The identity of no store.
    pub const NONE: Self = Self([0; 16]);

    /// Draws the identity of a new store.
    ///
    /// # Errors
    /// If the host has no random numbers.
    pub fn draw() -> io::Result<Self> {
        let mut identity = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut identity)?;
        Ok(Self(identity))
    }

    /// The identity that is shown as this text.
    pub fn parse(text: &str) -> Option<Self> {
        let is_plain = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = is_plain.then(|| u128::from_str_radix(text, 16).ok())??;
        Some(Self(number.to_be_bytes()))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", u128::from_be_bytes(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_read_as_it_is_shown() {
        let identity = Identity(*b"\x0f123456789abcde\xff");
        assert_eq!(identity.to_string(), "0f31323334353637383961626364 65ff".replace(' ', ""));
        assert_eq!(Identity::parse(&identity.to_string()), Some(identity));
        let text = identity.to_string();
        for other in [&text[1..], &text.replace('f', "g"), &text.replacen("0f", "+f", 1), ""] {
            assert_eq!(Identity::parse(other), None, "{other}");
        }
        assert_ne!(Identity::draw().unwrap(), Identity::draw().unwrap());
    }
}
