//! The most frequent values.

use std::fmt::Write as _;

use crate::eval::TEXT_LIMIT;
use crate::value::Value;

/// The most values that a query can request.
pub const VALUES_MAX: u16 = 1000;

/// Values and their counts as a text: each value, a colon and its count, separated by spaces. Texts
/// are in double quotes, with the escapes of JSON. Null if there are no values, or if the text
/// would be longer than [`TEXT_LIMIT`].
pub fn to_text<'a>(values: impl IntoIterator<Item = (&'a Value, i64)>) -> Value {
    let mut text = String::new();
    for (value, count) in values {
        if !text.is_empty() {
            text.push(' ');
        }
        match value {
            Value::Text(value) => quote(value, &mut text),
            Value::Float(number) => {
                let number = format!("{:?}", number + 0.0);
                text.push_str(&number.to_ascii_lowercase());
            }
            other => text.push_str(&other.to_string()),
        }
        let _ = write!(text, ":{count}");
        if text.len() > TEXT_LIMIT {
            return Value::Null;
        }
    }
    if text.is_empty() { Value::Null } else { Value::text(&text) }
}

fn quote(value: &str, text: &mut String) {
    text.push('"');
    for character in value.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\0'..' ' => {
                let _ = write!(text, "\\u{:04x}", u32::from(character));
            }
            other => text.push(other),
        }
    }
    text.push('"');
}

/// The `wanted` most frequent values, computed naively. `values` are sorted.
pub(super) fn of_sorted(values: &[Value], wanted: u16) -> Value {
    let same = values.chunk_by(|one, other| one == other);
    let mut counted: Vec<(&Value, i64)> = same.map(|same| (&same[0], same.len() as i64)).collect();
    // The sort is stable: equally frequent values stay in order.
    counted.sort_by_key(|&(_, count)| -count);
    counted.truncate(wanted.into());
    to_text(counted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn most(values: &[Value], wanted: u16) -> String {
        let mut values = values.to_vec();
        values.sort();
        of_sorted(&values, wanted).to_string()
    }

    #[test]
    fn the_most_frequent_come_first_and_ties_are_in_order() {
        let integers = [5, 3, 3, 9, -1, 9, 7].map(Value::Integer);
        assert_eq!(most(&integers, 3), "3:2 9:2 -1:1");
        assert_eq!(most(&integers, 9), "3:2 9:2 -1:1 5:1 7:1");
        assert_eq!(most(&[], 3), "");
        let floats = [1.0, f64::NAN, 1e300, 0.25, f64::NEG_INFINITY].map(Value::Float);
        assert_eq!(most(&floats, 9), "-inf:1 0.25:1 1.0:1 1e300:1 nan:1");
        assert_eq!(most(&[false, true, true].map(Value::Boolean), 9), "true:2 false:1");
    }

    #[test]
    fn texts_are_quoted() {
        let texts = ["a b:3", "\"\\", "é\n\u{1}", "", ""].map(Value::text);
        assert_eq!(most(&texts, 9), r#""":2 "\"\\":1 "a b:3":1 "é\n\u0001":1"#);
        let long = [Value::text(&"\"".repeat(TEXT_LIMIT / 2))];
        assert!(of_sorted(&long, 1).is_null());
    }
}
