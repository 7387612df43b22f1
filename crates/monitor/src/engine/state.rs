//! The state of an aggregate, in a form in which adding or removing a value costs little.

use std::collections::BTreeMap;

use fathom_cql::Value;
use fathom_cql::aggregate::exact::FloatSums;
use fathom_cql::aggregate::integer_variance;
use fathom_cql::eval::float;
use fathom_cql::plan::{Aggregate, AggregateFunction};
use hashbrown::HashMap;

use super::build::Stateful;
use super::percentiles::Percentile;
use super::tallies::{Histogram, Ranking, Registers};

/// The state of an aggregate's values other than null.
#[derive(Clone, Debug)]
pub(super) enum AggregateState {
    /// The number of values.
    Count(i64),
    /// The sums from which sum, average and variance are computed.
    Sums(Sums),
    /// The count of each value, for minimum and maximum.
    Values(BTreeMap<Value, i64>),
    /// The ordered values of a percentile.
    Percentile(Percentile),
    /// The state of an aggregate over distinct values.
    Distinct(Box<Distinct>),
    /// The counts of `top_k`.
    Ranking(Ranking),
    /// The registers of an approximate count or of a part of one. Boxed because they are large.
    Registers(Box<Registers>),
    /// The number of values in each bucket.
    Histogram(Histogram),
}

impl AggregateState {
    pub(super) fn new(aggregate: &Aggregate) -> Self {
        use AggregateFunction as Function;
        match aggregate.function {
            Function::ApproximateDistinct(precision, stage) => {
                Self::Registers(Box::new(Registers::new(precision, stage)))
            }
            Function::Minimum | Function::Maximum => Self::Values(BTreeMap::new()),
            _ if aggregate.distinct => {
                let of = Self::new(&Aggregate { distinct: false, ..aggregate.clone() });
                Self::Distinct(Box::new(Distinct { counts: HashMap::new(), of }))
            }
            Function::Count => Self::Count(0),
            Function::Sum | Function::Average => Self::Sums(Sums::default()),
            Function::Variance | Function::StandardDeviation => {
                Self::Sums(Sums { squares: Some(0), ..Sums::default() })
            }
            Function::Percentile(percentage) => Self::Percentile(Percentile::new(percentage)),
            Function::MostFrequent(_) => Self::Ranking(Ranking::default()),
            Function::Histogram(buckets, stage) => Self::Histogram(Histogram::new(buckets, stage)),
        }
    }

    /// Whether two aggregates, whose states get the same changes, can have one state.
    pub(super) fn is_shared(one: &Aggregate, other: &Aggregate) -> bool {
        use AggregateFunction as Function;
        // A function with an equal state for the same values.
        let like = |function| match function {
            Function::Average => Function::Sum,
            Function::Maximum => Function::Minimum,
            Function::StandardDeviation => Function::Variance,
            other => other,
        };
        one.argument == other.argument
            && one.distinct == other.distinct
            && like(one.function) == like(other.function)
    }

    /// Changes the count of an integer.
    #[inline]
    pub(super) fn add_integer(&mut self, integer: i64, count: i64) {
        match self {
            Self::Count(all) => *all += count,
            Self::Sums(sums) => sums.add_integer(integer, count),
            Self::Histogram(histogram) => histogram.add_integer(integer, count),
            Self::Values(_)
            | Self::Percentile(_)
            | Self::Distinct(_)
            | Self::Ranking(_)
            | Self::Registers(_) => {
                self.add(&Value::Integer(integer), count);
            }
        }
    }

    /// Changes the count of a value.
    #[inline]
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
            Self::Percentile(percentile) => percentile.add(value, count),
            Self::Distinct(distinct) => distinct.add(value, count),
            Self::Ranking(ranking) => ranking.add(value, count),
            Self::Registers(registers) => registers.add(value, count),
            Self::Histogram(histogram) => histogram.add(value, count),
        }
    }

    /// The number of values, ranks and buckets that are kept separately.
    pub(super) fn values(&self) -> usize {
        match self {
            Self::Count(_) | Self::Sums(_) => 0,
            Self::Values(values) => values.len(),
            Self::Percentile(percentile) => percentile.rows(),
            Self::Distinct(distinct) => distinct.counts.len() + distinct.of.values(),
            Self::Ranking(ranking) => ranking.rows(),
            Self::Registers(registers) => registers.rows(),
            Self::Histogram(histogram) => histogram.rows(),
        }
    }

    /// Writes the result to `place`. Tag and number are written separately: a processor stalls when
    /// one wide load follows narrower stores to the same memory.
    #[inline]
    pub(super) fn show(&mut self, aggregate: &Aggregate, place: &mut Value) {
        match self {
            Self::Count(count) => *place = Value::Integer(*count),
            Self::Sums(sums) => match sums.result(aggregate.function) {
                Value::Integer(sum) => *place = Value::Integer(sum),
                Value::Float(number) => *place = Value::Float(number),
                other => *place = other,
            },
            Self::Values(values) => {
                let value = match aggregate.function {
                    AggregateFunction::Minimum => values.keys().next(),
                    _ => values.keys().next_back(),
                };
                *place = value.cloned().unwrap_or(Value::Null);
            }
            Self::Percentile(percentile) => *place = percentile.result(),
            Self::Distinct(distinct) => distinct.of.show(aggregate, place),
            Self::Ranking(ranking) => *place = ranking.result(aggregate.function),
            Self::Registers(registers) => *place = registers.result(),
            Self::Histogram(histogram) => *place = histogram.result(),
        }
    }

    #[cfg(test)]
    pub(super) fn result(&mut self, aggregate: &Aggregate) -> Value {
        let mut value = Value::Null;
        self.show(aggregate, &mut value);
        value
    }
}

