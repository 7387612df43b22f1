//! Predictions of how long a device stays idle.
//!
//! A [`Predictor`] learns the lengths of past idle periods, and decides whether a step of
//! background work may begin in the current one. `bench/idle` compares all of them;
//! [`default_predictor`] is the best of them.

mod arrivals;
mod simple;
mod survival;

pub use arrivals::Arrivals;
pub use simple::{Fixed, MovingAverage, Quantile};
pub use survival::{Quietest, Survival};

/// Decides when background work may begin.
pub trait Predictor: Send {
    /// Its name in tables.
    fn name(&self) -> String;

    /// An idle period has ended after `length_ns` because a request came.
    fn ended(&mut self, length_ns: u64);

    /// How long to wait before a step that takes `step_ns` begins, if the device has been idle for
    /// `idle_ns` and stays idle; 0 means that the step may begin now. At the end of the wait the
    /// caller asks again.
    fn wait_ns(&self, idle_ns: u64, step_ns: u64) -> u64;
}

/// The predictor that the daemon uses.
pub fn default_predictor() -> Box<dyn Predictor> {
    Box::new(Quietest::new(SHARE))
}

/// The share of the idle time that the daemon's predictor offers to background work. With more,
/// steps also begin in gaps within bursts, and each request of a burst waits for the step that met
/// the first one.
pub const SHARE: f64 = 0.7;

/// All predictors with their usual settings, for comparisons.
pub fn all_predictors() -> Vec<Box<dyn Predictor>> {
    const MS: u64 = 1_000_000;
    let mut all: Vec<Box<dyn Predictor>> = Vec::new();
    for timeout_ms in [0, 10, 50, 100, 200] {
        all.push(Box::new(Fixed::new(timeout_ms * MS)));
    }
    for factor in [0.5, 1.0, 2.0] {
        all.push(Box::new(MovingAverage::new(factor)));
    }
    for share in [0.8, 0.9, 0.95] {
        all.push(Box::new(Quantile::new(share)));
    }
    for share in [0.7, 0.75, 0.85, 0.95] {
        all.push(Box::new(Quietest::new(share)));
    }
    for risk in [0.02, 0.05, 0.1, 0.2] {
        all.push(Box::new(Survival::new(risk)));
    }
    for risk in [0.02, 0.05, 0.1, 0.2] {
        all.push(Box::new(Arrivals::new(risk)));
    }
    all
}

#[cfg(test)]
mod tests;
