//! Types of expressions: what fits what.

use crate::ast::BinaryOperator;
use crate::plan::Expression;
use crate::span::{Diagnostic, Span};
use crate::value::{Type, Value};

use super::fold;

/// An expression with its type.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Typed {
    /// The expression.
    pub(super) expression: Expression,
    /// The type; `None` for null.
    pub(super) kind: Option<Type>,
    /// How many operators.
    pub(super) size: usize,
}

impl Typed {
    /// An expression over parts of a size.
    pub(super) fn new(expression: Expression, kind: Option<Type>, size: usize) -> Self {
        Self { expression, kind, size: size + 1 }
    }

    /// As a type that it fits: an integer becomes a float.
    pub(super) fn fit(self, kind: Option<Type>) -> Expression {
        if self.kind == Some(Type::Integer) && kind == Some(Type::Float) {
            fold::cast(self.expression, Type::Float)
        } else {
            self.expression
        }
    }

    /// Whether it can be calculated with.
    pub(super) fn is_number(&self) -> bool {
        matches!(self.kind, None | Some(Type::Integer | Type::Float))
    }

    /// The type, as a message says it.
    pub(super) fn kind_name(&self) -> &'static str {
        kind_name(self.kind)
    }
}

/// A type, as a message says it.
pub(super) fn kind_name(kind: Option<Type>) -> &'static str {
    kind.map_or("null", Type::name)
}

/// There is no type that both fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mismatch;

/// The type that both fit.
pub(super) fn unify(left: Option<Type>, right: Option<Type>) -> Result<Option<Type>, Mismatch> {
    match (left, right) {
        (None, other) | (other, None) => Ok(other),
        (Some(left), Some(right)) if left == right => Ok(Some(left)),
        (Some(Type::Integer), Some(Type::Float)) | (Some(Type::Float), Some(Type::Integer)) => {
            Ok(Some(Type::Float))
        }
        _ => Err(Mismatch),
    }
}

/// A constant.
pub(super) fn literal(value: Value) -> Typed {
    let kind = value.kind();
    Typed::new(Expression::Literal(value), kind, 0)
}

/// An error where an operand has another type.
pub(super) fn expect(
    operand: &Typed,
    kind: Type,
    span: Span,
    what: &str,
) -> Result<(), Diagnostic> {
    if operand.kind.is_none_or(|other| other == kind) {
        return Ok(());
    }
    let message = format!("{what} wants {kind}, and this is {}", operand.kind_name());
    Err(Diagnostic::new(span, message))
}

/// An error where an operand is no number.
pub(super) fn expect_number(operand: &Typed, span: Span, what: &str) -> Result<(), Diagnostic> {
    if operand.is_number() {
        return Ok(());
    }
    let message = format!("{what} wants a number, and this is {}", operand.kind_name());
    Err(Diagnostic::new(span, message))
}

/// An operator as it is written.
pub(crate) fn symbol(operator: BinaryOperator) -> &'static str {
    match operator {
        BinaryOperator::Or => "or",
        BinaryOperator::And => "and",
        BinaryOperator::Equal => "=",
        BinaryOperator::NotEqual => "<>",
        BinaryOperator::Less => "<",
        BinaryOperator::LessOrEqual => "<=",
        BinaryOperator::Greater => ">",
        BinaryOperator::GreaterOrEqual => ">=",
        BinaryOperator::Add => "+",
        BinaryOperator::Subtract => "-",
        BinaryOperator::Multiply => "*",
        BinaryOperator::Divide => "/",
        BinaryOperator::Remainder => "%",
        BinaryOperator::Concatenate => "||",
    }
}
