//! Counts from which values can be removed: registers, buckets, and values by their counts.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use fathom_cql::Value;
use fathom_cql::aggregate::distinct::{self, Mark, Precision, Ranks};
use fathom_cql::aggregate::frequent;
use fathom_cql::aggregate::histogram::{BucketNumber, Buckets};
use fathom_cql::plan::{AggregateFunction, Stage};

use super::bag::Bag;
use super::build::Stateful;

/// The registers of an approximate count.
///
/// A register alone does not know its rank before the greatest one arrived. So the number of rows
/// is kept for each register and rank, and the greatest remaining rank is always known. With 2^p
/// registers there are at most 2^p · (65 − p) counts, for any input, and usually one per value
/// until there are as many values as registers.
#[derive(Clone, Debug)]
pub(super) struct Registers {
    precision: Precision,
    stage: Stage,
    marks: Bag<Mark>,
    ranks: Ranks,
}

impl Registers {
    pub(super) fn new(precision: Precision, stage: Stage) -> Self {
        Self { precision, stage, marks: Bag::default(), ranks: Ranks::new(precision) }
    }

    pub(super) fn add(&mut self, value: &Value, count: i64) {
        match (self.stage, value) {
            (Stage::Merge, Value::Text(part)) => {
                for mark in distinct::from_text(part, self.precision).unwrap_or_default() {
                    self.mark(mark, count);
                }
            }
            (Stage::Merge, _) => {}
            (Stage::Whole | Stage::Part, value) => {
                self.mark(Mark::of(value, self.precision), count);
            }
        }
    }

    fn mark(&mut self, mark: Mark, count: i64) {
        let greatest = self.greatest(mark.register);
        let (before, after) = self.marks.add(mark, count);
        if (before == 0) != (after == 0) {
            let now = self.greatest(mark.register);
            self.ranks.change(greatest, now);
        }
    }

    /// The greatest rank of a register; 0 if the register is empty.
    fn greatest(&self, register: u16) -> u8 {
        let last = self.marks.last_up_to(&Mark { register, rank: u8::MAX });
        last.filter(|mark| mark.register == register).map_or(0, |mark| mark.rank)
    }

    pub(super) fn result(&self) -> Value {
        match self.stage {
            Stage::Whole | Stage::Merge => Value::Integer(self.ranks.estimate()),
            Stage::Part => {
                let mut marks: Vec<Mark> = Vec::new();
                for (mark, _) in self.marks.iter() {
                    match marks.last_mut() {
                        Some(last) if last.register == mark.register => *last = *mark,
                        _ => marks.push(*mark),
                    }
                }
                if marks.is_empty() {
                    Value::Null
                } else {
                    distinct::to_text(&marks, self.precision)
                }
            }
        }
    }
}

impl Stateful for Registers {
    fn rows(&self) -> usize {
        self.marks.rows()
    }
}

/// The number of values in each bucket that is not empty.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    buckets: Buckets,
    stage: Stage,
    counts: BTreeMap<BucketNumber, i64>,
}

impl Histogram {
    pub(super) fn new(buckets: Buckets, stage: Stage) -> Self {
        Self { buckets, stage, counts: BTreeMap::new() }
    }

    pub(super) fn add_integer(&mut self, integer: i64, count: i64) {
        if self.stage != Stage::Merge {
            self.count(self.buckets.place_of_integer(integer), count);
        }
    }

    pub(super) fn add(&mut self, value: &Value, count: i64) {
        match (self.stage, value) {
            (Stage::Merge, Value::Text(part)) => {
                for (place, each) in self.buckets.from_part(part).unwrap_or_default() {
                    self.count(place, each.wrapping_mul(count));
                }
            }
            (Stage::Merge, _) => {}
            (Stage::Whole | Stage::Part, value) => {
                if let Some(place) = self.buckets.place(value) {
                    self.count(place, count);
                }
            }
        }
    }

    /// Counts wrap around and back, because parts from other hosts may contain any numbers.
    fn count(&mut self, place: BucketNumber, count: i64) {
        let counted = self.counts.entry(place).or_default();
        *counted = counted.wrapping_add(count);
        if *counted == 0 {
            self.counts.remove(&place);
        }
    }

    pub(super) fn result(&self) -> Value {
        let counts = self.counts.iter().map(|(&place, &count)| (place, count));
        match self.stage {
            Stage::Whole | Stage::Merge => self.buckets.text(counts),
            Stage::Part => self.buckets.part(counts),
        }
    }
}

impl Stateful for Histogram {
    fn rows(&self) -> usize {
        self.counts.len()
    }
}

/// Values by their counts.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranking {
    counts: Bag<Value>,
    /// The same values, the most frequent first, and among equally frequent ones the smallest
    /// first.
    order: BTreeSet<(Reverse<i64>, Value)>,
}

