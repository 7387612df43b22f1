//! The disk that a store belongs to.

use std::fmt;

use crate::bytes::{put, u16_at};

/// The longest name of a disk, in bytes.
pub const NAME_LENGTH_MAX: usize = 128;

/// The disk that a store belongs to. Of a longer name of its home, the last `HOME` bytes are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owner<const HOME: usize> {
    /// The disk's name.
    pub name: String,
    /// The name of the disk's own store, for example its image's path.
    pub home: String,
}

/// The name of a disk is longer than [`NAME_LENGTH_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameTooLong;

impl fmt::Display for NameTooLong {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "the disk's name is longer than {NAME_LENGTH_MAX} bytes")
    }
}

impl std::error::Error for NameTooLong {}

impl<const HOME: usize> Owner<HOME> {
    /// The disk `name` with the store `home`.
    ///
    /// # Errors
    /// If the name is too long.
    pub fn new(name: &str, home: &str) -> Result<Self, NameTooLong> {
        if name.len() > NAME_LENGTH_MAX {
            return Err(NameTooLong);
        }
        Ok(Self { name: name.to_owned(), home: end_of(home, HOME).to_owned() })
    }

    /// Whether the disk's own store has this name.
    #[must_use]
    pub fn is_home(&self, home: &str) -> bool {
        end_of(home, HOME) == self.home
    }

    /// Writes the lengths of both names, 2 bytes each, at `lengths_at`, and the names at
    /// `names_at`.
    ///
    /// # Panics
    /// If a name is too long, or `bytes` are too short.
    pub fn put(&self, bytes: &mut [u8], lengths_at: usize, names_at: usize) {
        let (name, home) = (self.name.as_bytes(), self.home.as_bytes());
        assert!(name.len() <= NAME_LENGTH_MAX && home.len() <= HOME);
        put(bytes, lengths_at, &(name.len() as u16).to_le_bytes());
        put(bytes, lengths_at + 2, &(home.len() as u16).to_le_bytes());
        put(bytes, names_at, name);
        put(bytes, names_at + NAME_LENGTH_MAX, home);
    }

    /// Reads what [`put`](Self::put) has written; `None` if it is damaged.
    pub fn get(bytes: &[u8], lengths_at: usize, names_at: usize) -> Option<Self> {
        let text = |at: usize, length: u16, limit: usize| {
            let length = usize::from(length);
            let text = bytes.get(at..at + length).filter(|_| length <= limit)?;
            String::from_utf8(text.to_vec()).ok()
        };
        let name = text(names_at, u16_at(bytes, lengths_at), NAME_LENGTH_MAX)?;
        let home = text(names_at + NAME_LENGTH_MAX, u16_at(bytes, lengths_at + 2), HOME)?;
        Some(Self { name, home })
    }
}

/// The end of a text, of at most `length` bytes.
pub fn end_of(text: &str, length: usize) -> &str {
    let mut start = text.len().saturating_sub(length);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_of_disks_are_rejected_and_long_names_of_stores_are_cut() {
        assert_eq!(Owner::<9>::new(&"a".repeat(129), ""), Err(NameTooLong));
        let home = format!("x{}", "\u{e4}".repeat(9));
        let owner = Owner::<9>::new(&"a".repeat(128), &home).unwrap();
        assert_eq!(owner.home, "\u{e4}".repeat(4));
        assert!(owner.is_home(&home) && owner.is_home(&owner.home) && !owner.is_home("x"));
        let mut bytes = [0; 160];
        owner.put(&mut bytes, 2, 20);
        assert_eq!(Owner::get(&bytes, 2, 20).as_ref(), Some(&owner));
        for (at, value) in [(2, 129), (4, 10), (3, 255), (20, 255)] {
            let mut damaged = bytes;
            damaged[at] = value;
            assert_eq!(Owner::<9>::get(&damaged, 2, 20), None, "{at} {value}");
        }
        assert_eq!(Owner::<9>::get(&bytes[..20], 2, 20), None);
    }
}
