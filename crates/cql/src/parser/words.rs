//! The words of the language, and words that are nearly one.

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
    let written: Vec<char> = written.chars().take(20).map(|c| c.to_ascii_lowercase()).collect();
    let distances = words.iter().map(|&word| (distance(&written, word), word));
    let near = distances.filter(|&(distance, word)| distance > 0 && distance <= word.len() / 3);
    near.min_by_key(|&(distance, _)| distance).map(|(_, word)| word)
}

/// How many letters are missing, too many, wrong or exchanged with their neighbour.
fn distance(written: &[char], word: &str) -> usize {
    let word: Vec<char> = word.chars().collect();
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=word.len()).collect();
    for (row, &character) in written.iter().enumerate() {
        let mut next = vec![row + 1];
        for (column, &other) in word.iter().enumerate() {
            let wrong = last[column] + usize::from(character != other);
            let mut best = wrong.min(last[column + 1] + 1).min(next[column] + 1);
            if row > 0 && column > 0 && character == word[column - 1] && other == written[row - 1] {
                best = best.min(before[column - 1] + 1);
            }
            next.push(best);
        }
        before = std::mem::replace(&mut last, next);
    }
    last[word.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        let distance = |written: &str, word| distance(&written.chars().collect::<Vec<_>>(), word);
        assert_eq!(distance("from", "from"), 0);
        assert_eq!(distance("form", "from"), 1);
        assert_eq!(distance("wher", "where"), 1);
        assert_eq!(distance("whhere", "where"), 1);
        assert_eq!(distance("", "where"), 5);
        assert_eq!(distance("selekt", "select"), 1);
        assert_eq!(distance("abc", ""), 3);
    }

    #[test]
    fn the_nearest_word() {
        assert_eq!(nearest("SELCT", &["query", "select"]), Some("select"));
        assert_eq!(nearest("a", &["as", "from"]), None);
        assert_eq!(nearest("from", &["from"]), None);
    }
}
