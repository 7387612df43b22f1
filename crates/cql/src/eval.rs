//! The evaluation of expressions.
//!
//! Logic and comparisons are SQL's, with three truth values. Values of the same type are compared
//! by [`Value`]'s order, so that `=` has the same meaning in a filter and in a join: NaN equals NaN
//! and is greater than all other floats. The result of arithmetic is null if an integer overflows,
//! the divisor is zero or the result is NaN. No result is negative zero, because it equals zero and
//! must not be distinguishable from it.

mod functions;
mod like;

use std::cmp::Ordering;

use crate::ast::{BinaryOperator, UnaryOperator};
use crate::plan::Expression;
use crate::value::{Type, Value};

pub use like::like;

/// The longest text that an expression returns, in bytes; a longer result is null.
pub const TEXT_LIMIT: usize = 1 << 20;

/// The value of an expression for a row. It is null if the types are wrong or if a column does not
/// exist.
pub fn evaluate(expression: &Expression, row: &[Value]) -> Value {
    match expression {
        Expression::Column(position) => row.get(*position).map_or(Value::Null, plain),
        Expression::Literal(value) => plain(value),
        Expression::Unary(operator, operand) => unary(*operator, &evaluate(operand, row)),
        Expression::Binary(BinaryOperator::And, left, right) => both(left, right, row),
        Expression::Binary(BinaryOperator::Or, left, right) => either(left, right, row),
        Expression::Binary(operator, left, right) => {
            binary(*operator, &evaluate(left, row), &evaluate(right, row))
        }
        Expression::IsNull(operand) => Value::Boolean(evaluate(operand, row).is_null()),
        Expression::Like(operand, pattern) => {
            match (evaluate(operand, row), evaluate(pattern, row)) {
                (Value::Text(text), Value::Text(pattern)) => Value::Boolean(like(&text, &pattern)),
                _ => Value::Null,
            }
        }
        Expression::Cast(operand, kind) => cast(&evaluate(operand, row), *kind),
        Expression::Case(branches, otherwise) => {
            let taken = branches.iter().find(|(condition, _)| is_true(&evaluate(condition, row)));
            match (taken, otherwise) {
                (Some((_, value)), _) => evaluate(value, row),
                (None, Some(value)) => evaluate(value, row),
                (None, None) => Value::Null,
            }
        }
        Expression::Call(function, arguments) => functions::call(*function, arguments, row),
    }
}

/// Whether a value is true: neither false nor null.
pub fn is_true(value: &Value) -> bool {
    matches!(value, Value::Boolean(true))
}

/// A value, with zero in place of negative zero.
fn plain(value: &Value) -> Value {
    match value {
        Value::Float(number) => Value::Float(number + 0.0),
        other => other.clone(),
    }
}

/// A float as a result: NaN becomes null, and negative zero becomes zero.
pub fn float(number: f64) -> Value {
    if number.is_nan() { Value::Null } else { Value::Float(number + 0.0) }
}

/// An integer as a result, or null after an overflow.
fn integer(number: Option<i64>) -> Value {
    number.map_or(Value::Null, Value::Integer)
}

/// A text as a result, or null if it is too long.
fn text(text: &str) -> Value {
    if text.len() > TEXT_LIMIT { Value::Null } else { Value::text(text) }
}

fn both(left: &Expression, right: &Expression, row: &[Value]) -> Value {
    let left = evaluate(left, row);
    if matches!(left, Value::Boolean(false)) {
        return left;
    }
    match (left, evaluate(right, row)) {
        (_, Value::Boolean(false)) => Value::Boolean(false),
        (Value::Boolean(true), Value::Boolean(true)) => Value::Boolean(true),
        _ => Value::Null,
    }
}

fn either(left: &Expression, right: &Expression, row: &[Value]) -> Value {
    let left = evaluate(left, row);
    if is_true(&left) {
        return left;
    }
    match (left, evaluate(right, row)) {
        (_, Value::Boolean(true)) => Value::Boolean(true),
        (Value::Boolean(false), Value::Boolean(false)) => Value::Boolean(false),
        _ => Value::Null,
    }
}

fn unary(operator: UnaryOperator, operand: &Value) -> Value {
    match (operator, operand) {
        (UnaryOperator::Not, Value::Boolean(value)) => Value::Boolean(!value),
        (UnaryOperator::Negate, Value::Integer(number)) => integer(number.checked_neg()),
        (UnaryOperator::Negate, Value::Float(number)) => float(-number),
        _ => Value::Null,
    }
}

