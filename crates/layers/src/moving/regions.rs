//! Which regions of a disk are to be copied: one bit for each.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most regions of a disk. So the bits of a disk take at most 8 MiB.
const COUNT_MAX: u64 = 1 << 26;
/// The smallest region, in bytes.
const SIZE_MIN: u64 = 4096;
const WORD_BITS: u64 = u64::BITS as u64;

/// The regions that differ, or may differ, from the target. Queues mark regions while one copier
/// takes them.
pub(super) struct Regions {
    /// The size of a region in bytes, a power of two.
    size: u64,
    /// The bytes of the disk.
    capacity: u64,
    words: Vec<AtomicU64>,
    /// The number of marked regions.
    marked: AtomicU64,
}

impl Regions {
    /// The regions of a disk of `capacity` bytes, all of them marked.
    pub(super) fn all(capacity: u64) -> Self {
        let size = capacity.div_ceil(COUNT_MAX).next_power_of_two().max(SIZE_MIN);
        let count = capacity.div_ceil(size);
        let word = |index: u64| match count - index * WORD_BITS {
            left if left >= WORD_BITS => u64::MAX,
            left => (1 << left) - 1,
        };
        let words = (0..count.div_ceil(WORD_BITS)).map(|index| AtomicU64::new(word(index)));
        Self { size, capacity, words: words.collect(), marked: AtomicU64::new(count) }
    }

    /// The bytes of the disk.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The bytes in marked regions. Exact while nobody marks or takes any.
    pub(super) fn marked_bytes(&self) -> u64 {
        (self.marked.load(Ordering::Acquire) * self.size).min(self.capacity)
    }

    /// The words of a range in bytes, each with the bits of the range in it.
    fn masks(&self, range: &Range<u64>) -> impl Iterator<Item = (usize, u64)> + use<> {
        let end = range.end.min(self.capacity);
        let regions = range.start / self.size..end.div_ceil(self.size);
        let words = regions.start / WORD_BITS..regions.end.div_ceil(WORD_BITS);
        let is_empty = range.start >= end;
        words.filter(move |_| !is_empty).map(move |word| {
            let first = word * WORD_BITS;
            let from = regions.start.max(first) - first;
            let to = regions.end.min(first + WORD_BITS) - first;
            (word as usize, (u64::MAX >> (WORD_BITS - (to - from))) << from)
        })
    }

    /// Marks the regions that a range in bytes touches.
    pub(super) fn mark(&self, range: &Range<u64>) {
        for (word, mask) in self.masks(range) {
            let before = self.words[word].fetch_or(mask, Ordering::AcqRel);
            let added = (mask & !before).count_ones();
            if added > 0 {
                self.marked.fetch_add(u64::from(added), Ordering::AcqRel);
            }
        }
    }

    /// Whether every region that a range in bytes touches is marked.
    pub(super) fn are_marked(&self, range: &Range<u64>) -> bool {
        self.masks(range)
            .all(|(word, mask)| self.words[word].load(Ordering::Acquire) & mask == mask)
    }

    /// Takes the first run of marked regions from byte `from` on, of at most `length_max` bytes, as
    /// a range in bytes. A change that completes after this call marks its regions again.
    pub(super) fn take(&self, from: u64, length_max: u64) -> Option<Range<u64>> {
        let start = self.find(from / self.size)?;
        let end = start.saturating_add((length_max / self.size).max(1));
        let mut at = start;
        while at < end {
            let (word, bit) = ((at / WORD_BITS) as usize, at % WORD_BITS);
            let Some(value) = self.words.get(word) else { break };
            let run = u64::from((value.load(Ordering::Acquire) >> bit).trailing_ones());
            let run = run.min(end - at);
            if run == 0 {
                break;
            }
            let mask = (u64::MAX >> (WORD_BITS - run)) << bit;
            // Only the copier takes regions, so those of the mask are marked.
            value.fetch_and(!mask, Ordering::AcqRel);
            self.marked.fetch_sub(run, Ordering::AcqRel);
            at += run;
            if bit + run < WORD_BITS {
                break;
            }
        }
        Some(start * self.size..(at * self.size).min(self.capacity))
    }

    /// The first marked region from `region` on.
    fn find(&self, region: u64) -> Option<u64> {
        let mut mask = u64::MAX << (region % WORD_BITS);
        let first = (region / WORD_BITS) as usize;
        for (index, word) in self.words.iter().enumerate().skip(first) {
            let marked = word.load(Ordering::Acquire) & mask;
            if marked != 0 {
                return Some(index as u64 * WORD_BITS + u64::from(marked.trailing_zeros()));
            }
            mask = u64::MAX;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_keep_the_bits_small() {
        for (capacity, size) in
            [(512, 4096), (256 << 30, 4096), (257 << 30, 8192), (16 << 40, 1 << 18)]
        {
            let regions = Regions { words: Vec::new(), ..Regions::all(capacity.min(1 << 20)) };
            assert_eq!(regions.size, SIZE_MIN);
            assert_eq!(capacity.div_ceil(COUNT_MAX).next_power_of_two().max(SIZE_MIN), size);
        }
        assert_eq!(Regions::all(0).take(0, u64::MAX), None);
    }

    /// Every operation against a plain list of bits.
    #[test]
    fn regions_are_as_in_a_plain_list() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let capacity = random.u64(1..3_000_000) / 512 * 512 + 512;
            let count = capacity.div_ceil(SIZE_MIN) as usize;
            let (regions, mut plain) = (Regions::all(capacity), vec![true; count]);
            assert_eq!(regions.marked_bytes(), capacity);
            for _ in 0..300 {
                let (start, length) = (random.u64(0..capacity), random.u64(1..100_000));
                let range = start..start + length;
                let touched = start / SIZE_MIN..(start + length).min(capacity).div_ceil(SIZE_MIN);
                let touched = touched.start as usize..touched.end as usize;
                assert_eq!(
                    regions.are_marked(&range),
                    plain[touched.clone()].iter().all(|bit| *bit)
                );
                if random.bool() && random.bool() {
                    regions.mark(&range);
                    plain[touched].fill(true);
                    continue;
                }
                let length_max = random.u64(1..2_000_000);
                let taken = regions.take(start, length_max);
                let first = (start / SIZE_MIN) as usize;
                let from = plain[first..].iter().position(|bit| *bit).map(|at| first + at);
                assert_eq!(taken.is_some(), from.is_some());
                let (Some(taken), Some(from)) = (taken, from) else { continue };
                let run = plain[from..].iter().take_while(|bit| **bit).count();
                let run = run.min((length_max / SIZE_MIN).max(1) as usize);
                let end = ((from + run) as u64 * SIZE_MIN).min(capacity);
                assert_eq!(taken, from as u64 * SIZE_MIN..end, "seed {seed}");
                plain[from..from + run].fill(false);
                let marked = plain.iter().filter(|bit| **bit).count() as u64;
                assert_eq!(regions.marked_bytes(), (marked * SIZE_MIN).min(capacity));
            }
        }
    }
}
