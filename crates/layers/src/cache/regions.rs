//! The regions of a disk in which changes have begun lately, as bits that are kept on the cache
//! volume.
//!
//! A change of a disk begins at home only when the bit of its region is durable. When a volume is
//! opened again, mappings in regions with a bit are dropped, because a crash may have kept the old
//! content in the cache and the new one at home, or the other way round. The bit of a region is
//! cleared when its changes are durable at home, and when all tables of the volume are durable that
//! show these changes.
//!
//! A change need not wait for the bit if a write-ahead log beneath has it first. The log brings it
//! home only when the bit is durable ([`ChangeNotes`](crate::ChangeNotes)); until then, an opening
//! finds the change in the log, and sets the bit.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::RangeInclusive;

use super::format::REGIONS_PER_PAGE;
use super::note::Notes;

const WORDS_PER_PAGE: usize = REGIONS_PER_PAGE as usize / 64;

/// A region with a bit.
#[derive(Clone, Copy, Debug, Default)]
struct Region {
    /// The changes in flight.
    changes: u32,
    /// The number of the flush of home that covers its last change.
    flush: u64,
    /// When its last change ended, in nanoseconds.
    ended_ns: u64,
    /// The number of the tables that show its last change.
    tables: u64,
    /// Whether it is in the order.
    is_queued: bool,
    /// Whether a change has failed: a crash may leave the content of before, or that of the change,
    /// so that the bit stays.
    is_uncertain: bool,
    /// Whether a change waits for this bit, or for others with this one. It needs all of them at
    /// once.
    is_awaited: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Regions {
    shift: u8,
    count: u64,
    /// The bits that the next pages will have, and those that are durable.
    wanted: Vec<u64>,
    durable: Vec<u64>,
    /// The regions with a wanted bit.
    active: HashMap<u32, Region>,
    /// The regions without changes in flight, about in the order in which their last changes ended.
    order: VecDeque<u32>,
    dirty: BTreeSet<u32>,
    /// The number of regions whose bits stay because of a failed change.
    uncertain: usize,
    /// The flushes of home begun, and the number up to which they have completed.
    flushes: u64,
    flushed: u64,
    /// The number of bits set so far. The pages with the bits up to the number `bits_durable` are
    /// durable, and the log beneath waits for those up to `bits_awaited`.
    bits: u64,
    bits_durable: u64,
    bits_awaited: u64,
    /// Whether a log beneath brings changes home only when their bits are durable, and whether the
    /// disk's page that names this log is durable. If both, changes do not wait for their bits.
    pub(super) has_log: bool,
    pub(super) is_log_noted: bool,
    /// Whether the mark of the disk's store has been removed, so that no start uses the disk's
    /// blocks: changes do not wait for their bits.
    pub(super) is_unmarked: bool,
    /// The notes of the store's modification time.
    pub(super) notes: Notes,
}

impl Regions {
    /// Regions of `1 << shift` bytes, whose bits are in `pages` pages.
    pub(super) fn new(shift: u8, pages: u32) -> Self {
        let words = pages as usize * WORDS_PER_PAGE;
        Self {
            shift,
            count: u64::from(pages) * REGIONS_PER_PAGE,
            wanted: vec![0; words],
            durable: vec![0; words],
            active: HashMap::new(),
            order: VecDeque::new(),
            dirty: BTreeSet::new(),
            uncertain: 0,
            flushes: 0,
            flushed: 0,
            bits: 0,
            bits_durable: 0,
            bits_awaited: 0,
            has_log: false,
            is_log_noted: false,
            is_unmarked: false,
            notes: Notes::default(),
        }
    }

    /// The least size of a region, as its binary logarithm, such that a disk of `capacity` bytes
    /// has at most as many regions as `pages` pages have bits, and at least `least`.
    pub(super) fn shift_for(capacity: u64, pages: u32, least: u8) -> u8 {
        let count = u64::from(pages) * REGIONS_PER_PAGE;
        (least..63).find(|shift| capacity >> shift < count).unwrap_or(63)
    }

