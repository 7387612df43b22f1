//! The index of fingerprints: where a block with a given fingerprint may be.
//!
//! The *fingerprint table* of the device has, for each place, the fingerprint of what was last
//! written there. It is a hint as a whole: a page that is lost, old or damaged costs a chance to
//! share a block, or a comparison in vain.
//!
//! Blocks that were written together are often found together. So memory has few pages of the
//! table, with the places of all of their fingerprints, and of all other pages only a sample: a
//! *hook* leads from a fingerprint to the page that has it. A hook that is hit brings its page into
//! memory, where the neighbours of the block are found. The fingerprints of a page become hooks
//! when it leaves memory, and hooks of a page that has changed meanwhile are dropped when they are
//! hit. While memory suffices, each fingerprint is a hook; each time the hooks become too many,
//! every second one is dropped (by a bit of the fingerprint, so that equal blocks stay equally
//! likely to be found).
//!
//! Sampled hooks that lead to pages of neighbours are those of *Sparse Indexing* (Lillibridge et
//! al., FAST 2009).

use std::collections::VecDeque;

use fathom_persistence::Identity;
use fathom_persistence::bytes::u64_at;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::fingerprint::{FINGERPRINT, Fingerprint};
use crate::layout::{FINGERPRINTS, Layout, PAYLOAD};
use crate::paged::{Payload, payload};

/// The fewest hooks for which there is room.
const HOOKS_MIN: u64 = 1 << 16;
/// The places of the pool for each hook for which there is room.
const PLACES_OF_HOOK: u64 = 64;
/// The bytes of memory that a page of the fingerprint table takes, with all tables, about.
pub const INDEX_PAGE_MEMORY: u64 = 20 << 10;
/// The bytes of memory that an entry takes in a table, about.
const ENTRY_MEMORY: usize = 24;
const HOOK_MEMORY: usize = 12;

/// The word of a place, while its page is read, whose block has no fingerprint. It is none of a
/// fingerprint.
const UNKNOWN: u64 = 1 << 63;

/// What the index knows of a fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// A block with this fingerprint was written to this place.
    Place(u64),
    /// This page of the table may say more, and is not in memory.
    Page(u32),
    /// The same, and it is being read.
    Loading(u32),
    Nothing,
}

/// A page of the table in memory: the bits of the fingerprint of each place, 0 for none.
struct IndexPage {
    words: Box<[u64; FINGERPRINTS]>,
    /// Whether the page is being read: what was set meanwhile is newer.
    is_loading: bool,
    is_dirty: bool,
    /// Whether it was used since the hand of the clock passed it.
    is_used: bool,
}

impl IndexPage {
    fn new(is_loading: bool) -> Self {
        Self { words: Box::new([0; FINGERPRINTS]), is_loading, is_dirty: false, is_used: true }
    }
}

/// See the module. Nothing here does I/O.
pub(crate) struct Index {
    /// The first block of the table on the device, and its pages in use.
    first: u64,
    count: u32,
    pages: HashMap<u32, IndexPage>,
    /// The pages in memory, in the order in which the hand of the clock passes them.
    clock: VecDeque<u32>,
    places: HashMap<Fingerprint, u64>,
    /// From the low bits of a fingerprint to a page.
    hooks: HashMap<u32, u32>,
    /// Fingerprints that have so many low bits of 0 are hooks.
    sampling: u32,
    pages_max: usize,
    hooks_max: usize,
    /// The page of the table that is read next to find its hooks.
    scanned: u32,
}

/// The fingerprints of page `index` of the table, from its bytes on the device; `None` if it is not
/// valid.
pub(crate) fn read_page(
    identity: Identity,
    index: u32,
    bytes: &[u8],
) -> Option<Box<[u64; FINGERPRINTS]>> {
    payload(identity, index, bytes).map(decode)
}

/// The fingerprints of the payload of a page.
fn decode(payload: &[u8]) -> Box<[u64; FINGERPRINTS]> {
    let mut words = Box::new([0; FINGERPRINTS]);
    for (index, word) in words.iter_mut().enumerate() {
        let bits = u64_at(payload, index * FINGERPRINT);
        *word = Fingerprint::from_bits(bits).map_or(0, Fingerprint::bits);
    }
    words
}

