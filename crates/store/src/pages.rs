//! The pages of all maps: the page table, the pages in memory, and which of them have changed.
//!
//! A page has 512 words. In a leaf each is a [`MapEntry`](crate::entry::MapEntry), in a page above
//! it the number of the page below. The page table has, for each number, where the page is on the
//! device, in up to two copies, its birth and its checksum. So a page that is written to a new
//! place keeps its number, and no page above it changes.
//!
//! Changed pages stay in memory until a checkpoint has written them.

use std::cell::Cell;
use std::sync::Arc;

use fathom_persistence::bytes::{put, u32_at, u64_at};

use crate::catalogue::{Epoch, PageId};
use crate::entry::MapEntry;
use crate::layout::{BLOCK_BYTES, TABLE_ENTRIES, TABLE_ENTRY};
use crate::paged::Paged;
use crate::rules::Rules;
use crate::scrub::PageMarks;

/// The fewest pages in memory: several requests have the pages that they need at the same time.
const CACHED_MIN: usize = 16;
/// The words of a page.
pub(crate) const WORDS: usize = 512;
/// A page of a map.
pub(crate) type Page = [u64; WORDS];

/// Why a map cannot be read or changed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// This page is not in memory.
    Missing(PageId),
    /// A map leads to a page or a block that does not exist.
    Damaged,
}

/// What the page table knows of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableEntry {
    /// The block on the device; 0 if no checkpoint has written the page yet.
    pub(crate) block: u64,
    /// The block of its second copy; 0 if there is none.
    pub(crate) copy: u64,
    /// The epoch in which it was made; 0 if there is no such page.
    pub(crate) birth: Epoch,
    /// The CRC-32C of its bytes.
    pub(crate) checksum: u32,
}

/// The bits of a word of the page table that have the block of a page. The others have the distance
/// to its second copy, with a sign; 0 if there is none.
const BLOCK_BITS: u32 = 36;

impl TableEntry {
    /// The blocks of a page and of its second copy, from their word.
    pub(crate) fn blocks_of(word: u64) -> (u64, u64) {
        let block = word & ((1 << BLOCK_BITS) - 1);
        let distance = word as i64 >> BLOCK_BITS;
        let copy = if distance == 0 { None } else { block.checked_add_signed(distance) };
        (block, copy.unwrap_or(0))
    }

    /// The word of both blocks.
    fn word(&self) -> u64 {
        let distance = if self.copy == 0 { 0 } else { self.copy.wrapping_sub(self.block) };
        self.block | distance << BLOCK_BITS
    }

    /// Whether the page table can name a copy of a page.
    pub(crate) fn can_name(block: u64, copy: u64) -> bool {
        block.abs_diff(copy) < 1 << (u64::BITS - BLOCK_BITS - 1)
    }

    /// The blocks of both copies, as far as they are there.
    pub(crate) fn blocks(self) -> impl Iterator<Item = u64> {
        [self.block, self.copy].into_iter().filter(|block| *block != 0)
    }
}

#[derive(Default)]
struct Slot {
    page: Option<Arc<Page>>,
    is_dirty: bool,
    /// Whether it was removed since the last checkpoint's instant.
    is_dead: bool,
    /// Whether a checkpoint writes it.
    is_written: bool,
    /// Whether it was used since the hand of the clock passed it.
    is_used: Cell<bool>,
}

/// See the module.
pub(crate) struct Pages {
    table: Paged,
    slots: Vec<Slot>,
    free: Vec<PageId>,
    /// Pages that nothing refers to. The checkpoint that is being written may.
    dead: Vec<PageId>,
    dirty: Vec<PageId>,
    dirty_count: usize,
    /// The pages that were made since the last checkpoint's instant.
    new_count: usize,
    cached: usize,
    /// The pages in memory that a checkpoint writes.
    written_count: usize,
    hand: usize,
    /// The most pages in memory besides those that have changed. If these counted, too, a path from
    /// a root to a leaf would have no room beside them.
    cached_max: usize,
    /// While a walk is in progress: the pages that were found, or made since.
    found: Option<Vec<bool>>,
    /// The pages of which a copy was made meanwhile, and their levels: a copy counts as found, but
    /// what it has from the original was perhaps not.
    copied: Vec<(PageId, u32)>,
    /// The copies of leaves that were made meanwhile.
    leaf_copies: Vec<PageId>,
    /// While a scrub is in progress: what it has seen.
    pub(crate) scrubbed: Option<PageMarks>,
    rules: Rules,
}

