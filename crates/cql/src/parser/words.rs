//! The keywords of the language, and suggestions for misspelt ones.

use crate::likeness::distance;

/// Keywords that are names only in backticks, after a point and where columns are declared.
const RESERVED: [&str; 29] = [
    "and",
    "as",
    "between",
    "by",
    "case",
    "distinct",
    "else",
    "end",
    "except",
    "false",
    "from",
    "group",
    "having",
    "in",
    "intersect",
    "is",
    "join",
    "like",
    "not",
    "null",
    "on",
    "or",
    "order",
    "select",
    "then",
    "true",
    "union",
    "when",
    "where",
];

/// Further words that are an alias only after `as`.
const NO_BARE_ALIAS: [&str; 14] = [
    "asc",
    "create",
    "cross",
    "desc",
    "full",
    "inner",
    "left",
    "limit",
    "minus",
    "natural",
    "now",
    "right",
    "unbounded",
    "using",
];

fn is_one_of(word: &str, words: &[&str]) -> bool {
    words.iter().any(|other| other.eq_ignore_ascii_case(word))
}

/// Whether a word is a name only in backticks.
pub(super) fn is_reserved(word: &str) -> bool {
    is_one_of(word, &RESERVED)
}

/// Whether a word is an alias only after `as`.
pub(super) fn is_no_bare_alias(word: &str) -> bool {
    is_reserved(word) || is_one_of(word, &NO_BARE_ALIAS)
}

/// The most similar of some words, if one is similar enough.
pub(super) fn nearest<'a>(written: &str, words: &[&'a str]) -> Option<&'a str> {
    let distances = words.iter().map(|&word| (distance(written, word), word));
    let near = distances.filter(|&(distance, word)| distance > 0 && distance <= word.len() / 3);
    near.min_by_key(|&(distance, _)| distance).map(|(_, word)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word() {
        assert_eq!(nearest("SELCT", &["query", "select"]), Some("select"));
        assert_eq!(nearest("a", &["as", "from"]), None);
        assert_eq!(nearest("from", &["from"]), None);
    }
}