fn encode(words: &[u64; FINGERPRINTS]) -> Box<Payload> {
    let mut payload = Box::new([0; PAYLOAD]);
    for (target, word) in payload.chunks_exact_mut(FINGERPRINT).zip(words) {
        target.copy_from_slice(&word.to_le_bytes()[..FINGERPRINT]);
    }
    payload
}

impl Index {
    /// An empty index of a pool, with up to `pages_max` pages of the table in memory besides those
    /// that have changed.
    pub(crate) fn new(layout: &Layout, pages_max: usize) -> Self {
        let count = layout.places().div_ceil(FINGERPRINTS as u64);
        Self {
            first: layout.fingerprint_table(),
            count: (count as u32).min(layout.fingerprint_pages),
            pages: HashMap::new(),
            clock: VecDeque::new(),
            places: HashMap::new(),
            hooks: HashMap::new(),
            sampling: 0,
            pages_max,
            hooks_max: (layout.places() / PLACES_OF_HOOK).max(HOOKS_MIN) as usize,
            scanned: 0,
        }
    }

    /// The page with the fingerprint of a place, and its index in it.
    fn at(place: u64) -> (u32, usize) {
        ((place / FINGERPRINTS as u64) as u32, (place % FINGERPRINTS as u64) as usize)
    }

    /// The places that a page describes.
    pub(crate) fn places_of(page: u32) -> std::ops::Range<u64> {
        let first = u64::from(page) * FINGERPRINTS as u64;
        first..first + FINGERPRINTS as u64
    }

    /// The page that describes a place.
    pub(crate) fn page_of(place: u64) -> u32 {
        Self::at(place).0
    }

    /// The pages of the table.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// The bits of the fingerprint of a place, as far as memory has them.
    pub(crate) fn known(&self, place: u64) -> Option<u64> {
        let (page, index) = Self::at(place);
        let page = self.pages.get(&page)?;
        Some(page.words[index]).filter(|word| *word != 0 || !page.is_loading)
    }

    /// The block of a page on the device.
    pub(crate) fn block(&self, page: u32) -> u64 {
        self.first + u64::from(page)
    }

    pub(crate) fn look_up(&mut self, fingerprint: Fingerprint) -> Found {
        if let Some(place) = self.places.get(&fingerprint) {
            if let Some(page) = self.pages.get_mut(&Self::at(*place).0) {
                page.is_used = true;
            }
            return Found::Place(*place);
        }
        let Some(page) = self.hooks.get(&(fingerprint.bits() as u32)).copied() else {
            return Found::Nothing;
        };
        if !self.is_hook(fingerprint) {
            return Found::Nothing;
        }
        match self.pages.get(&page) {
            None => Found::Page(page),
            Some(found) if found.is_loading => Found::Loading(page),
            // The page does not have it any more.
            Some(_) => {
                self.hooks.remove(&(fingerprint.bits() as u32));
                Found::Nothing
            }
        }
    }

    /// The place does not have a block with this fingerprint.
    pub(crate) fn forget(&mut self, fingerprint: Fingerprint, place: u64) {
        self.remove_place(fingerprint, place);
        let (page, index) = Self::at(place);
        let page = self.pages.get_mut(&page);
        if let Some(page) = page.filter(|page| page.words[index] == fingerprint.bits()) {
            page.words[index] = 0;
            page.is_dirty = true;
        }
    }

    /// Whether a page is in memory, or is being read.
    pub(crate) fn has(&self, page: u32) -> bool {
        self.pages.contains_key(&page)
    }

    /// Makes room for a page, which is read if `is_loading`, and is empty otherwise.
    pub(crate) fn admit(&mut self, page: u32, is_loading: bool) {
        if page >= self.count || self.has(page) {
            return;
        }
        self.make_room();
        self.pages.insert(page, IndexPage::new(is_loading));
        self.clock.push_back(page);
    }

    /// Fingerprints will come into a page: it stays in memory until it is written.
    pub(crate) fn expect(&mut self, page: u32) {
        if let Some(page) = self.pages.get_mut(&page) {
            page.is_dirty = true;
        }
    }

    /// Drops pages that were not used for a while.
    fn make_room(&mut self) {
        for _ in 0..2 * self.clock.len() {
            if self.pages.len() < self.pages_max {
                return;
            }
            let Some(candidate) = self.clock.pop_front() else { return };
            let Some(page) = self.pages.get_mut(&candidate) else { continue };
            if page.is_loading || page.is_dirty || std::mem::take(&mut page.is_used) {
                self.clock.push_back(candidate);
                continue;
            }
            let Some(page) = self.pages.remove(&candidate) else { continue };
            for (place, word) in Self::places_of(candidate).zip(page.words.iter()) {
                let Some(fingerprint) = Fingerprint::from_bits(*word) else { continue };
                self.remove_place(fingerprint, place);
                self.add_hook(fingerprint, candidate);
            }
        }
    }

