//! The types of expressions.

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
    /// The number of operators.
    pub(super) size: usize,
}

impl Typed {
    /// An expression whose parts have `size` operators.
    pub(super) fn new(expression: Expression, kind: Option<Type>, size: usize) -> Self {
        Self { expression, kind, size: size + 1 }
    }

    /// The expression as another type: an integer becomes a float.
    pub(super) fn fit(self, kind: Option<Type>) -> Expression {
        if self.kind == Some(Type::Integer) && kind == Some(Type::Float) {
            fold::cast(self.expression, Type::Float)
        } else {
            self.expression
        }
    }

    /// Whether it is a number or null.
    pub(super) fn is_number(&self) -> bool {
        matches!(self.kind, None | Some(Type::Integer | Type::Float))
    }

    /// The name of the type in messages.
    pub(super) fn kind_name(&self) -> &'static str {
        kind_name(self.kind)
    }
}

/// The name of a type in messages.
pub(super) fn kind_name(kind: Option<Type>) -> &'static str {
    kind.map_or("null", Type::name)
}

/// Two types have no common type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mismatch;

/// The common type of two types.
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

/// Checks that an operand has a type, or is null.
pub(super) fn expect(
    operand: &Typed,
    kind: Type,
    span: Span,
    what: &str,
) -> Result<(), Diagnostic> {
    if operand.kind.is_none_or(|other| other == kind) {
        return Ok(());
    }
    let message = format!("expected {kind} for {what}, found {}", operand.kind_name());
    Err(Diagnostic::new(span, message))
}

/// Checks that an operand is a number, or null.
pub(super) fn expect_number(operand: &Typed, span: Span, what: &str) -> Result<(), Diagnostic> {
    if operand.is_number() {
        return Ok(());
    }
    let message = format!("expected a number for {what}, found {}", operand.kind_name());
    Err(Diagnostic::new(span, message))
}

/// An operator in the language.
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
