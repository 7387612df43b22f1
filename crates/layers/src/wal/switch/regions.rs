//! Which parts of the disk a scan of the log could still write to.
//!
//! After a crash, a scan shows the content of every record from the durable tail to the head again,
//! also of one that is at home or that a later record has replaced. So a change must not go home
//! past the log while any of these records has an entry in its range: the old content would
//! reappear. The map of the log is not sufficient, because it forgets content as soon as it is at
//! home.
//!
//! While the log works, a change that only touches a region of a record costs no more than another
//! way. A log that has failed rejects what it may have, so that then the
//! [places](Regions::overlap_records) of the records decide.
//!
//! The parts are counted, not listed: a range counts in the smallest regions of which it touches at
//! most [`SPAN_MAX`], so that a discard of a whole disk costs no more than a write. Larger regions
//! only make more changes take the way through the log.

use std::collections::{BTreeMap, VecDeque};
use std::ops::{Range, RangeInclusive};

use fathom_wal::Record;

/// The number of sizes of regions. Each is [`SPAN_MAX`] times as large as the one before.
const LEVELS: usize = 10;
/// The most regions in which a range counts.
const SPAN_MAX: u64 = 1 << SPAN_SHIFT;
const SPAN_SHIFT: u32 = 6;
/// The largest region covers everything that a log accepts.
const SHIFT_MAX: u32 = 62;

/// An entry of a record that a scan could find.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Kept {
    sequence: u64,
    range: Range<u64>,
}

/// The counts of ranges by region.
#[derive(Debug)]
pub(crate) struct Regions {
    /// The smallest size, as a power of two.
    shift: u32,
    /// For each size, the regions in which ranges count, by number.
    counts: [BTreeMap<u64, u64>; LEVELS],
    /// The entries of the records that a scan could find, in order of their sequence.
    kept: VecDeque<Kept>,
    /// Their ranges, merged, in the order of the disk; `None` if they are not known.
    places: Option<Vec<Range<u64>>>,
}

impl Regions {
    /// Counts of nothing. The smallest regions have 2^`shift` bytes.
    pub(crate) fn new(shift: u32) -> Self {
        Self { shift, counts: Default::default(), kept: VecDeque::new(), places: None }
    }

    /// The size of the regions number `level`, as a power of two.
    fn shift(&self, level: usize) -> u32 {
        (self.shift + level as u32 * SPAN_SHIFT).min(SHIFT_MAX)
    }

    /// The regions of the size number `level` that `range` touches. `range` must not be empty.
    fn touched(&self, level: usize, range: &Range<u64>) -> RangeInclusive<u64> {
        let shift = self.shift(level);
        range.start >> shift..=(range.end - 1) >> shift
    }

    /// The size of the regions in which `range` counts, by number.
    fn level(&self, range: &Range<u64>) -> usize {
        let is_short = |level: &usize| {
            let regions = self.touched(*level, range);
            regions.end() - regions.start() < SPAN_MAX
        };
        (0..LEVELS).find(is_short).unwrap_or(LEVELS - 1)
    }

    /// Whether a counted range may overlap `range`, which must not be empty.
    pub(crate) fn overlap(&self, range: &Range<u64>) -> bool {
        let mut levels = self.counts.iter().enumerate();
        levels.any(|(level, counts)| counts.range(self.touched(level, range)).next().is_some())
    }

    /// Counts `range`, which must not be empty.
    pub(crate) fn add(&mut self, range: &Range<u64>) {
        let level = self.level(range);
        for region in self.touched(level, range) {
            *self.counts[level].entry(region).or_default() += 1;
        }
    }

    /// Ends one [`add`](Self::add) of the same range.
    pub(crate) fn remove(&mut self, range: &Range<u64>) {
        let level = self.level(range);
        for region in self.touched(level, range) {
            if let Some(count) = self.counts[level].get_mut(&region) {
                *count -= 1;
                if *count == 0 {
                    self.counts[level].remove(&region);
                }
            }
        }
    }

    /// Whether an entry of a record that a scan could find overlaps `range`, which must not be
    /// empty. The first call after a change of the records sorts them.
    pub(crate) fn overlap_records(&mut self, range: &Range<u64>) -> bool {
        let kept = &self.kept;
        let places = self.places.get_or_insert_with(|| merged(kept));
        let after = places.partition_point(|place| place.start < range.end);
        after > 0 && places[after - 1].end > range.start
    }

    /// A scan could find `record` from now on. Records are added in order of their sequence.
    pub(crate) fn add_record(&mut self, record: &Record) {
        self.places = None;
        for entry in &record.entries {
            let range = entry.offset..entry.offset + entry.length;
            self.add(&range);
            self.kept.push_back(Kept { sequence: record.sequence, range });
        }
    }