/// The bytes of a page.
pub(crate) fn to_bytes(page: &Page, bytes: &mut [u8]) {
    for (target, word) in bytes.chunks_exact_mut(8).zip(page) {
        target.copy_from_slice(&word.to_le_bytes());
    }
}

/// The page with these bytes.
pub(crate) fn from_bytes(bytes: &[u8]) -> Box<Page> {
    let mut page = Box::new([0; WORDS]);
    for (word, source) in page.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64_at(source, 0);
    }
    page
}

impl Pages {
    /// The pages of a pool with this page table, in which pages up to `count` (exclusive) may
    /// exist. Page 0 never does.
    pub(crate) fn new(table: Paged, count: PageId, cached_max: usize, rules: Rules) -> Self {
        let mut pages = Self {
            table,
            slots: Vec::new(),
            free: Vec::new(),
            dead: Vec::new(),
            dirty: Vec::new(),
            dirty_count: 0,
            new_count: 0,
            cached: 0,
            written_count: 0,
            hand: 0,
            cached_max: cached_max.max(CACHED_MIN),
            found: None,
            copied: Vec::new(),
            leaf_copies: Vec::new(),
            scrubbed: None,
            rules,
        };
        let count = u64::from(count.max(1)).min(pages.table_length()) as usize;
        pages.slots.resize_with(count, Slot::default);
        for id in (1..count as PageId).rev() {
            // One that no checkpoint has written belongs to a later, lost state.
            if pages.entry(id).block == 0 {
                pages.set_entry(id, TableEntry::default());
                pages.free.push(id);
            }
        }
        pages
    }

    fn table_length(&self) -> u64 {
        u64::from(self.table.count()) * TABLE_ENTRIES
    }

    /// One more than the highest page that may exist.
    pub(crate) fn count(&self) -> PageId {
        self.slots.len() as PageId
    }

    pub(crate) fn table(&mut self) -> &mut Paged {
        &mut self.table
    }

    fn at(id: PageId) -> (usize, usize) {
        let id = u64::from(id);
        ((id / TABLE_ENTRIES) as usize, (id % TABLE_ENTRIES) as usize * TABLE_ENTRY)
    }

    /// What the table has of a page.
    pub(crate) fn entry(&self, id: PageId) -> TableEntry {
        if id >= self.count() {
            return TableEntry::default();
        }
        let (page, at) = Self::at(id);
        let bytes = self.table.page(page);
        let (block, copy) = TableEntry::blocks_of(u64_at(bytes, at));
        let (birth, checksum) = (u32_at(bytes, at + 8), u32_at(bytes, at + 12));
        TableEntry { block, copy, birth, checksum }
    }