    /// The regions of a range of the disk, in bytes. A disk that has grown has its end in the last
    /// one.
    fn range(&self, offset: u64, length: u64) -> RangeInclusive<u32> {
        let last = self.count - 1;
        let of = |byte: u64| (byte >> self.shift).min(last) as u32;
        of(offset)..=of(offset + length.max(1) - 1)
    }

    fn is_set(bits: &[u64], region: u32) -> bool {
        bits[region as usize / 64] >> (region % 64) & 1 == 1
    }

    /// Whether the region of a byte of the disk has a bit.
    pub(super) fn is_active(&self, offset: u64) -> bool {
        Self::is_set(&self.wanted, *self.range(offset, 1).start())
    }

    /// A change of a range begins, if the bits of its regions are durable, or a log has it first,
    /// or no start uses the disk's blocks. Otherwise they will be written, and the caller tries
    /// again.
    pub(super) fn begin(&mut self, offset: u64, length: u64, now_ns: u64) -> bool {
        let range = self.range(offset, length);
        let is_durable = range.clone().all(|region| Self::is_set(&self.durable, region));
        let begins = is_durable || self.has_log && self.is_log_noted || self.is_unmarked;
        for region in range {
            if !is_durable {
                self.set(region, now_ns);
            }
            if begins {
                let region = self.active.entry(region).or_default();
                region.changes += 1;
                region.is_awaited = false;
            } else if let Some(region) = self.active.get_mut(&region) {
                region.is_awaited = true;
            }
        }
        begins
    }

    /// Sets the bits of the regions of a range, in which the log has changes. The tables with the
    /// number `tables` have none of its blocks any more.
    pub(super) fn mark(&mut self, offset: u64, length: u64, now_ns: u64, tables: u64) {
        for region in self.range(offset, length) {
            self.set_until(region, now_ns, tables);
        }
    }

    /// Sets the bit of a region, which stays at least until the tables with the number `tables` are
    /// durable.
    fn set_until(&mut self, region: u32, now_ns: u64, tables: u64) {
        self.set(region, now_ns);
        if let Some(found) = self.active.get_mut(&region) {
            found.tables = found.tables.max(tables);
        }
    }

    fn set(&mut self, region: u32, now_ns: u64) {
        let (word, bit) = (region as usize / 64, 1 << (region % 64));
        if self.wanted[word] & bit == 0 {
            self.wanted[word] |= bit;
            self.dirty.insert((word / WORDS_PER_PAGE) as u32);
            self.bits += 1;
            // It is kept until a flush covers whatever was written before.
            let flush = self.flushes + 1;
            self.insert(region, Region { flush, ended_ns: now_ns, ..Region::default() });
        }
    }

    fn insert(&mut self, number: u32, region: Region) {
        self.active.insert(number, Region { is_queued: true, ..region });
        self.order.push_back(number);
    }

    /// Whether content of a range may replace older content in the slot that has it, which a table
    /// on the volume may show. A crash can lose a change that a log beneath has, and leave a part
    /// of its content in the slot: then the bit of the region has to be durable, so that the
    /// table's entry is dropped.
    pub(super) fn may_replace(&self, offset: u64, length: u64) -> bool {
        self.range(offset, length).all(|region| {
            !Self::is_set(&self.wanted, region) || Self::is_set(&self.durable, region)
        })
    }

    /// A change has ended. The tables with the number `tables` show it.
    pub(super) fn end(
        &mut self,
        offset: u64,
        length: u64,
        now_ns: u64,
        tables: u64,
        has_succeeded: bool,
    ) {
        let flush = self.flushes + 1;
        self.notes.changed(now_ns);
        for number in self.range(offset, length) {
            let Some(region) = self.active.get_mut(&number) else { continue };
            region.changes = region.changes.saturating_sub(1);
            (region.flush, region.ended_ns, region.tables) = (flush, now_ns, tables);
            if !has_succeeded && !std::mem::replace(&mut region.is_uncertain, true) {
                self.uncertain += 1;
            }
            if region.changes > 0 || region.is_uncertain {
                continue;
            }
            if !std::mem::replace(&mut region.is_queued, true) {
                self.order.push_back(number);
            }
        }
    }

