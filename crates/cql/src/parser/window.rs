//! Windows.

use super::{Parsed, Parser};
use crate::ast::{Window, WindowKind};
use crate::lexer::TokenKind;
use crate::span::{Diagnostic, Span};

/// The first words of windows.
const KINDS: [&str; 6] = ["now", "unbounded", "range", "rows", "partition", "tumbling"];

const MICROSECOND: u64 = 1000;
const SECOND: u64 = 1_000_000_000;

/// Units of time, in nanoseconds.
const UNITS: [(&str, u64); 21] = [
    ("nanosecond", 1),
    ("nanoseconds", 1),
    ("ns", 1),
    ("microsecond", MICROSECOND),
    ("microseconds", MICROSECOND),
    ("us", MICROSECOND),
    ("millisecond", 1_000_000),
    ("milliseconds", 1_000_000),
    ("ms", 1_000_000),
    ("second", SECOND),
    ("seconds", SECOND),
    ("s", SECOND),
    ("sec", SECOND),
    ("minute", 60 * SECOND),
    ("minutes", 60 * SECOND),
    ("min", 60 * SECOND),
    ("hour", 3600 * SECOND),
    ("hours", 3600 * SECOND),
    ("h", 3600 * SECOND),
    ("day", 24 * 3600 * SECOND),
    ("days", 24 * 3600 * SECOND),
];

/// Why a number is not the length of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LengthError {
    Zero,
    TooLong,
    TooFine,
}

