//! Queries and their sources.

use super::{LEVELS_MAX, Parsed, Parser, QUERY_LEVELS};
use crate::ast::{
    Expression, Identifier, JoinKind, OrderItem, Query, Select, SelectItem, SetExpression,
    SetOperation, TableReference, ToStream,
};
use crate::foreign;
use crate::lexer::TokenKind;
use crate::span::Diagnostic;

/// Keywords that may follow the sources of a query.
const CLAUSES: [&str; 15] = [
    "where",
    "group",
    "having",
    "order",
    "limit",
    "union",
    "except",
    "minus",
    "intersect",
    "join",
    "inner",
    "left",
    "right",
    "full",
    "cross",
];

/// Keywords that may follow an expression in a query.
pub(super) const CONTINUATIONS: [&str; 12] = [
    "and",
    "like",
    "between",
    "where",
    "group",
    "having",
    "order",
    "limit",
    "union",
    "except",
    "intersect",
    "desc",
];

/// Operators that make a stream from a relation.
const TO_STREAM: [(&str, ToStream); 3] = [
    ("istream", ToStream::Insertions),
    ("dstream", ToStream::Deletions),
    ("rstream", ToStream::Whole),
];

impl Parser<'_> {
    /// Whether a query without brackets around it begins here.
    pub(super) fn at_query(&self) -> bool {
        self.query_ahead(0)
    }

    fn query_ahead(&self, count: usize) -> bool {
        let is_with = self.word_ahead(count, "with")
            && self.ahead(count + 1).kind == TokenKind::Word
            && (self.word_ahead(count + 2, "as") || self.sign_ahead(count + 2, "("));
        is_with
            || self.word_ahead(count, "select")
            || TO_STREAM.iter().any(|(word, _)| {
                self.word_ahead(count, word)
                    && (self.sign_ahead(count + 1, "(") || self.word_ahead(count + 1, "select"))
            })
    }

    /// A query.
    pub(super) fn query(&mut self) -> Parsed<Query> {
        if self.at_with() {
            self.with()?;
        }
        let outer = self.enter(QUERY_LEVELS)?;
        let start = self.token().span.start;
        let body = self.set_expression()?;
        let order_by = if self.eat_word("order") { self.order_by()? } else { Vec::new() };
        let limit = if self.eat_word("limit") { Some(self.whole_number("a limit")?) } else { None };
        self.leave(QUERY_LEVELS, outer)?;
        let span = self.span_from(start);
        Ok(match body {
            // Only brackets around a query.
            SetExpression::Query(query) if order_by.is_empty() && limit.is_none() => {
                Query { span, ..*query }
            }
            body => Query { body, order_by, limit, to_stream: None, span },
        })
    }

    /// The rest after `order`.
    fn order_by(&mut self) -> Parsed<Vec<OrderItem>> {
        self.expect_word("by")?;
        let mut items = Vec::new();
        loop {
            let expression = self.expression()?;
            let descending = self.eat_word("desc");
            if !descending {
                self.eat_word("asc");
            }
            items.push(OrderItem { expression, descending });
            if !self.eat(",") {
                return Ok(items);
            }
        }
    }

    /// Selections with `union` and `except` between them.
    fn set_expression(&mut self) -> Parsed<SetExpression> {
        let start = self.token().span.start;
        let mut left = self.intersection()?;
        loop {
            let operation = if self.eat_word("union") {
                SetOperation::Union
            } else if self.eat_word("except") || self.eat_word("minus") {
                SetOperation::Except
            } else {
                return Ok(left);
            };
            let all = self.all();
            let right = self.intersection()?;
            left = self.combined(operation, all, left, right, start)?;
        }
    }

    /// Selections with `intersect` between them.
    fn intersection(&mut self) -> Parsed<SetExpression> {
        let start = self.token().span.start;
        let mut left = self.set_operand()?;
        while self.eat_word("intersect") {
            let all = self.all();
            let right = self.set_operand()?;
            left = self.combined(SetOperation::Intersect, all, left, right, start)?;
        }
        Ok(left)
    }

    fn combined(
        &mut self,
        operation: SetOperation,
        all: bool,
        left: SetExpression,
        right: SetExpression,
        start: u32,
    ) -> Parsed<SetExpression> {
        self.grow()?;
        let span = self.span_from(start);
        let (left, right) = (Box::new(left), Box::new(right));
        Ok(SetExpression::Operation { operation, all, left, right, span })
    }

    /// `all`, or `distinct`, which is the default. Returns whether it is `all`.
    fn all(&mut self) -> bool {
        let all = self.eat_word("all");
        if !all {
            self.eat_word("distinct");
        }
        all
    }

    /// A selection, a query in brackets, or a query with an operator to a stream.
    fn set_operand(&mut self) -> Parsed<SetExpression> {
        if self.at_word("select") {
            return Ok(SetExpression::Select(Box::new(self.select()?)));
        }
        let start = self.token().span.start;
        if self.eat("(") {
            let query = self.query()?;
            self.expect(")")?;
            let span = self.span_from(start);
            return Ok(SetExpression::Query(Box::new(Query { span, ..query })));
        }
        let made = TO_STREAM.into_iter().find(|(word, _)| self.at_word(word));
        let Some((word, to_stream)) = made else {
            let words = ["select", "Istream", "Dstream", "Rstream"];
            return Err(self.expected("a query", &words));
        };
        let written = self.advance();
        if self.at_word("select") {
            let written = self.written(written);
            let help = format!("put the query in brackets: `{written}(select …)`");
            return Err(self.expected("`(`", &[]).help(help));
        }
        self.expect("(")?;
        if !(self.at_query() || self.at("(")) {
            return Err(self.expected(&format!("a query in `{word}(…)`"), &["select"]));
        }
        let query = self.query()?;
        self.expect(")")?;
        let span = self.span_from(start);
        if query.to_stream.is_none() {
            let query = Query { to_stream: Some(to_stream), span, ..query };
            return Ok(SetExpression::Query(Box::new(query)));
        }
        // An operator to a stream over another one. The planner decides whether this is valid.
        self.grow()?;
        let body = SetExpression::Query(Box::new(query));
        let to_stream = Some(to_stream);
        let query = Query { body, order_by: Vec::new(), limit: None, to_stream, span };
        Ok(SetExpression::Query(Box::new(query)))
    }

    fn select(&mut self) -> Parsed<Select> {
        let start = self.expect_word("select")?.span.start;
        let distinct = self.eat_word("distinct");
        let items = self.select_items()?;
        if !self.eat_word("from") {
            return Err(self.expected("`,` or `from`", &["from", "and", "like", "between"]));
        }
        let mut from = vec![self.joined()?];
        while self.eat(",") {
            from.push(self.joined()?);
        }
        let selection = if self.eat_word("where") { Some(self.expression()?) } else { None };
        let group_by = if self.eat_word("group") {
            self.expect_word("by")?;
            self.expressions()?
        } else {
            Vec::new()
        };
        let having = if self.eat_word("having") { Some(self.expression()?) } else { None };
        let span = self.span_from(start);
        Ok(Select { distinct, items, from, selection, group_by, having, span })
    }

    /// Expressions with commas between them.
    pub(super) fn expressions(&mut self) -> Parsed<Vec<Expression>> {
        let mut expressions = vec![self.expression()?];
        while self.eat(",") {
            expressions.push(self.expression()?);
        }
        Ok(expressions)
    }

    fn select_items(&mut self) -> Parsed<Vec<SelectItem>> {
        let mut items = Vec::new();
        loop {
            if !items.is_empty() && self.at_word("from") {
                return Err(self.expected("an expression", &[]).help("leave out the last `,`"));
            }
            items.push(self.select_item()?);
            if !self.eat(",") {
                return Ok(items);
            }
        }
    }

    fn select_item(&mut self) -> Parsed<SelectItem> {
        if self.at("*") {
            return Ok(SelectItem::All(self.advance().span));
        }
        let is_name = matches!(self.token().kind, TokenKind::Word | TokenKind::Quoted);
        if is_name && self.sign_ahead(1, ".") && self.sign_ahead(2, "*") {
            let name = self.name("a name")?;
            self.advance();
            self.advance();
            return Ok(SelectItem::AllOf(name));
        }
        let expression = self.expression()?;
        let alias = self.alias(&["from"])?;
        Ok(SelectItem::Expression { expression, alias })
    }

    /// One part of `from`, with its joins.
    fn joined(&mut self) -> Parsed<TableReference> {
        let start = self.token().span.start;
        let mut left = self.table()?;
        while let Some((kind, with_condition)) = self.join()? {
            let right = self.table()?;
            let on = if with_condition { Some(self.join_condition()?) } else { None };
            self.grow()?;
            let span = self.span_from(start);
            let (below, right) = (Box::new(left), Box::new(right));
            left = TableReference::Join { left: below, right, kind, on, span };
        }
        Ok(left)
    }

    /// `on …`.
    fn join_condition(&mut self) -> Parsed<Expression> {
        if self.eat_word("on") {
            return self.expression();
        }
        let mistake = self.expected("`on`", &["on"]);
        Err(if self.at_word("using") {
            mistake.help("write the condition out: `on a.x = b.x`")
        } else if mistake.help.is_none() && self.token().kind != TokenKind::End {
            mistake.help("a join has a condition, unless it is a `cross join`")
        } else {
            mistake
        })
    }

    /// `join` with the words before it. Returns its kind, and whether a condition follows.
    fn join(&mut self) -> Parsed<Option<(JoinKind, bool)>> {
        let kind = if self.eat_word("join") {
            return Ok(Some((JoinKind::Inner, true)));
        } else if self.eat_word("cross") {
            self.expect_word("join")?;
            return Ok(Some((JoinKind::Inner, false)));
        } else if self.eat_word("inner") {
            self.expect_word("join")?;
            return Ok(Some((JoinKind::Inner, true)));
        } else if self.eat_word("left") {
            JoinKind::Left
        } else if self.eat_word("right") {
            JoinKind::Right
        } else if self.eat_word("full") {
            JoinKind::Full
        } else {
            return Ok(None);
        };
        self.eat_word("outer");
        self.expect_word("join")?;
        Ok(Some((kind, true)))
    }

    /// `name [window] as alias`, `(query) [window] as alias`, or joins in brackets.
    fn table(&mut self) -> Parsed<TableReference> {
        if self.at("(") {
            return self.table_in_brackets();
        }
        if self.at_query() {
            let help = "put the query in brackets: `from (select …) as name`";
            return Err(self.expected("the name of a stream or view", &[]).help(help));
        }
        if let Some(made) = self.window_function()? {
            return Ok(made);
        }
        if self.sign_ahead(1, "(") {
            let is_table = self.at_word("table") && self.ahead(2).kind == TokenKind::Word;
            let word = if is_table { self.ahead(2) } else { self.token() };
            if let Some(help) = foreign::window_function(self.written(word)) {
                return Err(self.expected("the name of a stream or view", &[]).help(help));
            }
        }
        let name = self.name("the name of a stream or view")?;
        let window = self.window()?;
        let alias = self.table_alias()?;
        Ok(TableReference::Named { name, window, alias })
    }

    fn table_in_brackets(&mut self) -> Parsed<TableReference> {
        let mut inner = 1;
        while self.sign_ahead(inner, "(") && inner <= LEVELS_MAX as usize {
            inner += 1;
        }
        if !self.query_ahead(inner) {
            let outer = self.enter(QUERY_LEVELS)?;
            self.advance();
            let joined = self.joined()?;
            self.expect(")")?;
            self.leave(QUERY_LEVELS, outer)?;
            return Ok(joined);
        }
        self.advance();
        let query = Box::new(self.query()?);
        self.expect(")")?;
        let window = self.window()?;
        let alias = self.table_alias()?;
        Ok(TableReference::Subquery { query, window, alias })
    }

    /// An alias. A window without brackets is reported as a mistake, because it looks like an
    /// alias.
    pub(super) fn table_alias(&mut self) -> Parsed<Option<Identifier>> {
        if let Some(mistake) = self.window_without_brackets() {
            return Err(mistake);
        }
        let alias = self.alias(&CLAUSES)?;
        if self.at("[") && alias.is_some() {
            let help = "a window directly follows the stream's name, before `as`";
            return Err(
                Diagnostic::new(self.token().span, "the window is in the wrong place").help(help)
            );
        }
        Ok(alias)
    }
}
