//! What is read of a guest's memory: recorded where the crate is built for that.

use crate::memory::GuestMemory;

/// The places of aligned words that were read, in order, each once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sites {
    /// All of them.
    pub all: Vec<u64>,
    /// Those that were not read at long stretches.
    pub structures: Vec<u64>,
}

impl Sites {
    fn new(ranges: &[(u64, u64)]) -> Self {
        let words = |length_max: u64| {
            let ranges = ranges.iter().filter(|(_, length)| *length <= length_max);
            let words =
                ranges.flat_map(|(address, length)| (address & !7..address + length).step_by(8));
            let mut words: Vec<u64> = words.collect();
            words.sort_unstable();
            words.dedup();
            words
        };
        Self { all: words(u64::MAX), structures: words(256) }
    }

    /// Adds those of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (own, more) in [(&mut self.all, &other.all), (&mut self.structures, &other.structures)]
        {
            own.extend(more);
            own.sort_unstable();
            own.dedup();
        }
    }
}

/// How many reads there have been on this thread.
#[cfg(any(test, feature = "recording"))]
pub(crate) fn count() -> u64 {
    crate::memory::recording::count()
}

/// Does `act` and returns what it read.
#[cfg(any(test, feature = "recording"))]
pub(crate) fn record<T>(_memory: &GuestMemory, act: impl FnOnce() -> T) -> (T, Sites) {
    let (result, ranges) = crate::memory::recording::record(act);
    let ranges: Vec<_> =
        ranges.into_iter().map(|(address, length)| (address, u64::from(length))).collect();
    (result, Sites::new(&ranges))
}

/// Nobody counts.
#[cfg(not(any(test, feature = "recording")))]
pub(crate) fn count() -> u64 {
    0
}

/// Does `act` and returns all of the memory.
#[cfg(not(any(test, feature = "recording")))]
pub(crate) fn record<T>(memory: &GuestMemory, act: impl FnOnce() -> T) -> (T, Sites) {
    let touched = memory.regions().iter().flat_map(|region| GuestMemory::touched(region, 0));
    let pages = touched.flat_map(|(start, end)| (start..end).step_by(256).map(|at| (at, 256)));
    (act(), Sites::new(&pages.collect::<Vec<_>>()))
}
