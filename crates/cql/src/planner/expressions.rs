//! Plans expressions: resolves names and checks types.

use crate::ast::{self, BinaryOperator, ExpressionKind, Identifier, UnaryOperator};
use crate::plan::{Aggregate, Expression};
use crate::span::{Diagnostic, Span};
use crate::value::{Type, Value};

use super::scope::{NotFound, Scope, suggest};
use super::subqueries::Subqueries;
use super::types::{Typed, expect, expect_number, kind_name, literal, symbol, unify};
use super::{Parameters, calls, fold, walk};

/// The most levels of nested expressions.
const DEPTH_MAX: usize = 256;
/// The most operators of an expression. `between` and `case` use operands more than once.
const SIZE_MAX: usize = 20_000;

/// The columns of an aggregation, for the expressions above it.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// The keys of the groups.
    pub(super) keys: Vec<Typed>,
    /// The aggregates, with their types.
    pub(super) aggregates: Vec<(Aggregate, Option<Type>)>,
}

/// The context of the expressions in one part of a query.
pub(super) struct Expressions<'a> {
    /// The columns.
    pub(super) scope: &'a Scope,
    /// The values of parameters.
    pub(super) parameters: &'a Parameters,
    /// The aliases of selected expressions, for names that are not columns.
    pub(super) aliases: &'a [(&'a str, &'a ast::Expression)],
    /// The groups, if there are any. Then the planned expressions are over keys and aggregates.
    pub(super) groups: Option<&'a mut Groups>,
    /// The subqueries; `None` if they are not allowed here.
    pub(super) subqueries: Option<&'a mut Subqueries>,
    /// Whether false and null have the same effect in the next planned expression.
    pub(super) filters: bool,
    /// The help if there is an aggregate although none is allowed here.
    pub(super) no_aggregate: &'a str,
    /// Probable mistakes.
    pub(super) warnings: Vec<Diagnostic>,
    /// The level of nesting.
    pub(super) depth: usize,
}

impl<'a> Expressions<'a> {
    /// Expressions over rows.
    pub(super) fn new(
        scope: &'a Scope,
        parameters: &'a Parameters,
        aliases: &'a [(&'a str, &'a ast::Expression)],
        no_aggregate: &'a str,
    ) -> Self {
        Self {
            scope,
            parameters,
            aliases,
            groups: None,
            subqueries: None,
            filters: false,
            no_aggregate,
            warnings: Vec::new(),
            depth: 0,
        }
    }

    /// The same context, for expressions over the rows that are grouped.
    fn rows<'b>(&'b self, no_aggregate: &'b str) -> Expressions<'b> {
        Expressions {
            scope: self.scope,
            parameters: self.parameters,
            aliases: self.aliases,
            groups: None,
            subqueries: None,
            filters: false,
            no_aggregate,
            warnings: Vec::new(),
            depth: self.depth,
        }
    }

    /// An expression.
    pub(super) fn plan(&mut self, expression: &ast::Expression) -> Result<Typed, Diagnostic> {
        if self.depth >= DEPTH_MAX {
            return Err(Diagnostic::new(expression.span, "the expression is nested too deeply"));
        }
        self.depth += 1;
        let filters = std::mem::take(&mut self.filters);
        let planned = match self.key(expression) {
            Some(key) => Ok(key),
            None => self.kind(expression, filters),
        };
        self.depth -= 1;
        let planned = planned?;
        check_size(planned.size, expression.span)?;
        Ok(planned)
    }

    /// A condition.
    pub(super) fn condition(&mut self, expression: &ast::Expression) -> Result<Typed, Diagnostic> {
        let planned = self.plan(expression)?;
        expect(&planned, Type::Boolean, expression.span, "a condition")?;
        Ok(planned)
    }

    /// A condition that selects rows, for which false and null are the same.
    pub(super) fn filter(&mut self, expression: &ast::Expression) -> Result<Typed, Diagnostic> {
        self.filters = true;
        self.condition(expression)
    }

