//! Random expressions.

use super::Generator;
use super::plans::Kind;
use crate::ast::{BinaryOperator, UnaryOperator};
use crate::plan::{Expression, Function};
use crate::value::{Type, Value};

const TYPES: [Type; 4] = [Type::Boolean, Type::Integer, Type::Float, Type::Text];

const COMPARISONS: [BinaryOperator; 6] = [
    BinaryOperator::Equal,
    BinaryOperator::NotEqual,
    BinaryOperator::Less,
    BinaryOperator::LessOrEqual,
    BinaryOperator::Greater,
    BinaryOperator::GreaterOrEqual,
];

const ARITHMETIC: [BinaryOperator; 5] = [
    BinaryOperator::Add,
    BinaryOperator::Subtract,
    BinaryOperator::Multiply,
    BinaryOperator::Divide,
    BinaryOperator::Remainder,
];

impl Generator {
    /// The type of a random column, or integer if there are no columns.
    pub(super) fn kind_of(&mut self, columns: &[Kind]) -> Type {
        if columns.is_empty() { Type::Integer } else { self.one_of(columns).kind }
    }

    /// A condition over columns. Half of the conditions are simple, so that they often hold.
    pub(super) fn condition(&mut self, columns: &[Kind]) -> Expression {
        if self.chance(50) {
            let kind = self.kind_of(columns);
            let operator = self.one_of(&COMPARISONS[1..]);
            return self.binary(operator, kind, columns, 0);
        }
        let depth = 1 + self.below(2);
        self.expression(Type::Boolean, columns, depth)
    }

    /// An expression of any type over columns.
    pub(super) fn any(&mut self, columns: &[Kind]) -> Expression {
        let depth = if self.chance(50) { 0 } else { 1 + self.below(2) };
        let kind = if self.chance(75) { self.kind_of(columns) } else { self.one_of(&TYPES) };
        self.expression(kind, columns, depth)
    }

    /// An expression of the type `kind`.
    pub(super) fn expression(&mut self, kind: Type, columns: &[Kind], depth: usize) -> Expression {
        if depth == 0 {
            return self.leaf(kind, columns);
        }
        let depth = depth - 1;
        match self.below(12) {
            0 => self.leaf(kind, columns),
            1 => {
                let branches = (0..=self.below(2)).map(|_| {
                    let condition = self.expression(Type::Boolean, columns, depth);
                    (condition, self.expression(kind, columns, depth))
                });
                let branches = branches.collect();
                let otherwise =
                    self.chance(60).then(|| Box::new(self.expression(kind, columns, depth)));
                Expression::Case(branches, otherwise)
            }
            2 => {
                let function =
                    self.one_of(&[Function::Coalesce, Function::Greatest, Function::Least]);
                let count = 1 + self.below(3);
                self.call(function, &vec![kind; count], columns, depth)
            }
            3 => {
                let from = self.one_of(&TYPES);
                Expression::Cast(Box::new(self.expression(from, columns, depth)), kind)
            }
            _ => match kind {
                Type::Boolean => self.boolean(columns, depth),
                Type::Integer => self.integer(columns, depth),
                Type::Float => self.float(columns, depth),
                Type::Text => self.text(columns, depth),
            },
        }
    }

    fn leaf(&mut self, kind: Type, columns: &[Kind]) -> Expression {
        let fitting: Vec<usize> =
            (0..columns.len()).filter(|column| columns[*column].kind == kind).collect();
        if !fitting.is_empty() && self.chance(75) {
            return Expression::Column(self.one_of(&fitting));
        }
        if self.chance(6) {
            return Expression::Literal(Value::Null);
        }
        Expression::Literal(match kind {
            Type::Boolean => Value::Boolean(self.chance(50)),
            Type::Integer if self.chance(2) => Value::Integer(self.one_of(&[i64::MIN, i64::MAX])),
            Type::Integer => Value::Integer(self.below(6) as i64 - 2),
            Type::Float => Value::Float(self.quarters()),
            Type::Text => Value::text(self.one_of(&["", "a", "b", "ab", "%", "_%a", "1"])),
        })
    }