    /// The region that has had no change for the longest time.
    fn oldest(&mut self) -> Option<(u32, Region)> {
        // A region with changes in flight is put into the order again at their end; of the others,
        // one with a later change moves to the end of the order once.
        for _ in 0..=self.order.len() {
            let number = *self.order.front()?;
            match self.active.get_mut(&number) {
                Some(region) if region.changes == 0 && !region.is_uncertain => {
                    return Some((number, *region));
                }
                Some(region) => region.is_queued = false,
                None => {}
            }
            self.order.pop_front();
        }
        None
    }

    /// A flush of home begins. Returns its number.
    pub(super) fn begin_flush(&mut self) -> u64 {
        self.flushes += 1;
        self.flushes
    }

    /// A flush of home has succeeded: it covers the changes that had ended when it began.
    pub(super) fn end_flush(&mut self, number: u64) {
        self.flushed = self.flushed.max(number);
    }

    /// Whether regions have had no change for `quiet_ns`, but wait for a flush of home.
    pub(super) fn needs_flush(&mut self, now_ns: u64, quiet_ns: u64) -> bool {
        let flushed = self.flushed;
        self.oldest().is_some_and(|(_, region)| {
            region.flush > flushed && now_ns >= region.ended_ns + quiet_ns
        })
    }

    /// Clears the bits of the regions that have had no change for `quiet_ns`, if their changes are
    /// durable at home and in the tables up to the number `tables`.
    pub(super) fn clear_quiet(&mut self, now_ns: u64, quiet_ns: u64, tables: u64) {
        for _ in 0..self.order.len() {
            let Some((number, region)) = self.oldest() else { return };
            let (word, bit) = (number as usize / 64, 1_u64 << (number % 64));
            let is_quiet = now_ns >= region.ended_ns + quiet_ns;
            if let Some(region) =
                self.active.get_mut(&number).filter(|it| is_quiet && it.is_awaited)
            {
                region.ended_ns = now_ns;
            }
            // A change may wait for a bit that is not durable yet.
            let is_awaited = region.is_awaited || self.durable[word] & bit == 0;
            if !is_quiet || is_awaited {
                self.order.rotate_left(1);
                continue;
            }
            if region.flush > self.flushed || region.tables > tables {
                return;
            }
            self.wanted[word] &= !bit;
            self.durable[word] &= !bit;
            self.dirty.insert((word / WORDS_PER_PAGE) as u32);
            self.active.remove(&number);
            self.order.pop_front();
            if self.active.is_empty() {
                // There may have been many.
                (self.active, self.order) = (HashMap::new(), VecDeque::new());
            }
        }
    }

    /// The number of regions with a bit.
    pub(super) fn active(&self) -> usize {
        self.active.len()
    }

    /// Whether there are bits that will be cleared.
    pub(super) fn has_clearable(&self) -> bool {
        self.active.len() > self.uncertain
    }

    /// The time at which the next region may have been quiet for `quiet_ns`; `None` without
    /// regions.
    pub(super) fn next_quiet_ns(&mut self, quiet_ns: u64) -> Option<u64> {
        self.oldest().map(|(_, region)| region.ended_ns + quiet_ns)
    }

    /// Whether pages have to be written.
    pub(super) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Takes the next page to write, counted within the disk, with its bits.
    pub(super) fn take_dirty(&mut self) -> Option<(u32, Vec<u64>)> {
        let page = self.dirty.pop_first()?;
        let at = page as usize * WORDS_PER_PAGE;
        Some((page, self.wanted[at..at + WORDS_PER_PAGE].to_vec()))
    }

    /// The number of the last bit.
    pub(super) fn bits(&self) -> u64 {
        self.bits
    }

    /// All pages with the bits up to `number` are durable.
    pub(super) fn bits_durable(&mut self, number: u64) {
        self.bits_durable = self.bits_durable.max(number);
    }

    /// Whether the bits up to `number` are durable.
    pub(super) fn are_durable(&self, number: u64) -> bool {
        self.bits_durable >= number
    }

