//! The operator `like`.

use std::str::Chars;

/// Whether a text matches a pattern: `%` matches any text, `_` any character, and any other
/// character itself.
///
/// The function backtracks to the last `%` only, without recursion. So the time is at most
/// proportional to the product of the lengths.
pub fn like(text: &str, pattern: &str) -> bool {
    let mut text = text.chars();
    let mut pattern = pattern.chars();
    // The text from the end of the last `%`'s match on, and the pattern after this `%`.
    let mut last_percent: Option<(Chars<'_>, Chars<'_>)> = None;
    loop {
        let mut rest = text.clone();
        match (pattern.next(), rest.next()) {
            (Some('%'), _) => {
                if pattern.as_str().is_empty() {
                    return true;
                }
                last_percent = Some((text.clone(), pattern.clone()));
                continue;
            }
            (None, None) => return true,
            (Some(_), None) => return false,
            (Some(wanted), Some(character)) if wanted == '_' || wanted == character => {
                text = rest;
                continue;
            }
            (_, Some(_)) => {}
        }
        let Some((end, pattern_rest)) = &mut last_percent else {
            return false;
        };
        if end.next().is_none() {
            return false;
        }
        text = end.clone();
        pattern = pattern_rest.clone();
    }
}
