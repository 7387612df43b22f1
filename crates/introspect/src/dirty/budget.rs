//! The effort of one count.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

/// The steps after which the time is looked at.
const TIME_INTERVAL: u64 = 1024;

/// The steps that are left for one count, and its end. All lists and counters of a guest, and all
/// tries, share one: each of them has a limit of its own, but a guest chooses how many there are.
#[derive(Debug)]
pub(crate) struct Budget {
    left: Cell<u64>,
    end: Instant,
    /// The lines that are read, if they are to be remembered.
    lines: Option<RefCell<Vec<u64>>>,
}

impl Budget {
    /// A budget of so many steps, for a count that takes at most `time`.
    pub(crate) fn new(steps: u64, time: Duration) -> Self {
        Self { left: Cell::new(steps), end: Instant::now() + time, lines: None }
    }

    /// Lets the count remember the lines that it reads.
    pub(super) fn remember(&mut self) {
        self.lines = Some(RefCell::default());
    }

    /// Whether the lines are to be remembered.
    pub(super) fn remembers(&self) -> bool {
        self.lines.is_some()
    }

    /// Calls `record` with the lines, if they are to be remembered.
    pub(super) fn record(&self, record: impl FnOnce(&mut Vec<u64>)) {
        if let Some(lines) = &self.lines {
            record(&mut lines.borrow_mut());
        }
    }

    /// The remembered lines.
    pub(super) fn into_lines(self) -> Option<Vec<u64>> {
        self.lines.map(RefCell::into_inner)
    }

    /// Uses up steps. `None` from then on if there are not enough, or if the time is over.
    pub(crate) fn take(&self, steps: u64) -> Option<()> {
        let before = self.left.get();
        let after = before.checked_sub(steps).filter(|after| {
            before / TIME_INTERVAL == after / TIME_INTERVAL || Instant::now() < self.end
        });
        self.left.set(after.unwrap_or(0));
        after.map(drop)
    }

    /// Whether no step is left.
    pub(super) fn is_over(&self) -> bool {
        self.left.get() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_time_end() {
        let budget = Budget::new(3, Duration::from_secs(3600));
        assert_eq!((budget.take(2), budget.is_over()), (Some(()), false));
        assert_eq!((budget.take(2), budget.is_over()), (None, true));
        assert_eq!(budget.take(1), None);
        let late = Budget::new(1 << 40, Duration::ZERO);
        let steps = (0..=TIME_INTERVAL).filter(|_| late.take(1).is_some()).count() as u64;
        assert!(steps < TIME_INTERVAL && late.is_over(), "{steps} steps");
    }
}
