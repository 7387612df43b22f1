//! Random plans and inputs, on which evaluators are compared.
//!
//! The same seed always gives the same case. Results must be the same to the bit in any order of
//! the rows, because sums of floats are exact. So some floats are so large or so small that a
//! rounded sum would lose others.

mod expressions;
mod inputs;
mod plans;
mod shrink;

use crate::catalog::{Catalog, StreamSchema};
use crate::oracle::{self, InputRow};
use crate::plan::Plan;
use crate::value::Type;

pub use shrink::shrink;

/// The most steps of the oracle for a case.
const STEPS_MAX: u64 = 30_000;

/// A plan and its inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The streams.
    pub catalog: Catalog,
    /// The plan.
    pub plan: Plan,
    /// The inputs in the order of arrival; times do not decrease.
    pub inputs: Vec<InputRow>,
    /// The end of the evaluation, inclusive; at or after the last input.
    pub until_ns: i64,
}

/// A random case; most have a result. Inputs are removed until the oracle evaluates the case within
/// its limit of steps.
pub fn case(seed: u64) -> Case {
    let mut generator = Generator::new(seed);
    let (first, has_result) = attempt(&mut generator);
    if has_result { first } else { attempt(&mut generator).0 }
}

/// A case, and whether it has a result.
fn attempt(generator: &mut Generator) -> (Case, bool) {
    let plan = generator.plan();
    let mut inputs = generator.inputs();
    let last = inputs.last().map_or(0, |input| input.time_ns);
    let until_ns = last + generator.below(30) as i64;
    loop {
        match oracle::run_within(&plan, &inputs, until_ns, STEPS_MAX) {
            None if !inputs.is_empty() => inputs.truncate(inputs.len() * 2 / 3),
            deltas => {
                let has_result = deltas.is_some_and(|deltas| !deltas.is_empty());
                return (Case { catalog: catalog(), plan, inputs, until_ns }, has_result);
            }
        }
    }
}

/// The streams of random cases.
pub fn catalog() -> Catalog {
    let first = [("K", Type::Integer), ("V", Type::Integer), ("F", Type::Float), ("T", Type::Text)];
    let second = [("K", Type::Integer), ("V", Type::Integer), ("T", Type::Text)];
    Catalog { streams: vec![StreamSchema::new("A", &first), StreamSchema::new("B", &second)] }
}

/// A source of random numbers (`SplitMix64`), and of random plans and inputs.
#[derive(Clone, Debug)]
pub struct Generator {
    state: u64,
}

impl Generator {
    /// A generator; the same seed always gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A random number.
    pub fn number(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.state;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^ (number >> 31)
    }

    /// A random number less than `limit`; 0 if `limit` is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.number() % limit.max(1) as u64) as usize
    }

    /// True with a probability of `percent` per cent.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// A random element of `things`.
    fn one_of<T: Clone>(&mut self, things: &[T]) -> T {
        things[self.below(things.len())].clone()
    }
}

#[cfg(test)]
mod tests;