    /// The log waits for the bits up to `number`. Returns whether that is new.
    pub(super) fn await_bits(&mut self, number: u64) -> bool {
        let is_new = self.bits_awaited < number;
        self.bits_awaited = number.max(self.bits_awaited);
        is_new
    }

    /// Whether the log waits for bits.
    pub(super) fn are_bits_awaited(&self) -> bool {
        self.bits_awaited > self.bits_durable
    }

    /// Marks a page as not written.
    pub(super) fn put_dirty(&mut self, page: u32) {
        self.dirty.insert(page);
    }

    /// A page with `bits` is durable. However long that took, the changes that wait for them get
    /// the time to begin.
    pub(super) fn page_durable(&mut self, page: u32, bits: &[u64], now_ns: u64) {
        let at = page as usize * WORDS_PER_PAGE;
        for (index, bits) in (at..).zip(bits) {
            // Bits may have been cleared meanwhile.
            let durable = bits & self.wanted[index];
            let mut new = durable & !self.durable[index];
            self.durable[index] = durable;
            while new != 0 {
                let number = index as u32 * 64 + new.trailing_zeros();
                if let Some(region) = self.active.get_mut(&number) {
                    region.ended_ns = region.ended_ns.max(now_ns);
                }
                new &= new - 1;
            }
        }
    }

    /// Takes over the bits of a page that the volume has, at the opening.
    pub(super) fn load(&mut self, page: u32, bits: &[u64], now_ns: u64) {
        let at = page as usize * WORDS_PER_PAGE;
        self.wanted[at..at + bits.len()].copy_from_slice(bits);
        self.durable[at..at + bits.len()].copy_from_slice(bits);
        for (index, word) in bits.iter().enumerate() {
            for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                let number = ((at + index) * 64 + bit) as u32;
                let flush = self.flushes + 1;
                let region = Region { flush, ended_ns: now_ns, tables: 1, ..Region::default() };
                self.insert(number, region);
            }
        }
    }

