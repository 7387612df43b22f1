//! Texts of other parties: guests, peers, files. What they send to a terminal is a command to it.

use std::borrow::Cow;

/// The longest text of another party in a message, in characters.
const FOREIGN_LENGTH_MAX: usize = 300;

/// Whether a character would command a terminal or disturb the layout of its screen: control
/// characters, marks that change the direction of writing, characters without a width.
pub fn is_harmful(character: char) -> bool {
    character.is_control()
        || character == '\u{61c}'
        || ('\u{200b}'..='\u{200f}').contains(&character)
        || ('\u{2028}'..='\u{202e}').contains(&character)
        || ('\u{2060}'..='\u{206f}').contains(&character)
        || ('\u{fe00}'..='\u{fe0f}').contains(&character)
        || ('\u{fff9}'..='\u{fffb}').contains(&character)
        || character == '\u{feff}'
        || character > '\u{dffff}'
}

/// A text without harmful characters, except line feeds and tabulators.
pub fn harmless(text: &str) -> Cow<'_, str> {
    let is_bad = |c: char| is_harmful(c) && c != '\n' && c != '\t';
    if text.contains(is_bad) { text.replace(is_bad, "\u{fffd}").into() } else { text.into() }
}

/// The text of another party as a part of a message: one line without harmful characters, of at
/// most 300 characters.
pub fn foreign(text: &str) -> String {
    let mut characters = text.trim().chars();
    let plain = |c: char| match c {
        '\n' | '\r' | '\t' => ' ',
        c if is_harmful(c) => '\u{fffd}',
        c => c,
    };
    let mut short: String = characters.by_ref().take(FOREIGN_LENGTH_MAX).map(plain).collect();
    if characters.next().is_some() {
        short.pop();
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_commands_a_terminal() {
        assert_eq!(harmless("/srv/ä 日本\t1\n2"), "/srv/ä 日本\t1\n2");
        assert_eq!(harmless("a\u{1b}[2J\rb\u{9b}m"), "a\u{fffd}[2J\u{fffd}b\u{fffd}m");
    }

    #[test]
    fn a_foreign_text_is_a_short_line() {
        assert_eq!(foreign(" ERR a\r\nb\u{1b}]0;x\u{7} "), "ERR a  b\u{fffd}]0;x\u{fffd}");
        let long = foreign(&"é".repeat(1000));
        assert_eq!(long.chars().count(), FOREIGN_LENGTH_MAX);
        assert!(long.ends_with("é…"), "{long}");
        assert_eq!(foreign(&"x".repeat(FOREIGN_LENGTH_MAX)), "x".repeat(FOREIGN_LENGTH_MAX));
    }
}
