//! A predictor that learns the process of arrivals.

use super::Predictor;

/// The number of states.
const STATES: usize = 3;
/// How much of its weight the past keeps with each period.
const DECAY: f64 = 1.0 - 1.0 / 2000.0;
/// The mean lengths of the states before anything is known, in nanoseconds.
const MEANS_NS: [f64; STATES] = [1e6, 30e6, 1e9];
/// The longest wait, in nanoseconds.
const WAIT_MAX_NS: f64 = 60e9;

/// Requests are assumed to come from a process with hidden states, such as bursts and quiet times.
/// In each state, idle periods have an exponential distribution with a mean of its own; after each
/// period the state may change. The means and the probabilities of changes are learned.
///
/// The longer a period lasts, the likelier is a state with long periods. Work begins when the
/// probability of a request during the step is small enough.
#[derive(Clone, Debug)]
pub struct Arrivals {
    risk: f64,
    /// The weight and the sum of the lengths of each state's periods.
    weights: [f64; STATES],
    sums_ns: [f64; STATES],
    /// The weights of changes, from one state to another.
    changes: [[f64; STATES]; STATES],
    /// The probabilities of the states for the next period.
    next: [f64; STATES],
}

impl Arrivals {
    /// A step may begin if a request comes during it with at most the probability `risk`.
    pub fn new(risk: f64) -> Self {
        Self {
            risk,
            weights: [1.0; STATES],
            sums_ns: MEANS_NS,
            changes: [[1.0; STATES]; STATES],
            next: [1.0 / STATES as f64; STATES],
        }
    }

    fn mean_ns(&self, state: usize) -> f64 {
        (self.sums_ns[state] / self.weights[state]).max(1e3)
    }

    /// The probability that no request comes for `step_ns` after `idle_ns`.
    fn quiet(&self, idle_ns: f64, step_ns: f64) -> f64 {
        let (mut all, mut quiet) = (0.0, 0.0);
        for (state, probability) in self.next.iter().enumerate() {
            let mean_ns = self.mean_ns(state);
            let reached = probability * (-idle_ns / mean_ns).exp();
            all += reached;
            quiet += reached * (-step_ns / mean_ns).exp();
        }
        // Beyond all experience.
        if all <= f64::MIN_POSITIVE { 1.0 } else { quiet / all }
    }
}

impl Predictor for Arrivals {
    fn name(&self) -> String {
        format!("arrivals {}", self.risk)
    }

    fn ended(&mut self, length_ns: u64) {
        let length_ns = length_ns as f64;
        let before = self.next;
        let mut now = [0.0; STATES];
        for (state, probability) in now.iter_mut().enumerate() {
            let mean_ns = self.mean_ns(state);
            *probability = before[state] * (-length_ns / mean_ns).exp() / mean_ns;
        }
        let sum: f64 = now.iter().sum();
        if sum > f64::MIN_POSITIVE {
            for probability in &mut now {
                *probability /= sum;
            }
        } else {
            now = [0.0, 0.0, 1.0];
        }
        for (state, probability) in now.iter().enumerate() {
            self.weights[state] = self.weights[state] * DECAY + probability + 1e-6;
            self.sums_ns[state] =
                self.sums_ns[state] * DECAY + probability * length_ns + 1e-6 * MEANS_NS[state];
            for (from, earlier) in before.iter().enumerate() {
                let change = &mut self.changes[from][state];
                *change = *change * DECAY + earlier * probability;
            }
        }
        self.next = [0.0; STATES];
        for (from, probability) in now.iter().enumerate() {
            let sum: f64 = self.changes[from].iter().sum();
            for (state, change) in self.changes[from].iter().enumerate() {
                self.next[state] += probability * change / sum;
            }
        }
    }

    fn wait_ns(&self, idle_ns: u64, step_ns: u64) -> u64 {
        let (idle, step) = (idle_ns as f64, step_ns as f64);
        let wanted = 1.0 - self.risk;
        if self.quiet(idle, step) >= wanted {
            return 0;
        }
        // The probability grows with the time.
        let (mut low, mut high) = (0.0, 1e5);
        while self.quiet(idle + high, step) < wanted {
            (low, high) = (high, high * 2.0);
            if high > WAIT_MAX_NS {
                return WAIT_MAX_NS as u64;
            }
        }
        for _ in 0..20 {
            let middle = f64::midpoint(low, high);
            if self.quiet(idle + middle, step) < wanted {
                low = middle;
            } else {
                high = middle;
            }
        }
        high as u64 + 1
    }
}
