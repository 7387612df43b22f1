//! What users of other stream systems write, with the same meaning here: `with`, windows as table
//! functions, `interval`, `filter (where …)` and `x::type`. Each becomes the tree of the language's
//! own form, so that nothing after the parser knows of it.

use super::{Parsed, Parser, QUERY_LEVELS};
use crate::ast::{Expression, ExpressionKind, Statement, TableReference, Window, WindowKind};
use crate::lexer::{Token, TokenKind, unquote};
use crate::span::{Diagnostic, Span};
use crate::value::Value;

impl Parser<'_> {
    /// Whether `with` begins a query here.
    pub(super) fn at_with(&self) -> bool {
        self.at_word("with") && matches!(self.ahead(1).kind, TokenKind::Word | TokenKind::Quoted)
    }

    /// `with name [(column, …)] as (query), …` before a query: each is a view before the statement.
    pub(super) fn with(&mut self) -> Parsed<()> {
        let with = self.advance();
        if self.depth > 0 {
            let message = "`with` is not at the beginning of the statement";
            let help = "move it before the first `select` of the statement";
            return Err(Diagnostic::new(with.span, message).help(help));
        }
        if self.at_word("recursive") && !self.word_ahead(1, "as") {
            let help = "a view cannot use itself; `[partition by VDisk rows 2]` joins a row with \
                        the one before it";
            return Err(self.expected("the name of a view", &[]).help(help));
        }
        loop {
            let name = self.name("the name of a view")?;
            let columns = if self.at("(") { self.columns(false)? } else { Vec::new() };
            self.expect_word("as")?;
            self.expect("(")?;
            // Levels as for a query in brackets.
            let outer = self.enter(QUERY_LEVELS)?;
            let query = self.query()?;
            self.leave(QUERY_LEVELS, outer)?;
            self.expect(")")?;
            self.before.push(Statement::View { name, columns, declared: None, query });
            if !self.eat(",") {
                return Ok(());
            }
        }
    }

    /// `tumble(source, size)` and `hop(source, slide, size)`, also in `table(…)`.
    pub(super) fn window_function(&mut self) -> Parsed<Option<TableReference>> {
        let is_wrapped = self.at_word("table") && self.sign_ahead(1, "(");
        let first = if is_wrapped { 2 } else { 0 };
        let is_hop = self.word_ahead(first, "hop");
        if !(is_hop || self.word_ahead(first, "tumble")) || !self.sign_ahead(first + 1, "(") {
            return Ok(None);
        }
        let outer = self.enter(QUERY_LEVELS)?;
        if is_wrapped {
            self.advance();
            self.advance();
        }
        let function = self.advance();
        self.expect("(")?;
        let is_table = self.at_word("table") && !self.sign_ahead(1, ",");
        if is_table {
            self.advance();
        }
        let mut source = if self.eat("(") {
            let query = Box::new(self.query()?);
            self.expect(")")?;
            TableReference::Subquery { query, window: None, alias: None }
        } else {
            let name = self.name("the name of a stream or view")?;
            TableReference::Named { name, window: None, alias: None }
        };
        self.expect(",")?;
        self.refuse_time_column(function)?;
        // The length of `tumble` is its slide, too.
        let slide_ns = self.length()?;
        let mut length_ns = slide_ns;
        if is_hop {
            self.expect(",")?;
            length_ns = self.length()?;
        } else if self.at(",") {
            let help = "windows begin at whole multiples of their length";
            return Err(self.expected("`)`", &[]).help(help));
        }
        self.expect(")")?;
        let span = self.span_from(function.span.start);
        if is_wrapped {
            self.expect(")")?;
        }
        self.leave(QUERY_LEVELS, outer)?;
        let kind = WindowKind::Range { length_ns, slide_ns: Some(slide_ns) };
        let made = Window { kind, span };
        if let TableReference::Named { window, alias, .. }
        | TableReference::Subquery { window, alias, .. } = &mut source
        {
            *window = Some(made);
            *alias = self.table_alias()?;
        }
        Ok(Some(source))
    }

    /// Other systems name the column with the time here.
    fn refuse_time_column(&self, function: Token) -> Parsed<()> {
        let token = self.token();
        let is_column = matches!(token.kind, TokenKind::Word | TokenKind::Quoted);
        if !is_column || self.at_interval() {
            return Ok(());
        }
        let message = "a window is by the time of the stream itself, not by a column";
        let function = self.written(function).to_ascii_lowercase();
        let times = if function == "hop" { "SLIDE, SIZE" } else { "SIZE" };
        let help = format!("leave the column out: `{function}(IOstream, {times})`");
        Err(Diagnostic::new(token.span, message).help(help))
    }

    /// Whether `interval '…'` begins here.
    pub(super) fn at_interval(&self) -> bool {
        self.at_word("interval") && self.ahead(1).kind == TokenKind::Text
    }

    /// `interval '5' second` or `interval '5 seconds'`: the number, the text of the unit if it is
    /// in the quotes, and the span of both words.
    pub(super) fn interval(&mut self) -> Parsed<(String, Option<String>, Span)> {
        let start = self.advance().span.start;
        let token = self.advance();
        let text = unquote(self.written(token));
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = (&text[..end], text[end..].trim());
        let is_number = number.parse::<f64>().is_ok();
        if !is_number || unit.contains(char::is_whitespace) {
            let help = "write a number and a unit: `interval '5' seconds`";
            return Err(Diagnostic::new(token.span, "this is not a length of time").help(help));
        }
        let unit = (!unit.is_empty()).then(|| unit.to_owned());
        Ok((number.to_owned(), unit, self.span_from(start)))
    }

    /// `interval '5' second` in an expression: times are integers in nanoseconds.
    pub(super) fn interval_constant(&mut self) -> Parsed<Expression> {
        let start = self.token().span.start;
        let length_ns = self.length()?;
        let value = Value::Integer(i64::try_from(length_ns).unwrap_or(i64::MAX));
        Ok(Expression { kind: ExpressionKind::Literal(value), span: self.span_from(start) })
    }

    /// `filter (where condition)` after the call of an aggregate: the aggregate of the values for
    /// which the condition is true. Null is not aggregated.
    pub(super) fn filtered(&mut self, call: Expression) -> Parsed<Expression> {
        let start = call.span.start;
        let filter = self.token().span;
        let ExpressionKind::Call { name, distinct, star, mut arguments } = call.kind else {
            return Ok(call);
        };
        if !crate::planner::is_aggregate(&name.text) {
            let message = "`filter` follows an aggregate only";
            let help = "write `case when … then … end`";
            return Err(Diagnostic::new(filter, message).help(help));
        }
        self.advance();
        self.expect("(")?;
        self.expect_word("where")?;
        let condition = self.expression()?;
        self.expect(")")?;
        self.grow()?;
        let span = self.span_from(start);
        let one = Expression { kind: ExpressionKind::Literal(Value::Integer(1)), span };
        let value = if star || arguments.is_empty() { one } else { arguments.remove(0) };
        let branches = vec![(condition, value)];
        let kind = ExpressionKind::Case { operand: None, branches, otherwise: None };
        arguments.insert(0, Expression { kind, span });
        let kind = ExpressionKind::Call { name, distinct, star: false, arguments };
        Ok(Expression { kind, span })
    }

    /// `x::type`, any number of times.
    pub(super) fn casts(&mut self, mut operand: Expression) -> Parsed<Expression> {
        let start = operand.span.start;
        while self.at(":")
            && self.sign_ahead(1, ":")
            && self.ahead(1).span.start == self.token().span.end
        {
            self.advance();
            self.advance();
            let kind = self.kind()?;
            self.grow()?;
            let kind = ExpressionKind::Cast(Box::new(operand), kind);
            operand = Expression { kind, span: self.span_from(start) };
        }
        Ok(operand)
    }
}
