//! Equal blocks are kept once: what the state has to do with that.
//!
//! A block that is to be written and is equal to one that is there becomes a *reference*. From the
//! decision on, the place of the other one is shared: it is not freed when the entry for which it
//! was written changes, but by a walk that finds that no entry has it. Until the reference is in
//! the map, it is *pinned*, so that no walk frees it either.

use std::ops::Range;

use crate::entry::MapEntry;
use crate::fingerprint::Fingerprint;
use crate::index::{Found, Index};
use crate::layout::FINGERPRINTS;
use crate::state::State;

impl State {
    /// Where a block with this fingerprint may be.
    pub(crate) fn find_equal(&mut self, fingerprint: Fingerprint) -> Found {
        let found = self.index.look_up(fingerprint);
        match found {
            Found::Place(place) if self.moved(place).is_some() => {
                let kept = self.moved(place).filter(|kept| self.may_refer_to(*kept));
                kept.map_or(Found::Nothing, Found::Place)
            }
            Found::Place(place) if !self.may_refer_to(place) => Found::Nothing,
            Found::Place(place) if !self.space.has_data(place) => {
                self.index.forget(fingerprint, place);
                Found::Nothing
            }
            Found::Place(_) | Found::Page(_) | Found::Loading(_) | Found::Nothing => found,
        }
    }

    /// Begins to read a page of the fingerprint table. Returns its block.
    pub(crate) fn load_fingerprints(&mut self, page: u32) -> u64 {
        self.index.admit(page, true);
        self.counts.fingerprint_reads += 1;
        self.index.block(page)
    }

    /// A page of the fingerprint table has been read; `None` if it has no content.
    pub(crate) fn fingerprints_loaded(&mut self, page: u32, words: Option<&[u64; FINGERPRINTS]>) {
        let Self { index, space, .. } = self;
        index.loaded(page, words, |place| space.has_data(place));
    }

    /// The next pages of the fingerprint table, at most `count`, that were not looked at since the
    /// opening and have fingerprints of places in use. None if there are no more.
    pub(crate) fn next_scan(&mut self, count: u32) -> Range<u32> {
        loop {
            let pages = self.index.next_scan(count);
            let places = Index::places_of(pages.start).start..Index::places_of(pages.end).start;
            if pages.is_empty() || self.space.is_any_used(places) {
                return pages;
            }
        }
    }

    /// A page of the fingerprint table has been read after the opening.
    pub(crate) fn fingerprints_scanned(&mut self, page: u32, words: &[u64; FINGERPRINTS]) {
        let Self { index, space, .. } = self;
        index.scan(page, words, |place| space.has_data(place));
    }

    /// Makes room for the fingerprints of blocks that are being written to these places. Returns
    /// the pages of the table that have to be [loaded](Self::load_fingerprints): the others have
    /// none.
    pub(crate) fn admit_fingerprints(&mut self, places: &[u64]) -> Vec<u32> {
        let mut loads = Vec::new();
        for place in places {
            let page = Index::page_of(*place);
            if loads.contains(&page) {
                continue;
            }
            if !self.index.has(page) && self.space.is_any_used(Index::places_of(page)) {
                loads.push(page);
                continue;
            }
            self.index.admit(page, false);
            self.index.expect(page);
        }
        loads
    }

    /// A block with this fingerprint, or with none, has been written to a place.
    pub(crate) fn note_fingerprint(&mut self, place: u64, fingerprint: Option<Fingerprint>) {
        if self.space.has_data(place) {
            self.index.set(place, fingerprint);
            self.unmerged += u64::from(fingerprint.is_some());
        }
    }

    /// Decides that a reference to a place will be made, which has to be
    /// [unpinned](Self::unpin) when that has been done, or was given up. Returns false if the place
    /// has no block of data, one that a walk will free, or one that
    /// relocations use.
    pub(crate) fn pin(&mut self, place: u64) -> bool {
        let is_moving = self.moved(place).is_some() || !self.may_refer_to(place);
        if is_moving || !self.space.has_data(place) {
            return false;
        }
        self.space.share(place);
        *self.pinned.entry(place).or_default() += 1;
        self.note_change();
        true
    }

    pub(crate) fn unpin(&mut self, places: &[u64]) {
        for place in places {
            if let Some(count) = self.pinned.get_mut(place) {
                *count -= 1;
                if *count == 0 {
                    self.pinned.remove(place);
                }
            }
        }
    }

    /// A walk has begun: it does not free what is pinned.
    pub(crate) fn mark_pinned(&mut self) {
        for place in self.pinned.keys() {
            self.space.mark(*place);
        }
    }

    /// The entry of a block of a volume, if its leaf is in memory.
    pub(crate) fn known_entry(&self, volume: u32, block: u64) -> Option<MapEntry> {
        let root = self.catalogue.volumes.get(&volume)?.root;
        let mut entries = Vec::new();
        let found = self.pages.look_up(root, block..block + 1, &mut entries, &mut Vec::new());
        found.ok().and_then(|()| entries.first().copied())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use fathom_persistence::Identity;

    use super::*;
    use crate::catalogue::Catalogue;
    use crate::layout::Layout;
    use crate::paged::Paged;
    use crate::pages::Pages;
    use crate::rules::Rules;
    use crate::seal::Key;
    use crate::space::Space;
    use crate::state::Parts;

    /// The state of a small, empty pool.
    pub(crate) fn state(rules: Rules) -> State {
        let layout = Layout::new(3 << 20, 3 << 20, 16).unwrap();
        let map = Paged::new(layout.space_map(), layout.space_pages);
        let table = Paged::new(layout.page_table(), layout.table_pages);
        State::new(Parts {
            identity: Identity(*b"identity of test"),
            key: Key([7; 32]),
            catalogue: Catalogue::new(),
            space: Space::new(layout, map, rules),
            pages: Pages::new(table, 1, 16, rules),
            index: Index::new(&layout, 4),
            generation: 1,
            number: 0,
            sequence: 0,
            has_garbage: false,
            rules,
        })
    }

    #[test]
    fn a_walk_frees_what_is_shared_only_if_it_is_not_pinned() {
        for pins_references in [true, false] {
            let mut state = state(Rules { pins_references, ..Rules::default() });
            state.space.take(5);
            assert!(state.pin(5) && !state.pin(6) && state.space.is_shared(5));
            assert!(state.begin_walk() && state.end_walk());
            assert_eq!(state.space.is_used(5), pins_references);
            state.unpin(&[5]);
            assert!(state.begin_walk() && state.end_walk());
            assert!(!state.space.is_used(5) && !state.space.is_shared(5));
        }
    }

    #[test]
    fn what_is_free_is_not_found() {
        let mut state = state(Rules::default());
        let fingerprint = Fingerprint::from_bits(77).unwrap();
        assert_eq!(state.admit_fingerprints(&[3]), Vec::<u32>::new());
        state.note_fingerprint(3, Some(fingerprint));
        assert_eq!(state.find_equal(fingerprint), Found::Nothing);
        state.space.take(3);
        state.note_fingerprint(3, Some(fingerprint));
        assert_eq!(state.find_equal(fingerprint), Found::Place(3));
        state.space.free(3);
        assert_eq!(state.find_equal(fingerprint), Found::Nothing);
        state.space.take(3);
        assert_eq!(state.find_equal(fingerprint), Found::Nothing, "what it has is not known");
    }
}
