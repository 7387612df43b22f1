//! How options are written, and what is said about mistakes in them.
//!
//! - [`read`]: a type of serde's is read from a value that may come from TOML, from JSON or from
//!   flags. All mistakes are found at once, each with its place.
//! - [`Problems`]: what is wrong, where ([`Place`]), and the remedy.
//! - [`Check`]: how a type says what is wrong with values that could be read.
//! - [`Bytes`], [`Nanoseconds`]: sizes and times as people write them.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod check;
mod fields;
mod problem;
mod read;
mod units;

pub use check::Check;
pub use fields::fields;
pub use problem::{Place, Places, Problem, Problems};
pub use read::{Title, Written, read};
pub use units::{Bytes, Nanoseconds, UnitError, count, parse_bytes, parse_nanoseconds};

/// What `written` may have meant among `known`.
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
    let names: Vec<String> = known.iter().map(|name| format!("`{name}`")).collect();
    format!("known here: {}", names.join(", "))
}
