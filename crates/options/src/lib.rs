//! The notation of options, and the messages about mistakes in them.
//!
//! Read [`Section`] first. The crate must not know what is configured.
//!
//! - [`read`]: reads a type with serde from a value that may come from TOML, from JSON or from
//!   flags. Reports all mistakes in one pass, each with its origin.
//! - [`Problems`]: the problems of a configuration, each with its [`Origin`] and a remedy.
//! - [`Section`]: a table of a configuration, which serde reads, with the keys of its
//!   documentation.
//! - [`Check`]: reports problems with values that could be read.
//! - [`Bytes`], [`Nanoseconds`]: sizes and times in human notation.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod check;
mod fields;
mod problem;
mod read;
mod section;
mod units;

pub use check::Check;
pub use fields::fields;
pub use problem::{Origin, Origins, Problem, Problems};
pub use read::{Title, Written, read};
pub use section::{Key, Section};
pub use units::{Bytes, Nanoseconds, UnitError, count, parse_bytes, parse_nanoseconds};

/// The most names in a suggestion.
const NAMES_MAX: usize = 24;

/// A remedy for the unknown name `written`: the most similar name of `known`, or all of them.
pub fn suggestion(written: &str, known: &[&str]) -> String {
    let near = known
        .iter()
        .filter(|_| written.len() <= 64)
        .map(|name| (strsim::damerau_levenshtein(&written.to_lowercase(), name), name))
        .filter(|(distance, name)| *distance <= 1 + name.len() / 3)
        .min_by_key(|(distance, _)| *distance);
    if let Some((_, name)) = near {
        return format!("did you mean `{name}`?");
    }
    if known.is_empty() {
        return "this configuration has none".into();
    }
    let names: Vec<String> = known.iter().take(NAMES_MAX).map(|name| format!("`{name}`")).collect();
    let more = if known.len() > NAMES_MAX { ", …" } else { "" };
    format!("known here: {}{more}", names.join(", "))
}
