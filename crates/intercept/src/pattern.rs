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

fn matches(pattern: &[u8], text: &[u8]) -> bool {
    match pattern.split_first() {
        None => text.is_empty(),
        // Both are short, so the number of ways is small.
        Some((b'*', rest)) => (0..=text.len()).any(|from| matches(rest, &text[from..])),
        Some((b'?', rest)) => text.split_first().is_some_and(|(_, text)| matches(rest, text)),
        Some((byte, rest)) => {
            text.split_first().is_some_and(|(first, text)| first == byte && matches(rest, text))
        }
    }
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
        for text in ["", "12345678901234567", "a\0b"] {
            assert_eq!(CommandPattern::new(text), None, "{text:?}");
        }
    }
}