    /// Sets the bits of all regions, also of those beyond the end of the disk, which may have been
    /// longer. The tables with the number `tables` have none of its blocks any more.
    pub(super) fn load_all(&mut self, now_ns: u64, tables: u64) {
        for region in 0..self.count as u32 {
            self.set_until(region, now_ns, tables);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes all pages, and makes them durable.
    fn write(regions: &mut Regions) {
        while let Some((page, bits)) = regions.take_dirty() {
            regions.page_durable(page, &bits, 0);
        }
    }

    #[test]
    fn a_change_waits_for_the_bits_of_its_regions() {
        let mut regions = Regions::new(20, 1);
        assert!(!regions.begin(1 << 20, 2 << 20, 0));
        assert!(regions.is_active(1 << 20) && regions.is_active(3 << 20 - 1) && regions.is_dirty());
        assert!(!regions.begin(1 << 20, 1, 0), "the page is not durable");
        let (page, bits) = regions.take_dirty().unwrap();
        assert!(!regions.begin(5 << 20, 1, 0));
        regions.page_durable(page, &bits, 0);
        assert!(regions.begin((1 << 20) + 5, (2 << 20) - 5, 0));
        assert!(!regions.begin(5 << 20, 1, 0), "its bit came after the page");
        write(&mut regions);
        assert!(regions.begin(5 << 20, 1, 0) && !regions.is_dirty());
        assert!(!regions.begin(u64::MAX - 5, 1, 0), "the last region has everything beyond");
    }

    #[test]
    fn a_change_that_a_log_has_first_does_not_wait_but_its_bit_is_written() {
        let mut regions = Regions::new(20, 2);
        regions.has_log = true;
        assert!(!regions.begin(0, 512, 0), "a crash would leave no page that names the log");
        regions.is_log_noted = true;
        assert!(regions.begin(0, 512, 0) && regions.begin(5 << 20, 512, 0));
        let number = regions.bits();
        assert!(regions.is_active(0) && regions.is_dirty() && !regions.are_durable(number));
        assert!(regions.await_bits(number) && !regions.await_bits(number));
        // The bits are not cleared before they were durable.
        regions.end(0, 512, 0, 1, true);
        let flush = regions.begin_flush();
        regions.end_flush(flush);
        regions.clear_quiet(100, 0, 1);
        assert!(regions.is_active(0));
        let first = regions.bits();
        write(&mut regions);
        // A bit that came after the page was taken is not among those that it makes durable.
        assert!(regions.begin(9 << 20, 512, 0));
        regions.bits_durable(first);
        assert!(regions.are_durable(number) && !regions.are_bits_awaited());
        assert!(!regions.are_durable(regions.bits()));
        regions.clear_quiet(100, 0, 1);
        assert!(!regions.is_active(0) && regions.is_active(5 << 20));
        // It gets a new number when it is set again.
        let before = regions.bits();
        assert!(regions.begin(0, 512, 0) && regions.bits() > before);
        regions.has_log = false;
        assert!(!regions.begin(0, 512, 0), "its bit is not durable");
    }

    /// A writing takes longer than the time after which a region is quiet.
    #[test]
    fn a_change_gets_the_bits_of_all_its_regions_on_a_slow_volume() {
        let mut regions = Regions::new(20, 2);
        let (mut now_ns, quiet_ns) = (0, 5);
        let mut write_slowly = |regions: &mut Regions| {
            regions.clear_quiet(now_ns, quiet_ns, 1);
            write(regions);
            now_ns += 10;
            now_ns
        };
        // The change reaches from one region, whose bit is durable and quiet, into the next one.
        assert!(!regions.begin(0, 512, 0));
        write_slowly(&mut regions);
        let flush = regions.begin_flush();
        regions.end_flush(flush);
        let (begin, length) = ((1 << 20) - 512, 1024);
        assert!(!regions.begin(begin, length, 10));
        let now_ns = write_slowly(&mut regions);
        assert!(regions.begin(begin, length, now_ns));
        // Afterwards both become quiet.
        regions.end(begin, length, now_ns, 1, true);
        let flush = regions.begin_flush();
        regions.end_flush(flush);
        write_slowly(&mut regions);
        write_slowly(&mut regions);
        assert!(!regions.is_active(0) && !regions.is_active(1 << 20));
    }

    #[test]
    fn a_bit_is_cleared_when_its_changes_are_durable_everywhere() {
        let mut regions = Regions::new(20, 2);
        regions.begin(0, 512, 0);
        write(&mut regions);
        assert!(regions.begin(0, 512, 0));
        let number = regions.begin_flush();
        regions.end_flush(number);
        regions.clear_quiet(1000, 0, 10);
        assert_eq!(regions.active(), 1, "the change is in flight");
        let number = regions.begin_flush();
        regions.end(0, 512, 1000, 7, true);
        regions.end_flush(number);
        assert!(regions.needs_flush(1000, 0), "the flush began before the end");
        regions.clear_quiet(1000, 0, 7);
        assert_eq!(regions.active(), 1);
        let number = regions.begin_flush();
        regions.end_flush(number);
        assert!(!regions.needs_flush(5000, 0));
        regions.clear_quiet(1000, 0, 6);
        assert_eq!(regions.active(), 1, "the tables do not show the change");
        regions.clear_quiet(1000, 100, 7);
        assert_eq!(regions.active(), 1, "it is not quiet");
        assert_eq!(regions.next_quiet_ns(100), Some(1100));
        regions.clear_quiet(1100, 100, 7);
        assert!(regions.active() == 0 && regions.is_dirty());
        assert!(!regions.begin(0, 512, 0), "the bit has to be written again");
        write(&mut regions);
        assert!(regions.begin(0, 512, 0));
    }

    #[test]
    fn the_bit_of_a_failed_change_stays() {
        let mut regions = Regions::new(20, 1);
        regions.begin(0, 2 << 20, 0);
        write(&mut regions);
        assert!(regions.begin(0, 512, 0) && regions.begin(1 << 20, 512, 0));
        regions.end(0, 512, 1, 1, false);
        regions.end(1 << 20, 512, 1, 1, true);
        // A later change does not make the failed one certain.
        assert!(regions.begin(0, 512, 2));
        regions.end(0, 512, 3, 1, true);
        let number = regions.begin_flush();
        regions.end_flush(number);
        assert!(regions.has_clearable());
        regions.clear_quiet(1000, 0, 1);
        assert!(regions.active() == 1 && regions.is_active(0) && !regions.has_clearable());
        assert!(!regions.needs_flush(1000, 0) && regions.next_quiet_ns(0).is_none());
    }

    #[test]
    fn a_bit_that_became_durable_late_stays_for_the_changes_that_wait() {
        let mut regions = Regions::new(20, 1);
        assert!(!regions.begin(0, 512, 0));
        let (page, bits) = regions.take_dirty().unwrap();
        let number = regions.begin_flush();
        regions.end_flush(number);
        regions.page_durable(page, &bits, 5000);
        regions.clear_quiet(5000, 100, 0);
        assert!(regions.begin(0, 512, 5000), "it was quiet only because it was not durable");
    }

    #[test]
    fn a_cleared_bit_does_not_become_durable_late() {
        let mut regions = Regions::new(20, 1);
        regions.begin(0, 1, 0);
        write(&mut regions);
        assert!(regions.begin(0, 1, 0));
        regions.end(0, 1, 0, 0, true);
        // A page with the bit is in flight while the bit is cleared.
        regions.begin(1 << 20, 1, 0);
        let (page, bits) = regions.take_dirty().unwrap();
        let number = regions.begin_flush();
        regions.end_flush(number);
        regions.clear_quiet(0, 0, 0);
        regions.page_durable(page, &bits, 0);
        assert!(!regions.begin(0, 1, 0) && regions.begin(1 << 20, 1, 0));
    }

    #[test]
    fn the_bits_of_a_disk_without_blocks_are_kept_until_the_tables_show_it() {
        let mut regions = Regions::new(20, 1);
        regions.load_all(0, 501);
        let (page, bits) = regions.take_dirty().unwrap();
        assert!(bits.iter().all(|word| *word == u64::MAX), "the disk may have been longer");
        regions.page_durable(page, &bits, 0);
        let number = regions.begin_flush();
        regions.end_flush(number);
        regions.clear_quiet(1000, 0, 500);
        let count = REGIONS_PER_PAGE as usize;
        assert!(
            regions.is_active(0) && regions.active() == count,
            "older tables may have its blocks"
        );
        regions.clear_quiet(1000, 0, 501);
        assert_eq!(regions.active(), 0);
    }

    #[test]
    fn the_bits_of_changes_in_a_log_are_kept_until_the_tables_show_that_the_blocks_are_gone() {
        let mut regions = Regions::new(20, 1);
        regions.load(0, &[0b1], 0);
        regions.mark(0, 2 << 20, 0, 5);
        write(&mut regions);
        let number = regions.begin_flush();
        regions.end_flush(number);
        for tables in [0, 1, 4] {
            regions.clear_quiet(1000, 0, tables);
            assert_eq!(regions.active(), 2, "the tables {tables} may have their blocks");
        }
        regions.clear_quiet(1000, 0, 5);
        assert_eq!(regions.active(), 0);
    }

    #[test]
    fn bits_of_the_volume_are_kept_until_a_flush() {
        let mut regions = Regions::new(20, 1);
        regions.load(0, &[0b101], 50);
        assert!(
            regions.is_active(0) && !regions.is_active(1 << 20) && regions.begin(2 << 20, 1, 0)
        );
        regions.end(2 << 20, 1, 60, 1, true);
        regions.clear_quiet(1000, 0, 1);
        assert_eq!(regions.active(), 2);
        let number = regions.begin_flush();
        regions.end_flush(number);
        regions.clear_quiet(1000, 0, 1);
        assert_eq!(regions.active(), 0);
        assert_eq!(Regions::shift_for(1 << 40, 16, 20), 22);
        assert_eq!(Regions::shift_for(1 << 30, 16, 20), 20);
    }
}