    /// A page has been read; `None` if it has no fingerprints, or is damaged. `is_used` is whether
    /// a place is in use.
    pub(crate) fn loaded(
        &mut self,
        page: u32,
        words: Option<&[u64; FINGERPRINTS]>,
        is_used: impl Fn(u64) -> bool,
    ) {
        let Some(found) = self.pages.get_mut(&page).filter(|found| found.is_loading) else {
            return;
        };
        found.is_loading = false;
        let none = [0; FINGERPRINTS];
        let words = words.unwrap_or(&none);
        for (place, (own, word)) in
            Self::places_of(page).zip(found.words.iter_mut().zip(words.iter()))
        {
            if *own == UNKNOWN {
                *own = 0;
                continue;
            }
            let Some(fingerprint) = Fingerprint::from_bits(*word) else { continue };
            if *own == 0 && is_used(place) {
                *own = *word;
                self.places.entry(fingerprint).or_insert(place);
            }
        }
    }

    /// Whether any fingerprint may be known.
    pub(crate) fn is_empty(&self) -> bool {
        self.hooks.is_empty() && self.pages.is_empty() && self.is_scanned()
    }

    /// A block with this fingerprint, or with one that nobody may know, has been written to a
    /// place, whose page was [admitted](Self::admit).
    pub(crate) fn set(&mut self, place: u64, fingerprint: Option<Fingerprint>) {
        let (number, index) = Self::at(place);
        let Some(page) = self.pages.get_mut(&number) else { return };
        // While the page is read, this is newer.
        let bits = fingerprint.map_or(if page.is_loading { UNKNOWN } else { 0 }, Fingerprint::bits);
        let old = std::mem::replace(&mut page.words[index], bits);
        (page.is_dirty, page.is_used) = (true, true);
        if let Some(old) = Fingerprint::from_bits(old).filter(|old| Some(*old) != fingerprint) {
            self.remove_place(old, place);
        }
        if let Some(fingerprint) = fingerprint {
            self.places.insert(fingerprint, place);
        }
    }

    /// A fingerprint does not lead to a place any more.
    fn remove_place(&mut self, fingerprint: Fingerprint, place: u64) {
        if let Entry::Occupied(entry) = self.places.entry(fingerprint) {
            if *entry.get() == place {
                entry.remove();
            }
        }
    }

    fn is_hook(&self, fingerprint: Fingerprint) -> bool {
        fingerprint.bits().trailing_zeros() >= self.sampling
    }

    fn add_hook(&mut self, fingerprint: Fingerprint, page: u32) {
        while self.hooks.len() >= self.hooks_max && self.sampling < u32::BITS {
            self.sampling += 1;
            let sampling = self.sampling;
            self.hooks.retain(|bits, _| bits.trailing_zeros() >= sampling);
        }
        if self.is_hook(fingerprint) {
            self.hooks.insert(fingerprint.bits() as u32, page);
        }
    }

    /// Takes the pages that have changed, to be written: each with its block and its index.
    pub(crate) fn freeze(&mut self) -> Vec<(u64, u32, Box<Payload>)> {
        let mut frozen = Vec::new();
        for (number, page) in &mut self.pages {
            if page.is_dirty && !page.is_loading {
                page.is_dirty = false;
                frozen.push((self.first + u64::from(*number), *number, encode(&page.words)));
            }
        }
        frozen.sort_unstable_by_key(|(block, ..)| *block);
        self.make_room();
        frozen
    }

    /// The next pages of the table that were not looked at since the opening, at most `count`.
    pub(crate) fn next_scan(&mut self, count: u32) -> std::ops::Range<u32> {
        let start = self.scanned;
        self.scanned = start.saturating_add(count).min(self.count);
        start..self.scanned
    }

    /// Whether all pages of the table have been looked at.
    pub(crate) fn is_scanned(&self) -> bool {
        self.scanned >= self.count
    }

