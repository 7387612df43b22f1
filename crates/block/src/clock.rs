//! Time, as an argument: a layer that reads no ambient clock can be replayed by seed.

use std::cell::Cell;
use std::rc::Rc;

/// Where a stack's time comes from.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// The host's monotonic clock.
    #[default]
    System,
    /// A clock that stands still until someone moves it, in nanoseconds.
    Simulated(Rc<Cell<u64>>),
}

impl Clock {
    /// Nanoseconds since some fixed instant in the past.
    pub fn now_ns(&self) -> u64 {
        match self {
            Self::System => {
                let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                // SAFETY: the call fills the structure it is given and fails for no known clock.
                unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
                time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
            }
            Self::Simulated(time) => time.get(),
        }
    }
}
