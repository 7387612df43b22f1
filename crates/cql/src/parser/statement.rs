//! Statements: queries, views and input streams.

use super::{Parsed, Parser};
use crate::ast::{ColumnDeclaration, Declared, Identifier, Script, Statement};
use crate::foreign;
use crate::lexer::TokenKind;
use crate::span::{Diagnostic, Span};
use crate::value::Type;

/// The first words of statements.
const BEGINNINGS: [&str; 9] =
    ["select", "query", "vquery", "vtable", "table", "create", "Istream", "Dstream", "Rstream"];

/// The words before a colon.
const SECTIONS: [&str; 4] = ["query", "vquery", "vtable", "table"];

/// Names of types.
const TYPES: [(&str, Type); 13] = [
    ("integer", Type::Integer),
    ("int", Type::Integer),
    ("bigint", Type::Integer),
    ("byte", Type::Integer),
    ("float", Type::Float),
    ("double", Type::Float),
    ("real", Type::Float),
    ("char", Type::Text),
    ("varchar", Type::Text),
    ("text", Type::Text),
    ("string", Type::Text),
    ("boolean", Type::Boolean),
    ("bool", Type::Boolean),
];

impl Parser<'_> {
    /// The whole text.
    pub(super) fn script(&mut self) -> Parsed<Script> {
        let mut script = Script::default();
        loop {
            while self.eat(";") {}
            if self.token().kind == TokenKind::End {
                return match self.failure.take() {
                    Some(failure) => Err(failure),
                    None => Ok(script),
                };
            }
            let statement = self.statement()?;
            script.statements.append(&mut self.before);
            script.statements.push(statement);
        }
    }

    fn statement(&mut self) -> Parsed<Statement> {
        if self.token().kind == TokenKind::Word && self.sign_ahead(1, ":") {
            return self.section();
        }
        if self.at_word("create") {
            return self.create();
        }
        if self.at_query() || self.at_with() || self.at("(") {
            let query = self.query()?;
            self.end_of_statement()?;
            return Ok(Statement::Query(query));
        }
        let mistake = self.expected("a statement", &BEGINNINGS);
        if let Some(help) = self.foreign(foreign::statement) {
            return Err(mistake.help(help));
        }
        let section = SECTIONS.into_iter().find(|section| self.at_word(section));
        Err(if let Some(section) = section {
            mistake.help(format!("write `{section} : …`"))
        } else if self.at_word("register") {
            mistake.help("write `table : register stream …`")
        } else {
            mistake
        })
    }

    /// `;`, or the end of the text.
    fn end_of_statement(&mut self) -> Parsed<()> {
        let ended = self.token().kind == TokenKind::End && self.failure.is_none();
        if ended || self.eat(";") { Ok(()) } else { Err(self.expected_end()) }
    }

    /// The diagnostic for an unexpected token after a query.
    fn expected_end(&self) -> Diagnostic {
        if self.at("[") {
            let help = "a window directly follows the stream's name, before `as`";
            return self.expected("`;`", &[]).help(help);
        }
        // Such a word was taken as an alias without `as` of the part before it.
        let alias = self.bare_alias.filter(|(position, _)| position + 1 == self.position);
        let alias = alias
            .and_then(|(position, _)| foreign::continuation(self.written(self.tokens[position])));
        if let Some(help) = self.foreign(foreign::continuation).or(alias) {
            return self.expected("`;`", &[]).help(help);
        }
        self.expected("`;`", &super::query::CONTINUATIONS)
    }

    /// `query :`, `vquery :`, `table :`.
    fn section(&mut self) -> Parsed<Statement> {
        let word = self.token();
        if self.eat_word("query") {
            self.expect(":")?;
            let query = self.query()?;
            self.end_of_statement()?;
            return Ok(Statement::Query(query));
        }
        if self.eat_word("vquery") {
            return self.view_section(word.span);
        }
        if self.eat_word("table") {
            self.expect(":")?;
            self.expect_word("register")?;
            let place = self.token().span;
            if self.declared()? == Declared::Relation {
                let message = "an input cannot be a relation, only a stream";
                let help = "register a stream: a window makes a relation from it";
                return Err(Diagnostic::new(place, message).help(help));
            }
            return self.stream();
        }
        if self.at_word("vtable") {
            let message = "this `vtable` has no `vquery` before it";
            let help = "a view is `vquery : …; vtable : register stream Name(column type, …);`";
            return Err(Diagnostic::new(word.span, message).help(help));
        }
        Err(self.expected("`query`, `vquery`, `vtable` or `table`", &SECTIONS))
    }

    /// `vquery : query; vtable : register stream Name(column type, …);`.
    fn view_section(&mut self, place: Span) -> Parsed<Statement> {
        self.expect(":")?;
        let query = self.query()?;
        let ended = self.eat(";");
        if !self.at_word("vtable") {
            let continues = !ended && self.token().kind != TokenKind::End;
            if continues || self.failure.is_some() && self.token().kind == TokenKind::End {
                return Err(self.expected_end());
            }
            let message = "this `vquery` has no `vtable` after it";
            let help = "name it: `vtable : register stream Name(column type, …);`, \
                        or write `query :` if no other query uses it";
            return Err(Diagnostic::new(place, message).help(help));
        }
        self.advance();
        self.expect(":")?;
        self.expect_word("register")?;
        let declared = Some(self.declared()?);
        let name = self.name("the name of the view")?;
        let columns = self.columns(false)?;
        self.end_of_statement()?;
        Ok(Statement::View { name, columns, declared, query })
    }

    /// `stream` or `relation`.
    fn declared(&mut self) -> Parsed<Declared> {
        if self.eat_word("stream") {
            Ok(Declared::Stream)
        } else if self.eat_word("relation") {
            Ok(Declared::Relation)
        } else {
            Err(self.expected("`stream` or `relation`", &["stream", "relation"]))
        }
    }

    /// `create view …`, `create stream …`.
    fn create(&mut self) -> Parsed<Statement> {
        self.advance();
        if self.eat_word("stream") {
            return self.stream();
        }
        if !self.eat_word("view") {
            let mistake = self.expected("`view` or `stream`", &["view", "stream"]);
            return Err(match self.foreign(foreign::created) {
                Some(help) => mistake.help(help),
                None => mistake,
            });
        }
        let name = self.name("the name of the view")?;
        let columns = if self.at("(") { self.columns(false)? } else { Vec::new() };
        self.expect_word("as")?;
        let query = self.query()?;
        self.end_of_statement()?;
        Ok(Statement::View { name, columns, declared: None, query })
    }

    /// `Name(column type, …);`.
    fn stream(&mut self) -> Parsed<Statement> {
        let name: Identifier = self.name("the name of the stream")?;
        let columns = self.columns(true)?;
        self.end_of_statement()?;
        Ok(Statement::Stream { name, columns })
    }

    /// `(column type, …)`; the types are optional unless `typed` is set.
    pub(super) fn columns(&mut self, typed: bool) -> Parsed<Vec<ColumnDeclaration>> {
        self.expect("(")?;
        let mut columns = Vec::new();
        loop {
            let name = self.any_name("the name of a column")?;
            let untyped = !typed && (self.at(",") || self.at(")"));
            let kind = if untyped { None } else { Some(self.kind()?) };
            columns.push(ColumnDeclaration { name, kind });
            if self.eat(")") {
                return Ok(columns);
            }
            if !self.eat(",") {
                return Err(self.expected("`,` or `)`", &[]));
            }
        }
    }

    /// A type.
    pub(super) fn kind(&mut self) -> Parsed<Type> {
        let found = TYPES.into_iter().find(|(word, _)| self.at_word(word));
        let Some((word, kind)) = found else {
            let mistake = self.expected("a type", &TYPES.map(|(word, _)| word));
            return Err(if mistake.help.is_none() && self.failure.is_none() {
                mistake.help("the types are `integer`, `float`, `text` and `boolean`")
            } else {
                mistake
            });
        };
        self.advance();
        if word == "double" {
            self.eat_word("precision");
        }
        if matches!(word, "char" | "varchar") && self.eat("(") {
            self.whole_number("a length")?;
            self.expect(")")?;
        }
        Ok(kind)
    }

    /// A number without a fraction.
    pub(super) fn whole_number(&mut self, what: &str) -> Parsed<u64> {
        let token = self.token();
        if token.kind != TokenKind::Integer {
            return Err(self.expected(&format!("{what}, a whole number"), &[]));
        }
        self.advance();
        let too_large = |_| Diagnostic::new(token.span, "this number is too large");
        self.written(token).parse().map_err(too_large)
    }
}