    /// A page has been read as it was at the opening. Its fingerprints become hooks.
    pub(crate) fn scan(
        &mut self,
        page: u32,
        words: &[u64; FINGERPRINTS],
        is_used: impl Fn(u64) -> bool,
    ) {
        for (place, word) in Self::places_of(page).zip(words.iter()) {
            if let Some(fingerprint) = Fingerprint::from_bits(*word).filter(|_| is_used(place)) {
                self.add_hook(fingerprint, page);
            }
        }
        if self.pages.len() < self.pages_max && !self.has(page) {
            self.admit(page, true);
            self.loaded(page, Some(words), is_used);
        }
    }

    /// The bytes of memory that this takes, about.
    pub(crate) fn memory(&self) -> u64 {
        let pages = self.pages.len() * (FINGERPRINTS * size_of::<u64>() + 64);
        let tables = self.places.capacity() * ENTRY_MEMORY + self.hooks.capacity() * HOOK_MEMORY;
        (pages + tables) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(pages_max: usize) -> Index {
        Index::new(&Layout::new(64 << 20, 64 << 20, 64).unwrap(), pages_max)
    }

    fn fingerprint(number: u64) -> Fingerprint {
        Fingerprint::from_bits(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8).unwrap()
    }

    #[test]
    fn what_was_set_is_found_until_its_page_is_dropped_and_then_by_its_hook() {
        let mut index = index(2);
        for page in 0..4_u32 {
            index.admit(page, false);
            for place in Index::places_of(page).take(3) {
                index.set(place, Some(fingerprint(9 + place)));
            }
            index.freeze();
        }
        let last = 512 * 3 + 1;
        assert_eq!(index.look_up(fingerprint(9 + last)), Found::Place(last));
        assert_eq!(index.look_up(fingerprint(10)), Found::Page(0));
        index.admit(0, true);
        assert_eq!(index.look_up(fingerprint(10)), Found::Loading(0));
        // What is written while the page is read is newer; free places are not found.
        index.set(2, Some(fingerprint(7)));
        index.set(3, None);
        let mut words = Box::new([0; FINGERPRINTS]);
        (0..4).for_each(|place| words[place as usize] = fingerprint(9 + place).bits());
        index.loaded(0, Some(&words), |place| place != 0);
        assert_eq!(index.look_up(fingerprint(10)), Found::Place(1));
        assert_eq!(index.look_up(fingerprint(7)), Found::Place(2));
        assert_eq!(index.look_up(fingerprint(9)), Found::Nothing);
        assert_eq!(index.look_up(fingerprint(11)), Found::Nothing);
        assert_eq!(index.look_up(fingerprint(12)), Found::Nothing);
        index.forget(fingerprint(10), 1);
        assert_eq!(index.look_up(fingerprint(10)), Found::Nothing);
        let frozen = index.freeze();
        assert_eq!((frozen.len(), frozen[0].1), (1, 0));
        let again = decode(&frozen[0].2[..]);
        assert_eq!((again[1], again[2], again[3]), (0, fingerprint(7).bits(), 0));
    }

    #[test]
    fn hooks_are_sampled_when_there_are_too_many() {
        let mut index = index(1);
        let count = HOOKS_MIN * 3;
        for number in 1..=count {
            index.add_hook(fingerprint(number), 5);
            assert!(index.hooks.len() <= HOOKS_MIN as usize);
        }
        assert!(index.sampling >= 1 && index.hooks.len() > HOOKS_MIN as usize / 4);
        let found = (1..=count)
            .filter(|number| index.look_up(fingerprint(*number)) == Found::Page(5))
            .count();
        assert!(found >= index.hooks.len(), "{found}");
        assert!(index.memory() > 0 && !index.is_scanned());
    }

    #[test]
    fn a_scan_finds_the_hooks_of_all_pages() {
        let mut index = index(1);
        let all = index.next_scan(3).chain(index.next_scan(u32::MAX)).count();
        assert!(index.is_scanned() && all == index.count as usize);
        let words = |page: u32| {
            let mut words = Box::new([0; FINGERPRINTS]);
            words[9] = fingerprint(9 + u64::from(page)).bits();
            words
        };
        for page in 0..3 {
            index.scan(page, &words(page), |place| place != 512 + 9);
        }
        assert_eq!(index.look_up(fingerprint(9)), Found::Place(9));
        assert_eq!(index.look_up(fingerprint(10)), Found::Nothing);
        assert_eq!(index.look_up(fingerprint(11)), Found::Page(2));
    }
}
