//! The reads of a guest's memory, recorded if the crate is built with recording.

use fathom_guest_memory::GuestMemory;

/// The addresses of the aligned words that were read, sorted and without duplicates.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sites {
    /// All words.
    pub all: Vec<u64>,
    /// The words that were not part of a long read.
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

    /// Adds the words of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (own, more) in [(&mut self.all, &other.all), (&mut self.structures, &other.structures)]
        {
            own.extend(more);
            own.sort_unstable();
            own.dedup();
        }
    }
}

/// The number of reads on this thread.
#[cfg(all(any(test, feature = "recording"), debug_assertions))]
pub(crate) fn count() -> u64 {
    fathom_guest_memory::recording::count()
}

/// Runs `act`. Returns its result and the words that it read.
#[cfg(all(any(test, feature = "recording"), debug_assertions))]
pub(crate) fn record<T>(_memory: &GuestMemory, act: impl FnOnce() -> T) -> (T, Sites) {
    let (result, ranges) = fathom_guest_memory::recording::record(act);
    let ranges: Vec<_> =
        ranges.into_iter().map(|(address, length)| (address, u64::from(length))).collect();
    (result, Sites::new(&ranges))
}

/// Without recording, the number of reads is unknown: 0.
#[cfg(not(all(any(test, feature = "recording"), debug_assertions)))]
pub(crate) fn count() -> u64 {
    0
}

/// Runs `act`. Without recording, returns its result and all words of the memory.
#[cfg(not(all(any(test, feature = "recording"), debug_assertions)))]
pub(crate) fn record<T>(memory: &GuestMemory, act: impl FnOnce() -> T) -> (T, Sites) {
    let touched = memory.regions().iter().flat_map(|region| region.touched(0));
    let pages = touched.flat_map(|(start, end)| (start..end).step_by(256).map(|at| (at, 256)));
    (act(), Sites::new(&pages.collect::<Vec<_>>()))
}
