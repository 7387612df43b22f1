//! What is kept of the values of an aggregate, so that each that comes or goes costs little.

use std::collections::BTreeMap;

use fathom_cql::Value;
use fathom_cql::aggregate::{aggregate_values, integer_variance};
use fathom_cql::eval::float;
use fathom_cql::plan::{Aggregate, AggregateFunction};

use super::build::Holds;
use super::tallies::{Histogram, Ranking, Registers};

/// An aggregate's values, nulls left out.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// How many.
    Count(i64),
    /// What sums, averages and variances need.
    Sums(Sums),
    /// How often each value is there.
    Values(BTreeMap<Value, i64>),
    /// What `top_k` needs.
    Ranking(Ranking),
    /// What an approximate count needs, or a part of one: larger than the others.
    Registers(Box<Registers>),
    /// How many values are in each bucket.
    Histogram(Histogram),
}

impl State {
    pub(super) fn new(aggregate: &Aggregate) -> Self {
        use AggregateFunction as Function;
        match aggregate.function {
            Function::ApproximateDistinct(precision, stage) => {
                Self::Registers(Box::new(Registers::new(precision, stage)))
            }
            _ if aggregate.distinct => Self::Values(BTreeMap::new()),
            Function::Count => Self::Count(0),
            Function::Sum | Function::Average => Self::Sums(Sums::default()),
            Function::Variance | Function::StandardDeviation => {
                Self::Sums(Sums { squares: Some(0), ..Sums::default() })
            }
            Function::Minimum | Function::Maximum | Function::Percentile(_) => {
                Self::Values(BTreeMap::new())
            }
            Function::MostFrequent(_) => Self::Ranking(Ranking::default()),
            Function::Histogram(buckets, stage) => Self::Histogram(Histogram::new(buckets, stage)),
        }
    }

    /// An integer comes so many times.
    pub(super) fn add_integer(&mut self, integer: i64, count: i64) {
        match self {
            Self::Count(all) => *all += count,
            Self::Sums(sums) => sums.add_integer(integer, count),
            Self::Histogram(histogram) => histogram.add_integer(integer, count),
            Self::Values(_) | Self::Ranking(_) | Self::Registers(_) => {
                self.add(&Value::Integer(integer), count);
            }
        }
    }

    /// A value comes so many times.
    pub(super) fn add(&mut self, value: &Value, count: i64) {
        if value.is_null() {
            return;
        }
        match self {
            Self::Count(all) => *all += count,
            Self::Sums(sums) => sums.add(value, count),
            Self::Values(values) => {
                let counted = values.entry(value.clone()).or_insert(0);
                *counted += count;
                if *counted == 0 {
                    values.remove(value);
                }
            }
            Self::Ranking(ranking) => ranking.add(value, count),
            Self::Registers(registers) => registers.add(value, count),
            Self::Histogram(histogram) => histogram.add(value, count),
        }
    }

    /// How many values, ranks and buckets are kept by themselves.
    pub(super) fn values(&self) -> usize {
        match self {
            Self::Count(_) | Self::Sums(_) => 0,
            Self::Values(values) => values.len(),
            Self::Ranking(ranking) => ranking.rows(),
            Self::Registers(registers) => registers.rows(),
            Self::Histogram(histogram) => histogram.rows(),
        }
    }

    /// Puts the result in place of another value. Numbers go there part by part: to copy what was
    /// written in parts just now as one makes a processor wait.
    #[inline]
    pub(super) fn show(&self, aggregate: &Aggregate, place: &mut Value) {
        match self {
            Self::Count(count) => *place = Value::Integer(*count),
            Self::Sums(sums) => match sums.result(aggregate.function) {
                Value::Integer(sum) => *place = Value::Integer(sum),
                Value::Float(number) => *place = Value::Float(number),
                other => *place = other,
            },
            Self::Values(values) => *place = of_values(aggregate, values),
            Self::Ranking(ranking) => *place = ranking.result(aggregate.function),
            Self::Registers(registers) => *place = registers.result(),
            Self::Histogram(histogram) => *place = histogram.result(),
        }
    }

    #[cfg(test)]
    pub(super) fn result(&self, aggregate: &Aggregate) -> Value {
        let mut value = Value::Null;
        self.show(aggregate, &mut value);
        value
    }
}

/// How many values there are and what they add up to: integers exactly, floats as far as their
/// additions are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    count: i64,
    integers: i128,
    /// The sum of the squares, where it is asked for. It wraps around and back: what counts is
    /// whether the sum of what is left fits.
    squares: Option<i128>,
    floats: Option<Floats>,
}

/// Sums of floats. Those that are not finite are counted: added up they would never go away.
#[derive(Clone, Copy, Debug, Default)]
struct Floats {
    sum: f64,
    squares: f64,
    infinite: i64,
    negative_infinite: i64,
    no_numbers: i64,
}