    fn boolean(&mut self, columns: &[Kind], depth: usize) -> Expression {
        match self.below(8) {
            0 => {
                let operator = self.one_of(&[BinaryOperator::And, BinaryOperator::Or]);
                self.binary(operator, Type::Boolean, columns, depth)
            }
            1 => self.unary(UnaryOperator::Not, Type::Boolean, columns, depth),
            2 => {
                let kind = self.kind_of(columns);
                Expression::IsNull(Box::new(self.expression(kind, columns, depth)))
            }
            3 => {
                let text = self.expression(Type::Text, columns, depth);
                let pattern = self.expression(Type::Text, columns, 0);
                Expression::Like(Box::new(text), Box::new(pattern))
            }
            4 => {
                let function = self.one_of(&[Function::StartsWith, Function::EndsWith]);
                self.call(function, &[Type::Text, Type::Text], columns, depth)
            }
            _ => {
                let kind = self.kind_of(columns);
                let operator = self.one_of(&COMPARISONS);
                self.binary(operator, kind, columns, depth)
            }
        }
    }

    fn integer(&mut self, columns: &[Kind], depth: usize) -> Expression {
        match self.below(7) {
            0 => self.unary(UnaryOperator::Negate, Type::Integer, columns, depth),
            1 => self.call(Function::Length, &[Type::Text], columns, depth),
            2 => self.call(Function::Position, &[Type::Text, Type::Text], columns, depth),
            3 => self.call(Function::Absolute, &[Type::Integer], columns, depth),
            _ => {
                let operator = self.one_of(&ARITHMETIC);
                self.binary(operator, Type::Integer, columns, depth)
            }
        }
    }

    fn float(&mut self, columns: &[Kind], depth: usize) -> Expression {
        match self.below(8) {
            0 => self.unary(UnaryOperator::Negate, Type::Float, columns, depth),
            1..=3 => {
                let function = self.one_of(&[
                    Function::Absolute,
                    Function::Floor,
                    Function::Ceiling,
                    Function::Round,
                    Function::SquareRoot,
                    Function::Logarithm,
                ]);
                self.call(function, &[Type::Float], columns, depth)
            }
            4 => self.call(Function::Power, &[Type::Float, Type::Float], columns, depth),
            _ => {
                let operator = self.one_of(&ARITHMETIC);
                self.binary(operator, Type::Float, columns, depth)
            }
        }
    }

    fn text(&mut self, columns: &[Kind], depth: usize) -> Expression {
        use Type::{Integer, Text};
        match self.below(6) {
            0 => {
                let function = self.one_of(&[Function::Lower, Function::Upper, Function::Trim]);
                self.call(function, &[Text], columns, depth)
            }
            1 => self.call(Function::Substring, &[Text, Integer], columns, depth),
            2 => self.call(Function::Substring, &[Text, Integer, Integer], columns, depth),
            3 => self.call(Function::Replace, &[Text, Text, Text], columns, depth),
            4 => self.call(Function::SplitPart, &[Text, Text, Integer], columns, depth),
            _ => self.binary(BinaryOperator::Concatenate, Text, columns, depth),
        }
    }

    fn unary(
        &mut self,
        operator: UnaryOperator,
        kind: Type,
        columns: &[Kind],
        depth: usize,
    ) -> Expression {
        Expression::Unary(operator, Box::new(self.expression(kind, columns, depth)))
    }

    fn binary(
        &mut self,
        operator: BinaryOperator,
        kind: Type,
        columns: &[Kind],
        depth: usize,
    ) -> Expression {
        let left = self.expression(kind, columns, depth);
        let right = self.expression(kind, columns, depth);
        Expression::Binary(operator, Box::new(left), Box::new(right))
    }

    fn call(
        &mut self,
        function: Function,
        kinds: &[Type],
        columns: &[Kind],
        depth: usize,
    ) -> Expression {
        let arguments = kinds.iter().map(|kind| self.expression(*kind, columns, depth));
        Expression::Call(function, arguments.collect())
    }
}
