//! The similarity of words.

/// The number of letters of a word that are compared.
const LETTERS_MAX: usize = 64;

/// The number of letters that are missing, added, wrong or exchanged with their neighbour. Case
/// does not matter.
pub(crate) fn distance(left: &str, right: &str) -> usize {
    let letters = |text: &str| -> String {
        text.chars().take(LETTERS_MAX).map(|letter| letter.to_ascii_lowercase()).collect()
    };
    strsim::osa_distance(&letters(left), &letters(right))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        assert_eq!(distance("from", "FROM"), 0);
        assert_eq!(distance("form", "from"), 1);
        assert_eq!(distance("whhere", "where"), 1);
        assert_eq!(distance("I0stream", "IOStream"), 1);
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("abc", ""), 3);
        assert_eq!(distance(&"a".repeat(100_000), &"b".repeat(100_000)), LETTERS_MAX);
    }
}
