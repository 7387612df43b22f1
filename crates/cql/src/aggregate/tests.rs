use super::*;
use crate::plan::Expression;
use AggregateFunction::{
    ApproximateDistinct, Average, Count, Histogram, Maximum, Minimum, MostFrequent, Percentile,
    StandardDeviation, Sum, Variance,
};

fn integers(function: AggregateFunction, numbers: &[i64]) -> Value {
    let values = numbers.iter().map(|number| Value::Integer(*number)).collect();
    aggregate_values(function, false, values)
}

fn floats(function: AggregateFunction, numbers: &[f64]) -> Value {
    let values = numbers.iter().map(|number| Value::Float(*number)).collect();
    aggregate_values(function, false, values)
}

fn int(number: i64) -> Value {
    Value::Integer(number)
}

fn approximate(stage: Stage) -> AggregateFunction {
    ApproximateDistinct(Precision::default(), stage)
}

const POWERS: Buckets = Buckets::PowersOfTwo;

const ALL: [AggregateFunction; 11] = [
    Count,
    Sum,
    Average,
    Minimum,
    Maximum,
    Variance,
    StandardDeviation,
    Percentile(50.0),
    MostFrequent(3),
    Histogram(POWERS, Stage::Whole),
    Histogram(POWERS, Stage::Part),
];

#[test]
fn over_nothing_and_over_nulls() {
    let all = [Stage::Whole, Stage::Part, Stage::Merge].map(approximate).into_iter().chain(ALL);
    for function in all {
        for values in [vec![], vec![Value::Null, Value::Null]] {
            let expected = match function {
                Count | ApproximateDistinct(_, Stage::Whole | Stage::Merge) => int(0),
                _ => Value::Null,
            };
            assert_eq!(aggregate_values(function, false, values), expected, "{function:?}");
        }
    }
}

#[test]
fn counts() {
    let rows = [vec![int(1)], vec![Value::Null], vec![int(1)]];
    let count =
        |argument, distinct| aggregate(&Aggregate { function: Count, argument, distinct }, &rows);
    assert_eq!(count(None, false), int(3));
    assert_eq!(count(Some(Expression::Column(0)), false), int(2));
    assert_eq!(count(Some(Expression::Column(0)), true), int(1));
    assert_eq!(integers(approximate(Stage::Whole), &[4, 4, 5]), int(2));
}

#[test]
fn sums() {
    assert_eq!(integers(Sum, &[i64::MAX, 1, -1]), int(i64::MAX));
    assert_eq!(integers(Sum, &[i64::MAX, 1]), Value::Null);
    assert_eq!(floats(Sum, &[0.25, 0.5]), Value::Float(0.75));
    assert_eq!(floats(Sum, &[f64::INFINITY, f64::NEG_INFINITY]), Value::Null);
    let twice = vec![int(2), int(2), int(3)];
    assert_eq!(aggregate_values(Sum, true, twice), int(5));
    assert_eq!(aggregate_values(Sum, false, vec![Value::text("a")]), Value::Null);
    assert_eq!(aggregate_values(Sum, false, vec![int(1), Value::text("a")]), Value::Null);
}

#[test]
fn averages_and_extremes() {
    assert_eq!(integers(Average, &[1, 2]), Value::Float(1.5));
    assert_eq!(integers(Average, &[i64::MAX, i64::MAX]), Value::Float(i64::MAX as f64));
    assert_eq!(floats(Average, &[1.0, 2.0]), Value::Float(1.5));
    assert_eq!(integers(Minimum, &[3, 1, 2]), int(1));
    assert_eq!(integers(Maximum, &[3, 1, 2]), int(3));
    let texts = vec![Value::text("b"), Value::Null, Value::text("a")];
    assert_eq!(aggregate_values(Minimum, false, texts), Value::text("a"));
}

#[test]
fn variances() {
    assert_eq!(integers(Variance, &[2, 4, 4, 4, 5, 5, 7, 9]), Value::Float(4.0));
    assert_eq!(integers(StandardDeviation, &[2, 4, 4, 4, 5, 5, 7, 9]), Value::Float(2.0));
    assert_eq!(integers(Variance, &[5]), Value::Float(0.0));
    let large = 1_000_000_000_000_000_000;
    assert_eq!(integers(Variance, &[large, large + 2]), Value::Float(1.0));
    assert_eq!(integers(Variance, &[i64::MIN, i64::MIN]), Value::Null);
    assert_eq!(floats(Variance, &[1.0, 2.0, 3.0, 4.0]), Value::Float(1.25));
    assert_eq!(floats(Variance, &[f64::INFINITY, 1.0]), Value::Null);
    assert_eq!(integer_variance(0, 0, 0), None);
}

#[test]
fn percentiles() {
    let numbers: Vec<i64> = (1..=10).rev().collect();
    for (percentage, expected) in [
        (0.0, 1),
        (-5.0, 1),
        (f64::NAN, 1),
        (10.0, 1),
        (10.5, 2),
        (50.0, 5),
        (70.0, 7),
        (99.0, 10),
        (100.0, 10),
        (400.0, 10),
    ] {
        assert_eq!(integers(Percentile(percentage), &numbers), int(expected), "{percentage}");
    }
    assert_eq!(integers(Percentile(99.0), &[3]), int(3));
    assert_eq!(percentile_rank(99.9, 1000), Some(999));
    assert_eq!(percentile_rank(50.0, 0), None);
}

#[test]
fn histograms() {
    let histogram = |function, numbers: &[i64]| integers(function, numbers).to_string();
    let whole = Histogram(POWERS, Stage::Whole);
    assert_eq!(histogram(whole, &[0, 5, 4, 7, -3, 5, 8]), "-4:1 0:1 4:4 8:1");
    let values = [5, 5, 9].map(int).to_vec();
    assert_eq!(aggregate_values(whole, true, values), Value::text("4:1 8:1"));
    assert_eq!(floats(whole, &[0.3, 0.25, f64::NAN]), Value::text("0.25:2 nan:1"));
    let by_ten = Buckets::Integers(std::num::NonZeroU64::new(10).unwrap());
    assert_eq!(histogram(Histogram(by_ten, Stage::Whole), &[3, 9, 10, -1]), "-10:1 0:2 10:1");
}

#[test]
fn merged_parts_equal_the_whole() {
    let numbers: Vec<i64> = (0..3000).map(|number| number * number % 1009 - 300).collect();
    let precision = Precision::new(5).unwrap();
    for function in [
        (|stage| Histogram(POWERS, stage)) as fn(Stage) -> AggregateFunction,
        |stage| ApproximateDistinct(Precision::new(5).unwrap_or_default(), stage),
        approximate,
    ] {
        let parts = numbers.chunks(700).map(|part| integers(function(Stage::Part), part));
        let mut parts: Vec<Value> = parts.collect();
        // Texts that are not those of a part are ignored.
        parts.extend([Value::Null, Value::text("1:-1"), Value::text("é"), int(3)]);
        let whole = integers(function(Stage::Whole), &numbers);
        let merged = aggregate_values(function(Stage::Merge), false, parts);
        assert_eq!(merged, whole);
        assert_ne!(merged, integers(function(Stage::Whole), &numbers[700..800]));
    }
    let exact = aggregate_values(Count, true, numbers.iter().copied().map(int).collect());
    let rough = integers(ApproximateDistinct(precision, Stage::Whole), &numbers);
    assert_ne!(rough, exact, "32 registers are few");
}
