//! Tables of a configuration that are documented from themselves.

use serde::de::DeserializeOwned;

use crate::Check;

/// The documentation of a key of a table.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The key's name.
    pub name: &'static str,
    /// The default in TOML syntax; empty for none.
    pub default: &'static str,
    /// The meaning of the key.
    pub meaning: &'static str,
    /// Other names of the key.
    pub aliases: &'static [&'static str],
}

impl Key {
    /// A key with a default; an empty text for none.
    pub const fn new(name: &'static str, default: &'static str, meaning: &'static str) -> Self {
        Self { name, default, meaning, aliases: &[] }
    }

    /// The key with other names.
    #[must_use]
    pub const fn with_aliases(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }
}

/// A table of a configuration: a type that serde reads, with the keys of its documentation.
pub trait Section: Default + DeserializeOwned {
    /// All keys, in the order of the fields and of the documentation.
    const KEYS: &'static [Key];

    /// Reports invalid values, as far as the table alone shows them. It looks at no files and no
    /// other tables.
    fn check(&self, _: &mut Check<'_>) {}
}
