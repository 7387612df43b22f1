//! Shows diagnostics with the line of the text.

use crate::span::Diagnostic;

/// The most columns of a line that are shown.
const COLUMNS_MAX: usize = 100;

/// The columns that are shown before the place if the line is cut.
const CONTEXT: usize = 40;

/// The width of a tab, in columns.
const TAB: usize = 4;

impl Diagnostic {
    /// The message with its place, the line of the text, and a mark under the place: three lines,
    /// the last without `\n`. They contain no characters that control a terminal.
    pub fn render(&self, text: &str) -> String {
        let start = boundary(text, self.span.start as usize);
        let end = boundary(text, self.span.end as usize).max(start);
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let rest = &text[line_start..];
        let line = rest.split('\n').next().unwrap_or(rest);
        let line = line.strip_suffix('\r').unwrap_or(line);
        let number = text[..line_start].matches('\n').count() + 1;
        let column = text[line_start..start].chars().count() + 1;
        let place = (start - line_start).min(line.len())..(end - line_start).min(line.len());
        let (shown, before, marked) = excerpt(line, place.start, place.end);
        let message = shown_text(&self.message);
        let (blank, mark) = (" ".repeat(before), "^".repeat(marked));
        format!("line {number}, column {column}: {message}\n    {shown}\n    {blank}{mark}")
    }

    /// The help, without characters that control a terminal.
    pub fn render_help(&self) -> Option<String> {
        self.help.as_deref().map(shown_text)
    }
}

/// The last beginning of a character at or before a byte.
fn boundary(text: &str, byte: usize) -> usize {
    let mut byte = byte.min(text.len());
    while !text.is_char_boundary(byte) {
        byte -= 1;
    }
    byte
}

/// A text without characters that control a terminal.
fn shown_text(text: &str) -> String {
    text.chars().map(|character| shown(character).0).collect()
}

/// A character as it is shown, and its width in columns. A tab becomes a space of several columns.
fn shown(character: char) -> (char, usize) {
    match character {
        '\t' => (' ', TAB),
        // Control characters, invisible ones, and those that change the direction of writing.
        '\0'..='\u{1f}'
        | '\u{7f}'..='\u{9f}'
        | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}'
        | '\u{2066}'..='\u{2069}'
        | '\u{feff}' => ('\u{fffd}', 1),
        // Combining marks, on the character before.
        '\u{300}'..='\u{36f}' | '\u{fe00}'..='\u{fe0f}' => (character, 0),
        // Wide characters.
        '\u{1100}'..='\u{115f}'
        | '\u{2e80}'..='\u{a4cf}'
        | '\u{ac00}'..='\u{d7a3}'
        | '\u{f900}'..='\u{faff}'
        | '\u{fe30}'..='\u{fe6f}'
        | '\u{ff00}'..='\u{ff60}'
        | '\u{ffe0}'..='\u{ffe6}'
        | '\u{1f300}'..='\u{1faff}'
        | '\u{20000}'..='\u{3fffd}' => (character, 2),
        _ => (character, 1),
    }
}

/// The part of a line around a place, the number of columns before the place, and that of the place
/// itself, which is at least one.
fn excerpt(line: &str, start: usize, end: usize) -> (String, usize, usize) {
    let width = |part: &str| part.chars().map(|character| shown(character).1).sum::<usize>();
    let mut first = 0;
    if width(line) > COLUMNS_MAX {
        let mut before = 0;
        first = start;
        for (byte, character) in line[..start].char_indices().rev() {
            before += shown(character).1;
            if before > CONTEXT {
                break;
            }
            first = byte;
        }
    }
    let mut last = first;
    let mut columns = 0;
    for character in line[first..].chars() {
        columns += shown(character).1;
        if columns > COLUMNS_MAX {
            break;
        }
        last += character.len_utf8();
    }
    let mut text = String::new();
    if first > 0 {
        text.push('…');
    }
    for character in line[first..last].chars() {
        let (character, width) = shown(character);
        let times = if character == ' ' { width } else { 1 };
        text.extend(std::iter::repeat_n(character, times));
    }
    if last < line.len() {
        text.push('…');
    }
    let before = usize::from(first > 0) + width(&line[first..start.min(last)]);
    let marked = width(&line[start.min(last)..end.min(last)]).max(1);
    (text, before, marked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::span::Span;

    fn at(start: u32, end: u32) -> Diagnostic {
        Diagnostic::new(Span { start, end }, "wrong")
    }

    #[test]
    fn the_line_and_the_place() {
        let text = "select *\r\nform S;\n";
        let shown = at(10, 14).render(text);
        assert_eq!(shown, "line 2, column 1: wrong\n    form S;\n    ^^^^");
    }

    #[test]
    fn tabs_and_wide_characters() {
        let text = "\té界\u{301}x";
        let x = text.len() as u32 - 1;
        let shown = at(x, x + 1).render(text);
        assert!(shown.starts_with("line 1, column 5:"), "{shown}");
        assert!(shown.ends_with("\n        é界\u{301}x\n           ^"), "{shown}");
    }

    #[test]
    fn long_lines_are_cut() {
        let text = format!("{}HERE{}", "a".repeat(5000), "b".repeat(5000));
        let shown = at(5000, 5004).render(&text);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[1].chars().count(), 4 + 1 + COLUMNS_MAX + 1);
        let mark = lines[2].find('^').expect("a mark");
        let here: String = lines[1].chars().skip(mark).take(4).collect();
        assert_eq!(here, "HERE");
        assert_eq!(lines[2].matches('^').count(), 4);
        // A place that is wider than the shown part.
        let shown = at(0, 10_000).render(&text);
        assert!(shown.lines().all(|line| line.chars().count() < COLUMNS_MAX + 10), "{shown}");
    }

    #[test]
    fn places_at_the_end_over_lines_and_beyond() {
        assert!(at(3, 3).render("abc").ends_with("column 4: wrong\n    abc\n       ^"));
        assert!(at(4, 4).render("abc\n").ends_with("line 2, column 1: wrong\n    \n    ^"));
        assert!(at(1, 6).render("abc\ndef").ends_with("\n    abc\n     ^^"));
        assert!(at(90, 99).render("abc").ends_with("\n    abc\n       ^"));
        assert!(at(1, 2).render("é").ends_with("\n    é\n    ^"));
        assert!(at(0, 0).render("").ends_with("\n    \n    ^"));
        for text in ["", "é", "a\n", &"x".repeat(1000)] {
            for (start, end) in [(0, 1), (1, 9), (900, 990), (990, 5), (u32::MAX, 0)] {
                assert_eq!(at(start, end).render(text).lines().count(), 3);
            }
        }
    }

    #[test]
    fn terminals_are_not_controlled() {
        let harmful = ['\x1b', '\u{202e}'];
        let wrong = Diagnostic::new(Span { start: 0, end: 1 }, "no \x1b[2J").help("not \u{202e}");
        let shown = wrong.render("\x1b[31m\u{202e}");
        assert!(!shown.contains(harmful), "{shown}");
        assert_eq!(wrong.render_help().as_deref(), Some("not \u{fffd}"));
    }
}
