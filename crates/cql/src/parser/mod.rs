//! The parser: from a text to a script.
//!
//! A recursive-descent parser. It stops at the first mistake. The depth of nested parts and the
//! height of the tree are bounded, so that neither the parser nor code that walks the tree runs out
//! of stack.

mod expression;
mod familiar;
mod query;
mod statement;
mod window;
mod words;

use crate::ast::{Identifier, Script, Statement};
use crate::lexer::{Token, TokenKind, tokenize, unquote};
use crate::span::{Diagnostic, Span};

/// The most levels of nested parts.
const LEVELS_MAX: u32 = 128;

/// The levels of an expression.
const EXPRESSION_LEVELS: u32 = 1;

/// The levels of a query: it needs about four times as much stack as an expression.
const QUERY_LEVELS: u32 = 4;

/// The greatest height of the tree. A chain `a or b or …` is as high as it is long.
const HEIGHT_MAX: u32 = 256;

/// Options of the parser.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParseOptions {
    /// Whether windows use the unit of the monitoring paper, in whose STREAM a `second` is a
    /// microsecond.
    pub stream_compat: bool,
    /// The unit of the input's times, in nanoseconds; 0 means 1. It is the length of `[now]`, which
    /// ends at the next possible instant. The monitoring paper's unit is a microsecond.
    pub time_unit_ns: u64,
}

/// Parses a script.
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
        before: Vec::new(),
        options: *options,
    };
    parser.script()
}

/// The parsed part, or the mistake.
type Parsed<T> = Result<T, Diagnostic>;

struct Parser<'a> {
    text: &'a str,
    /// The tokens; the last is [`TokenKind::End`].
    tokens: Vec<Token>,
    /// The lexer's error at the end of the tokens.
    failure: Option<Diagnostic>,
    /// The index of the current token.
    position: usize,
    /// The levels of the open parts.
    depth: u32,
    /// The height of the highest tree within the innermost open part.
    height: u32,
    /// The index of the last alias without `as`, and the keywords of which it may be a misspelling.
    bare_alias: Option<(usize, &'static [&'static str])>,
    /// The views of `with`, which belong before the current statement.
    before: Vec<Statement>,
    options: ParseOptions,
}

impl<'a> Parser<'a> {
    /// The token `count` places after the current one.
    fn ahead(&self, count: usize) -> Token {
        self.tokens[(self.position + count).min(self.tokens.len() - 1)]
    }

    /// The current token.
    fn token(&self) -> Token {
        self.ahead(0)
    }

    /// The text of a token.
    fn written(&self, token: Token) -> &'a str {
        &self.text[token.span.range()]
    }

    /// Takes the current token; the end is never taken.
    fn advance(&mut self) -> Token {
        let token = self.token();
        if token.kind != TokenKind::End {
            self.position += 1;
        }
        token
    }

    /// The end of the last taken token, in bytes.
    fn last_end(&self) -> u32 {
        self.position.checked_sub(1).map_or(0, |last| self.tokens[last].span.end)
    }

    /// The span from a place to the end of the last taken token.
    fn span_from(&self, start: u32) -> Span {
        Span { start, end: self.last_end().max(start) }
    }

    /// Whether the token `count` places ahead is `sign`.
    fn sign_ahead(&self, count: usize, sign: &str) -> bool {
        matches!(self.ahead(count).kind, TokenKind::Sign(other) if other == sign)
    }

    /// Whether the current token is `sign`.
    fn at(&self, sign: &str) -> bool {
        self.sign_ahead(0, sign)
    }

    /// Takes a sign if it is the current token.
    fn eat(&mut self, sign: &str) -> bool {
        let found = self.at(sign);
        if found {
            self.advance();
        }
        found
    }

    /// Takes a required sign.
    fn expect(&mut self, sign: &str) -> Parsed<Token> {
        if self.at(sign) { Ok(self.advance()) } else { Err(self.expected(&quoted(sign), &[])) }
    }

    /// Whether the token `count` places ahead is `word`, in any case.
    fn word_ahead(&self, count: usize, word: &str) -> bool {
        let token = self.ahead(count);
        token.kind == TokenKind::Word && self.written(token).eq_ignore_ascii_case(word)
    }

    /// Whether the current token is `word`, in any case.
    fn at_word(&self, word: &str) -> bool {
        self.word_ahead(0, word)
    }

    /// Whether the current token is one of `words`, in any case.
    fn at_any(&self, words: &[&str]) -> bool {
        words.iter().any(|word| self.at_word(word))
    }

    /// Takes a word if it is the current token.
    fn eat_word(&mut self, word: &str) -> bool {
        let found = self.at_word(word);
        if found {
            self.advance();
        }
        found
    }

    /// Takes a required word.
    fn expect_word(&mut self, word: &'static str) -> Parsed<Token> {
        if self.at_word(word) {
            Ok(self.advance())
        } else {
            Err(self.expected(&quoted(word), &[word]))
        }
    }

    /// The help for the current token, if it is a word of another system.
    fn foreign(&self, find: fn(&str) -> Option<&'static str>) -> Option<&'static str> {
        let token = self.token();
        if token.kind == TokenKind::Word { find(self.written(token)) } else { None }
    }

    /// Takes a required name.
    fn name(&mut self, what: &str) -> Parsed<Identifier> {
        if self.at_reserved() { Err(self.reserved(what)) } else { self.any_name(what) }
    }

    /// Whether the current token is a name only in backticks.
    fn at_reserved(&self) -> bool {
        let token = self.token();
        token.kind == TokenKind::Word && words::is_reserved(self.written(token))
    }

    /// The diagnostic for a keyword in the place of a name.
    fn reserved(&self, what: &str) -> Diagnostic {
        let word = self.written(self.token());
        let help = format!("`{word}` is a keyword: to use it as a name, put it in backticks");
        self.expected(what, &[]).help(help)
    }

    /// Takes a required name in a place where keywords are names too.
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

    /// `as name`, or just a name if it is not a keyword. `meant` are the keywords of which it may
    /// be a misspelling.
    fn alias(&mut self, meant: &'static [&'static str]) -> Parsed<Option<Identifier>> {
        if self.eat_word("as") {
            return self.name("a name after `as`").map(Some);
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

    /// Opens a part of `levels` levels. Returns the height of the outer part, which the caller
    /// passes to [`leave`](Self::leave).
    fn enter(&mut self, levels: u32) -> Parsed<u32> {
        if self.depth + levels > LEVELS_MAX {
            let message = "this is nested too deeply";
            let queries = LEVELS_MAX / QUERY_LEVELS;
            let help =
                format!("at most {LEVELS_MAX} levels are allowed, or {queries} levels of queries");
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

    /// Adds a node above the parsed tree.
    fn grow(&mut self) -> Parsed<()> {
        self.height += 1;
        if self.height <= HEIGHT_MAX {
            return Ok(());
        }
        let message = "too many operators in a row";
        let help =
            format!("at most about {HEIGHT_MAX} are allowed; `in (…)` takes any number of values");
        Err(Diagnostic::new(self.token().span, message).help(help))
    }

    /// The diagnostic for an unexpected token. `words` are the keywords that are possible here.
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
            TokenKind::End => Span { start: self.last_end(), end: self.last_end() },
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

    /// A description of a token.
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

/// A text in backticks.
fn quoted(text: &str) -> String {
    format!("`{text}`")
}
