//! Makes texts chosen by others, such as names within a guest, safe to show on a line of the
//! screen.
use fathom_failure::text::is_harmful;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Replaces characters that would disturb the layout of the screen: control characters, marks that
/// change the direction of writing, characters without a width.
pub fn clean(text: &str) -> String {
    if text.contains(is_harmful) { text.replace(is_harmful, "\u{fffd}") } else { text.to_owned() }
}

/// Truncates the text to a width, with an ellipsis at its end.
pub fn shorten(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut shortened = String::new();
    let mut used = 1;
    for character in text.chars() {
        used += character.width().unwrap_or(0);
        if used > width {
            break;
        }
        shortened.push(character);
    }
    if width > 0 {
        shortened.push('…');
    }
    shortened
}

/// Truncates the text to a width, with an ellipsis at its beginning: the end of a path is more
/// specific.
pub fn shorten_front(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut start = text.len();
    let mut used = 1;
    for (at, character) in text.char_indices().rev() {
        used += character.width().unwrap_or(0);
        if used > width {
            break;
        }
        start = at;
    }
    if width > 0 { format!("…{}", &text[start..]) } else { String::new() }
}

/// Breaks the text into lines of a width, at any character: a path may have no spaces.
pub fn fold(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for character in text.chars() {
        let wide = character.width().unwrap_or(0);
        if used + wide > width.max(2) {
            lines.push(String::new());
            used = 0;
        }
        used += wide;
        lines.last_mut().expect("there is a line").push(character);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_lose_their_end_or_their_beginning() {
        assert_eq!(shorten("müll", 3), "mü…");
        assert_eq!(shorten("ab", 0), "");
        assert_eq!(shorten_front("/srv/web/index.html", 10), "…ndex.html");
        assert_eq!(shorten_front("/srv", 4), "/srv");
        assert_eq!(shorten_front("ab", 0), "");
        for width in 0..12 {
            for text in ["日本語のファイル", "/e\u{301}te\u{301}/ü", "a\u{20dd}b日c"] {
                assert!(shorten(text, width).width() <= width, "{text} {width}");
                assert!(shorten_front(text, width).width() <= width, "{text} {width}");
            }
        }
    }

    #[test]
    fn a_text_is_broken_anywhere() {
        assert_eq!(fold("/srv/日本語", 7), ["/srv/日", "本語"]);
        assert_eq!(fold("", 7), [""]);
        assert_eq!(fold("日本", 0), ["日", "本"]);
    }

    #[test]
    fn characters_that_disturb_the_layout_are_replaced() {
        assert_eq!(clean("/srv/ä 日本"), "/srv/ä 日本");
        assert_eq!(
            clean("a\u{202e}b\u{200b}c\u{1b}[2Jd\u{2028}"),
            "a\u{fffd}b\u{fffd}c\u{fffd}[2Jd\u{fffd}"
        );
    }
}
