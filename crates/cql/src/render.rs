//! What is wrong, shown in the text.

use std::fmt::Write as _;

use crate::span::Diagnostic;

/// How many columns of a line are shown.
const WIDEST: usize = 100;

/// How many columns before a place are shown where a line is cut.
const CONTEXT: usize = 40;

/// How many columns a tab takes.
const TAB: usize = 4;

/// The colours of an error, of what frames the text and of help.
struct Colours {
    error: &'static str,
    frame: &'static str,
    help: &'static str,
    bold: &'static str,
    off: &'static str,
}

const PLAIN: Colours = Colours { error: "", frame: "", help: "", bold: "", off: "" };

const COLOURED: Colours = Colours {
    error: "\x1b[1;31m",
    frame: "\x1b[1;34m",
    help: "\x1b[1;36m",
    bold: "\x1b[1m",
    off: "\x1b[0m",
};

impl Diagnostic {
    /// The message, the line of the text that it is about with a mark under the place, and the
    /// help. `name` is the text's: a file, say. The lines end with `\n`, the last one too.
    pub fn render(&self, name: &str, text: &str, colour: bool) -> String {
        let Colours { error, frame, help, bold, off } = if colour { COLOURED } else { PLAIN };
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

        let number = number.to_string();
        let margin = " ".repeat(number.len());
        let message = shown_text(&self.message);
        let name = shown_text(name);
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(out, "{error}error{off}{bold}: {message}{off}");
        let _ = writeln!(out, "{margin}{frame}-->{off} {name}:{number}:{column}");
        let _ = writeln!(out, "{margin} {frame}|{off}");
        let _ = writeln!(out, "{frame}{number} |{off} {shown}");
        let (blank, mark) = (" ".repeat(before), "^".repeat(marked));
        let _ = writeln!(out, "{margin} {frame}|{off} {blank}{error}{mark}{off}");
        if let Some(text) = &self.help {
            let _ = writeln!(out, "{help}help{off}: {}", shown_text(text));
        }
        out
    }
}

/// The last place at or before a byte where a character begins.
fn boundary(text: &str, byte: usize) -> usize {
    let mut byte = byte.min(text.len());
    while !text.is_char_boundary(byte) {
        byte -= 1;
    }
    byte
}

/// A text without what a terminal would act upon.
fn shown_text(text: &str) -> String {
    text.chars().map(|character| shown(character).0).collect()
}

/// A character as it is shown, and how many columns it takes (a tab is a special case).
fn shown(character: char) -> (char, usize) {
    match character {
        '\t' => (' ', TAB),
        // Control characters, and those that turn the direction of writing.
        '\0'..='\u{1f}'
        | '\u{7f}'..='\u{9f}'
        | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}'
        | '\u{2066}'..='\u{2069}'
        | '\u{feff}' => ('\u{fffd}', 1),
        // Marks on the character before.
        '\u{300}'..='\u{36f}' | '\u{fe00}'..='\u{fe0f}' => (character, 0),
        // Wide ones.
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

/// The part of a line around a place, the columns before the place, and the columns of the
/// place, of which there is at least one.
fn excerpt(line: &str, start: usize, end: usize) -> (String, usize, usize) {
    let width = |part: &str| part.chars().map(|character| shown(character).1).sum::<usize>();
    let mut first = 0;
    if width(line) > WIDEST {
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
        if columns > WIDEST {
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
        let shown = at(10, 14).help("write `from`").render("a.cql", text, false);
        let expected =
            "error: wrong\n --> a.cql:2:1\n  |\n2 | form S;\n  | ^^^^\nhelp: write `from`\n";
        assert_eq!(shown, expected);
    }

    #[test]
    fn tabs_and_wide_characters() {
        let text = "\té界\u{301}x";
        let x = text.len() as u32 - 1;
        let shown = at(x, x + 1).render("n", text, false);
        assert!(shown.contains("n:1:5\n"), "{shown}");
        assert!(shown.ends_with("1 |     é界\u{301}x\n  |        ^\n"), "{shown}");
    }

    #[test]
    fn long_lines_are_cut() {
        let text = format!("{}HERE{}", "a".repeat(5000), "b".repeat(5000));
        let shown = at(5000, 5004).render("n", &text, false);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[3].chars().count(), 4 + 1 + WIDEST + 1);
        let mark = lines[4].find('^').expect("a mark");
        let here: String = lines[3].chars().skip(mark).take(4).collect();
        assert_eq!(here, "HERE");
        assert_eq!(lines[4].matches('^').count(), 4);
        // A place that is wider than what is shown.
        let shown = at(0, 10_000).render("n", &text, false);
        assert!(shown.lines().all(|line| line.chars().count() < WIDEST + 10), "{shown}");
    }

    #[test]
    fn places_at_the_end_over_lines_and_beyond() {
        assert!(at(3, 3).render("n", "abc", false).ends_with("1 | abc\n  |    ^\n"));
        assert!(at(4, 4).render("n", "abc\n", false).ends_with("2 | \n  | ^\n"));
        assert!(at(1, 6).render("n", "abc\ndef", false).ends_with("1 | abc\n  |  ^^\n"));
        assert!(at(90, 99).render("n", "abc", false).ends_with("1 | abc\n  |    ^\n"));
        assert!(at(1, 2).render("n", "é", false).ends_with("1 | é\n  | ^\n"));
        assert!(at(0, 0).render("n", "", false).ends_with("1 | \n  | ^\n"));
    }

    #[test]
    fn terminals_are_not_acted_upon() {
        let shown = at(0, 1).render("\x1b[2J", "\x1b[31m\u{202e}", false);
        assert!(!shown.contains(['\x1b', '\u{202e}']), "{shown}");
        assert!(at(0, 1).render("n", "x", true).contains("\x1b[1;31m^\x1b[0m"));
    }
}
