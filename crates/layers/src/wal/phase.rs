//! The phases of a log in use (docs/wal.md, "Phases"). What is decided by the fields of the state
//! is asserted here to be one of the known steps, so that no path leaves a failed or lost log by
//! itself.

use fathom_persistence::Phase as _;

use super::LogState;

/// What a log does with changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// It takes them.
    #[default]
    Serving,
    /// Its volume has failed. It rejects them and begins nothing, until it is recovered.
    Failed,
    /// It was recovered with content, and rejects them until all of that is home.
    Emptying,
    /// Acknowledged changes may be gone. It rejects them, and each flush fails, until the operator
    /// has confirmed that.
    Lost,
}

impl fathom_persistence::Phase for Phase {
    fn leads_to(self, next: Self) -> bool {
        use Phase::{Emptying, Failed, Lost, Serving};
        matches!(
            (self, next),
            (Serving, Failed | Lost)
                | (Failed, Serving | Emptying | Lost)
                | (Emptying, Serving | Failed)
                | (Lost, Serving)
        )
    }
}

impl LogState {
    /// The phase that the fields describe.
    fn described(&self) -> Phase {
        if self.recovery.lost.is_some() {
            Phase::Lost
        } else if self.failed.is_some() {
            Phase::Failed
        } else if self.recovery.emptied_after.is_some() {
            Phase::Emptying
        } else {
            Phase::Serving
        }
    }

    /// Called after each change of these fields.
    pub(super) fn has_moved(&mut self) {
        let next = self.described();
        self.recovery.phase.step(next);
    }
}