impl Parser<'_> {
    /// An optional window, `[…]`.
    pub(super) fn window(&mut self) -> Parsed<Option<Window>> {
        let start = self.token().span.start;
        if !self.eat("[") {
            return Ok(None);
        }
        let kind = self.window_kind()?;
        if !self.eat("]") {
            let sliding = matches!(kind, WindowKind::Range { slide_ns: None, .. });
            let words: &[&str] = if sliding { &["slide"] } else { &[] };
            let mistake = self.expected("`]`", words);
            let lexer_failed = self.token().kind == TokenKind::End && self.failure.is_some();
            return Err(if mistake.help.is_some() || lexer_failed {
                mistake
            } else if self.at_word("slide") {
                mistake.help("only `range` has a `slide`, and only one")
            } else if matches!(kind, WindowKind::Rows(_)) && self.unit_here().is_some() {
                mistake.help("a length of time follows `range`")
            } else {
                mistake.help("a window ends with `]`")
            });
        }
        Ok(Some(Window { kind, span: self.span_from(start) }))
    }

    fn window_kind(&mut self) -> Parsed<WindowKind> {
        if self.eat_word("now") {
            Ok(self.now())
        } else if self.eat_word("unbounded") {
            Ok(WindowKind::Unbounded)
        } else if self.eat_word("range") {
            if self.eat_word("unbounded") {
                return Ok(WindowKind::Unbounded);
            }
            let length_ns = self.length()?;
            let slide_ns = if self.eat_word("slide") { Some(self.length()?) } else { None };
            Ok(WindowKind::Range { length_ns, slide_ns })
        } else if self.eat_word("tumbling") {
            let length_ns = self.length()?;
            Ok(WindowKind::Range { length_ns, slide_ns: Some(length_ns) })
        } else if self.eat_word("rows") {
            if self.eat_word("unbounded") {
                return Ok(WindowKind::Unbounded);
            }
            self.whole_number("the number of rows").map(WindowKind::Rows)
        } else if self.eat_word("partition") {
            self.partition()
        } else {
            let mistake = self
                .expected("`now`, `unbounded`, `range`, `rows`, `partition` or `tumbling`", &KINDS);
            let number = matches!(self.token().kind, TokenKind::Integer | TokenKind::Float);
            Err(if number {
                mistake.help("a length of time follows `range`, a number of rows `rows`")
            } else {
                mistake
            })
        }
    }

    /// `[now]`: the rows of an instant. Its length is the unit of the input's times, so that its
    /// rows leave at the next possible instant.
    fn now(&self) -> WindowKind {
        let unit_ns = match self.options.time_unit_ns {
            0 if self.options.stream_compat => MICROSECOND,
            unit_ns => unit_ns,
        };
        match unit_ns {
            0..=1 => WindowKind::Now,
            length_ns => WindowKind::Range { length_ns, slide_ns: None },
        }
    }

    /// The rest after `partition`.
    fn partition(&mut self) -> Parsed<WindowKind> {
        self.expect_word("by")?;
        let mut by = vec![self.name("the name of a column")?];
        while self.eat(",") {
            by.push(self.name("the name of a column")?);
        }
        if !self.at_word("rows") {
            let mistake = self.expected("`,` or `rows`", &["rows"]);
            return Err(if self.at(".") {
                mistake
                    .help("these are columns of the stream itself: leave out the name before `.`")
            } else if self.at_word("range") {
                mistake.help("`partition by` is possible with `rows` only")
            } else {
                mistake
            });
        }
        self.advance();
        let rows = self.whole_number("the number of rows")?;
        Ok(WindowKind::Partition { by, rows })
    }

    /// A length of time, in nanoseconds.
    pub(super) fn length(&mut self) -> Parsed<u64> {
        let token = self.token();
        let (number, unit) = if self.at_interval() {
            let (number, unit, span) = self.interval()?;
            match unit {
                Some(unit) => (number, self.unit_called(&unit, span)?),
                None => (number, self.unit()?),
            }
        } else if matches!(token.kind, TokenKind::Integer | TokenKind::Float) {
            self.advance();
            (self.written(token).to_owned(), self.unit()?)
        } else {
            return Err(self.expected("a length of time, such as `3 seconds`", &[]));
        };
        let span = Span { start: token.span.start, end: self.last_end() };
        length_ns(&number, unit).map_err(|why| match why {
            LengthError::Zero => {
                Diagnostic::new(span, "the length and the slide of a window cannot be 0")
                    .help("`[now]` is the window of the current instant")
            }
            LengthError::TooLong => {
                Diagnostic::new(span, "this is too long: a window has at most 292 years")
                    .help("`[unbounded]` holds all rows so far")
            }
            LengthError::TooFine => {
                Diagnostic::new(span, "this is not a whole number of nanoseconds")
            }
        })
    }

    /// The unit of time in the quotes of an interval, in nanoseconds.
    fn unit_called(&self, name: &str, span: Span) -> Parsed<u64> {
        let unit = UNITS.into_iter().find(|(word, _)| word.eq_ignore_ascii_case(name));
        match unit {
            Some((_, MICROSECOND | SECOND)) if self.options.stream_compat => Ok(MICROSECOND),
            Some((_, unit)) if !self.options.stream_compat => Ok(unit),
            _ => {
                let help = "the units are ns, us, ms, seconds, minutes, hours and days";
                Err(Diagnostic::new(span, format!("`{name}` is no unit of time here")).help(help))
            }
        }
    }

    /// The current token as a unit of time, in nanoseconds.
    fn unit_here(&self) -> Option<u64> {
        UNITS.into_iter().find(|(word, _)| self.at_word(word)).map(|(_, unit)| unit)
    }

    /// A unit of time, in nanoseconds; the default is the second.
    fn unit(&mut self) -> Parsed<u64> {
        let compat = self.options.stream_compat;
        let token = self.token();
        if token.kind != TokenKind::Word || self.at_word("slide") {
            return Ok(if compat { MICROSECOND } else { SECOND });
        }
        let Some(unit) = self.unit_here() else {
            let mut words = vec!["slide"];
            words.extend(UNITS.map(|(word, _)| word));
            let mistake = self.expected("a unit of time or `]`", &words);
            return Err(if mistake.help.is_some() {
                mistake
            } else if self.at_word("as") {
                mistake.help("a window ends with `]`")
            } else {
                mistake.help("the units are ns, us, ms, seconds, minutes, hours and days")
            });
        };
        if compat && !matches!(unit, SECOND | MICROSECOND) {
            let word = self.written(token);
            let message = format!(
                "`{word}` cannot be used where a second means a microsecond, as in the \
                 monitoring paper"
            );
            let help = "give the length in microseconds, or turn off the paper's units";
            return Err(Diagnostic::new(token.span, message).help(help));
        }
        self.advance();
        Ok(if compat { MICROSECOND } else { unit })
    }

    /// The diagnostic for a window without brackets, if there is one here.
    pub(super) fn window_without_brackets(&self) -> Option<Diagnostic> {
        let next = self.ahead(1);
        let number = matches!(next.kind, TokenKind::Integer | TokenKind::Float);
        let is_window = match () {
            () if self.at_any(&["now", "unbounded"]) => true,
            () if self.at_any(&["range", "rows"]) => number || self.word_ahead(1, "unbounded"),
            () if self.at_word("tumbling") => number,
            () if self.at_word("partition") => self.word_ahead(1, "by"),
            () => false,
        };
        if !is_window {
            return None;
        }
        let word = self.written(self.token()).to_ascii_lowercase();
        let example = match word.as_str() {
            "range" | "tumbling" => " 3 seconds",
            "rows" => " 10",
            "partition" => " by A rows 10",
            _ => "",
        };
        let help = format!("a window is written in square brackets: `[{word}{example}]`");
        Some(self.expected("`[` before a window", &[]).help(help))
    }
}

