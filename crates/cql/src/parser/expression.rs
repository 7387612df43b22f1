//! Expressions, by precedence.

use super::{EXPRESSION_LEVELS, Parsed, Parser};
use crate::ast::{BinaryOperator, Expression, ExpressionKind, UnaryOperator};
use crate::foreign;
use crate::lexer::{Token, TokenKind, unquote};
use crate::span::{Diagnostic, Span};
use crate::value::Value;

// How tightly operators bind.
const OR: u8 = 1;
const AND: u8 = 2;
const NOT: u8 = 3;
const COMPARE: u8 = 4;
const ADD: u8 = 5;
const MULTIPLY: u8 = 6;
const NEGATE: u8 = 7;

/// The magnitude of the smallest integer, which is too large for a positive integer.
const INTEGER_MIN_MAGNITUDE: &str = "9223372036854775808";

impl Parser<'_> {
    /// An expression.
    pub(super) fn expression(&mut self) -> Parsed<Expression> {
        self.operators(OR)
    }

    /// An expression of operators that bind at least as tightly as `least`.
    fn operators(&mut self, least: u8) -> Parsed<Expression> {
        let outer = self.enter(EXPRESSION_LEVELS)?;
        let start = self.token().span.start;
        let mut left = self.operand(least)?;
        left = self.casts(left)?;
        let mut compared = false;
        loop {
            let compares = self.at_comparison();
            if compares && least <= COMPARE {
                if compared {
                    let help = "join comparisons with `and`, or put one of them in brackets";
                    let message = "comparisons cannot be chained";
                    return Err(Diagnostic::new(self.token().span, message).help(help));
                }
                compared = true;
                left = self.comparison(left)?;
            } else if let Some((operator, level)) = self.operator().filter(|o| o.1 >= least) {
                self.advance();
                let right = self.operators(level + 1)?;
                let kind = ExpressionKind::Binary(operator, Box::new(left), Box::new(right));
                left = Expression { kind, span: self.span_from(start) };
            } else {
                break;
            }
            left.span.start = start;
            self.grow()?;
        }
        self.leave(EXPRESSION_LEVELS, outer)?;
        Ok(left)
    }

    /// The current token as an operator of two operands, unless it is a comparison, and how tightly
    /// it binds.
    fn operator(&self) -> Option<(BinaryOperator, u8)> {
        let token = self.token();
        Some(match token.kind {
            TokenKind::Sign("+") => (BinaryOperator::Add, ADD),
            TokenKind::Sign("-") => (BinaryOperator::Subtract, ADD),
            TokenKind::Sign("||") => (BinaryOperator::Concatenate, ADD),
            TokenKind::Sign("*") => (BinaryOperator::Multiply, MULTIPLY),
            TokenKind::Sign("/") => (BinaryOperator::Divide, MULTIPLY),
            TokenKind::Sign("%") => (BinaryOperator::Remainder, MULTIPLY),
            TokenKind::Word if self.at_word("and") => (BinaryOperator::And, AND),
            TokenKind::Word if self.at_word("or") => (BinaryOperator::Or, OR),
            _ => return None,
        })
    }

    fn compare_sign(&self) -> Option<BinaryOperator> {
        Some(match self.token().kind {
            TokenKind::Sign("=") => BinaryOperator::Equal,
            TokenKind::Sign("<>" | "!=") => BinaryOperator::NotEqual,
            TokenKind::Sign("<") => BinaryOperator::Less,
            TokenKind::Sign("<=") => BinaryOperator::LessOrEqual,
            TokenKind::Sign(">") => BinaryOperator::Greater,
            TokenKind::Sign(">=") => BinaryOperator::GreaterOrEqual,
            _ => return None,
        })
    }

    fn at_comparison(&self) -> bool {
        let ahead = usize::from(self.at_word("not"));
        self.compare_sign().is_some()
            || self.at_word("is")
            || ["in", "like", "between"].iter().any(|word| self.word_ahead(ahead, word))
    }

    /// The rest of a comparison after its left operand.
    fn comparison(&mut self, left: Expression) -> Parsed<Expression> {
        let start = left.span.start;
        let left = Box::new(left);
        let kind = if let Some(operator) = self.compare_sign() {
            self.advance();
            let right = self.operators(COMPARE + 1)?;
            ExpressionKind::Binary(operator, left, Box::new(right))
        } else if self.eat_word("is") {
            let negated = self.eat_word("not");
            if !self.eat_word("null") {
                let what = if negated { "`null`" } else { "`null` or `not null`" };
                return Err(self.expected(what, &["null"]));
            }
            ExpressionKind::IsNull { operand: left, negated }
        } else {
            let negated = self.eat_word("not");
            if self.eat_word("between") {
                self.between(left, negated)?
            } else if self.eat_word("like") {
                let pattern = Box::new(self.operators(COMPARE + 1)?);
                ExpressionKind::Like { operand: left, pattern, negated }
            } else {
                self.expect_word("in")?;
                self.expect("(")?;
                if self.at_query() {
                    let query = Box::new(self.query()?);
                    self.expect(")")?;
                    ExpressionKind::InQuery { operand: left, query, negated }
                } else {
                    let list = self.expressions()?;
                    self.close("`,` or `)`")?;
                    ExpressionKind::In { operand: left, list, negated }
                }
            }
        };
        Ok(Expression { kind, span: self.span_from(start) })
    }

    fn between(&mut self, operand: Box<Expression>, negated: bool) -> Parsed<ExpressionKind> {
        let low = Box::new(self.operators(COMPARE + 1)?);
        self.expect_word("and")?;
        let high = Box::new(self.operators(COMPARE + 1)?);
        Ok(ExpressionKind::Between { operand, low, high, negated })
    }

    /// An operand with the operators before it.
    fn operand(&mut self, least: u8) -> Parsed<Expression> {
        let token = self.token();
        match token.kind {
            TokenKind::Integer | TokenKind::Float => self.number(token),
            TokenKind::Text => {
                self.advance();
                let text = unquote(self.written(token));
                Ok(literal(Value::text(&text), token.span))
            }
            TokenKind::Parameter => {
                self.advance();
                let name = self.written(token)[1..].to_owned();
                Ok(Expression { kind: ExpressionKind::Parameter(name), span: token.span })
            }
            TokenKind::Sign("(") => self.in_brackets(),
            TokenKind::Sign("-") => self.negation(),
            TokenKind::Quoted => self.column_or_call(),
            TokenKind::Word => self.word(least),
            TokenKind::Sign(_) | TokenKind::End => Err(self.expected("an expression", &[])),
        }
    }

    fn number(&mut self, token: Token) -> Parsed<Expression> {
        self.advance();
        let next = self.token();
        if next.kind == TokenKind::Word && next.span.start == token.span.end {
            let span = token.span.to(next.span);
            return Err(Diagnostic::new(span, "a number must be separated from the next word"));
        }
        let written = self.written(token);
        let value = if token.kind == TokenKind::Integer {
            written.parse().ok().map(Value::Integer)
        } else {
            written.parse().ok().filter(|number: &f64| number.is_finite()).map(Value::Float)
        };
        match value {
            Some(value) => Ok(literal(value, token.span)),
            None if token.kind == TokenKind::Float => {
                Err(Diagnostic::new(token.span, "this number is too large"))
            }
            None => Err(Diagnostic::new(token.span, "this number is too large")
                .help("integers have 64 bits: write it with `.0` for a float")),
        }
    }

    fn negation(&mut self) -> Parsed<Expression> {
        let start = self.advance().span.start;
        let next = self.token();
        if next.kind == TokenKind::Integer && self.written(next) == INTEGER_MIN_MAGNITUDE {
            self.advance();
            return Ok(literal(Value::Integer(i64::MIN), self.span_from(start)));
        }
        let operand = Box::new(self.operators(NEGATE)?);
        let kind = ExpressionKind::Unary(UnaryOperator::Negate, operand);
        Ok(Expression { kind, span: self.span_from(start) })
    }

    fn in_brackets(&mut self) -> Parsed<Expression> {
        let start = self.advance().span.start;
        if self.at_query() {
            let kind = ExpressionKind::Query(Box::new(self.query()?));
            self.expect(")")?;
            return Ok(Expression { kind, span: self.span_from(start) });
        }
        let inner = self.operators(OR)?;
        self.close("`)`")?;
        Ok(Expression { span: self.span_from(start), ..inner })
    }

    /// The `)` after an expression.
    fn close(&mut self, what: &str) -> Parsed<()> {
        if self.eat(")") {
            return Ok(());
        }
        Err(self.expected(what, &["and", "like", "between"]))
    }

    /// An expression that begins with a word.
    fn word(&mut self, least: u8) -> Parsed<Expression> {
        let token = self.token();
        let word = self.written(token);
        let constant = match () {
            () if word.eq_ignore_ascii_case("null") => Some(Value::Null),
            () if word.eq_ignore_ascii_case("true") => Some(Value::Boolean(true)),
            () if word.eq_ignore_ascii_case("false") => Some(Value::Boolean(false)),
            () => None,
        };
        if let Some(value) = constant {
            self.advance();
            return Ok(literal(value, token.span));
        }
        if self.at_word("not") {
            return self.inversion(least);
        }
        if self.at_word("case") {
            return self.case();
        }
        if self.at_word("cast") && self.sign_ahead(1, "(") {
            return self.cast();
        }
        if self.at_word("exists") && self.sign_ahead(1, "(") {
            return self.exists();
        }
        if self.at_query() && !self.sign_ahead(1, ".") {
            let message = "a query in an expression must be in brackets";
            let help = "put it in brackets: `(select …)`";
            return Err(Diagnostic::new(token.span, message).help(help));
        }
        self.column_or_call()
    }

    fn inversion(&mut self, least: u8) -> Parsed<Expression> {
        if least > NOT {
            let help = "put it in brackets: `(not …)`";
            return Err(self.expected("an expression", &[]).help(help));
        }
        let start = self.advance().span.start;
        let operand = Box::new(self.operators(NOT)?);
        let kind = ExpressionKind::Unary(UnaryOperator::Not, operand);
        Ok(Expression { kind, span: self.span_from(start) })
    }

    /// `column`, `alias.column` or `function(…)`.
    fn column_or_call(&mut self) -> Parsed<Expression> {
        let start = self.token().span.start;
        let what = "an expression";
        if self.at_reserved() && !self.sign_ahead(1, ".") {
            // These keywords may be meant as columns.
            let column = self.at_any(&["order", "group", "by", "end"]);
            let column = column && !self.word_ahead(1, "by");
            return Err(if column { self.reserved(what) } else { self.expected(what, &[]) });
        }
        if self.at_interval() {
            return self.interval_constant();
        }
        if self.sign_ahead(1, "(") {
            if let Some(help) = self.foreign(foreign::window_function) {
                return Err(self.expected(what, &[]).help(help));
            }
        }
        let name = self.any_name(what)?;
        if self.eat("(") {
            let call = self.call(name, start)?;
            if self.at_word("filter") && self.sign_ahead(1, "(") {
                return self.filtered(call);
            }
            if self.sign_ahead(1, "(") || self.word_ahead(1, "group") {
                if let Some(help) = self.foreign(foreign::after_call) {
                    let word = self.written(self.token());
                    let message = format!("`{word}` cannot follow a function");
                    return Err(Diagnostic::new(self.token().span, message).help(help));
                }
            }
            return Ok(call);
        }
        let kind = if self.eat(".") {
            let column = self.any_name("the name of a column")?;
            ExpressionKind::Column { qualifier: Some(name), name: column }
        } else {
            ExpressionKind::Column { qualifier: None, name }
        };
        Ok(Expression { kind, span: self.span_from(start) })
    }

    /// The rest of a call after `name(`.
    fn call(&mut self, name: crate::ast::Identifier, start: u32) -> Parsed<Expression> {
        let distinct = self.eat_word("distinct");
        let star = !distinct && self.eat("*");
        let arguments =
            if star || (!distinct && self.at(")")) { Vec::new() } else { self.expressions()? };
        self.close(if star { "`)`" } else { "`,` or `)`" })?;
        let kind = ExpressionKind::Call { name, distinct, star, arguments };
        Ok(Expression { kind, span: self.span_from(start) })
    }

    /// `exists (select …)`.
    fn exists(&mut self) -> Parsed<Expression> {
        let start = self.advance().span.start;
        self.expect("(")?;
        if !(self.at_query() || self.at("(")) {
            return Err(self.expected("a query in `exists (…)`", &["select"]));
        }
        let kind = ExpressionKind::Exists(Box::new(self.query()?));
        self.expect(")")?;
        Ok(Expression { kind, span: self.span_from(start) })
    }

    /// `cast(x as type)`.
    fn cast(&mut self) -> Parsed<Expression> {
        let start = self.advance().span.start;
        self.expect("(")?;
        let operand = Box::new(self.expression()?);
        self.expect_word("as")?;
        let kind = self.kind()?;
        self.expect(")")?;
        let kind = ExpressionKind::Cast(operand, kind);
        Ok(Expression { kind, span: self.span_from(start) })
    }

    /// `case … end`.
    fn case(&mut self) -> Parsed<Expression> {
        let start = self.advance().span.start;
        let operand = if self.at_word("when") { None } else { Some(Box::new(self.expression()?)) };
        let mut branches = Vec::new();
        self.expect_word("when")?;
        loop {
            let condition = self.expression()?;
            self.expect_word("then")?;
            branches.push((condition, self.expression()?));
            if !self.eat_word("when") {
                break;
            }
        }
        let otherwise =
            if self.eat_word("else") { Some(Box::new(self.expression()?)) } else { None };
        if !self.eat_word("end") {
            let (what, words): (_, &[&str]) = match otherwise {
                Some(_) => ("`end`", &["end"]),
                None => ("`when`, `else` or `end`", &["when", "else", "end"]),
            };
            return Err(self.expected(what, words));
        }
        let kind = ExpressionKind::Case { operand, branches, otherwise };
        Ok(Expression { kind, span: self.span_from(start) })
    }
}

fn literal(value: Value, span: Span) -> Expression {
    Expression { kind: ExpressionKind::Literal(value), span }
}
