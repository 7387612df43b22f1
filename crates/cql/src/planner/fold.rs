//! Constant folding. Special cases are left to the evaluation.

use std::cmp::Ordering;

use crate::ast::{BinaryOperator, UnaryOperator};
use crate::plan::Expression;
use crate::value::{Type, Value};

/// The longest text that is concatenated here, in bytes.
const TEXT_LENGTH_MAX: usize = 4096;

/// An operator of one operand.
pub(super) fn unary(operator: UnaryOperator, operand: Expression) -> Expression {
    let folded = match (operator, &operand) {
        (_, Expression::Literal(Value::Null)) => Some(Value::Null),
        (UnaryOperator::Not, Expression::Literal(Value::Boolean(value))) => {
            Some(Value::Boolean(!value))
        }
        (UnaryOperator::Negate, Expression::Literal(Value::Integer(value))) => {
            Some(value.checked_neg().map_or(Value::Null, Value::Integer))
        }
        (UnaryOperator::Negate, Expression::Literal(Value::Float(value))) => {
            Some(Value::Float(-value))
        }
        _ => None,
    };
    match folded {
        Some(value) => Expression::Literal(value),
        None => Expression::Unary(operator, Box::new(operand)),
    }
}

/// An operator of two operands.
pub(super) fn binary(operator: BinaryOperator, left: Expression, right: Expression) -> Expression {
    if matches!(operator, BinaryOperator::And | BinaryOperator::Or) {
        return logical(operator, left, right);
    }
    if let (Expression::Literal(left), Expression::Literal(right)) = (&left, &right) {
        if let Some(value) = constant(operator, left, right) {
            return Expression::Literal(value);
        }
    }
    Expression::Binary(operator, Box::new(left), Box::new(right))
}

/// `and` and `or`: one operand may decide the result.
fn logical(operator: BinaryOperator, left: Expression, right: Expression) -> Expression {
    // The operand that decides the result; the opposite one has no effect.
    let decides = operator == BinaryOperator::Or;
    let is = |expression: &Expression, wanted: bool| matches!(expression, Expression::Literal(Value::Boolean(value)) if *value == wanted);
    if is(&left, decides) || is(&right, decides) {
        Expression::Literal(Value::Boolean(decides))
    } else if is(&left, !decides) {
        right
    } else if is(&right, !decides) {
        left
    } else {
        Expression::Binary(operator, Box::new(left), Box::new(right))
    }
}

/// The value of an operator over constants; `None` in special cases.
fn constant(operator: BinaryOperator, left: &Value, right: &Value) -> Option<Value> {
    use BinaryOperator as Operator;
    match (left, right) {
        (Value::Null, _) | (_, Value::Null) => Some(Value::Null),
        (Value::Integer(left), Value::Integer(right)) => {
            let number = match operator {
                Operator::Add => left.checked_add(*right),
                Operator::Subtract => left.checked_sub(*right),
                Operator::Multiply => left.checked_mul(*right),
                Operator::Divide => left.checked_div(*right),
                Operator::Remainder if *right > 0 => left.checked_rem(*right),
                Operator::Remainder => return None,
                _ => return compare(operator, left.cmp(right)),
            };
            Some(number.map_or(Value::Null, Value::Integer))
        }
        (Value::Float(left), Value::Float(right)) => {
            let number = match operator {
                Operator::Add => left + right,
                Operator::Subtract => left - right,
                Operator::Multiply => left * right,
                Operator::Divide if *right != 0.0 => left / right,
                Operator::Divide | Operator::Remainder => return None,
                _ => return compare(operator, left.partial_cmp(right)?),
            };
            number.is_finite().then_some(Value::Float(number))
        }
        (Value::Text(left), Value::Text(right)) => match operator {
            Operator::Concatenate if left.len() + right.len() > TEXT_LENGTH_MAX => None,
            Operator::Concatenate => Some(Value::Text([&**left, &**right].concat().into())),
            _ => compare(operator, left.cmp(right)),
        },
        (Value::Boolean(left), Value::Boolean(right)) => compare(operator, left.cmp(right)),
        _ => None,
    }
}

/// The value of a comparison.
fn compare(operator: BinaryOperator, order: Ordering) -> Option<Value> {
    let holds = match operator {
        BinaryOperator::Equal => order.is_eq(),
        BinaryOperator::NotEqual => order.is_ne(),
        BinaryOperator::Less => order.is_lt(),
        BinaryOperator::LessOrEqual => order.is_le(),
        BinaryOperator::Greater => order.is_gt(),
        BinaryOperator::GreaterOrEqual => order.is_ge(),
        _ => return None,
    };
    Some(Value::Boolean(holds))
}

/// A value as another type.
pub(super) fn cast(operand: Expression, to: Type) -> Expression {
    match (operand, to) {
        (Expression::Literal(Value::Integer(value)), Type::Float) => {
            Expression::Literal(Value::Float(value as f64))
        }
        (Expression::Literal(Value::Null), _) => Expression::Literal(Value::Null),
        (operand, to) => Expression::Cast(Box::new(operand), to),
    }
}

/// An expression that tests whether a value is null.
pub(super) fn is_null(operand: Expression) -> Expression {
    match operand {
        Expression::Literal(value) => Expression::Literal(Value::Boolean(value.is_null())),
        operand => Expression::IsNull(Box::new(operand)),
    }
}
