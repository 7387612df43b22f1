//! A percentile of values that are added and removed.
//!
//! The values are kept in order, each with its count. A cursor points to the value at the requested
//! rank, and keeps the number of smaller values. Adding or removing a value changes the requested
//! rank by at most one. So the cursor moves past about as many values as have been added and
//! removed since the last result. Each of its steps is a search in the ordered map, so a value
//! costs O(log n).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Bound;

use fathom_cql::Value;
use fathom_cql::aggregate::percentile_rank;

use super::build::Stateful;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Percentile {
    percentage: f64,
    counts: BTreeMap<Value, i64>,
    /// The number of values.
    all: i64,
    /// The cursor: a value, which may have been removed, and the number of smaller values.
    place: Option<(Value, i64)>,
    #[cfg(test)]
    steps: usize,
}

impl Percentile {
    /// No values yet. The percentage is from 0 to 100.
    pub(super) fn new(percentage: f64) -> Self {
        Self {
            percentage,
            counts: BTreeMap::new(),
            all: 0,
            place: None,
            #[cfg(test)]
            steps: 0,
        }
    }

    /// Changes the count of a value.
    pub(super) fn add(&mut self, value: &Value, count: i64) {
        match self.counts.entry(value.clone()) {
            Entry::Vacant(vacant) => {
                vacant.insert(count);
            }
            Entry::Occupied(mut occupied) => {
                *occupied.get_mut() += count;
                if *occupied.get() == 0 {
                    occupied.remove();
                }
            }
        }
        self.all += count;
        match &mut self.place {
            Some((at, less)) if value < at => *less += count,
            _ => {}
        }
    }

    /// The percentile; null if there are no values.
    pub(super) fn result(&mut self) -> Value {
        let count = usize::try_from(self.all).unwrap_or(0);
        let Some(rank) = percentile_rank(self.percentage, count) else {
            self.place = None;
            return Value::Null;
        };
        let rank = rank as i64;
        let counts = &self.counts;
        let (mut at, mut less) = match self.place.take() {
            Some(place) => place,
            None => match counts.keys().next() {
                Some(first) => (first.clone(), 0),
                None => return Value::Null,
            },
        };
        let mut here = counts.get(&at).copied().unwrap_or(0);
        let mut moved = None;
        loop {
            let next = if rank <= less {
                counts.range::<Value, _>(..moved.unwrap_or(&at)).next_back()
            } else if rank > less + here {
                let behind = (Bound::Excluded(moved.unwrap_or(&at)), Bound::Unbounded);
                counts.range::<Value, _>(behind).next()
            } else {
                break;
            };
            let Some((value, &count)) = next else { break };
            less += if rank <= less { -count } else { here };
            (moved, here) = (Some(value), count);
            #[cfg(test)]
            {
                self.steps += 1;
            }
        }
        if let Some(value) = moved {
            at = value.clone();
        }
        self.place.insert((at, less)).0.clone()
    }
}

impl Stateful for Percentile {
    fn rows(&self) -> usize {
        self.counts.len()
    }
}

#[cfg(test)]
mod tests {
    use fathom_cql::aggregate::aggregate_values;
    use fathom_cql::generate::Generator;
    use fathom_cql::plan::AggregateFunction;

    use super::*;

    #[test]
    fn percentiles_follow_added_and_removed_values() {
        for (seed, percentage) in (0..).zip([0.0, 1.0, 25.0, 50.0, 90.0, 99.0, 99.9, 100.0]) {
            let mut generator = Generator::new(seed);
            let mut percentile = Percentile::new(percentage);
            let mut values: Vec<Value> = Vec::new();
            for step in 0..4_000 {
                let chance = if step / 1000 % 2 == 0 { 70 } else { 30 };
                if values.is_empty() || generator.chance(chance) {
                    let spread = 1 << generator.below(20);
                    let value = Value::Integer(generator.below(spread) as i64);
                    let count = 1 + generator.below(3);
                    percentile.add(&value, count as i64);
                    values.extend(std::iter::repeat_n(value, count));
                } else if generator.chance(1) {
                    for value in values.drain(..) {
                        percentile.add(&value, -1);
                    }
                } else {
                    let removed = values.swap_remove(generator.below(values.len()));
                    percentile.add(&removed, -1);
                }
                if generator.chance(30) {
                    let function = AggregateFunction::Percentile(percentage);
                    let expected = aggregate_values(function, false, values.clone());
                    assert_eq!(percentile.result(), expected, "{percentage} of {values:?}");
                }
            }
        }
    }

    /// For each added or removed value, the cursor moves past few values. The test counts steps
    /// instead of measuring time.
    #[test]
    fn the_cursor_stays_near_the_requested_rank() {
        for percentage in [1.0, 50.0, 99.0] {
            let mut percentile = Percentile::new(percentage);
            let value = |number: i64| Value::Integer(number * 7919 % 20_011);
            let (all, window) = (20_000, 2_000);
            for number in 0..all {
                percentile.add(&value(number), 1);
                if number >= window {
                    percentile.add(&value(number - window), -1);
                }
                percentile.result();
            }
            let changes = (2 * all - window) as usize;
            assert!(percentile.steps <= changes, "{} of {changes}", percentile.steps);
        }
    }
}
