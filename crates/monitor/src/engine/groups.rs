//! Groups and their aggregates, kept up to date row by row.

use std::collections::BTreeMap;

use differential_dataflow::VecCollection;
use fathom_cql::Value;
use fathom_cql::aggregate::{aggregate_values, integer_variance};
use fathom_cql::eval::evaluate;
use fathom_cql::plan::{Aggregate, AggregateFunction, Expression};
use hashbrown::HashMap;
use timely::dataflow::Scope;

use super::Tuple;
use super::instants::by_instant;

/// What is kept of an aggregate's values.
#[derive(Clone, Debug)]
enum State {
    /// How many, and their sums: all that counts, sums, averages and variances need.
    Sums(Sums),
    /// How often each value is there.
    Values(BTreeMap<Value, isize>),
}

/// How many values there are and what they add up to, integers exactly.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    count: i128,
    integers: i128,
    squares: i128,
    floats: f64,
    float_squares: f64,
    has_floats: bool,
}

impl Sums {
    fn add(&mut self, value: &Value, count: isize) {
        let count_wide = count as i128;
        self.count += count_wide;
        match *value {
            Value::Integer(number) => {
                let number = i128::from(number);
                self.integers += number * count_wide;
                // Wraps around and back: what counts is whether the sum of what is left fits.
                let squares = (number * number).wrapping_mul(count_wide);
                self.squares = self.squares.wrapping_add(squares);
            }
            Value::Float(number) => {
                self.has_floats = true;
                self.floats += number * count as f64;
                self.float_squares += number * number * count as f64;
            }
            Value::Null | Value::Boolean(_) | Value::Text(_) => {}
        }
        if self.count == 0 {
            // Rounding errors end with the values that they come from.
            *self = Self::default();
        }
    }
}

impl State {
    fn new(aggregate: &Aggregate) -> Self {
        let of_values = aggregate.distinct
            || matches!(
                aggregate.function,
                AggregateFunction::Minimum
                    | AggregateFunction::Maximum
                    | AggregateFunction::Percentile(_)
                    | AggregateFunction::ApproximateDistinct
            );
        if of_values { Self::Values(BTreeMap::new()) } else { Self::Sums(Sums::default()) }
    }

    fn add(&mut self, value: &Value, count: isize) {
        match self {
            Self::Sums(sums) => sums.add(value, count),
            Self::Values(values) => {
                let counted = values.entry(value.clone()).or_insert(0);
                *counted += count;
                if *counted == 0 {
                    values.remove(value);
                }
            }
        }
    }

    fn result(&self, aggregate: &Aggregate) -> Value {
        match self {
            Self::Sums(sums) => of_sums(aggregate.function, sums),
            Self::Values(values) => of_values(aggregate, values),
        }
    }
}

fn float(number: f64) -> Value {
    if number.is_finite() { Value::Float(number) } else { Value::Null }
}

fn of_sums(function: AggregateFunction, sums: &Sums) -> Value {
    if function == AggregateFunction::Count {
        return Value::Integer(i64::try_from(sums.count).unwrap_or(i64::MAX));
    }
    if sums.count == 0 {
        return Value::Null;
    }
    let count = sums.count as f64;
    let variance = || {
        if sums.has_floats {
            let mean = sums.floats / count;
            return Some((sums.float_squares / count - mean * mean).max(0.0));
        }
        integer_variance(sums.count, sums.integers, sums.squares)
    };
    match function {
        AggregateFunction::Sum if sums.has_floats => float(sums.floats),
        AggregateFunction::Sum => i64::try_from(sums.integers).map_or(Value::Null, Value::Integer),
        AggregateFunction::Average if sums.has_floats => float(sums.floats / count),
        AggregateFunction::Average => float(sums.integers as f64 / count),
        AggregateFunction::Variance => variance().map_or(Value::Null, float),
        AggregateFunction::StandardDeviation => {
            variance().map_or(Value::Null, |variance| float(variance.sqrt()))
        }
        _ => Value::Null,
    }
}

fn of_values(aggregate: &Aggregate, values: &BTreeMap<Value, isize>) -> Value {
    match aggregate.function {
        AggregateFunction::Minimum => values.keys().next().cloned().unwrap_or(Value::Null),
        AggregateFunction::Maximum => values.keys().next_back().cloned().unwrap_or(Value::Null),
        AggregateFunction::Count | AggregateFunction::ApproximateDistinct => {
            Value::Integer(values.len() as i64)
        }
        function => {
            let once: Vec<Value>;
            let expanded: Vec<Value>;
            let values = if aggregate.distinct {
                once = values.keys().cloned().collect();
                once
            } else {
                expanded = values
                    .iter()
                    .flat_map(|(value, &count)| {
                        std::iter::repeat_n(value.clone(), count.max(0) as usize)
                    })
                    .collect();
                expanded
            };
            aggregate_values(function, false, values)
        }
    }
}

/// A group: how many rows, and its aggregates.
struct Group {
    rows: isize,
    states: Vec<State>,
    /// What the relation shows of it.
    shown: Option<Tuple>,
}

/// A row for each group that has rows: the keys, then the aggregates.
pub(super) fn aggregate<G: Scope<Timestamp = u64>>(
    relation: &VecCollection<G, Tuple, isize>,
    keys: Vec<Expression>,
    aggregates: Vec<Aggregate>,
) -> VecCollection<G, Tuple, isize> {
    let mut groups: HashMap<Tuple, Group> = HashMap::new();
    let mut touched: Vec<Tuple> = Vec::new();
    by_instant(relation, "aggregate", move |_, changes, results| {
        touched.clear();
        for (row, count) in changes.drain(..) {
            let key: Tuple = keys.iter().map(|each| evaluate(each, &row)).collect();
            if !groups.contains_key(&key) {
                let states = aggregates.iter().map(State::new).collect();
                groups.insert(key.clone(), Group { rows: 0, states, shown: None });
            }
            let Some(group) = groups.get_mut(&key) else { continue };
            group.rows += count;
            for (aggregate, state) in aggregates.iter().zip(&mut group.states) {
                let value = match &aggregate.argument {
                    Some(argument) => evaluate(argument, &row),
                    None => Value::Boolean(true),
                };
                if !value.is_null() {
                    state.add(&value, count);
                }
            }
            touched.push(key);
        }
        touched.sort();
        touched.dedup();
        for key in touched.drain(..) {
            let Some(group) = groups.get_mut(&key) else { continue };
            let is = (group.rows > 0).then(|| {
                let states = aggregates.iter().zip(&group.states);
                let results = states.map(|(aggregate, state)| state.result(aggregate));
                key.iter().cloned().chain(results).collect::<Tuple>()
            });
            if group.shown != is {
                results.extend(group.shown.take().map(|row| (row, -1)));
                results.extend(is.clone().map(|row| (row, 1)));
                group.shown = is;
            }
            if group.rows == 0 {
                groups.remove(&key);
            }
        }
    })
}
