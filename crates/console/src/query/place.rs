//! What is wrong with a query, and where: the line with a mark under the place.
use fathom_cql::Diagnostic;

use crate::failure::Failure;

/// The widest part of a line that is shown.
const WIDTH: usize = 100;

/// All that is wrong with a script.
pub fn failure(script: &str, diagnostics: &[Diagnostic]) -> Failure {
    let texts: Vec<String> =
        diagnostics.iter().map(|diagnostic| describe(script, diagnostic)).collect();
    let failure = Failure::new(texts.join("\n"));
    let mut helps = diagnostics.iter().filter_map(|diagnostic| diagnostic.help.as_deref());
    match helps.next() {
        Some(help) => failure.advise(help),
        None => failure,
    }
}

/// What is wrong, and where.
pub fn describe(script: &str, diagnostic: &Diagnostic) -> String {
    let floor = |mut at: usize| {
        at = at.min(script.len());
        while !script.is_char_boundary(at) {
            at -= 1;
        }
        at
    };
    let range = diagnostic.span.range();
    let start = floor(range.start);
    let before = &script[..start];
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    let line_end = script[start..].find('\n').map_or(script.len(), |at| start + at);
    let end = floor(range.end.min(line_end)).max(start);
    let (number, column) =
        (before.matches('\n').count() + 1, script[line_start..start].chars().count());
    let marked = script[start..end].chars().count().max(1);
    // A long line is shown from a little before the place on.
    let left_out = if column + marked > WIDTH { column.saturating_sub(WIDTH / 4) } else { 0 };
    let harmless = |c: char| if c.is_control() { ' ' } else { c };
    let shown: String =
        script[line_start..line_end].chars().skip(left_out).take(WIDTH).map(harmless).collect();
    let space = " ".repeat(column - left_out);
    let mark = "^".repeat(marked.min(WIDTH.saturating_sub(column - left_out)).max(1));
    let message = &diagnostic.message;
    format!("line {number}, column {}: {message}\n    {shown}\n    {space}{mark}", column + 1)
}

#[cfg(test)]
mod tests {
    use fathom_cql::Span;

    use super::*;

    fn at(script: &str, start: u32, end: u32) -> String {
        describe(script, &Diagnostic::new(Span { start, end }, "no such column"))
    }

    #[test]
    fn the_place_is_marked() {
        assert_eq!(
            at("select é,\n\tSizes from S", 12, 17),
            "line 2, column 2: no such column\n     Sizes from S\n     ^^^^^"
        );
        // A span over lines is marked to the end of the first.
        assert_eq!(at("ab\ncd", 1, 4), "line 1, column 2: no such column\n    ab\n     ^");
        assert_eq!(at("ab", 2, 2), "line 1, column 3: no such column\n    ab\n      ^");
    }

    #[test]
    fn no_place_is_out_of_reach() {
        for script in ["", "é", "a\n", &"x".repeat(1000)] {
            for (start, end) in
                [(0, 0), (0, 1), (1, 1), (1, 9), (900, 990), (990, 5), (u32::MAX, 0)]
            {
                let text = at(script, start, end);
                assert!(text.lines().count() == 3, "{text}");
                assert!(text.lines().all(|line| line.chars().count() < 120), "{text}");
            }
        }
    }
}
