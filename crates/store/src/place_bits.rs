//! A bit for each place.

/// See the module.
pub(crate) struct PlaceBits(Vec<u64>);

impl PlaceBits {
    pub(crate) fn new(places: u64) -> Self {
        Self(vec![0; (places as usize).div_ceil(64)])
    }

    pub(crate) fn has(&self, place: u64) -> bool {
        self.0.get(place as usize / 64).is_some_and(|word| word >> (place % 64) & 1 == 1)
    }

    /// Sets a bit. Returns whether it was not set before; `None` if there is no such place.
    pub(crate) fn set(&mut self, place: u64) -> Option<bool> {
        let word = self.0.get_mut(place as usize / 64)?;
        let before = *word;
        *word |= 1 << (place % 64);
        Some(*word != before)
    }

    /// The bits that are set.
    pub(crate) fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}