impl Ranking {
    pub(super) fn add(&mut self, value: &Value, count: i64) {
        let (before, after) = self.counts.add(value.clone(), count);
        if before == after {
            return;
        }
        if before != 0 {
            self.order.remove(&(Reverse(before), value.clone()));
        }
        if after != 0 {
            self.order.insert((Reverse(after), value.clone()));
        }
    }

    pub(super) fn result(&self, function: AggregateFunction) -> Value {
        let AggregateFunction::MostFrequent(wanted) = function else { return Value::Null };
        let first = self.order.iter().take(wanted.into());
        frequent::to_text(first.map(|(Reverse(count), value)| (value, *count)))
    }
}

impl Stateful for Ranking {
    fn rows(&self) -> usize {
        self.order.len()
    }
}

#[cfg(test)]
mod tests {
    use fathom_cql::aggregate::aggregate_values;
    use fathom_cql::generate::Generator;
    use fathom_cql::plan::Aggregate;

    use super::super::state::AggregateState;
    use super::*;

    fn functions(precision: Precision) -> [AggregateFunction; 5] {
        use AggregateFunction as Of;
        [
            Of::ApproximateDistinct(precision, Stage::Whole),
            Of::ApproximateDistinct(precision, Stage::Part),
            Of::Histogram(Buckets::PowersOfTwo, Stage::Whole),
            Of::Histogram(Buckets::PowersOfTwo, Stage::Part),
            Of::MostFrequent(5),
        ]
    }

    fn state(function: AggregateFunction) -> (Aggregate, AggregateState) {
        let aggregate = Aggregate { function, argument: None, distinct: false };
        let state = AggregateState::new(&aggregate);
        (aggregate, state)
    }

    #[test]
    fn results_follow_removed_values() {
        for bits in [4, 6, 11, 16] {
            let precision = Precision::new(bits).unwrap();
            for function in functions(precision) {
                let (aggregate, mut state) = state(function);
                let mut generator = Generator::new(bits.into());
                let mut values: Vec<Value> = Vec::new();
                for step in 0..6_000 {
                    // First more values are added than removed, then more are removed than added.
                    if values.is_empty() || generator.chance(if step < 3_000 { 70 } else { 30 }) {
                        let range = 1 << generator.below(12);
                        let value = Value::Integer(generator.below(range) as i64 - 40);
                        state.add(&value, 1);
                        values.push(value);
                    } else {
                        let removed = values.swap_remove(generator.below(values.len()));
                        state.add(&removed, -1);
                    }
                    if step % 50 == 0 {
                        let expected = aggregate_values(function, false, values.clone());
                        assert_eq!(state.result(&aggregate), expected, "{function:?}");
                    }
                }
                for value in values.drain(..) {
                    state.add(&value, -1);
                }
                assert_eq!(state.values(), 0);
                let expected = aggregate_values(function, false, values);
                assert_eq!(state.result(&aggregate), expected, "{function:?}");
            }
        }
    }

    #[test]
    fn sketches_have_bounded_state_and_the_state_of_top_k_is_reported() {
        let bits = 4;
        let [count, _, histogram, _, top] = functions(Precision::new(bits).unwrap());
        let held = [count, histogram, top].map(|function| {
            let (_, mut state) = state(function);
            let mut generator = Generator::new(9);
            for _ in 0..50_000 {
                state.add(&Value::Integer(generator.number() as i64), 1);
            }
            state.values()
        });
        assert!((100..=16 * (65 - 4)).contains(&held[0]), "{held:?}");
        assert!((20..=171).contains(&held[1]), "{held:?}");
        assert_eq!(held[2], 50_000);
    }

    /// Parts come from other hosts and may be any text.
    #[test]
    fn invalid_parts_do_no_harm_and_can_be_removed() {
        let precision = Precision::default();
        for function in [
            AggregateFunction::ApproximateDistinct(precision, Stage::Merge),
            AggregateFunction::Histogram(Buckets::PowersOfTwo, Stage::Merge),
        ] {
            let (aggregate, mut state) = state(function);
            let empty = state.result(&aggregate);
            let many = format!("1:{}", i64::MAX);
            let texts = ["", "1:1", &many, &many, "-85:7 85:1", "00F1", "00F2", "zzzz", "é"];
            for count in [3, -3] {
                for text in texts {
                    state.add(&Value::text(text), count);
                    state.result(&aggregate);
                }
                state.add_integer(7, count);
                state.add(&Value::Boolean(true), count);
                assert_eq!(state.values() > 0, count > 0, "{function:?}");
            }
            assert_eq!(state.result(&aggregate), empty);
        }
    }
}