    /// The blocks of all pages on the device.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = u64> {
        (1..self.count()).flat_map(|id| self.entry(id).blocks())
    }

    fn set_entry(&mut self, id: PageId, entry: TableEntry) {
        if self.entry(id) == entry {
            return;
        }
        let (page, at) = Self::at(id);
        let bytes = self.table.change(page);
        put(&mut bytes[..], at, &entry.word().to_le_bytes());
        put(&mut bytes[..], at + 8, &entry.birth.to_le_bytes());
        put(&mut bytes[..], at + 12, &entry.checksum.to_le_bytes());
    }

    /// Whether a page was removed, and still has its entry of the table.
    pub(crate) fn is_dead(&self, id: PageId) -> bool {
        self.slots.get(id as usize).is_some_and(|slot| slot.is_dead)
    }

    /// Whether a branch with this floor has the page alone.
    pub(crate) fn is_own(&self, id: PageId, floor: Epoch) -> bool {
        self.entry(id).birth > floor
    }

    /// A page in memory.
    pub(crate) fn get(&self, id: PageId) -> Result<&Arc<Page>, Fault> {
        let slot = self.slots.get(id as usize).filter(|_| id != 0).ok_or(Fault::Damaged)?;
        slot.is_used.set(true);
        slot.page.as_ref().ok_or(Fault::Missing(id))
    }

    /// The entry of a leaf in memory.
    pub(crate) fn leaf_entry(page: &Page, index: usize) -> Result<MapEntry, Fault> {
        MapEntry::from_bits(page[index]).ok_or(Fault::Damaged)
    }

    /// The page below, at `index`; 0 if there is none.
    pub(crate) fn child(page: &Page, index: usize) -> Result<PageId, Fault> {
        PageId::try_from(page[index]).map_err(|_| Fault::Damaged)
    }

    /// A page in memory, to change.
    pub(crate) fn change(&mut self, id: PageId) -> Result<&mut Page, Fault> {
        let slot = self.slots.get_mut(id as usize).filter(|_| id != 0).ok_or(Fault::Damaged)?;
        let page = slot.page.as_mut().ok_or(Fault::Missing(id))?;
        if !slot.is_dirty {
            slot.is_dirty = true;
            self.dirty.push(id);
            self.dirty_count += 1;
        }
        Ok(Arc::make_mut(page))
    }

    /// Makes a page.
    fn add(&mut self, page: Box<Page>, birth: Epoch) -> Result<PageId, Fault> {
        let id = match self.free.pop() {
            Some(id) => id,
            None if u64::from(self.count()) < self.table_length() => {
                self.slots.push(Slot::default());
                self.count() - 1
            }
            None => return Err(Fault::Damaged),
        };
        self.find(id);
        if let Some(scrubbed) = self.scrubbed.as_mut().filter(|_| self.rules.forgets_scrubbed) {
            scrubbed.clear(id);
        }
        self.set_entry(id, TableEntry { birth, ..TableEntry::default() });
        if self.slots[id as usize].page.replace(Arc::from(page)).is_none() {
            self.cached += 1;
        }
        self.new_count += 1;
        self.change(id)?;
        Ok(id)
    }

    /// Makes an empty page.
    pub(crate) fn add_empty(&mut self, birth: Epoch) -> Result<PageId, Fault> {
        self.add(Box::new([0; WORDS]), birth)
    }

    /// Copies a page for a branch that shares it. Nothing in the copy is fresh.
    pub(crate) fn copy(&mut self, id: PageId, level: u32, birth: Epoch) -> Result<PageId, Fault> {
        let mut page = Box::new(**self.get(id)?);
        if self.found.is_some() && self.rules.walks_copied {
            self.copied.push((id, level));
        }
        if level == 0 && self.rules.copies_stale {
            for word in page.iter_mut() {
                *word = MapEntry::from_bits(*word).ok_or(Fault::Damaged)?.stale().bits();
            }
        }
        let copy = self.add(page, birth)?;
        if level == 0 && self.found.is_some() {
            self.leaf_copies.push(copy);
        }
        Ok(copy)
    }

    /// Whether as many pages can be made.
    pub(crate) fn has_numbers(&self, count: usize) -> bool {
        let left = self.table_length() - u64::from(self.count());
        self.free.len() as u64 + left >= count as u64
    }

    /// Nothing refers to a page any more.
    pub(crate) fn remove(&mut self, id: PageId) {
        let Some(slot) = self.slots.get_mut(id as usize) else { return };
        if std::mem::replace(&mut slot.is_dead, true) {
            return;
        }
        if slot.page.take().is_some() {
            self.cached -= 1;
        }
        if std::mem::take(&mut slot.is_dirty) {
            self.dirty_count -= 1;
            if self.entry(id).block == 0 {
                self.new_count = self.new_count.saturating_sub(1);
            }
        }
        if self.rules.keeps_removed {
            self.dead.push(id);
        } else {
            self.slots[id as usize].is_dead = false;
            self.set_entry(id, TableEntry::default());
            self.free.push(id);
        }
    }

    /// Takes the removed pages, of which the next checkpoint knows nothing. Returns their blocks.
    pub(crate) fn bury(&mut self) -> Vec<u64> {
        let dead = std::mem::take(&mut self.dead);
        let mut blocks = Vec::new();
        for id in dead {
            blocks.extend(self.entry(id).blocks());
            self.set_entry(id, TableEntry::default());
            self.slots[id as usize].is_dead = false;
            self.free.push(id);
        }
        blocks
    }

    /// A walk begins: only pages that are found or made until its end stay.
    pub(crate) fn begin_finding(&mut self) {
        self.found = Some(vec![false; self.slots.len()]);
    }

    /// A walk has found a page. Returns whether that is new.
    pub(crate) fn find(&mut self, id: PageId) -> bool {
        let Some(found) = &mut self.found else { return false };
        if found.len() <= id as usize {
            found.resize(id as usize + 1, false);
        }
        !std::mem::replace(&mut found[id as usize], true)
    }

    /// Takes the pages that were copied, for the walk.
    pub(crate) fn take_copied(&mut self) -> Vec<(PageId, u32)> {
        std::mem::take(&mut self.copied)
    }

    /// Takes the copies of leaves, for the walk.
    pub(crate) fn take_leaf_copies(&mut self) -> Vec<PageId> {
        std::mem::take(&mut self.leaf_copies)
    }

    /// A walk was given up.
    pub(crate) fn forget_found(&mut self) {
        self.found = None;
        self.copied.clear();
        self.leaf_copies.clear();
    }

    /// Whether a page has changed since the last checkpoint's instant.
    pub(crate) fn is_dirty(&self, id: PageId) -> bool {
        self.slots.get(id as usize).is_some_and(|slot| slot.is_dirty)
    }

    /// Whether a checkpoint writes a page now.
    pub(crate) fn is_written(&self, id: PageId) -> bool {
        self.slots.get(id as usize).is_some_and(|slot| slot.is_written)
    }

    /// A walk has ended: removes the pages that it has not found.
    pub(crate) fn sweep(&mut self) {
        let Some(found) = self.found.take() else { return };
        let dead: Vec<bool> = {
            let mut dead = vec![false; self.slots.len()];
            self.dead.iter().for_each(|id| dead[*id as usize] = true);
            dead
        };
        for id in 1..self.count() {
            let is_lost = !found.get(id as usize).copied().unwrap_or(false) && !dead[id as usize];
            if is_lost && self.entry(id).birth != 0 {
                self.remove(id);
            }
        }
    }

    /// The number of pages that were made since the last checkpoint's instant.
    pub(crate) fn new_count(&self) -> usize {
        self.new_count
    }

    /// The number of changed pages.
    pub(crate) fn dirty_count(&self) -> usize {
        self.dirty_count
    }

    /// Takes the changed pages, to be written.
    pub(crate) fn freeze(&mut self) -> Vec<(PageId, Arc<Page>)> {
        let mut ids = std::mem::take(&mut self.dirty);
        ids.sort_unstable();
        ids.dedup();
        let mut frozen = Vec::with_capacity(ids.len());
        for id in ids {
            let slot = &mut self.slots[id as usize];
            if let Some(page) = slot.page.as_ref().filter(|_| slot.is_dirty) {
                frozen.push((id, Arc::clone(page)));
                (slot.is_dirty, slot.is_written) = (false, true);
                self.written_count += 1;
            }
        }
        (self.dirty_count, self.new_count) = (0, 0);
        frozen
    }

    /// A checkpoint has written a page to this block, and its second copy to another one, if any.
    pub(crate) fn written(&mut self, id: PageId, (block, copy): (u64, u64), checksum: u32) {
        let slot = &mut self.slots[id as usize];
        self.written_count -= usize::from(std::mem::take(&mut slot.is_written));
        let entry = TableEntry { block, copy, checksum, ..self.entry(id) };
        self.set_entry(id, entry);
    }

    /// Takes a page that was read from the device, unless it has changed meanwhile.
    pub(crate) fn insert(&mut self, id: PageId, read: TableEntry, page: Box<Page>) {
        if self.entry(id) != read {
            return;
        }
        let Some(slot) = self.slots.get_mut(id as usize) else { return };
        if slot.page.is_none() && !slot.is_dead {
            slot.page = Some(Arc::from(page));
            slot.is_used.set(true);
            self.cached += 1;
            self.evict(id);
        }
    }

    /// Drops pages from memory that have not changed and were not used for the longest time, about,
    /// but not page `kept`.
    fn evict(&mut self, kept: PageId) {
        let mut steps = 2 * self.slots.len();
        // A page may count twice, if it has changed while a checkpoint writes it.
        let fixed = self.dirty_count + self.written_count;
        while self.cached > self.cached_max + fixed && steps > 0 {
            steps -= 1;
            self.hand = (self.hand + 1) % self.slots.len();
            let slot = &mut self.slots[self.hand];
            let is_kept = slot.is_dirty || slot.is_written || self.hand == kept as usize;
            if slot.page.is_none() || is_kept {
                continue;
            }
            if !slot.is_used.replace(false) {
                slot.page = None;
                self.cached -= 1;
            }
        }
    }

    /// The bytes of memory that this takes.
    pub(crate) fn memory(&self) -> u64 {
        let slots = self.slots.len() * size_of::<Slot>();
        let scrubbed = self.scrubbed.as_ref().map_or(0, PageMarks::memory);
        self.table.memory() + scrubbed + (slots + self.cached * (BLOCK_BYTES + 16)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(cached_max: usize) -> Pages {
        Pages::new(Paged::new(100, 2), 1, cached_max, Rules::default())
    }

    /// Writes all changed pages, as a checkpoint does.
    fn write(pages: &mut Pages) -> Vec<PageId> {
        let frozen = pages.freeze();
        for (id, _) in &frozen {
            pages.written(*id, (1000 + u64::from(*id), 0), 7);
        }
        frozen.into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn changed_pages_stay_in_memory_until_they_are_written() {
        let mut pages = pages(2);
        let ids: Vec<_> = (0..20).map(|_| pages.add_empty(1).unwrap()).collect();
        assert_eq!(ids, (1..=20).collect::<Vec<_>>());
        pages.evict(0);
        assert_eq!((pages.cached, pages.dirty_count()), (20, 20));
        assert_eq!(write(&mut pages), ids);
        pages.evict(0);
        assert_eq!(pages.cached, CACHED_MIN);
        let missing = ids.iter().find(|id| pages.get(**id).is_err()).copied().unwrap();
        assert_eq!(pages.get(missing).err(), Some(Fault::Missing(missing)));
        let read = pages.entry(missing);
        pages.insert(missing, TableEntry { block: 5, ..read }, Box::new([0; WORDS]));
        assert!(pages.get(missing).is_err(), "it was read from another place");
        pages.insert(missing, read, Box::new([0; WORDS]));
        assert!(pages.get(missing).is_ok());
        assert_eq!(pages.get(0).err(), Some(Fault::Damaged));
        assert_eq!(pages.get(99).err(), Some(Fault::Damaged));
    }

    #[test]
    fn a_page_that_a_checkpoint_has_does_not_change_with_the_one_in_memory() {
        let mut pages = pages(9);
        let id = pages.add_empty(1).unwrap();
        pages.change(id).unwrap()[0] = 1;
        let frozen = pages.freeze();
        pages.change(id).unwrap()[0] = 2;
        assert_eq!((frozen[0].1[0], pages.get(id).unwrap()[0]), (1, 2));
        assert_eq!(pages.dirty_count(), 1);
        pages.remove(id);
        assert_eq!((pages.dirty_count(), pages.freeze().len()), (0, 0));
        pages.written(id, (1234, 99), 7);
        assert_eq!(pages.entry(id).birth, 1, "the checkpoint has it");
        assert_eq!(pages.bury(), [1234, 99]);
        assert_eq!(pages.entry(id), TableEntry::default());
        assert_eq!(pages.add_empty(2).unwrap(), id);
    }

    #[test]
    fn nothing_is_fresh_in_a_copied_leaf() {
        let mut pages = pages(9);
        let id = pages.add_empty(1).unwrap();
        pages.change(id).unwrap()[3] = MapEntry::new(99, 5).fresh().bits();
        let copy = pages.copy(id, 0, 2).unwrap();
        assert_eq!(pages.get(copy).unwrap()[3], MapEntry::new(99, 5).bits());
        assert!(pages.is_own(copy, 1) && !pages.is_own(id, 1));
        pages.change(id).unwrap()[4] = 1 << 38;
        assert_eq!(pages.copy(id, 0, 2), Err(Fault::Damaged));
    }

    #[test]
    fn an_entry_names_both_copies() {
        let last = (1 << BLOCK_BITS) - 1;
        let far = 1 << 27;
        for (block, copy) in [(5, 0), (5, 9), (9, 5), (last, last - far + 1), (1, far), (0, 0)] {
            let entry = TableEntry { block, copy, ..TableEntry::default() };
            assert_eq!(TableEntry::blocks_of(entry.word()), (block, copy));
            assert!(copy == 0 || TableEntry::can_name(block, copy));
        }
        assert!(!TableEntry::can_name(1, far + 1) && !TableEntry::can_name(far + 1, 1));
        // Before the beginning of the device.
        assert_eq!(TableEntry::blocks_of(3 | u64::MAX << BLOCK_BITS << 3), (3, 0));
    }
}