    /// The key of the groups that equals an expression.
    fn key(&self, expression: &ast::Expression) -> Option<Typed> {
        let groups = self.groups.as_ref().filter(|groups| !groups.keys.is_empty())?;
        let of_rows = self.rows("").plan(expression).ok()?;
        let same = |key: &Typed| key.expression == of_rows.expression;
        let at = groups.keys.iter().position(same)?;
        Some(Typed::new(Expression::Column(at), of_rows.kind, 0))
    }

    fn kind(&mut self, expression: &ast::Expression, filters: bool) -> Result<Typed, Diagnostic> {
        let span = expression.span;
        match &expression.kind {
            ExpressionKind::Literal(value) => Ok(literal(value.clone())),
            ExpressionKind::Column { qualifier, name } => self.column(qualifier.as_ref(), name),
            ExpressionKind::Parameter(name) => self.parameter(name, span),
            ExpressionKind::Unary(operator, operand) => match (operator, &operand.kind) {
                (UnaryOperator::Not, ExpressionKind::InQuery { operand, query, negated }) => {
                    self.in_query(operand, query, !negated, filters)
                }
                (UnaryOperator::Not, ExpressionKind::Exists(query)) => self.exists(query, true),
                _ => self.unary(*operator, operand),
            },
            ExpressionKind::Binary(BinaryOperator::And | BinaryOperator::Or, ..) => {
                self.logical(expression, filters)
            }
            ExpressionKind::Binary(operator, left, right) => {
                let constants = operator.is_comparison().then_some([&**left, &**right]);
                let (left, right) = (self.plan(left)?, self.plan(right)?);
                let planned = self.binary(*operator, left, right, span)?;
                if let Some(operands) = constants {
                    self.note_constants(operands, &planned, span);
                }
                Ok(planned)
            }
            ExpressionKind::IsNull { operand, negated } => {
                let operand = self.plan(operand)?;
                let size = operand.size + 1;
                let test = walk::negate_if(*negated, fold::is_null(operand.expression));
                Ok(Typed::new(test, Some(Type::Boolean), size))
            }
            ExpressionKind::Between { operand, low, high, negated } => {
                self.between(operand, low, high, *negated, span)
            }
            ExpressionKind::In { operand, list, negated } => {
                self.list(operand, list, *negated, span)
            }
            ExpressionKind::InQuery { operand, query, negated } => {
                self.in_query(operand, query, *negated, filters)
            }
            ExpressionKind::Exists(query) => self.exists(query, false),
            ExpressionKind::Query(query) => self.only_value(query),
            ExpressionKind::Like { operand, pattern, negated } => {
                self.like(operand, pattern, *negated)
            }
            ExpressionKind::Call { name, distinct, star, arguments } => {
                if calls::is_aggregate(&name.text) {
                    self.aggregate(name, *distinct, *star, arguments, span)
                } else {
                    if *distinct || *star {
                        let message = format!("`{}` is not an aggregate", name.text);
                        return Err(Diagnostic::new(name.span, message));
                    }
                    let mut planned = Vec::with_capacity(arguments.len());
                    for argument in arguments {
                        planned.push((self.plan(argument)?, argument.span));
                    }
                    calls::function(name, planned, span)
                }
            }
            ExpressionKind::Cast(operand, to) => {
                let operand = self.plan(operand)?;
                let size = operand.size;
                let cast = if operand.kind == Some(*to) {
                    operand.expression
                } else {
                    fold::cast(operand.expression, *to)
                };
                Ok(Typed::new(cast, Some(*to), size))
            }
            ExpressionKind::Case { operand, branches, otherwise } => {
                self.case(operand.as_deref(), branches, otherwise.as_deref(), span)
            }
        }
    }

