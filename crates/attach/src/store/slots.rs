//! Which places of the data area are taken: chunks of 64 KiB, each of which has slots of one size.
//!
//! It is known to one process at a time, and found anew from the index by the next one.

use std::collections::BTreeSet;

/// A chunk, in bytes: what is taken from, and given back to, the host's memory.
pub(super) const CHUNK: u64 = 64 << 10;
/// Places are counted in units of so many bytes, and the size of a slot is a multiple of it.
pub(super) const UNIT: u64 = 256;
const UNITS: u64 = CHUNK / UNIT;
/// The largest slot, in units.
const CLASS_MAX: usize = 17;
/// The longest content of a slot, in bytes.
pub(super) const SLOT_BYTES_MAX: usize = CLASS_MAX * UNIT as usize;

/// A chunk: the size of its slots, in units, and which are taken.
#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    /// 0 for a chunk that is not used.
    class: u8,
    taken: [u64; 4],
    count: u16,
}

impl Chunk {
    fn slots(self) -> u64 {
        UNITS / u64::from(self.class).max(1)
    }

    fn is_full(self) -> bool {
        u64::from(self.count) >= self.slots()
    }

    fn bit(slot: u64) -> (usize, u64) {
        ((slot / 64) as usize, 1 << (slot % 64))
    }

    fn set(&mut self, slot: u64, is_taken: bool) {
        let (word, bit) = Self::bit(slot);
        if is_taken {
            self.taken[word] |= bit;
            self.count += 1;
        } else {
            self.taken[word] &= !bit;
            self.count -= 1;
        }
    }

    fn has(self, slot: u64) -> bool {
        let (word, bit) = Self::bit(slot);
        self.taken[word] & bit != 0
    }

    fn first_free(self) -> Option<u64> {
        (0..self.slots()).find(|slot| !self.has(*slot))
    }
}

/// The slots of a data area.
#[derive(Debug, Default)]
pub(super) struct Slots {
    chunks: Vec<Chunk>,
    chunks_max: usize,
    /// Of each class, the chunks that have free slots.
    partial: [BTreeSet<usize>; CLASS_MAX + 1],
    /// The chunks below the end of `chunks` that are not used.
    free: BTreeSet<usize>,
    used: u64,
}

fn class_of(length: usize) -> Option<usize> {
    let class = length.div_ceil(UNIT as usize);
    (1..=CLASS_MAX).contains(&class).then_some(class)
}

impl Slots {
    /// An area of so many bytes in which nothing is taken.
    pub fn new(bytes: u64) -> Self {
        Self { chunks_max: (bytes / CHUNK) as usize, ..Self::default() }
    }

    /// The chunks in use.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Takes a slot for so many bytes. Returns its place in units. If it needs another chunk,
    /// `reserve` is called with it, and returns whether there is memory for it.
    pub fn take(&mut self, length: usize, reserve: impl FnOnce(usize) -> bool) -> Option<u64> {
        let class = class_of(length)?;
        let number = if let Some(number) = self.partial[class].first() {
            *number
        } else {
            let number = self.free.first().copied().unwrap_or(self.chunks.len());
            if number >= self.chunks_max || !reserve(number) {
                return None;
            }
            self.free.remove(&number);
            if number == self.chunks.len() {
                self.chunks.push(Chunk::default());
            }
            self.chunks[number] = Chunk { class: class as u8, ..Chunk::default() };
            self.partial[class].insert(number);
            self.used += 1;
            number
        };
        let chunk = &mut self.chunks[number];
        let slot = chunk.first_free()?;
        chunk.set(slot, true);
        if chunk.is_full() {
            self.partial[class].remove(&number);
        }
        Some(number as u64 * UNITS + slot * class as u64)
    }

    /// The chunk, slot and class of a place that could be that of so many bytes.
    fn locate(&self, place: u64, length: usize) -> Option<(usize, u64, usize)> {
        let class = class_of(length)?;
        let (number, unit) = (usize::try_from(place / UNITS).ok()?, place % UNITS);
        let slot = unit / class as u64;
        let is_one = unit % class as u64 == 0 && slot < UNITS / class as u64;
        (is_one && number < self.chunks_max).then_some((number, slot, class))
    }

    /// Takes the slot at a place, which an index says is in use. Returns false if it cannot be:
    /// another one is there.
    pub fn occupy(&mut self, place: u64, length: usize) -> bool {
        let Some((number, slot, class)) = self.locate(place, length) else { return false };
        if number >= self.chunks.len() {
            self.chunks.resize(number + 1, Chunk::default());
        }
        let chunk = &mut self.chunks[number];
        if chunk.class == 0 {
            chunk.class = class as u8;
            self.used += 1;
        }
        if usize::from(chunk.class) != class || chunk.has(slot) {
            return false;
        }
        chunk.set(slot, true);
        true
    }