fn binary(operator: BinaryOperator, left: &Value, right: &Value) -> Value {
    if left.is_null() || left.kind() != right.kind() {
        return Value::Null;
    }
    let holds = |test: fn(Ordering) -> bool| Value::Boolean(test(left.cmp(right)));
    match operator {
        BinaryOperator::Equal => holds(Ordering::is_eq),
        BinaryOperator::NotEqual => holds(Ordering::is_ne),
        BinaryOperator::Less => holds(Ordering::is_lt),
        BinaryOperator::LessOrEqual => holds(Ordering::is_le),
        BinaryOperator::Greater => holds(Ordering::is_gt),
        BinaryOperator::GreaterOrEqual => holds(Ordering::is_ge),
        // `evaluate` handles these: they may not need their right operand.
        BinaryOperator::And | BinaryOperator::Or => Value::Null,
        BinaryOperator::Concatenate => match (left, right) {
            (Value::Text(left), Value::Text(right)) if left.len() + right.len() <= TEXT_LIMIT => {
                Value::Text([&**left, &**right].concat().into())
            }
            _ => Value::Null,
        },
        BinaryOperator::Add
        | BinaryOperator::Subtract
        | BinaryOperator::Multiply
        | BinaryOperator::Divide
        | BinaryOperator::Remainder => match (left, right) {
            (Value::Integer(left), Value::Integer(right)) => of_integers(operator, *left, *right),
            (Value::Float(left), Value::Float(right)) => of_floats(operator, *left, *right),
            _ => Value::Null,
        },
    }
}

fn of_integers(operator: BinaryOperator, left: i64, right: i64) -> Value {
    integer(match operator {
        BinaryOperator::Add => left.checked_add(right),
        BinaryOperator::Subtract => left.checked_sub(right),
        BinaryOperator::Multiply => left.checked_mul(right),
        BinaryOperator::Divide => left.checked_div(right),
        // The remainder of a division by -1 is 0, even if the quotient overflows.
        BinaryOperator::Remainder if right != 0 => Some(left.wrapping_rem(right)),
        _ => None,
    })
}

fn of_floats(operator: BinaryOperator, left: f64, right: f64) -> Value {
    match operator {
        BinaryOperator::Add => float(left + right),
        BinaryOperator::Subtract => float(left - right),
        BinaryOperator::Multiply => float(left * right),
        BinaryOperator::Divide if right != 0.0 => float(left / right),
        BinaryOperator::Remainder if right != 0.0 => float(left % right),
        _ => Value::Null,
    }
}

/// 2 to the power of 63: the first float that is too large for an integer.
const TOO_LARGE: f64 = 9_223_372_036_854_775_808.0;

fn cast(value: &Value, kind: Type) -> Value {
    match (value, kind) {
        (Value::Null, _) => Value::Null,
        (value, kind) if value.kind() == Some(kind) => value.clone(),
        (Value::Boolean(value), Type::Integer) => Value::Integer(i64::from(*value)),
        (Value::Boolean(value), Type::Float) => Value::Float(f64::from(u8::from(*value))),
        (Value::Integer(0), Type::Boolean) => Value::Boolean(false),
        (Value::Integer(1), Type::Boolean) => Value::Boolean(true),
        (Value::Integer(number), Type::Float) => Value::Float(*number as f64),
        (Value::Float(number), Type::Integer) => {
            let fits = *number >= -TOO_LARGE && *number < TOO_LARGE;
            if fits { Value::Integer(*number as i64) } else { Value::Null }
        }
        (Value::Text(written), kind) => parse(written.trim(), kind),
        (value, Type::Text) => text(&value.to_string()),
        _ => Value::Null,
    }
}

fn parse(written: &str, kind: Type) -> Value {
    match kind {
        Type::Boolean if written.eq_ignore_ascii_case("true") => Value::Boolean(true),
        Type::Boolean if written.eq_ignore_ascii_case("false") => Value::Boolean(false),
        Type::Boolean | Type::Text => Value::Null,
        Type::Integer => integer(written.parse().ok()),
        Type::Float => written.parse().map_or(Value::Null, float),
    }
}

#[cfg(test)]
mod tests;
