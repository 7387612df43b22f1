//! The words of the language, and words that are nearly one.

use crate::likeness::distance;

/// Words that are names only in backticks, behind a point and where columns are declared.
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

/// Words that besides these are no alias unless `as` stands before them.
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

/// Whether a word is a name in backticks only.
pub(super) fn is_reserved(word: &str) -> bool {
    is_one_of(word, &RESERVED)
}

/// Whether a word is no alias unless `as` stands before it.
pub(super) fn is_no_bare_alias(word: &str) -> bool {
    is_reserved(word) || is_one_of(word, &NO_BARE_ALIAS)
}

/// The word that was probably meant.
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