/// The state of an aggregate over distinct values.
#[derive(Clone, Debug)]
pub(super) struct Distinct {
    counts: HashMap<Value, i64>,
    of: AggregateState,
}

impl Distinct {
    fn add(&mut self, value: &Value, count: i64) {
        let before = self.counts.get(value).copied().unwrap_or(0);
        let after = before + count;
        match self.counts.get_mut(value) {
            Some(_) if after == 0 => drop(self.counts.remove(value)),
            Some(counted) => *counted = after,
            None => drop(self.counts.insert(value.clone(), after)),
        }
        match (before > 0, after > 0) {
            (false, true) => self.of.add(value, 1),
            (true, false) => self.of.add(value, -1),
            _ => {}
        }
    }
}

/// The number of values and their exact sums.
#[derive(Clone, Debug, Default)]
pub(super) struct Sums {
    count: i64,
    integers: i128,
    /// The sum of the squares, if it is needed. It may wrap around and back: only the sum of the
    /// remaining values has to fit.
    squares: Option<i128>,
    floats: Option<Box<FloatSums>>,
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
                let squares = self.squares.is_some();
                let new = || Box::new(FloatSums::new(squares));
                self.floats.get_or_insert_with(new).add(number, count);
            }
            Value::Null | Value::Boolean(_) | Value::Text(_) => {}
        }
    }

    #[inline]
    fn result(&mut self, function: AggregateFunction) -> Value {
        if self.count == 0 {
            return Value::Null;
        }
        if let Some(floats) = &mut self.floats {
            return float(match function {
                AggregateFunction::Sum => floats.sum(),
                AggregateFunction::Average => floats.average(self.count),
                AggregateFunction::Variance => floats.variance(self.count),
                AggregateFunction::StandardDeviation => floats.variance(self.count).sqrt(),
                _ => f64::NAN,
            });
        }
        let count = self.count as f64;
        // The usual case is faster in 64 bits.
        let sum = match i64::try_from(self.integers) {
            Ok(sum) => sum as f64,
            Err(_) => wide(self.integers),
        };
        match function {
            AggregateFunction::Sum => {
                i64::try_from(self.integers).map_or(Value::Null, Value::Integer)
            }
            AggregateFunction::Average => float(sum / count),
            AggregateFunction::Variance => self.variance().map_or(Value::Null, float),
            AggregateFunction::StandardDeviation => {
                self.variance().map_or(Value::Null, |variance| float(variance.sqrt()))
            }
            _ => Value::Null,
        }
    }

    fn variance(&self) -> Option<f64> {
        integer_variance(self.count.into(), self.integers, self.squares?)
    }
}

/// A separate function, so that the conversion is not computed if it is not needed.
#[cold]
#[inline(never)]
fn wide(integer: i128) -> f64 {
    integer as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aggregate(function: AggregateFunction) -> Aggregate {
        Aggregate { function, argument: None, distinct: false }
    }

    #[test]
    fn infinite_values_can_be_removed() {
        let of = aggregate(AggregateFunction::Sum);
        let mut state = AggregateState::new(&of);
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
    fn floats_that_cancel_leave_no_error() {
        for (function, expected) in [
            (AggregateFunction::Sum, 12.0),
            (AggregateFunction::Average, 6.0),
            (AggregateFunction::Variance, 1.0),
            (AggregateFunction::StandardDeviation, 1.0),
        ] {
            let of = aggregate(function);
            let mut state = AggregateState::new(&of);
            for number in [1e17, 5.0, 7.0] {
                state.add(&Value::Float(number), 1);
            }
            state.add(&Value::Float(1e17), -1);
            assert_eq!(state.result(&of), Value::Float(expected), "{function:?}");
        }
    }

    #[test]
    fn each_value_counts_once() {
        for (function, expected) in [
            (AggregateFunction::Count, Value::Integer(2)),
            (AggregateFunction::Sum, Value::Integer(9)),
            (AggregateFunction::Average, Value::Float(4.5)),
            (AggregateFunction::Percentile(50.0), Value::Integer(2)),
            (AggregateFunction::MostFrequent(2), Value::text("2:1 7:1")),
        ] {
            let of = Aggregate { distinct: true, ..aggregate(function) };
            let mut state = AggregateState::new(&of);
            for (integer, count) in [(2, 3), (5, 2), (7, 1), (5, -2), (2, -1)] {
                state.add_integer(integer, count);
            }
            assert_eq!(state.result(&of), expected, "{function:?}");
        }
    }

    #[test]
    fn sums_of_integers_are_exact_or_null_if_too_large() {
        let of = aggregate(AggregateFunction::Sum);
        let mut state = AggregateState::new(&of);
        state.add_integer(i64::MAX, 2);
        assert_eq!(state.result(&of), Value::Null);
        state.add_integer(i64::MAX, -1);
        assert_eq!(state.result(&of), Value::Integer(i64::MAX));
        state.add_integer(i64::MAX, -1);
        assert_eq!(state.result(&of), Value::Null);
    }
}