    fn column(
        &mut self,
        qualifier: Option<&Identifier>,
        name: &Identifier,
    ) -> Result<Typed, Diagnostic> {
        match self.scope.find(qualifier, name) {
            Ok((column, kind)) if self.groups.is_none() => {
                Ok(Typed::new(Expression::Column(column), kind, 0))
            }
            Ok(_) => {
                let text = &name.text;
                let message = format!("`{text}` is neither in `group by` nor in an aggregate");
                let help = format!("add it to `group by`, or use an aggregate: `max({text})`");
                let span = qualifier.map_or(name.span, |qualifier| qualifier.span.to(name.span));
                Err(Diagnostic::new(span, message).help(help))
            }
            Err(NotFound::Unknown(diagnostic)) if qualifier.is_none() => {
                let is = |(alias, _): &&(&str, _)| alias.eq_ignore_ascii_case(&name.text);
                let Some((_, expression)) = self.aliases.iter().find(is) else {
                    return Err(diagnostic);
                };
                // An alias may not refer to other aliases.
                let aliases = std::mem::take(&mut self.aliases);
                let planned = self.plan(expression);
                self.aliases = aliases;
                planned
            }
            Err(not_found) => Err(not_found.into()),
        }
    }

    fn parameter(&self, name: &str, span: Span) -> Result<Typed, Diagnostic> {
        let by_case = || {
            let is = |(key, _): &(&String, _)| key.eq_ignore_ascii_case(name);
            self.parameters.iter().find(is).map(|(_, value)| value)
        };
        if let Some(value) = self.parameters.get(name).or_else(by_case) {
            return Ok(literal(value.clone()));
        }
        let diagnostic = Diagnostic::new(span, format!("there is no parameter `${name}`"));
        Err(suggest(diagnostic, name, self.parameters.keys().map(String::as_str)))
    }

    fn unary(
        &mut self,
        operator: UnaryOperator,
        operand: &ast::Expression,
    ) -> Result<Typed, Diagnostic> {
        let planned = self.plan(operand)?;
        let kind = match operator {
            UnaryOperator::Not => {
                expect(&planned, Type::Boolean, operand.span, "`not`")?;
                Some(Type::Boolean)
            }
            UnaryOperator::Negate => {
                expect_number(&planned, operand.span, "`-`")?;
                planned.kind
            }
        };
        let size = planned.size;
        Ok(Typed::new(fold::unary(operator, planned.expression), kind, size))
    }

    /// `and` and `or`, planned without recursion because chains of them may be long.
    fn logical(
        &mut self,
        expression: &ast::Expression,
        filters: bool,
    ) -> Result<Typed, Diagnostic> {
        let ExpressionKind::Binary(operator, _, _) = &expression.kind else {
            return self.plan(expression);
        };
        let mut parts = Vec::new();
        let mut open = vec![expression];
        while let Some(next) = open.pop() {
            match &next.kind {
                ExpressionKind::Binary(other, left, right) if other == operator => {
                    open.push(right);
                    open.push(left);
                }
                _ => parts.push(next),
            }
        }
        let name = if *operator == BinaryOperator::And { "`and`" } else { "`or`" };
        let mut planned = Vec::with_capacity(parts.len());
        let mut size = 0;
        for part in parts {
            self.filters = filters;
            let condition = self.plan(part)?;
            expect(&condition, Type::Boolean, part.span, name)?;
            size += condition.size + 1;
            check_size(size, expression.span)?;
            planned.push(condition.expression);
        }
        Ok(Typed::new(walk::combine(*operator, planned), Some(Type::Boolean), size))
    }

