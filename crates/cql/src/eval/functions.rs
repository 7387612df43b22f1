//! The evaluation of functions.

use super::{TEXT_LIMIT, evaluate, float, integer, text};
use crate::plan::{Expression, Function};
use crate::value::{Row, Value};

pub(super) fn call(function: Function, arguments: &[Expression], row: &[Value]) -> Value {
    if function == Function::Coalesce {
        let mut values = arguments.iter().map(|argument| evaluate(argument, row));
        return values.find(|value| !value.is_null()).unwrap_or(Value::Null);
    }
    let values: Row = arguments.iter().map(|argument| evaluate(argument, row)).collect();
    if values.iter().any(Value::is_null) {
        return Value::Null;
    }
    match function {
        Function::Greatest | Function::Least => extreme(function, values),
        _ => of_texts(function, &values)
            .or_else(|| of_numbers(function, &values))
            .unwrap_or(Value::Null),
    }
}

fn extreme(function: Function, values: Row) -> Value {
    if values.iter().any(|value| value.kind() != values[0].kind()) {
        return Value::Null;
    }
    let values = values.into_iter();
    let found = if function == Function::Greatest { values.max() } else { values.min() };
    found.unwrap_or(Value::Null)
}

/// A character count as a value.
fn count(number: usize) -> Value {
    integer(i64::try_from(number).ok())
}

fn of_texts(function: Function, values: &[Value]) -> Option<Value> {
    Some(match (function, values) {
        (Function::Lower, [Value::Text(whole)]) => text(&whole.to_lowercase()),
        (Function::Upper, [Value::Text(whole)]) => text(&whole.to_uppercase()),
        (Function::Length, [Value::Text(whole)]) => count(whole.chars().count()),
        (Function::Trim, [Value::Text(whole)]) => text(whole.trim()),
        (Function::Substring, [Value::Text(whole), Value::Integer(from)]) => {
            substring(whole, *from, i64::MAX)
        }
        (Function::Substring, [Value::Text(whole), Value::Integer(from), Value::Integer(size)]) => {
            substring(whole, *from, *size)
        }
        (Function::Position, [Value::Text(part), Value::Text(whole)]) => {
            let found = whole.find(&**part);
            count(found.map_or(0, |start| whole[..start].chars().count() + 1))
        }
        (Function::StartsWith, [Value::Text(whole), Value::Text(part)]) => {
            Value::Boolean(whole.starts_with(&**part))
        }
        (Function::EndsWith, [Value::Text(whole), Value::Text(part)]) => {
            Value::Boolean(whole.ends_with(&**part))
        }
        (Function::Replace, [Value::Text(whole), Value::Text(part), Value::Text(by)]) => {
            replace(whole, part, by)
        }
        (
            Function::SplitPart,
            [Value::Text(whole), Value::Text(separator), Value::Integer(position)],
        ) => text(split_part(whole, separator, *position)),
        _ => return None,
    })
}

/// The characters at the positions from `from` up to, but not including, `from + size`. The first
/// character has the position 1; positions before it count as well. Null if the size is negative.
fn substring(whole: &str, from: i64, size: i64) -> Value {
    if size < 0 {
        return Value::Null;
    }
    let end = from.saturating_add(size).max(1);
    let from = from.max(1);
    let take = usize::try_from(end.saturating_sub(from)).unwrap_or(0);
    let skip = usize::try_from(from - 1).unwrap_or(usize::MAX);
    text(&whole.chars().skip(skip).take(take).collect::<String>())
}

/// Replaces every occurrence of `part`. An empty part replaces nothing.
fn replace(whole: &str, part: &str, by: &str) -> Value {
    if part.is_empty() {
        return text(whole);
    }
    let found = whole.matches(part).count();
    let size = whole.len() - found * part.len();
    if found.saturating_mul(by.len()).saturating_add(size) > TEXT_LIMIT {
        return Value::Null;
    }
    text(&whole.replace(part, by))
}

/// The part at `position`, counted from 1. With an empty separator the whole text is the first
/// part.
fn split_part<'a>(whole: &'a str, separator: &str, position: i64) -> &'a str {
    let Some(skip) = position.checked_sub(1).and_then(|skip| usize::try_from(skip).ok()) else {
        return "";
    };
    if separator.is_empty() {
        return if skip == 0 { whole } else { "" };
    }
    whole.split(separator).nth(skip).unwrap_or("")
}

fn of_numbers(function: Function, values: &[Value]) -> Option<Value> {
    Some(match (function, values) {
        (Function::Absolute, [Value::Integer(number)]) => integer(number.checked_abs()),
        (Function::Absolute, [Value::Float(number)]) => float(number.abs()),
        (Function::Floor, [Value::Float(number)]) => float(number.floor()),
        (Function::Ceiling, [Value::Float(number)]) => float(number.ceil()),
        (Function::Round, [Value::Float(number)]) => float(number.round()),
        // The root of a negative number is NaN, hence null.
        (Function::SquareRoot, [Value::Float(number)]) => float(number.sqrt()),
        (Function::Logarithm, [Value::Float(number)]) if *number > 0.0 => float(number.ln()),
        (Function::Power, [Value::Float(base), Value::Float(exponent)])
            if *base != 0.0 || *exponent >= 0.0 =>
        {
            float(base.powf(*exponent))
        }
        _ => return None,
    })
}
