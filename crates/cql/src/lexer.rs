//! The lexer: divides a text into words, numbers, texts and signs.

use crate::span::{Diagnostic, Span};

/// The longest script, in bytes.
pub(crate) const SCRIPT_LENGTH_MAX: usize = 1 << 20;

/// The kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// A name or a keyword, depending on the position.
    Word,
    /// A name in backticks.
    Quoted,
    /// An integer: digits only.
    Integer,
    /// A number with a point or an exponent.
    Float,
    /// A text in quotes.
    Text,
    /// `$name`.
    Parameter,
    /// An operator or a bracket.
    Sign(&'static str),
    /// The end of the text.
    End,
}

/// A token and its place in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    /// The kind.
    pub kind: TokenKind,
    /// The place in the text.
    pub span: Span,
}

/// The tokens of a text.
#[derive(Debug)]
pub(crate) struct Tokens {
    /// The tokens in order; the last is [`TokenKind::End`].
    pub tokens: Vec<Token>,
    /// The error at the end of the tokens, if the lexer stopped before the end of the text.
    pub failure: Option<Diagnostic>,
}

/// The signs. If one is the beginning of another, the longer one is first.
const SIGNS: [&str; 21] = [
    "<>", "<=", ">=", "!=", "||", "=", "<", ">", "+", "-", "*", "/", "%", "(", ")", "[", "]", ",",
    ";", ":", ".",
];

/// Operators of other languages, and what to write instead.
const FOREIGN: [(&str, &str); 4] = [
    ("==", "equality is written `=`"),
    ("&&", "write `and`"),
    ("=>", "write `>=`"),
    ("!", "write `not`, or `<>` for inequality"),
];

/// Divides a text into tokens. Stops at the first invalid one.
pub(crate) fn tokenize(text: &str) -> Tokens {
    let mut lexer = Lexer { text, position: 0 };
    if text.len() > SCRIPT_LENGTH_MAX {
        let message = "the text is longer than 1 MiB";
        let end = Token { kind: TokenKind::End, span: Span::default() };
        let failure = Some(Diagnostic::new(Span::default(), message));
        return Tokens { tokens: vec![end], failure };
    }
    let mut tokens = Vec::new();
    loop {
        match lexer.token() {
            Ok(token) => {
                tokens.push(token);
                if token.kind == TokenKind::End {
                    return Tokens { tokens, failure: None };
                }
            }
            Err(failure) => {
                let start = failure.span.start;
                tokens.push(Token { kind: TokenKind::End, span: Span { start, end: start } });
                return Tokens { tokens, failure: Some(failure) };
            }
        }
    }
}

/// Whether a name may begin with a character.
pub(crate) fn begins_name(character: char) -> bool {
    character.is_alphabetic() || character == '_'
}

/// Whether a name may contain a character after the first.
fn continues_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

struct Lexer<'a> {
    text: &'a str,
    position: usize,
}

impl Lexer<'_> {
    fn rest(&self) -> &str {
        &self.text[self.position..]
    }

    fn byte(&self, ahead: usize) -> u8 {
        self.text.as_bytes().get(self.position + ahead).copied().unwrap_or(0)
    }

    fn span(&self, start: usize) -> Span {
        Span { start: start as u32, end: self.position as u32 }
    }

    fn skip_while(&mut self, of: impl Fn(char) -> bool) {
        let rest = self.rest();
        self.position += rest.find(|character| !of(character)).unwrap_or(rest.len());
    }

    /// The next token.
    fn token(&mut self) -> Result<Token, Diagnostic> {
        self.skip_blank()?;
        let start = self.position;
        let kind = match self.rest().chars().next() {
            None => TokenKind::End,
            Some(first) if begins_name(first) => {
                self.skip_while(continues_name);
                TokenKind::Word
            }
            Some('0'..='9') => self.number(),
            Some('.') if self.byte(1).is_ascii_digit() => self.number(),
            Some(quote @ ('"' | '\'' | '`')) => self.quoted(quote)?,
            Some('$') => {
                self.position += 1;
                self.skip_while(continues_name);
                if self.position == start + 1 {
                    return Err(Diagnostic::new(self.span(start), "expected a name after `$`"));
                }
                TokenKind::Parameter
            }
            Some(first) => self.sign(first)?,
        };
        Ok(Token { kind, span: self.span(start) })
    }

    /// Skips blanks and comments.
    fn skip_blank(&mut self) -> Result<(), Diagnostic> {
        loop {
            self.skip_while(|c| c.is_whitespace() || c == '\u{feff}');
            let rest = self.rest();
            if rest.starts_with('#') || rest.starts_with("--") || rest.starts_with("//") {
                self.skip_while(|c| c != '\n');
            } else if let Some(comment) = rest.strip_prefix("/*") {
                let Some(length) = comment.find("*/") else {
                    let start = self.position as u32;
                    let span = Span { start, end: start + 2 };
                    let message = "this comment has no end";
                    return Err(Diagnostic::new(span, message).help("end it with `*/`"));
                };
                self.position += length + 4;
            } else {
                return Ok(());
            }
        }
    }

    /// A number: digits, optionally with a fraction and an exponent.
    fn number(&mut self) -> TokenKind {
        let mut kind = TokenKind::Integer;
        let digit = |character: char| character.is_ascii_digit();
        self.skip_while(digit);
        if self.byte(0) == b'.' && self.byte(1).is_ascii_digit() {
            kind = TokenKind::Float;
            self.position += 1;
            self.skip_while(digit);
        }
        if matches!(self.byte(0), b'e' | b'E') {
            let sign = usize::from(matches!(self.byte(1), b'+' | b'-'));
            if self.byte(1 + sign).is_ascii_digit() {
                kind = TokenKind::Float;
                self.position += 1 + sign;
                self.skip_while(digit);
            }
        }
        kind
    }

    /// A text or a name in quotes. A doubled quote stands for the quote itself.
    fn quoted(&mut self, quote: char) -> Result<TokenKind, Diagnostic> {
        let start = self.position;
        loop {
            self.position += 1;
            let Some(length) = self.rest().find(quote) else {
                // The end is probably missing on the same line.
                let opened = &self.text[start..];
                let line = opened.find(['\n', '\r']).unwrap_or(opened.len());
                let span = Span { start: start as u32, end: (start + line) as u32 };
                let what = if quote == '`' { "name" } else { "text" };
                let message = format!("this {what} has no end");
                let help = if quote == '`' {
                    "end it with a backtick".to_owned()
                } else {
                    format!("end it with `{quote}`")
                };
                return Err(Diagnostic::new(span, message).help(help));
            };
            self.position += length + 1;
            if !self.rest().starts_with(quote) {
                break;
            }
        }
        if quote != '`' {
            return Ok(TokenKind::Text);
        }
        if self.position == start + 2 {
            return Err(Diagnostic::new(self.span(start), "a name cannot be empty"));
        }
        Ok(TokenKind::Quoted)
    }

    fn sign(&mut self, first: char) -> Result<TokenKind, Diagnostic> {
        let start = self.position;
        let rest = self.rest();
        let sign = SIGNS.into_iter().find(|&sign| rest.starts_with(sign));
        let foreign = FOREIGN.into_iter().find(|&(sign, _)| rest.starts_with(sign));
        if let Some((foreign, help)) = foreign {
            if sign.is_none_or(|sign| sign.len() < foreign.len()) {
                self.position += foreign.len();
                let message = format!("`{foreign}` is not an operator");
                return Err(Diagnostic::new(self.span(start), message).help(help));
            }
        }
        if let Some(sign) = sign {
            self.position += sign.len();
            return Ok(TokenKind::Sign(sign));
        }
        self.position += first.len_utf8();
        let message = format!("unexpected character `{}`", first.escape_debug());
        let failure = Diagnostic::new(self.span(start), message);
        Err(match first {
            '“' | '”' | '„' | '‘' | '’' => failure.help("quote texts with `\"` or `'`"),
            '{' | '}' => failure.help("use `(` and `)`, and `[` and `]` for windows"),
            _ => failure,
        })
    }
}