/// A decimal number of units in nanoseconds, exactly.
fn length_ns(written: &str, unit: u64) -> Result<u64, LengthError> {
    let (number, exponent) = written.split_once(['e', 'E']).unwrap_or((written, "0"));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let fraction = fraction.trim_end_matches('0');
    let mut digits = 0_u128;
    for digit in whole.bytes().chain(fraction.bytes()) {
        let next = digits.checked_mul(10).and_then(|d| d.checked_add(u128::from(digit - b'0')));
        digits =
            next.ok_or(if whole.len() > 30 { LengthError::TooLong } else { LengthError::TooFine })?;
    }
    if digits == 0 {
        return Err(LengthError::Zero);
    }
    // An exponent that does not fit `i32` exceeds all limits.
    let beyond = if exponent.starts_with('-') { i32::MIN } else { i32::MAX };
    let exponent = exponent.parse::<i32>().unwrap_or(beyond);
    let exponent = i64::from(exponent) - fraction.len() as i64;
    let mut length = digits.checked_mul(u128::from(unit)).ok_or(LengthError::TooLong)?;
    for _ in 0..exponent {
        length = length.checked_mul(10).ok_or(LengthError::TooLong)?;
    }
    for _ in exponent..0 {
        if length % 10 != 0 {
            return Err(LengthError::TooFine);
        }
        length /= 10;
    }
    if length > i64::MAX as u128 { Err(LengthError::TooLong) } else { Ok(length as u64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_exact() {
        assert_eq!(length_ns("3", SECOND), Ok(3_000_000_000));
        assert_eq!(length_ns("0.5", SECOND), Ok(500_000_000));
        assert_eq!(length_ns(".1000", SECOND), Ok(100_000_000));
        assert_eq!(length_ns("0.000000001", SECOND), Ok(1));
        assert_eq!(length_ns("9007199254740993", 1), Ok(9_007_199_254_740_993));
        assert_eq!(length_ns("1e-9", SECOND), Ok(1));
        assert_eq!(length_ns("2.5E+2", 1), Ok(250));
        assert_eq!(length_ns("9223372036854775807", 1), Ok(i64::MAX as u64));
    }

    #[test]
    fn lengths_are_bounded() {
        assert_eq!(length_ns("0", SECOND), Err(LengthError::Zero));
        assert_eq!(length_ns("0.000e99999999999", SECOND), Err(LengthError::Zero));
        assert_eq!(length_ns("0.0000000001", SECOND), Err(LengthError::TooFine));
        assert_eq!(length_ns("1e-99999999999", SECOND), Err(LengthError::TooFine));
        assert_eq!(length_ns("1e99999999999", SECOND), Err(LengthError::TooLong));
        assert_eq!(length_ns("9223372036854775808", 1), Err(LengthError::TooLong));
        assert_eq!(length_ns(&"9".repeat(60), 1), Err(LengthError::TooLong));
        assert_eq!(length_ns(&format!("0.{}", "9".repeat(60)), 1), Err(LengthError::TooFine));
    }
}
