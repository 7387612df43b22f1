//! The places of second copies of pages of maps.
//!
//! A copy lies at least [`DISTANCE_MIN`] segments from the page, so that what damages one part of a
//! device does not damage both. Copies are written while there is place: a pool that is nearly full
//! keeps no places for them, and a page then has one copy until it is written anew.

use super::{SegmentState, Space};
use crate::pages::TableEntry;
use crate::reserve::{Chosen, left_of};

/// The fewest segments from a page to its copy.
const DISTANCE_MIN: u32 = 2;
/// The free places that a checkpoint leaves to others, in those that pages of maps need.
const LEFT_SHARE: usize = 4;

impl Space {
    fn is_far(&self, one: u64, other: u64) -> bool {
        let segments = self.layout.segment(one).abs_diff(self.layout.segment(other));
        segments >= DISTANCE_MIN
            && TableEntry::can_name(self.layout.block(one), self.layout.block(other))
    }

    /// Places for the copies of pages at these places, as far as there are some that are far away.
    pub(crate) fn place_copies(&mut self, places: &[u64]) -> Vec<Option<u64>> {
        if !self.rules.copies_pages {
            return vec![None; places.len()];
        }
        let Self { copies, states, layout, .. } = self;
        let count = copies.left().min(places.len());
        let free = Self::take_in_order(copies, states, layout, count);
        let mut free = free.into_iter().peekable();
        // Both are in the order of their use. What is too near is used for none.
        let copy_of = |place: &u64| free.next_if(|copy| self.is_far(*place, *copy));
        places.iter().map(copy_of).collect()
    }

    /// Whether a segment is near one from which the next pages come.
    fn near_pages(&self) -> Vec<bool> {
        let segments = self.layout.segments as usize;
        let mut near = vec![false; segments];
        let pages = self.pages.open.iter().map(|open| open.segment).chain(self.pages.segments());
        for segment in pages.map(|segment| segment as usize) {
            let distance = DISTANCE_MIN as usize - 1;
            let end = (segment + distance + 1).min(segments);
            near[segment.saturating_sub(distance)..end].fill(true);
        }
        near
    }

    /// Gives the segments back that wait for copies. They are chosen again if there is place.
    pub(super) fn give_back_copies(&mut self) {
        for chosen in self.copies.waiting.drain(..) {
            self.states[chosen.segment as usize] = SegmentState::Idle;
        }
    }

    /// The free places of the segments that wait for copies.
    pub(super) fn lent_to_copies(&self) -> u64 {
        self.copies.waiting.iter().map(|chosen| chosen.left() as u64).sum()
    }

    /// Chooses segments for the copies of the pages of the next checkpoints. `idle` places are free
    /// in the candidates, of which those that are chosen are removed. Returns how many places were
    /// chosen.
    pub(super) fn choose_copies(
        &mut self,
        candidates: &mut Vec<u32>,
        idle: usize,
        page_places: usize,
    ) -> usize {
        if idle < LEFT_SHARE * page_places {
            if let Some(open) = self.copies.open.take() {
                self.states[open.segment as usize] = SegmentState::Spent;
            }
        }
        let before = self.copies.left() + left_of(&self.copies.prepared);
        let blocks = self.layout.segment_blocks as usize;
        if before >= page_places || !self.rules.copies_pages {
            return 0;
        }
        let near = self.near_pages();
        let mut chosen_now = 0;
        let mut kept = Vec::with_capacity(candidates.len());
        for segment in candidates.drain(..) {
            let holes = blocks - usize::from(self.used[segment as usize]);
            let is_wanted = before + chosen_now < page_places
                && idle >= chosen_now + LEFT_SHARE * page_places + holes;
            if is_wanted && !near[segment as usize] {
                let chosen = self.pick(segment);
                chosen_now += chosen.left();
                self.copies.prepared.push(chosen);
            } else {
                kept.push(segment);
            }
        }
        *candidates = kept;
        chosen_now
    }

    /// Chooses segments for the copies of the pages of the first checkpoint.
    pub(super) fn open_copies(&mut self, page_places: usize) {
        let mut candidates = self.candidates();
        let used = |segment: &u32| usize::from(self.used[*segment as usize]);
        let blocks = self.layout.segment_blocks as usize;
        let idle = candidates.iter().map(|segment| blocks - used(segment)).sum();
        self.choose_copies(&mut candidates, idle, page_places);
        let prepared: Vec<Chosen> = std::mem::take(&mut self.copies.prepared);
        self.copies.waiting.extend(prepared);
    }
}