impl Sums {
    fn add_integer(&mut self, integer: i64, count: i64) {
        self.count += count;
        let number = i128::from(integer);
        let counted = number * i128::from(count);
        self.integers += counted;
        if let Some(squares) = &mut self.squares {
            *squares = squares.wrapping_add(number.wrapping_mul(counted));
        }
    }

    fn add(&mut self, value: &Value, count: i64) {
        match *value {
            Value::Integer(integer) => self.add_integer(integer, count),
            Value::Float(number) => {
                self.count += count;
                self.floats.get_or_insert_default().add(number, count);
                if self.count == 0 {
                    // Rounding errors end with the values that they come from.
                    *self = Self { squares: self.squares.map(|_| 0), ..Self::default() };
                }
            }
            Value::Null | Value::Boolean(_) | Value::Text(_) => {}
        }
    }

    #[inline]
    fn result(&self, function: AggregateFunction) -> Value {
        if self.count == 0 {
            return Value::Null;
        }
        let count = self.count as f64;
        let sum = match self.floats {
            Some(floats) => floats.sum(),
            // The usual case is quicker by itself.
            None => match i64::try_from(self.integers) {
                Ok(sum) => sum as f64,
                Err(_) => wide(self.integers),
            },
        };
        match (function, self.floats) {
            (AggregateFunction::Sum, None) => {
                i64::try_from(self.integers).map_or(Value::Null, Value::Integer)
            }
            (AggregateFunction::Sum, Some(_)) => float(sum),
            (AggregateFunction::Average, _) => float(sum / count),
            (AggregateFunction::Variance, _) => self.variance().map_or(Value::Null, float),
            (AggregateFunction::StandardDeviation, _) => {
                self.variance().map_or(Value::Null, |variance| float(variance.sqrt()))
            }
            _ => Value::Null,
        }
    }

    fn variance(&self) -> Option<f64> {
        let Some(floats) = self.floats else {
            return integer_variance(self.count.into(), self.integers, self.squares?);
        };
        let count = self.count as f64;
        let mean = floats.sum() / count;
        let variance = floats.squares / count - mean * mean;
        Some(if variance < 0.0 { 0.0 } else { variance })
    }
}

/// By itself, so that it is not computed where it is not asked for.
#[cold]
#[inline(never)]
fn wide(integer: i128) -> f64 {
    integer as f64
}

impl Floats {
    fn add(&mut self, number: f64, count: i64) {
        if number.is_finite() {
            self.sum += number * count as f64;
            self.squares += number * number * count as f64;
        } else if number.is_nan() {
            self.no_numbers += count;
        } else if number > 0.0 {
            self.infinite += count;
        } else {
            self.negative_infinite += count;
        }
    }

    fn sum(&self) -> f64 {
        let counts = [self.no_numbers, self.infinite, self.negative_infinite];
        match counts.map(|count| count > 0) {
            [false, false, false] => self.sum,
            [false, true, false] => f64::INFINITY,
            [false, false, true] => f64::NEG_INFINITY,
            _ => f64::NAN,
        }
    }
}

fn of_values(aggregate: &Aggregate, values: &BTreeMap<Value, i64>) -> Value {
    match aggregate.function {
        AggregateFunction::Minimum => values.keys().next().cloned().unwrap_or(Value::Null),
        AggregateFunction::Maximum => values.keys().next_back().cloned().unwrap_or(Value::Null),
        AggregateFunction::Count => Value::Integer(values.len() as i64),
        function => {
            let often = |count: i64| if aggregate.distinct { 1 } else { count.max(0) as usize };
            let each = values
                .iter()
                .flat_map(|(value, &count)| std::iter::repeat_n(value.clone(), often(count)));
            aggregate_values(function, false, each.collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aggregate(function: AggregateFunction) -> Aggregate {
        Aggregate { function, argument: None, distinct: false }
    }

    #[test]
    fn what_is_not_finite_goes_away_again() {
        let of = aggregate(AggregateFunction::Sum);
        let mut state = State::new(&of);
        state.add(&Value::Float(1.5), 1);
        for strange in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            state.add(&Value::Float(strange), 2);
        }
        assert_eq!(state.result(&of), Value::Null);
        state.add(&Value::Float(f64::NAN), -2);
        state.add(&Value::Float(f64::NEG_INFINITY), -2);
        assert_eq!(state.result(&of), Value::Float(f64::INFINITY));
        state.add(&Value::Float(f64::INFINITY), -2);
        assert_eq!(state.result(&of), Value::Float(1.5));
    }

    #[test]
    fn integers_add_up_exactly_and_what_is_too_large_is_null() {
        let of = aggregate(AggregateFunction::Sum);
        let mut state = State::new(&of);
        state.add_integer(i64::MAX, 2);
        assert_eq!(state.result(&of), Value::Null);
        state.add_integer(i64::MAX, -1);
        assert_eq!(state.result(&of), Value::Integer(i64::MAX));
        state.add_integer(i64::MAX, -1);
        assert_eq!(state.result(&of), Value::Null);
    }
}
