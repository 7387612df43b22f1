//! How alike two words are.

/// How many letters of a word are looked at.
const LONGEST: usize = 64;

/// How many letters are missing, too many, wrong or exchanged with their neighbour; case does not
/// count.
pub(crate) fn distance(left: &str, right: &str) -> usize {
    let letters = |text: &str| -> String {
        text.chars().take(LONGEST).map(|letter| letter.to_ascii_lowercase()).collect()
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
        assert_eq!(distance(&"a".repeat(100_000), &"b".repeat(100_000)), LONGEST);
    }
}
