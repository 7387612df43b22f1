//! A text as a script.
//!
//! The parser goes down from statements to expressions. It stops at the first mistake. How deep
//! parts nest and how high the tree grows is bounded, so that neither it nor who walks the tree
//! runs out of stack.

mod expression;
mod query;
mod statement;
mod window;
mod words;

use crate::ast::{Identifier, Script};
use crate::lexer::{Token, TokenKind, tokenize, unquote};
use crate::span::{Diagnostic, Span};

/// How deep parts may nest.
const DEEPEST: u32 = 128;

/// How many levels an expression takes.
const EXPRESSION: u32 = 1;

/// How many levels a query takes: it needs about as much more of the stack.
const QUERY: u32 = 4;

/// How high the tree may grow. A chain `a or b or …` is as high as it is long.
const HIGHEST: u32 = 256;

/// How a text is to be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParseOptions {
    /// Whether windows are in the unit of the monitoring paper, whose STREAM counted
    /// microseconds where it said seconds.
    pub stream_compat: bool,
    /// The unit in which the input counts time, in nanoseconds; 0 is 1. `[now]` lasts so long: up to
    /// the next instant that there can be. The monitoring paper's is a microsecond.
    pub time_unit_ns: u64,
}

/// Reads a script.
///
/// # Errors
///
/// The first mistake and its place.
pub fn parse(text: &str, options: &ParseOptions) -> Result<Script, Diagnostic> {
    let lexed = tokenize(text);
    let mut parser = Parser {
        text,
        tokens: lexed.tokens,
        failure: lexed.failure,
        position: 0,
        depth: 0,
        height: 0,
        bare_alias: None,
        options: *options,
    };
    parser.script()
}

/// What is parsed, or the mistake.
type Parsed<T> = Result<T, Diagnostic>;

struct Parser<'a> {
    text: &'a str,
    /// The last is the end.
    tokens: Vec<Token>,
    /// What is wrong where the tokens end.
    failure: Option<Diagnostic>,
    /// The current token.
    position: usize,
    /// How many parts are open.
    depth: u32,
    /// The height of the highest tree within the innermost open part.
    height: u32,
    /// The last alias that was written without `as`, and the words that it may have been meant
    /// to be.
    bare_alias: Option<(usize, &'static [&'static str])>,
    options: ParseOptions,
}

impl<'a> Parser<'a> {
    /// The token so many ahead.
    fn ahead(&self, count: usize) -> Token {
        self.tokens[(self.position + count).min(self.tokens.len() - 1)]
    }

    /// The current token.
    fn token(&self) -> Token {
        self.ahead(0)
    }

