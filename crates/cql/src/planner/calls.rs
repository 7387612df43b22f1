//! Functions and aggregates, and their arguments.

use std::num::NonZeroU64;

use crate::aggregate::distinct::Precision;
use crate::aggregate::frequent::VALUES_MAX;
use crate::aggregate::histogram::Buckets;
use crate::ast::Identifier;
use crate::foreign;
use crate::plan::{Aggregate, AggregateFunction, Expression, Function, Stage};
use crate::span::{Diagnostic, Span};
use crate::value::{Type, Value};

use super::scope::suggest;
use super::types::{Typed, expect, expect_number, kind_name, unify};

/// The argument types and the result type of a function.
enum Signature {
    /// The types of the arguments, the number of optional arguments at the end, and the type of the
    /// result.
    Fixed(&'static [Type], usize, Type),
    /// One number; the result has the same type.
    Number,
    /// At least one argument, all of the same type, which the result has too.
    Same,
}

/// The functions by name.
fn signature(name: &str) -> Option<(Function, Signature)> {
    use Type::{Boolean, Float, Integer, Text};
    Some(match name {
        "lower" => (Function::Lower, Signature::Fixed(&[Text], 0, Text)),
        "upper" => (Function::Upper, Signature::Fixed(&[Text], 0, Text)),
        "length" => (Function::Length, Signature::Fixed(&[Text], 0, Integer)),
        "substring" => (Function::Substring, Signature::Fixed(&[Text, Integer, Integer], 1, Text)),
        "position" => (Function::Position, Signature::Fixed(&[Text, Text], 0, Integer)),
        "starts_with" => (Function::StartsWith, Signature::Fixed(&[Text, Text], 0, Boolean)),
        "ends_with" => (Function::EndsWith, Signature::Fixed(&[Text, Text], 0, Boolean)),
        "replace" => (Function::Replace, Signature::Fixed(&[Text, Text, Text], 0, Text)),
        "split_part" => (Function::SplitPart, Signature::Fixed(&[Text, Text, Integer], 0, Text)),
        "trim" => (Function::Trim, Signature::Fixed(&[Text], 0, Text)),
        "abs" => (Function::Absolute, Signature::Number),
        "floor" => (Function::Floor, Signature::Fixed(&[Float], 0, Float)),
        "ceil" | "ceiling" => (Function::Ceiling, Signature::Fixed(&[Float], 0, Float)),
        "round" => (Function::Round, Signature::Fixed(&[Float], 0, Float)),
        "sqrt" => (Function::SquareRoot, Signature::Fixed(&[Float], 0, Float)),
        "ln" => (Function::Logarithm, Signature::Fixed(&[Float], 0, Float)),
        "power" => (Function::Power, Signature::Fixed(&[Float, Float], 0, Float)),
        "greatest" => (Function::Greatest, Signature::Same),
        "least" => (Function::Least, Signature::Same),
        "coalesce" => (Function::Coalesce, Signature::Same),
        _ => return None,
    })
}

const FUNCTIONS: &[&str] = &[
    "lower",
    "upper",
    "length",
    "substring",
    "position",
    "starts_with",
    "ends_with",
    "replace",
    "split_part",
    "trim",
    "abs",
    "floor",
    "ceil",
    "round",
    "sqrt",
    "ln",
    "power",
    "greatest",
    "least",
    "coalesce",
];

const AGGREGATES: &[&str] = &[
    "count",
    "sum",
    "avg",
    "min",
    "max",
    "variance",
    "var",
    "stddev",
    "percentile",
    "median",
    "approx_count_distinct",
    "histogram",
    "top_k",
];

/// Whether a name is that of an aggregate.
pub(crate) fn is_aggregate(name: &str) -> bool {
    AGGREGATES.iter().any(|aggregate| aggregate.eq_ignore_ascii_case(name))
}

fn arguments(name: &Identifier, wants: &str, has: usize, span: Span) -> Diagnostic {
    Diagnostic::new(span, format!("`{}` takes {wants}, not {has}", name.text))
}

fn count(number: usize) -> String {
    if number == 1 { "one argument".to_owned() } else { format!("{number} arguments") }
}

/// A number of arguments in words, of which the last `optional` may be omitted.
fn counts(number: usize, optional: usize) -> String {
    match optional {
        0 => count(number),
        _ => format!("{} or {}", number - optional, count(number)),
    }
}

/// The call of a function. The arguments have their places.
pub(super) fn function(
    name: &Identifier,
    values: Vec<(Typed, Span)>,
    span: Span,
) -> Result<Typed, Diagnostic> {
    let Some((function, signature)) = signature(&name.text.to_ascii_lowercase()) else {
        let diagnostic =
            Diagnostic::new(name.span, format!("there is no function `{}`", name.text));
        if let Some(help) = foreign::function(&name.text) {
            return Err(diagnostic.help(help));
        }
        let known = FUNCTIONS.iter().chain(AGGREGATES).copied();
        let diagnostic = suggest(diagnostic, &name.text, known);
        return Err(if diagnostic.help.is_none() {
            let (functions, aggregates) = (FUNCTIONS.join(", "), AGGREGATES.join(", "));
            diagnostic
                .help(format!("the functions are {functions}; the aggregates are {aggregates}"))
        } else {
            diagnostic
        });
    };
    let has = values.len();
    let size = values.iter().map(|(value, _)| value.size).sum();
    let what = format!("`{}`", name.text);
    let mut planned = Vec::with_capacity(has);
    let kind = match signature {
        Signature::Fixed(kinds, optional, result) => {
            if has > kinds.len() || has + optional < kinds.len() {
                return Err(arguments(name, &counts(kinds.len(), optional), has, span));
            }
            for ((value, place), kind) in values.into_iter().zip(kinds) {
                if *kind == Type::Float {
                    expect_number(&value, place, &what)?;
                } else {
                    expect(&value, *kind, place, &what)?;
                }
                planned.push(value.fit(Some(*kind)));
            }
            Some(result)
        }
        Signature::Number => {
            if has != 1 {
                return Err(arguments(name, "one argument", has, span));
            }
            let mut kind = None;
            for (value, place) in values {
                expect_number(&value, place, &what)?;
                kind = value.kind;
                planned.push(value.expression);
            }
            kind
        }
        Signature::Same => {
            if has == 0 {
                return Err(arguments(name, "at least one argument", has, span));
            }
            let mut kind = None;
            for (value, place) in &values {
                let Ok(common) = unify(kind, value.kind) else {
                    let message = format!(
                        "the arguments of {what} must have the same type, but this is {}, not {}",
                        value.kind_name(),
                        kind_name(kind)
                    );
                    return Err(Diagnostic::new(*place, message));
                };
                kind = common;
            }
            planned.extend(values.into_iter().map(|(value, _)| value.fit(kind)));
            kind
        }
    };
    Ok(Typed::new(Expression::Call(function, planned), kind, size))
}

/// An aggregate and its type. The arguments have their places.
pub(super) fn aggregate(
    name: &Identifier,
    distinct: bool,
    star: bool,
    values: Vec<(Typed, Span)>,
    span: Span,
) -> Result<(Aggregate, Option<Type>), Diagnostic> {
    let lower = name.text.to_ascii_lowercase();
    let has = values.len();
    if star {
        if lower != "count" || distinct || has != 0 {
            let message = format!("only `count` takes `*`, not `{}`", name.text);
            return Err(Diagnostic::new(span, message));
        }
        let function = AggregateFunction::Count;
        return Ok((Aggregate { function, argument: None, distinct }, Some(Type::Integer)));
    }
    let (wants, optional) = match &lower[..] {
        "percentile" | "top_k" => (2, 0),
        "approx_count_distinct" | "histogram" => (2, 1),
        _ => (1, 0),
    };
    let wrong = || arguments(name, &counts(wants, optional), has, span);
    let mut values = values.into_iter();
    let (Some((argument, place)), true) =
        (values.next(), (wants - optional..=wants).contains(&has))
    else {
        return Err(wrong());
    };
    let second = values.next();
    let what = format!("`{}`", name.text);
    let mut expression = argument.expression.clone();
    let float = Some(Type::Float);
    let (function, kind, of_numbers) = match &lower[..] {
        "count" => (AggregateFunction::Count, Some(Type::Integer), false),
        "sum" => (AggregateFunction::Sum, argument.kind.or(Some(Type::Integer)), true),
        "avg" => (AggregateFunction::Average, float, true),
        "min" => (AggregateFunction::Minimum, argument.kind, false),
        "max" => (AggregateFunction::Maximum, argument.kind, false),
        "variance" | "var" => (AggregateFunction::Variance, float, true),
        "stddev" => (AggregateFunction::StandardDeviation, float, true),
        "median" => (AggregateFunction::Percentile(50.0), argument.kind, true),
        "percentile" => {
            let (value, place) = second.ok_or_else(wrong)?;
            (AggregateFunction::Percentile(per_cent(value, place)?), argument.kind, true)
        }
        "top_k" => {
            let (value, place) = second.ok_or_else(wrong)?;
            let wanted = wanted(&value, place)?;
            (AggregateFunction::MostFrequent(wanted), Some(Type::Text), false)
        }
        "histogram" => {
            let buckets = match second {
                None => Buckets::PowersOfTwo,
                Some((value, place)) => {
                    let buckets = width(&argument, value, place)?;
                    if matches!(buckets, Buckets::Floats(_)) {
                        expression = argument.clone().fit(float);
                    }
                    buckets
                }
            };
            (AggregateFunction::Histogram(buckets, Stage::Whole), Some(Type::Text), true)
        }
        _ => {
            let precision = match second {
                None => Precision::default(),
                Some((value, place)) => precision(&value, place)?,
            };
            let function = AggregateFunction::ApproximateDistinct(precision, Stage::Whole);
            (function, Some(Type::Integer), false)
        }
    };
    if of_numbers {
        expect_number(&argument, place, &what)?;
    }
    // `distinct` does not change these.
    let distinct = distinct
        && !matches!(
            function,
            AggregateFunction::Minimum
                | AggregateFunction::Maximum
                | AggregateFunction::ApproximateDistinct(..)
        );
    Ok((Aggregate { function, argument: Some(expression), distinct }, kind))
}

/// The second argument of `top_k`.
fn wanted(value: &Typed, span: Span) -> Result<u16, Diagnostic> {
    expect(value, Type::Integer, span, "the number of values of `top_k`")?;
    match value.expression {
        Expression::Literal(Value::Integer(number)) => {
            u16::try_from(number).ok().filter(|number| (1..=VALUES_MAX).contains(number))
        }
        Expression::Literal(_) => None,
        _ => {
            return Err(Diagnostic::new(
                span,
                "the number of values of `top_k` must be a constant",
            ));
        }
    }
    .ok_or_else(|| Diagnostic::new(span, format!("`top_k` gives 1 to {VALUES_MAX} values")))
}

/// The second argument of `approx_count_distinct`.
fn precision(value: &Typed, span: Span) -> Result<Precision, Diagnostic> {
    expect(value, Type::Integer, span, "the precision")?;
    match value.expression {
        Expression::Literal(Value::Integer(number)) => {
            u8::try_from(number).ok().and_then(Precision::new)
        }
        Expression::Literal(_) => None,
        _ => return Err(Diagnostic::new(span, "the precision must be a constant")),
    }
    .ok_or_else(|| {
        let (least, most) = (Precision::RANGE.start(), Precision::RANGE.end());
        Diagnostic::new(span, format!("a precision is an integer from {least} to {most}"))
    })
}

/// The second argument of `histogram`. Integers have buckets of floats if the width is a float.
fn width(argument: &Typed, value: Typed, span: Span) -> Result<Buckets, Diagnostic> {
    expect_number(&value, span, "the width of buckets")?;
    let of_floats = argument.kind == Some(Type::Float);
    let kind = if of_floats { Some(Type::Float) } else { value.kind };
    let buckets = match value.fit(kind) {
        Expression::Literal(Value::Integer(width)) => {
            u64::try_from(width).ok().and_then(NonZeroU64::new).map(Buckets::Integers)
        }
        Expression::Literal(Value::Float(width)) => Some(Buckets::Floats(width)),
        Expression::Literal(_) => None,
        _ => return Err(Diagnostic::new(span, "the width of buckets must be a constant")),
    };
    let good = |buckets: &Buckets| match buckets {
        Buckets::Integers(width) => Buckets::WIDTHS.contains(&(width.get() as f64)),
        Buckets::Floats(width) => Buckets::WIDTHS.contains(width),
        Buckets::PowersOfTwo => true,
    };
    buckets
        .filter(good)
        .ok_or_else(|| Diagnostic::new(span, "a width is a number from 0.000001 to 10¹⁵"))
}

/// The second argument of `percentile`.
fn per_cent(value: Typed, span: Span) -> Result<f64, Diagnostic> {
    expect_number(&value, span, "`percentile`")?;
    match value.fit(Some(Type::Float)) {
        Expression::Literal(Value::Float(number)) if (0.0..=100.0).contains(&number) => Ok(number),
        Expression::Literal(_) => {
            Err(Diagnostic::new(span, "a percentile is a number from 0 to 100"))
        }
        _ => Err(Diagnostic::new(span, "the percentile must be a constant")),
    }
}