/// The text between quotes, with doubled quotes as single ones.
pub(crate) fn unquote(written: &str) -> String {
    let mut characters = written.chars();
    let Some(quote) = characters.next() else { return String::new() };
    characters.next_back();
    let mut text = String::with_capacity(written.len());
    while let Some(character) = characters.next() {
        text.push(character);
        if character == quote {
            characters.next();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<(TokenKind, &str)> {
        let lexed = tokenize(text);
        assert_eq!(lexed.failure, None);
        lexed.tokens.iter().map(|token| (token.kind, &text[token.span.range()])).collect()
    }

    #[test]
    fn tokens_and_their_places() {
        use TokenKind::{End, Float, Integer, Parameter, Quoted, Sign, Text, Word};
        assert_eq!(
            kinds("IO.Type<>\"a\"\"b\" `x``y` $p 1 2.5 .5 1e3 2E-4 3s"),
            [
                (Word, "IO"),
                (Sign("."), "."),
                (Word, "Type"),
                (Sign("<>"), "<>"),
                (Text, "\"a\"\"b\""),
                (Quoted, "`x``y`"),
                (Parameter, "$p"),
                (Integer, "1"),
                (Float, "2.5"),
                (Float, ".5"),
                (Float, "1e3"),
                (Float, "2E-4"),
                (Integer, "3"),
                (Word, "s"),
                (End, ""),
            ]
        );
    }

    #[test]
    fn comments_are_blank() {
        let text = "#- a 'b\n a -- c\"\n// `\n /* *\n/ */ + é";
        let words: Vec<_> = kinds(text).into_iter().map(|(_, word)| word).collect();
        assert_eq!(words, ["a", "+", "é", ""]);
    }

    #[test]
    fn invalid_tokens() {
        let failure = |text: &str| {
            let failure = tokenize(text).failure.expect("a failure");
            (failure.span.range(), failure.message)
        };
        assert_eq!(failure("a == b"), (2..4, "`==` is not an operator".to_owned()));
        assert_eq!(failure("a = 'b\nc"), (4..6, "this text has no end".to_owned()));
        assert_eq!(failure("`b"), (0..2, "this name has no end".to_owned()));
        assert_eq!(failure("``"), (0..2, "a name cannot be empty".to_owned()));
        assert_eq!(failure("a /* b"), (2..4, "this comment has no end".to_owned()));
        assert_eq!(failure("$ a"), (0..1, "expected a name after `$`".to_owned()));
        assert_eq!(failure("“"), (0..3, "unexpected character `“`".to_owned()));
        let long = " ".repeat(SCRIPT_LENGTH_MAX + 1);
        assert_eq!(failure(&long), (0..0, "the text is longer than 1 MiB".to_owned()));
        assert_eq!(tokenize(&long[1..]).failure, None);
    }

    #[test]
    fn quotes_are_removed() {
        assert_eq!(unquote("\"a\"\"b'\""), "a\"b'");
        assert_eq!(unquote("''"), "");
        assert_eq!(unquote("''''"), "'");
    }
}
