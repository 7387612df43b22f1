//! Time, as an argument: a layer that reads no ambient clock can be replayed by seed.

use std::cell::Cell;
use std::rc::Rc;

use rustix::time::{ClockId, clock_gettime};

/// The source of a stack's time.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// The host's monotonic clock.
    #[default]
    System,
    /// A clock that stands still until it is set, in nanoseconds.
    Simulated(Rc<Cell<u64>>),
}

impl Clock {
    /// Nanoseconds since some fixed instant in the past.
    pub fn now_ns(&self) -> u64 {
        match self {
            Self::System => {
                let time = clock_gettime(ClockId::Monotonic);
                time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
            }
            Self::Simulated(time) => time.get(),
        }
    }

    /// Whether it is a simulated one.
    pub(crate) fn is_simulated(&self) -> bool {
        matches!(self, Self::Simulated(_))
    }
}

/// The clock of a stack within one round. [`now_ns`](Self::now_ns) always reads the clock;
/// [`round_ns`](Self::round_ns) reads it only if it has not been read in this round.
#[derive(Clone, Copy)]
pub(crate) struct Moment<'a> {
    pub(crate) clock: &'a Clock,
    /// The time at which the clock was last read in this round, in nanoseconds; 0 if it was not
    /// read yet.
    pub(crate) round_ns: &'a Cell<u64>,
}

impl Moment<'_> {
    pub(crate) fn now_ns(self) -> u64 {
        let now_ns = self.clock.now_ns();
        self.round_ns.set(now_ns);
        now_ns
    }

    pub(crate) fn round_ns(self) -> u64 {
        match self.round_ns.get() {
            0 => self.now_ns(),
            round_ns => round_ns,
        }
    }
}