    /// An operator of two operands, but not `and` and `or`.
    fn binary(
        &mut self,
        operator: BinaryOperator,
        left: Typed,
        right: Typed,
        span: Span,
    ) -> Result<Typed, Diagnostic> {
        let size = left.size + right.size;
        let wrong = |wants: &str| {
            let message = format!(
                "`{}` needs {wants}, not {} and {}",
                symbol(operator),
                left.kind_name(),
                right.kind_name()
            );
            Diagnostic::new(span, message)
        };
        let Ok(kind) = unify(left.kind, right.kind) else {
            return Err(match operator {
                BinaryOperator::Concatenate => wrong("texts").help("use `cast(… as text)`"),
                _ if operator.is_comparison() => wrong("two values of the same type"),
                _ => wrong("numbers"),
            });
        };
        let result = match operator {
            BinaryOperator::Concatenate => {
                if !matches!(kind, None | Some(Type::Text)) {
                    return Err(wrong("texts").help("use `cast(… as text)`"));
                }
                Some(Type::Text)
            }
            _ if operator.is_comparison() => {
                let null = Expression::Literal(Value::Null);
                if left.expression == null || right.expression == null {
                    let message = "a comparison with null is never true";
                    let help = "use `is null` or `is not null`";
                    self.warnings.push(Diagnostic::new(span, message).help(help));
                }
                self.note_value(&left.expression, &right.expression, span);
                self.note_value(&right.expression, &left.expression, span);
                Some(Type::Boolean)
            }
            _ => {
                if !left.is_number() || !right.is_number() {
                    return Err(wrong("numbers"));
                }
                kind
            }
        };
        let folded = fold::binary(operator, left.fit(kind), right.fit(kind));
        Ok(Typed::new(folded, result, size))
    }

    /// Warns about a comparison of two constants: quotes may have turned a column into a text.
    fn note_constants(&mut self, operands: [&ast::Expression; 2], planned: &Typed, span: Span) {
        let texts = operands.map(|operand| match &operand.kind {
            ExpressionKind::Literal(value) if !value.is_null() => Some(value.to_string()),
            _ => None,
        });
        let [Some(_), Some(_)] = &texts else { return };
        let holds = match planned.expression {
            Expression::Literal(Value::Boolean(true)) => "always true",
            _ => "never true",
        };
        let message = format!("this compares two constants: it is {holds}");
        let is_column =
            |text: &&String| self.scope.columns().any(|(_, column)| column.has_name(text));
        let diagnostic = Diagnostic::new(span, message);
        self.warnings.push(match texts.iter().flatten().find(is_column) {
            Some(name) => diagnostic.help(format!(
                "a text in quotes is a constant: the column is `{name}` without quotes, or in \
                 backticks"
            )),
            None => diagnostic,
        });
    }

    /// Warns about a comparison of a column with a text that the column never has.
    fn note_value(&mut self, column: &Expression, value: &Expression, span: Span) {
        let (Expression::Column(at), Expression::Literal(Value::Text(text)), true) =
            (column, value, self.groups.is_none())
        else {
            return;
        };
        let Some((_, column)) = self.scope.columns().find(|(position, _)| position == at) else {
            return;
        };
        let Some(values) = &column.values else { return };
        if values.iter().any(|value| **value == **text) {
            return;
        }
        let message = format!("`{}` is never '{text}'", column.name);
        let help = format!("it is one of {}", values.join(", "));
        self.warnings.push(Diagnostic::new(span, message).help(help));
    }

    fn between(
        &mut self,
        operand: &ast::Expression,
        low: &ast::Expression,
        high: &ast::Expression,
        negated: bool,
        span: Span,
    ) -> Result<Typed, Diagnostic> {
        let value = self.plan(operand)?;
        let (low, high) = (self.plan(low)?, self.plan(high)?);
        let low = self.binary(BinaryOperator::GreaterOrEqual, value.clone(), low, span)?;
        let high = self.binary(BinaryOperator::LessOrEqual, value, high, span)?;
        let size = low.size + high.size + 1;
        let both = fold::binary(BinaryOperator::And, low.expression, high.expression);
        Ok(Typed::new(walk::negate_if(negated, both), Some(Type::Boolean), size))
    }

    fn list(
        &mut self,
        operand: &ast::Expression,
        list: &[ast::Expression],
        negated: bool,
        span: Span,
    ) -> Result<Typed, Diagnostic> {
        let value = self.plan(operand)?;
        check_size(value.size.saturating_mul(list.len()), span)?;
        let mut tests = Vec::with_capacity(list.len());
        let mut size = 1;
        for element in list {
            let other = self.plan(element)?;
            let test = self.binary(BinaryOperator::Equal, value.clone(), other, element.span)?;
            size += test.size + 1;
            tests.push(test.expression);
        }
        let any = walk::combine(BinaryOperator::Or, tests);
        Ok(Typed::new(walk::negate_if(negated, any), Some(Type::Boolean), size))
    }

