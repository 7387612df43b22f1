//! The naive evaluator: the reference implementation of the meaning of plans.
//!
//! Every operator is a function from instants to bags of rows, with the set of instants at which
//! its value may change. The result consists of the values of the outermost function at these
//! instants, in order. No state is kept between instants. Only the rows of a stream that is made
//! from a relation are computed once and kept.
//!
//! Such rows also have an order of arrival, on which windows of rows depend. Within an instant they
//! arrive in the order of [`Value`]. Rows of a stream that were only filtered and projected keep
//! their order of arrival.
//!
//! [`Value`]: crate::value::Value

mod bag;
mod relations;
mod windows;

use std::cell::Cell;
use std::collections::BTreeSet;

use crate::ast::ToStream;
use crate::eval::{evaluate, is_true};
use crate::plan::{Output, Plan, Relation, Stream};
use crate::value::Row;
use bag::Bag;

/// An input row: a row of a stream, or an insertion or deletion of a given relation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputRow {
    /// The input, by its position in the catalogue.
    pub source: usize,
    /// The instant, in nanoseconds.
    pub time_ns: i64,
    /// The row.
    pub row: Row,
    /// The number of insertions of the row; negative for deletions. It is 1 for an event. A stream
    /// has no deletions.
    pub count: i64,
}

/// A change of the result.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Delta {
    /// The instant, in nanoseconds.
    pub time_ns: i64,
    /// The row.
    pub row: Row,
    /// The number of insertions of the row; negative for deletions. Never 0.
    pub count: i64,
}

/// The result of a plan up to an instant, inclusive: the net changes of a relation at each instant,
/// or the rows of a stream. There is one entry for each instant and row, in order.
///
/// The inputs are in the order of arrival; they are sorted by time first.
pub fn run(plan: &Plan, inputs: &[InputRow], until_ns: i64) -> Vec<Delta> {
    run_within(plan, inputs, until_ns, u64::MAX).unwrap_or_default()
}

/// Like [`run`], but returns `None` after `steps` steps. A step is a row that is made or a pair of
/// rows that is compared.
pub fn run_within(
    plan: &Plan,
    inputs: &[InputRow],
    until_ns: i64,
    steps: u64,
) -> Option<Vec<Delta>> {
    let oracle = Oracle::new(inputs, until_ns, steps);
    let deltas = oracle.output(&plan.output);
    (oracle.steps.get() > 0).then_some(deltas)
}

/// A row of a stream.
#[derive(Clone)]
struct Arrival {
    time: i64,
    row: Row,
}

/// A relation: a bag for each instant.
struct Changing<'a> {
    /// The only instants at which the bag may change.
    instants: BTreeSet<i64>,
    /// The bag at an instant.
    at: Box<dyn Fn(i64) -> Bag + 'a>,
}

struct Oracle {
    /// The inputs by time, up to `until`.
    inputs: Vec<InputRow>,
    until: i64,
    /// The remaining steps; at 0 the result is invalid.
    steps: Cell<u64>,
    /// Evaluate every instant from the first input on, to find instants that `Changing` lacks.
    every_instant: bool,
}

impl Oracle {
    fn new(inputs: &[InputRow], until: i64, steps: u64) -> Self {
        let mut inputs = inputs.to_vec();
        inputs.retain(|input| input.time_ns <= until);
        inputs.sort_by_key(|input| input.time_ns);
        Self { inputs, until, steps: Cell::new(steps), every_instant: false }
    }

    /// Counts steps; false if there have been too many.
    fn step(&self, count: usize) -> bool {
        self.steps.set(self.steps.get().saturating_sub(count as u64));
        self.steps.get() > 0
    }

    fn output(&self, output: &Output) -> Vec<Delta> {
        let mut deltas = Vec::new();
        match output {
            Output::Stream(stream) => {
                let mut arrivals = self.stream(stream);
                arrivals.sort_by(|a, b| (a.time, &a.row).cmp(&(b.time, &b.row)));
                for same in arrivals.chunk_by(|a, b| (a.time, &a.row) == (b.time, &b.row)) {
                    let Arrival { time, row } = same[0].clone();
                    deltas.push(Delta { time_ns: time, row, count: same.len() as i64 });
                }
            }
            Output::Relation(relation) => self.changes(relation, |time, before, now| {
                let (deleted, inserted) = (before.except_all(now), now.except_all(before));
                let deleted = deleted.counts().map(|(row, count)| (row, -count));
                let mut changes: Vec<_> = deleted.chain(inserted.counts()).collect();
                changes.sort();
                for (row, count) in changes {
                    deltas.push(Delta { time_ns: time, row, count });
                }
            }),
        }
        deltas
    }

    /// Calls `look` for each instant at which a relation changes, with its rows before and at the
    /// instant.
    fn changes(&self, relation: &Relation, mut look: impl FnMut(i64, &Bag, &Bag)) {
        let changing = self.relation(relation);
        let mut instants = changing.instants;
        if self.every_instant {
            let first = self.inputs.first().map_or(self.until, |input| input.time_ns);
            instants = (first..=self.until).collect();
        }
        let mut before = Bag::default();
        for instant in instants {
            let now = (changing.at)(instant);
            if now != before {
                look(instant, &before, &now);
            }
            before = now;
            if self.steps.get() == 0 {
                return;
            }
        }
    }

    /// All rows of a stream, in the order of their arrival.
    fn stream(&self, stream: &Stream) -> Vec<Arrival> {
        let mut arrivals = Vec::new();
        match stream {
            Stream::Source(source) => {
                for input in self.inputs.iter().filter(|input| input.source == *source) {
                    let arrival = Arrival { time: input.time_ns, row: input.row.clone() };
                    let count = usize::try_from(input.count).unwrap_or(0);
                    arrivals.extend(std::iter::repeat_n(arrival, count));
                }
            }
            Stream::Of(ToStream::Insertions, relation) if relation.only_grows() => {
                arrivals = self.passed_on(relation);
            }
            Stream::Of(to_stream, relation) => self.changes(relation, |time, before, now| {
                let rows = bag::to_stream(*to_stream, before, now);
                self.step(rows.len());
                arrivals.extend(rows.into_iter().map(|row| Arrival { time, row }));
            }),
        }
        arrivals
    }

    /// The rows of a relation that only grows, in the order of arrival of its stream.
    fn passed_on(&self, relation: &Relation) -> Vec<Arrival> {
        let mut arrivals = match relation {
            Relation::Window(_, stream) => self.stream(stream),
            Relation::Filter(of, _) | Relation::Project(of, _) => self.passed_on(of),
            _ => Vec::new(),
        };
        self.step(arrivals.len());
        match relation {
            Relation::Filter(_, predicate) => {
                arrivals.retain(|arrival| is_true(&evaluate(predicate, &arrival.row)));
            }
            Relation::Project(_, expressions) => {
                for arrival in &mut arrivals {
                    let values = expressions.iter().map(|each| evaluate(each, &arrival.row));
                    arrival.row = values.collect();
                }
            }
            _ => {}
        }
        arrivals
    }
}

#[cfg(test)]
mod tests;