    /// No scan finds the records before `tail` any more: the superblock with that tail is durable.
    /// Returns the number of their entries.
    pub(crate) fn drop_records(&mut self, tail: u64) -> u64 {
        let mut count = 0;
        while self.kept.front().is_some_and(|kept| kept.sequence < tail) {
            let Some(kept) = self.kept.pop_front() else { break };
            self.remove(&kept.range);
            count += 1;
        }
        if count > 0 {
            self.places = None;
        }
        count
    }

    /// Whether no range counts.
    pub(crate) fn is_empty(&self) -> bool {
        self.counts.iter().all(BTreeMap::is_empty)
    }
}

/// The ranges of entries, in order, without overlaps.
fn merged(kept: &VecDeque<Kept>) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = kept.iter().map(|kept| kept.range.clone()).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|range, last| {
        let is_merged = range.start <= last.end;
        if is_merged {
            last.end = last.end.max(range.end);
        }
        is_merged
    });
    ranges
}

#[cfg(test)]
mod tests {
    use fathom_wal::{Entry, EntryKind};

    use super::*;

    fn random_range(random: &mut fastrand::Rng) -> Range<u64> {
        let (length_bits, offset_bits) = (random.u32(0..46), random.u32(12..47));
        let length = random.u64(1..=1 << length_bits);
        let offset = random.u64(0..1 << offset_bits);
        offset..offset + length
    }

    fn record(sequence: u64, ranges: &[Range<u64>]) -> Record {
        let entry = |range: &Range<u64>| {
            let (offset, length) = (range.start, range.end - range.start);
            Entry { offset, length, kind: EntryKind::Discard }
        };
        let entries = ranges.iter().map(entry).collect();
        let (durable, age, time_ns) = (0, 0, 0);
        Record { epoch: 1, sequence, position: 0, length: 512, durable, age, time_ns, entries }
    }

    /// Whatever overlaps a live record or change is found, and nothing is found that lies more than
    /// a region away.
    #[test]
    fn counts_agree_with_a_list_of_ranges() {
        let mut random = fastrand::Rng::with_seed(1);
        let (mut found, mut free) = (0, 0);
        for _ in 0..200 {
            let mut regions = Regions::new(20);
            let (mut records, mut changes) = (VecDeque::new(), Vec::new());
            let mut sequence = 0;
            for _ in 0..60 {
                match random.u8(..6) {
                    0 | 1 => {
                        let ranges: Vec<_> =
                            (0..random.usize(0..4)).map(|_| random_range(&mut random)).collect();
                        regions.add_record(&record(sequence, &ranges));
                        records.push_back((sequence, ranges));
                        sequence += 1;
                    }
                    2 => {
                        let range = random_range(&mut random);
                        regions.add(&range);
                        changes.push(range);
                    }
                    3 if !changes.is_empty() => {
                        let range = changes.swap_remove(random.usize(..changes.len()));
                        regions.remove(&range);
                    }
                    _ => {
                        let tail = random.u64(0..=sequence);
                        let mut dropped = 0;
                        while records.front().is_some_and(|(sequence, _)| *sequence < tail) {
                            dropped += records.pop_front().unwrap().1.len() as u64;
                        }
                        assert_eq!(regions.drop_records(tail), dropped);
                    }
                }
                let range = random_range(&mut random);
                let live = || records.iter().flat_map(|(_, ranges)| ranges).chain(&changes);
                let meets = |other: &Range<u64>| other.start < range.end && range.start < other.end;
                // A range counts in regions that it touches at both of its ends.
                let near = |other: &Range<u64>| {
                    let region = 1 << regions.shift(regions.level(other));
                    let (start, end) = (other.start / region, (other.end - 1) / region);
                    start * region < range.end && range.start < (end + 1) * region
                };
                let is_found = regions.overlap(&range);
                assert!(is_found || !live().any(meets), "{range:?} overlaps a live range");
                assert_eq!(is_found, live().any(near), "{range:?}");
                let is_recorded = records.iter().flat_map(|(_, ranges)| ranges).any(meets);
                assert_eq!(regions.overlap_records(&range), is_recorded, "{range:?}");
                (found, free) = (found + u32::from(is_found), free + u32::from(!is_found));
            }
            regions.drop_records(u64::MAX);
            for change in &changes {
                regions.remove(change);
            }
            assert!(regions.is_empty());
        }
        assert!(found > 1000 && free > 1000, "{found} overlaps, {free} without");
    }

    /// A discard of the largest disk counts in few regions.
    #[test]
    fn a_range_counts_in_few_regions() {
        let mut regions = Regions::new(12);
        for end in [1, 1 << 20, 64 << 20, (64 << 20) + 1, 1 << 40, 1 << 62] {
            regions.add(&(0..end));
            let count: usize = regions.counts.iter().map(BTreeMap::len).sum();
            assert!(count <= 65, "{count} regions for {end} bytes");
            regions.remove(&(0..end));
            assert!(regions.is_empty());
        }
    }
}