    fn like(
        &mut self,
        operand: &ast::Expression,
        pattern: &ast::Expression,
        negated: bool,
    ) -> Result<Typed, Diagnostic> {
        let text = self.plan(operand)?;
        expect(&text, Type::Text, operand.span, "`like`")?;
        let like = self.plan(pattern)?;
        expect(&like, Type::Text, pattern.span, "`like`")?;
        let size = text.size + like.size + 1;
        let test = Expression::Like(Box::new(text.expression), Box::new(like.expression));
        Ok(Typed::new(walk::negate_if(negated, test), Some(Type::Boolean), size))
    }

    fn case(
        &mut self,
        operand: Option<&ast::Expression>,
        branches: &[(ast::Expression, ast::Expression)],
        otherwise: Option<&ast::Expression>,
        span: Span,
    ) -> Result<Typed, Diagnostic> {
        let operand = operand.map(|operand| self.plan(operand)).transpose()?;
        if let Some(operand) = &operand {
            check_size(operand.size.saturating_mul(branches.len()), span)?;
        }
        let mut kind = None;
        let mut size = 0;
        let mut planned = Vec::with_capacity(branches.len());
        let branch = |kind: &mut Option<Type>, value: &Typed, span: Span| {
            let Ok(common) = unify(*kind, value.kind) else {
                let message = format!(
                    "the branches of `case` have different types: {} and {}",
                    kind_name(*kind),
                    value.kind_name()
                );
                return Err(Diagnostic::new(span, message));
            };
            *kind = common;
            Ok(())
        };
        for (when, then) in branches {
            let condition = match &operand {
                None => self.condition(when)?,
                Some(operand) => {
                    let other = self.plan(when)?;
                    self.binary(BinaryOperator::Equal, operand.clone(), other, when.span)?
                }
            };
            let value = self.plan(then)?;
            branch(&mut kind, &value, then.span)?;
            size += condition.size + value.size;
            check_size(size, span)?;
            planned.push((condition.expression, value));
        }
        let otherwise = match otherwise {
            None => None,
            Some(otherwise) => {
                let value = self.plan(otherwise)?;
                branch(&mut kind, &value, otherwise.span)?;
                size += value.size;
                Some(value)
            }
        };
        let otherwise = otherwise.map(|value| Box::new(value.fit(kind)));
        let branches = planned.into_iter().map(|(when, then)| (when, then.fit(kind))).collect();
        Ok(Typed::new(Expression::Case(branches, otherwise), kind, size))
    }

    fn aggregate(
        &mut self,
        name: &Identifier,
        distinct: bool,
        star: bool,
        arguments: &[ast::Expression],
        span: Span,
    ) -> Result<Typed, Diagnostic> {
        if self.groups.is_none() {
            let message = format!("the aggregate `{}` is not allowed here", name.text);
            return Err(Diagnostic::new(span, message).help(self.no_aggregate));
        }
        let mut rows = self.rows("aggregates cannot be nested: use a subquery or a view");
        let mut planned = Vec::with_capacity(arguments.len());
        for argument in arguments {
            planned.push((rows.plan(argument)?, argument.span));
        }
        let warnings = rows.warnings;
        self.warnings.extend(warnings);
        let (aggregate, kind) = calls::aggregate(name, distinct, star, planned, span)?;
        let Some(groups) = &mut self.groups else {
            return Err(Diagnostic::new(span, "an aggregate is not allowed here"));
        };
        let known = groups.aggregates.iter().position(|(other, _)| *other == aggregate);
        let at = known.unwrap_or_else(|| {
            groups.aggregates.push((aggregate, kind));
            groups.aggregates.len() - 1
        });
        Ok(Typed::new(Expression::Column(groups.keys.len() + at), kind, 0))
    }
}

fn check_size(size: usize, span: Span) -> Result<(), Diagnostic> {
    if size > SIZE_MAX {
        return Err(Diagnostic::new(span, "the expression is too large"));
    }
    Ok(())
}