    /// After all slots in use were occupied: finds what is free. Returns the ranges of chunks that
    /// are not used.
    pub fn settle(&mut self) -> Vec<std::ops::Range<usize>> {
        let mut unused: Vec<std::ops::Range<usize>> = Vec::new();
        for (number, chunk) in self.chunks.iter().enumerate() {
            if chunk.class == 0 {
                self.free.insert(number);
                match unused.last_mut() {
                    Some(last) if last.end == number => last.end += 1,
                    _ => unused.push(number..number + 1),
                }
            } else if !chunk.is_full() {
                self.partial[usize::from(chunk.class)].insert(number);
            }
        }
        unused.push(self.chunks.len()..self.chunks_max);
        unused.retain(|range| !range.is_empty());
        unused
    }

    /// Gives a slot back. Returns its chunk if that is not used any more.
    pub fn give(&mut self, place: u64, length: usize) -> Option<usize> {
        let (number, slot, class) = self.locate(place, length)?;
        let chunk = self.chunks.get_mut(number)?;
        if usize::from(chunk.class) != class || !chunk.has(slot) {
            return None;
        }
        chunk.set(slot, false);
        if chunk.count > 0 {
            self.partial[class].insert(number);
            return None;
        }
        *chunk = Chunk::default();
        self.partial[class].remove(&number);
        self.free.insert(number);
        self.used -= 1;
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// What is taken never overlaps, and an area that is found anew from what is taken behaves as
    /// the old one.
    #[test]
    fn slots_never_overlap_and_are_found_anew() {
        let mut random = fastrand::Rng::with_seed(4);
        for _ in 0..20 {
            let mut slots = Slots::new(40 * CHUNK);
            let mut taken: Vec<(u64, usize)> = Vec::new();
            let mut reserved = HashSet::new();
            for step in 0..4000 {
                if random.u8(..) < 150 || taken.is_empty() {
                    let length = random.usize(1..=SLOT_BYTES_MAX);
                    let place = slots.take(length, |chunk| reserved.insert(chunk));
                    let Some(place) = place else { continue };
                    let range =
                        |(place, length): (u64, usize)| place * UNIT..place * UNIT + length as u64;
                    let own = range((place, length));
                    assert!(own.end <= 40 * CHUNK);
                    assert!(reserved.contains(&((own.start / CHUNK) as usize)));
                    let overlaps = |other: &(u64, usize)| {
                        let other = range(*other);
                        other.start < own.end && own.start < other.end
                    };
                    assert!(!taken.iter().any(overlaps), "{own:?}");
                    taken.push((place, length));
                } else {
                    let (place, length) = taken.swap_remove(random.usize(..taken.len()));
                    if let Some(chunk) = slots.give(place, length) {
                        assert!(reserved.remove(&chunk));
                        let is_in =
                            |(place, _): &(u64, usize)| place * UNIT / CHUNK == chunk as u64;
                        assert!(!taken.iter().any(is_in), "a chunk in use is given back");
                    }
                }
                assert_eq!(slots.used(), reserved.len() as u64);
                if step % 500 == 499 {
                    let mut anew = Slots::new(40 * CHUNK);
                    assert!(taken.iter().all(|(place, length)| anew.occupy(*place, *length)));
                    let unused: usize = anew.settle().into_iter().map(|range| range.len()).sum();
                    assert_eq!((anew.used(), unused as u64), (slots.used(), 40 - slots.used()));
                    slots = anew;
                }
            }
        }
    }

    #[test]
    fn places_that_cannot_be_are_refused() {
        let mut slots = Slots::new(2 * CHUNK);
        assert!(slots.occupy(0, 300));
        assert!(!slots.occupy(0, 300), "twice");
        assert!(!slots.occupy(1, 300), "within another");
        assert!(!slots.occupy(6, 700), "of another size in the same chunk");
        assert!(!slots.occupy(2 * UNITS, 300), "behind the end");
        assert!(!slots.occupy(u64::MAX, 300) && !slots.occupy(0, 0) && !slots.occupy(0, 5000));
        assert!(!slots.occupy(UNITS + 252, 5 * 256), "a slot that would reach beyond its chunk");
        assert_eq!(slots.give(2, 300), None, "not taken");
        assert_eq!(slots.give(0, 300), Some(0));
        assert_eq!(slots.give(0, 300), None, "twice");
    }
}
