//! Functions and aggregates: which there are, and what they take.

use crate::ast::Identifier;
use crate::plan::{Aggregate, AggregateFunction, Expression, Function};
use crate::span::{Diagnostic, Span};
use crate::value::{Type, Value};

use super::scope::suggest;
use super::types::{Typed, expect, expect_number, kind_name, unify};

/// What a function takes and gives.
enum Signature {
    /// Arguments of these types, the last so many of which may be left out.
    Fixed(&'static [Type], usize, Type),
    /// A number; gives the same type.
    Number,
    /// At least one of any type; gives that type.
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
];

/// Whether a name is that of an aggregate.
pub(super) fn is_aggregate(name: &str) -> bool {
    AGGREGATES.iter().any(|aggregate| aggregate.eq_ignore_ascii_case(name))
}

fn arguments(name: &Identifier, wants: &str, has: usize, span: Span) -> Diagnostic {
    Diagnostic::new(span, format!("`{}` takes {wants}, not {has}", name.text))
}

fn count(number: usize) -> String {
    if number == 1 { "one argument".to_owned() } else { format!("{number} arguments") }
}

/// A function of arguments with their places.
pub(super) fn function(
    name: &Identifier,
    values: Vec<(Typed, Span)>,
    span: Span,
) -> Result<Typed, Diagnostic> {
    let Some((function, signature)) = signature(&name.text.to_ascii_lowercase()) else {
        let diagnostic =
            Diagnostic::new(name.span, format!("there is no function `{}`", name.text));
        let known = FUNCTIONS.iter().chain(AGGREGATES).copied();
        return Err(suggest(diagnostic, &name.text, known));
    };
    let has = values.len();
    let size = values.iter().map(|(value, _)| value.size).sum();
    let what = format!("`{}`", name.text);
    let mut planned = Vec::with_capacity(has);
    let kind = match signature {
        Signature::Fixed(kinds, optional, result) => {
            if has > kinds.len() || has + optional < kinds.len() {
                let wants = match optional {
                    0 => count(kinds.len()),
                    _ => format!("{} or {}", kinds.len() - optional, count(kinds.len())),
                };
                return Err(arguments(name, &wants, has, span));
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
                        "{what} wants arguments of one type, and this is {}, not {}",
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

/// An aggregate of arguments with their places, and its type.
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
    let wants = if lower == "percentile" { 2 } else { 1 };
    let mut values = values.into_iter();
    let (Some((argument, place)), true) = (values.next(), has == wants) else {
        return Err(arguments(name, &count(wants), has, span));
    };
    let what = format!("`{}`", name.text);
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
            let per_cent = match values.next() {
                Some((value, place)) => per_cent(value, place)?,
                None => return Err(arguments(name, &count(wants), has, span)),
            };
            (AggregateFunction::Percentile(per_cent), argument.kind, true)
        }
        _ => (AggregateFunction::ApproximateDistinct, Some(Type::Integer), false),
    };
    if of_numbers {
        expect_number(&argument, place, &what)?;
    }
    // These are the same with and without it.
    let distinct = distinct
        && !matches!(
            function,
            AggregateFunction::Minimum
                | AggregateFunction::Maximum
                | AggregateFunction::ApproximateDistinct
        );
    Ok((Aggregate { function, argument: Some(argument.expression), distinct }, kind))
}

/// The second argument of `percentile`.
fn per_cent(value: Typed, span: Span) -> Result<f64, Diagnostic> {
    expect_number(&value, span, "`percentile`")?;
    match value.fit(Some(Type::Float)) {
        Expression::Literal(Value::Float(number)) if (0.0..=100.0).contains(&number) => Ok(number),
        Expression::Literal(_) => {
            Err(Diagnostic::new(span, "a percentile is a number from 0 to 100"))
        }
        _ => Err(Diagnostic::new(span, "which percentile must be a constant")),
    }
}