    /// A token as it is written.
    fn written(&self, token: Token) -> &'a str {
        &self.text[token.span.range()]
    }

    /// Takes the current token; the end stays.
    fn advance(&mut self) -> Token {
        let token = self.token();
        if token.kind != TokenKind::End {
            self.position += 1;
        }
        token
    }

    /// Where the last token ended.
    fn behind(&self) -> u32 {
        self.position.checked_sub(1).map_or(0, |last| self.tokens[last].span.end)
    }

    /// From a place to where the last token ended.
    fn span_from(&self, start: u32) -> Span {
        Span { start, end: self.behind().max(start) }
    }

    /// Whether the token so many ahead is a sign.
    fn sign_ahead(&self, count: usize, sign: &str) -> bool {
        matches!(self.ahead(count).kind, TokenKind::Sign(other) if other == sign)
    }

    /// Whether the current token is a sign.
    fn at(&self, sign: &str) -> bool {
        self.sign_ahead(0, sign)
    }

    /// Takes a sign, where it is there.
    fn eat(&mut self, sign: &str) -> bool {
        let there = self.at(sign);
        if there {
            self.advance();
        }
        there
    }

    /// Takes a sign that must be there.
    fn expect(&mut self, sign: &str) -> Parsed<Token> {
        if self.at(sign) { Ok(self.advance()) } else { Err(self.expected(&quoted(sign), &[])) }
    }

    /// Whether the token so many ahead is a word.
    fn word_ahead(&self, count: usize, word: &str) -> bool {
        let token = self.ahead(count);
        token.kind == TokenKind::Word && self.written(token).eq_ignore_ascii_case(word)
    }

    /// Whether the current token is a word.
    fn at_word(&self, word: &str) -> bool {
        self.word_ahead(0, word)
    }

    /// Whether the current token is one of some words.
    fn at_any(&self, words: &[&str]) -> bool {
        words.iter().any(|word| self.at_word(word))
    }

    /// Takes a word, where it is there.
    fn eat_word(&mut self, word: &str) -> bool {
        let there = self.at_word(word);
        if there {
            self.advance();
        }
        there
    }

    /// Takes a word that must be there.
    fn expect_word(&mut self, word: &'static str) -> Parsed<Token> {
        if self.at_word(word) {
            Ok(self.advance())
        } else {
            Err(self.expected(&quoted(word), &[word]))
        }
    }

    /// What this language has instead of the word of another system that is here, if it is one.
    fn foreign(&self, find: fn(&str) -> Option<&'static str>) -> Option<&'static str> {
        let token = self.token();
        if token.kind == TokenKind::Word { find(self.written(token)) } else { None }
    }

    /// Takes a name that must be there.
    fn name(&mut self, what: &str) -> Parsed<Identifier> {
        if self.at_reserved() { Err(self.reserved(what)) } else { self.any_name(what) }
    }

    /// Whether a word is here that is a name in backticks only.
    fn at_reserved(&self) -> bool {
        let token = self.token();
        token.kind == TokenKind::Word && words::is_reserved(self.written(token))
    }

    /// The mistake that a word of the language stands where a name is expected.
    fn reserved(&self, what: &str) -> Diagnostic {
        let word = self.written(self.token());
        let help = format!("`{word}` is a word of the language: as a name, put it in backticks");
        self.expected(what, &[]).help(help)
    }

    /// Takes a name that must be there, and stands where no word of the language can.
    fn any_name(&mut self, what: &str) -> Parsed<Identifier> {
        let token = self.token();
        let text = match token.kind {
            TokenKind::Word => self.written(token).to_owned(),
            TokenKind::Quoted => unquote(self.written(token)),
            _ => return Err(self.expected(what, &[])),
        };
        self.advance();
        Ok(Identifier { text, span: token.span })
    }

    /// `as name`, or just a name where it can be nothing else. `meant` are words that it may
    /// have been meant to be.
    fn alias(&mut self, meant: &'static [&'static str]) -> Parsed<Option<Identifier>> {
        if self.eat_word("as") {
            return self.name("a name behind `as`").map(Some);
        }
        let token = self.token();
        let is_name = match token.kind {
            TokenKind::Quoted => true,
            TokenKind::Word => {
                !words::is_no_bare_alias(self.written(token)) && !self.sign_ahead(1, ":")
            }
            _ => false,
        };
        if !is_name {
            return Ok(None);
        }
        if token.kind == TokenKind::Word {
            self.bare_alias = Some((self.position, meant));
        }
        self.any_name("a name").map(Some)
    }

    /// Opens a part that takes so many levels. What it returns is given to
    /// [`leave`](Self::leave).
    fn enter(&mut self, levels: u32) -> Parsed<u32> {
        if self.depth + levels > DEEPEST {
            let message = "this is nested too deeply";
            let queries = DEEPEST / QUERY;
            let help = format!("at most {DEEPEST} levels are read, or {queries} of queries");
            return Err(Diagnostic::new(self.token().span, message).help(help));
        }
        self.depth += levels;
        Ok(std::mem::take(&mut self.height))
    }

    /// Closes a part.
    fn leave(&mut self, levels: u32, outer: u32) -> Parsed<()> {
        self.grow()?;
        self.depth -= levels;
        self.height = self.height.max(outer);
        Ok(())
    }

    /// What has been parsed goes below something new.
    fn grow(&mut self) -> Parsed<()> {
        self.height += 1;
        if self.height <= HIGHEST {
            return Ok(());
        }
        let message = "too many operators in a row";
        let help = format!("at most about {HIGHEST} are read; `in (…)` takes any number of values");
        Err(Diagnostic::new(self.token().span, message).help(help))
    }

    /// The mistake that something else was expected here. `words` are the words that would have
    /// done.
    fn expected(&self, what: &str, words: &[&str]) -> Diagnostic {
        let token = self.token();
        if token.kind == TokenKind::End {
            if let Some(failure) = &self.failure {
                return failure.clone();
            }
        }
        if let Some((position, meant)) = self.bare_alias {
            let alias = self.tokens[position];
            let near = words::nearest(self.written(alias), meant);
            if let (true, Some(word)) = (position + 1 == self.position, near) {
                let message = format!("expected `{word}`, found {}", self.describe(alias));
                let help = format!("did you mean `{word}`?");
                return Diagnostic::new(alias.span, message).help(help);
            }
        }
        let span = match token.kind {
            TokenKind::End => Span { start: self.behind(), end: self.behind() },
            _ => token.span,
        };
        let message = format!("expected {what}, found {}", self.describe(token));
        let mistake = Diagnostic::new(span, message);
        match words::nearest(self.written(token), words) {
            Some(word) if token.kind == TokenKind::Word => {
                mistake.help(format!("did you mean `{word}`?"))
            }
            _ => mistake,
        }
    }

    /// A token in words.
    fn describe(&self, token: Token) -> String {
        let written = self.written(token);
        let mut short: String = written
            .chars()
            .take(40)
            .map(|character| if character.is_control() { ' ' } else { character })
            .collect();
        if written.chars().nth(40).is_some() {
            short.push('…');
        }
        match token.kind {
            TokenKind::End => "the end of the text".to_owned(),
            TokenKind::Text => format!("the text {short}"),
            TokenKind::Quoted => format!("the name {short}"),
            TokenKind::Integer | TokenKind::Float => format!("the number {short}"),
            TokenKind::Word | TokenKind::Parameter | TokenKind::Sign(_) => quoted(&short),
        }
    }
}

/// In backticks.
fn quoted(text: &str) -> String {
    format!("`{text}`")
}
