//! The meaning of the aggregates.
//!
//! The result is the same to the bit in any order of the values. Sums of floats are exact and
//! rounded once, at the end ([`exact`]).

pub mod distinct;
pub mod exact;
pub mod frequent;
pub mod histogram;

use std::collections::BTreeMap;

use crate::eval::{evaluate, float};
use crate::plan::{Aggregate, AggregateFunction, Stage};
use crate::value::{Row, Value};
use distinct::{Maxima, Precision};
use exact::FloatSums;
use histogram::{BucketNumber, Buckets};

/// The value of an aggregate over the rows of a group.
pub fn aggregate(aggregate: &Aggregate, rows: &[Row]) -> Value {
    match &aggregate.argument {
        Some(argument) => {
            let values = rows.iter().map(|row| evaluate(argument, row)).collect();
            aggregate_values(aggregate.function, aggregate.distinct, values)
        }
        None if aggregate.function == AggregateFunction::Count => count(rows.len()),
        None => Value::Null,
    }
}

/// The value of an aggregate function over a bag of values. Nulls are ignored.
pub fn aggregate_values(
    function: AggregateFunction,
    distinct: bool,
    mut values: Vec<Value>,
) -> Value {
    values.retain(|value| !value.is_null());
    values.sort();
    if distinct {
        values.dedup();
    }
    match function {
        AggregateFunction::Count => count(values.len()),
        AggregateFunction::Minimum => values.first().cloned().unwrap_or(Value::Null),
        AggregateFunction::Maximum => values.last().cloned().unwrap_or(Value::Null),
        AggregateFunction::Percentile(percentage) => {
            let rank = percentile_rank(percentage, values.len());
            rank.and_then(|rank| values.get(rank - 1)).cloned().unwrap_or(Value::Null)
        }
        AggregateFunction::Sum => match Numbers::of(&values) {
            Some(Numbers::Integers(numbers)) => integer_sum(&numbers),
            Some(Numbers::Floats(numbers)) => float(float_sums(&numbers, false).sum()),
            None => Value::Null,
        },
        AggregateFunction::Average => match Numbers::of(&values) {
            Some(Numbers::Integers(numbers)) => integer_average(&numbers),
            Some(Numbers::Floats(numbers)) => {
                float(float_sums(&numbers, false).average(numbers.len() as i64))
            }
            None => Value::Null,
        },
        AggregateFunction::Variance => variance(&values).map_or(Value::Null, float),
        AggregateFunction::StandardDeviation => {
            variance(&values).map_or(Value::Null, |variance| float(variance.sqrt()))
        }
        AggregateFunction::MostFrequent(wanted) => frequent::of_sorted(&values, wanted),
        AggregateFunction::ApproximateDistinct(precision, stage) => {
            approximate_distinct(precision, stage, &values)
        }
        AggregateFunction::Histogram(buckets, stage) => histogram(buckets, stage, &values),
    }
}

fn approximate_distinct(precision: Precision, stage: Stage, values: &[Value]) -> Value {
    let mut maxima = Maxima::new(precision);
    for value in values {
        match stage {
            Stage::Whole | Stage::Part => maxima.add(value),
            Stage::Merge => maxima.add_text(value),
        }
    }
    match stage {
        Stage::Whole | Stage::Merge => Value::Integer(maxima.estimate()),
        Stage::Part if values.is_empty() => Value::Null,
        Stage::Part => maxima.text(),
    }
}

fn histogram(buckets: Buckets, stage: Stage, values: &[Value]) -> Value {
    let mut counts: BTreeMap<BucketNumber, i64> = BTreeMap::new();
    let mut add = |place: BucketNumber, count: i64| {
        let counted = counts.entry(place).or_default();
        // Texts from other hosts may contain any count.
        *counted = counted.wrapping_add(count);
    };
    for value in values {
        match (stage, value) {
            (Stage::Merge, Value::Text(part)) => {
                for (place, count) in buckets.from_part(part).unwrap_or_default() {
                    add(place, count);
                }
            }
            (Stage::Merge, _) => {}
            (Stage::Whole | Stage::Part, value) => {
                if let Some(place) = buckets.search(value) {
                    add(place, 1);
                }
            }
        }
    }
    match stage {
        Stage::Whole | Stage::Merge => buckets.text(counts),
        Stage::Part => buckets.part(counts),
    }
}

/// The rank of a percentile among `count` sorted values, counted from 1. It is the nearest rank:
/// the smallest that is not less than `percentage · count / 100`. `None` if there are no values.
pub fn percentile_rank(percentage: f64, count: usize) -> Option<usize> {
    let rank = (percentage * count as f64 / 100.0).ceil() as usize;
    (count > 0).then(|| rank.clamp(1, count))
}

fn count(number: usize) -> Value {
    i64::try_from(number).map_or(Value::Null, Value::Integer)
}

/// One or more numbers, all of the same type.
enum Numbers {
    Integers(Vec<i64>),
    Floats(Vec<f64>),
}

impl Numbers {
    fn of(values: &[Value]) -> Option<Self> {
        match values.first()? {
            Value::Integer(_) => {
                let number = |value: &Value| match value {
                    Value::Integer(number) => Some(*number),
                    _ => None,
                };
                Some(Self::Integers(values.iter().map(number).collect::<Option<_>>()?))
            }
            Value::Float(_) => {
                let number = |value: &Value| match value {
                    Value::Float(number) => Some(*number),
                    _ => None,
                };
                Some(Self::Floats(values.iter().map(number).collect::<Option<_>>()?))
            }
            _ => None,
        }
    }
}

fn exact_sum(numbers: &[i64]) -> i128 {
    numbers.iter().map(|&number| i128::from(number)).sum()
}

fn integer_sum(numbers: &[i64]) -> Value {
    i64::try_from(exact_sum(numbers)).map_or(Value::Null, Value::Integer)
}

/// The exact sum, rounded to a float, divided by the count.
fn integer_average(numbers: &[i64]) -> Value {
    float(exact_sum(numbers) as f64 / numbers.len() as f64)
}

fn float_sums(numbers: &[f64], squares: bool) -> FloatSums {
    let mut sums = FloatSums::new(squares);
    for number in numbers {
        sums.add(*number, 1);
    }
    sums
}

fn variance(values: &[Value]) -> Option<f64> {
    match Numbers::of(values)? {
        Numbers::Integers(numbers) => {
            let count = numbers.len() as i128;
            let sum = exact_sum(&numbers);
            let square = |&number: &i64| i128::from(number) * i128::from(number);
            let mut squares = numbers.iter().map(square);
            integer_variance(count, sum, squares.try_fold(0, i128::checked_add)?)
        }
        Numbers::Floats(numbers) => Some(float_sums(&numbers, true).variance(numbers.len() as i64)),
    }
}

/// The variance of integers, from their count, their sum and the sum of their squares:
/// `(count · squares − sum²) / count²`, where numerator and denominator are exact and each is
/// rounded to a float once. `None` if there are no integers, or if an intermediate result exceeds
/// 128 bits.
pub fn integer_variance(count: i128, sum: i128, squares: i128) -> Option<f64> {
    let numerator = count.checked_mul(squares)?.checked_sub(sum.checked_mul(sum)?)?;
    let denominator = count.checked_mul(count)?;
    (count > 0).then(|| numerator as f64 / denominator as f64)
}

#[cfg(test)]
mod tests;
