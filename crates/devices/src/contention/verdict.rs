//! What is reported of a disk.

use super::window::Times;

/// The state of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentionState {
    /// Too little is known of the time under a low load.
    #[default]
    Learning,
    /// The times are those under a low load, and will be.
    Calm,
    /// The model predicts a peak.
    Foreseen,
    /// The times exceed those under a low load.
    Contended,
}

impl ContentionState {
    /// Whether there is a peak, or one comes.
    pub fn is_peak(self) -> bool {
        matches!(self, Self::Foreseen | Self::Contended)
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Learning => "learning",
            Self::Calm => "calm",
            Self::Foreseen => "foreseen",
            Self::Contended => "contended",
        }
    }
}

/// What a verdict is based on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VerdictBasis {
    /// Predictions of the model, and what is observed.
    Model,
    /// Only what is observed: the model is bad, or knows too little.
    #[default]
    Observed,
}

/// The mean relative errors of predictions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Errors {
    /// Of the mean.
    pub mean: f64,
    /// Of the 90th percentile.
    pub p90: f64,
    /// The number of windows that were compared.
    pub windows: u64,
}

/// The verdict on a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Verdict {
    /// The state.
    pub state: ContentionState,
    /// What it is based on.
    pub source: VerdictBasis,
    /// The times that the model predicts with the headroom; `None` if it knows too little.
    pub predicted: Option<Times>,
    /// The times in the last window; `None` if too few requests completed.
    pub observed: Option<Times>,
    /// The average times under a low load; `None` if they are not known.
    pub low: Option<Times>,
    /// The deviation that predictions exceed in a peak, in nanoseconds: that under a low load, and
    /// a margin.
    pub bound_ns: u64,
    /// The same for what is observed.
    pub bound_observed_ns: u64,
    /// The errors of predictions without the headroom, each compared with the next window.
    pub errors: Errors,
    /// The sums of the errors of all windows, and their number.
    pub totals: Errors,
    /// The mean time of a request on an idle device, in nanoseconds; 0 if it is not known.
    pub service_ns: u64,
}

impl Verdict {
    /// By how much the deviation exceeds its bound, in nanoseconds: predicted, or observed if this
    /// is more or there is no model.
    pub fn excess_ns(&self) -> u64 {
        let over = |times: Option<Times>, low_ns: u64| {
            times.map_or(0, |times| times.deviation_ns().saturating_sub(low_ns))
        };
        let observed = over(self.observed, self.bound_observed_ns);
        match self.source {
            VerdictBasis::Model => over(self.predicted, self.bound_ns).max(observed),
            VerdictBasis::Observed => observed,
        }
    }
}
