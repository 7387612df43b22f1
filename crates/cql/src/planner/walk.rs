//! Traverses and combines expressions.

use crate::ast::{BinaryOperator, UnaryOperator};
use crate::plan::Expression;
use crate::value::{Type, Value};

use super::fold;

/// Calls `visit` with each column that an expression uses.
pub fn each_column(expression: &Expression, visit: &mut dyn FnMut(usize)) {
    match expression {
        Expression::Column(column) => visit(*column),
        Expression::Literal(_) => {}
        Expression::Unary(_, operand)
        | Expression::IsNull(operand)
        | Expression::Cast(operand, _) => each_column(operand, visit),
        Expression::Binary(_, left, right) | Expression::Like(left, right) => {
            each_column(left, visit);
            each_column(right, visit);
        }
        Expression::Case(branches, otherwise) => {
            for (condition, value) in branches {
                each_column(condition, visit);
                each_column(value, visit);
            }
            if let Some(otherwise) = otherwise {
                each_column(otherwise, visit);
            }
        }
        Expression::Call(_, arguments) => {
            for argument in arguments {
                each_column(argument, visit);
            }
        }
    }
}

/// Replaces each column that an expression uses.
pub(crate) fn map_columns(expression: &mut Expression, map: &dyn Fn(usize) -> usize) {
    substitute(expression, &mut |column| Expression::Column(map(column)));
}

/// Replaces each column that an expression uses by another expression.
pub fn substitute(expression: &mut Expression, with: &mut dyn FnMut(usize) -> Expression) {
    match expression {
        Expression::Column(column) => *expression = with(*column),
        Expression::Literal(_) => {}
        Expression::Unary(_, operand)
        | Expression::IsNull(operand)
        | Expression::Cast(operand, _) => substitute(operand, with),
        Expression::Binary(_, left, right) | Expression::Like(left, right) => {
            substitute(left, with);
            substitute(right, with);
        }
        Expression::Case(branches, otherwise) => {
            for (condition, value) in branches {
                substitute(condition, with);
                substitute(value, with);
            }
            if let Some(otherwise) = otherwise {
                substitute(otherwise, with);
            }
        }
        Expression::Call(_, arguments) => {
            for argument in arguments {
                substitute(argument, with);
            }
        }
    }
}

/// Which sides of a join an expression uses.
pub(crate) fn sides(expression: &Expression, left_columns: usize) -> (bool, bool) {
    let (mut left, mut right) = (false, false);
    each_column(expression, &mut |column| {
        if column < left_columns {
            left = true;
        } else {
            right = true;
        }
    });
    (left, right)
}

/// The parts of a conjunction, without those that are always true.
pub fn conjuncts(expression: Expression) -> Vec<Expression> {
    let mut parts = Vec::new();
    let mut open = vec![expression];
    while let Some(next) = open.pop() {
        match next {
            Expression::Binary(BinaryOperator::And, left, right) => {
                open.push(*right);
                open.push(*left);
            }
            Expression::Literal(Value::Boolean(true)) => {}
            other => parts.push(other),
        }
    }
    parts
}

/// Combines conditions by `and` or `or`, as a balanced tree.
pub fn combine(operator: BinaryOperator, mut parts: Vec<Expression>) -> Expression {
    match parts.len() {
        0 => Expression::Literal(Value::Boolean(operator == BinaryOperator::And)),
        1 => parts.remove(0),
        count => {
            let right = parts.split_off(count / 2);
            fold::binary(operator, combine(operator, parts), combine(operator, right))
        }
    }
}

/// A condition, or its negation.
pub(super) fn negate_if(negated: bool, expression: Expression) -> Expression {
    if negated { fold::unary(UnaryOperator::Not, expression) } else { expression }
}

/// Whether an expression has a bounded number of values, for any number of rows.
pub(super) fn is_finite(expression: &Expression, kind: Option<Type>) -> bool {
    if matches!(kind, None | Some(Type::Boolean)) {
        return true;
    }
    match expression {
        Expression::Literal(_) => true,
        Expression::Case(branches, otherwise) => {
            branches.iter().all(|(_, value)| is_finite(value, kind))
                && otherwise.as_ref().is_none_or(|value| is_finite(value, kind))
        }
        Expression::Binary(BinaryOperator::Remainder, _, right) => {
            matches!(**right, Expression::Literal(Value::Integer(_)))
        }
        _ => false,
    }
}
