//! Patterns of commands: which processes are meant.

/// The most patterns.
pub const PATTERNS_MAX: usize = 16;
/// The length of a command, in bytes (`TASK_COMM_LEN`).
pub const COMMAND_LENGTH: usize = 16;

/// A pattern of commands: `*` stands for any bytes, `?` for one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommandPattern([u8; COMMAND_LENGTH]);

impl CommandPattern {
    /// The pattern with this text; `None` if it is empty, too long, or has a zero byte.
    pub fn new(text: &str) -> Option<Self> {
        let mut bytes = [0; COMMAND_LENGTH];
        let place = bytes.get_mut(..text.len()).filter(|_| !text.is_empty())?;
        place.copy_from_slice(text.as_bytes());
        (!text.contains('\0')).then_some(Self(bytes))
    }

    pub(crate) fn to_words(self) -> [u64; 2] {
        let number = u128::from_le_bytes(self.0);
        [number as u64, (number >> 64) as u64]
    }

    pub(crate) fn from_words([low, high]: [u64; 2]) -> Self {
        Self((u128::from(low) | u128::from(high) << 64).to_le_bytes())
    }

    /// Whether a command, which a zero byte ends if it is shorter, is meant.
    pub fn matches(&self, command: &[u8]) -> bool {
        let end = |bytes: &[u8]| bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        matches(&self.0[..end(&self.0)], &command[..end(command)])
    }
}

/// Whether a text is one that a pattern stands for: `*` stands for any bytes, `?` for one. The time
/// is bounded by the product of their lengths.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut read) = (0, 0);
    // After the last star: the rest of the pattern, and the first byte that is not the star's.
    let mut star = None;
    while read < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                at += 1;
                star = Some((at, read));
            }
            Some(byte) if *byte == b'?' || *byte == text[read] => (at, read) = (at + 1, read + 1),
            Some(_) | None => {
                // The star stands for one more.
                let Some((rest, end)) = star else { return false };
                star = Some((rest, end + 1));
                (at, read) = (rest, end + 1);
            }
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_stand_for_commands() {
        for (pattern, command, is_meant) in [
            ("*", &b"any\0\0"[..], true),
            ("dd", b"dd\0\0x", true),
            ("dd", b"ddx", false),
            ("post*", b"postgres", true),
            ("*gres", b"postgres", true),
            ("p*g?es", b"postgres", true),
            ("?", b"", false),
            ("postgres: write", b"postgres: write\0", true),
        ] {
            let pattern = CommandPattern::new(pattern).unwrap();
            assert_eq!(pattern.matches(command), is_meant, "{pattern:?} {command:?}");
            assert_eq!(CommandPattern::from_words(pattern.to_words()), pattern);
        }
        assert!(!CommandPattern::default().matches(b"x"));
        for (pattern, text, is_meant) in [
            ("/usr/bin/*", "/usr/bin/postgres", true),
            ("/usr/bin/*", "/usr/bin", false),
            ("*/pod?/*.slice", "/kube/pod1/a/b.slice", true),
            ("*ab", "aab", true),
            ("a*b*c", "abbcbcc", true),
            ("a*b*c", "abbcbca", false),
            ("**", "", true),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), is_meant, "{pattern} {text}");
        }
        // A text that is made for it takes no longer.
        let (pattern, text) = ("*a".repeat(200) + "b", "a".repeat(4096));
        assert!(!matches(pattern.as_bytes(), text.as_bytes()));
        for text in ["", "12345678901234567", "a\0b"] {
            assert_eq!(CommandPattern::new(text), None, "{text:?}");
        }
    }
}
