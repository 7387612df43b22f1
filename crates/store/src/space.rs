//! The space of a pool: which places are in use, and where the next blocks go.
//!
//! A place is in use while something refers to it: an entry of a map, or the page table. It is
//! *shared* if more than one entry may refer to it. A place
//! that becomes free is not used again at once. A checkpoint chooses the segments for the blocks
//! that come after it, and notes which of their places are free now. They are used when the
//! checkpoint is durable, and the reads have ended that began before it. So nothing is overwritten
//! that a recovery or a read may need.
//!
//! Blocks go into free segments first, then into the free places of the emptiest ones. A batch lies
//! in one segment, in ascending order.

mod copies;
mod marks;
mod moved;
mod punch;
mod room;

use std::collections::BTreeMap;
use std::ops::Range;

use fathom_block::{ErrorKind, Outcome};

use crate::layout::{Layout, SPACE_BITS};
use crate::paged::Paged;
use crate::reserve::{Chosen, Reserve, left_of};
use crate::rules::Rules;
use punch::Punches;

/// The most segments that may be opened between two checkpoints and have no completed batch.
/// Recovery ends its search when it has seen more.
const HOLLOW_MAX: u32 = 4;
/// Recovery reads segments in the order of their use until so many have no batch. Two checkpoints
/// may have been interrupted.
pub(crate) const EMPTY_SEGMENTS_MAX: u32 = 3 * HOLLOW_MAX;
/// The most segments for the batches between two checkpoints.
const LOG_SEGMENTS_MAX: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SegmentState {
    /// It may be chosen.
    Idle,
    /// It is chosen, or open.
    Chosen,
    /// All of its places that were free have been used. Headers in it may be needed until the next
    /// checkpoint.
    Spent,
    /// It is being given back to what is beneath the pool.
    Punching,
    /// A write to it has failed. It is not chosen while the pool is open.
    Retired,
}

/// The places of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BatchPlaces {
    pub(crate) segment: u32,
    /// The place of the header, and those of the data, ascending.
    pub(crate) header: u64,
    pub(crate) data: Vec<u64>,
}

/// See the module.
pub(crate) struct Space {
    layout: Layout,
    map: Paged,
    /// The places in use in each segment.
    used: Vec<u16>,
    used_places: u64,
    shared_places: u64,
    states: Vec<SegmentState>,
    /// Where batches go, where pages of maps go, and where batches without data go if the former
    /// has no place.
    log: Reserve,
    pages: Reserve,
    /// Where second copies of these pages go, if there is place.
    copies: Reserve,
    /// Where blocks are relocated to, and how many places are wanted for that.
    moved: Reserve,
    moved_wanted: usize,
    punches: Punches,
    kept: Option<Chosen>,
    next_kept: Option<Chosen>,
    /// The batches in flight in each segment that has some.
    busy: BTreeMap<u32, u32>,
    /// The segments opened since the last checkpoint without a completed batch.
    hollow: Vec<u32>,
    /// Places that have become free, and segments that have been used up, since the last
    /// checkpoint.
    freed: u64,
    spent: u32,
    /// The headers that were placed since.
    headers: u64,
    /// The free places for data in segments that the last checkpoint has chosen for nothing.
    spare: u64,
    is_hidden_wanted: bool,
    /// The places of pages of maps, a bit for each.
    page_places: Vec<u8>,
    /// While a walk is in progress: the places that something refers to, as in the map.
    marked: Option<Vec<u8>>,
    rules: Rules,
}

impl Space {
    /// The space of a pool whose space map is `map`.
    pub(crate) fn new(layout: Layout, map: Paged, rules: Rules) -> Self {
        let mut space = Self {
            layout,
            map,
            used: vec![0; layout.segments as usize],
            used_places: 0,
            shared_places: 0,
            states: vec![SegmentState::Idle; layout.segments as usize],
            log: Reserve::default(),
            pages: Reserve::default(),
            copies: Reserve::default(),
            moved: Reserve::default(),
            moved_wanted: 0,
            punches: Punches::new(layout.segments),
            kept: None,
            next_kept: None,
            busy: BTreeMap::new(),
            hollow: Vec::new(),
            freed: 0,
            spent: 0,
            headers: 0,
            spare: 0,
            is_hidden_wanted: false,
            page_places: vec![0; (layout.places() as usize).div_ceil(8)],
            marked: None,
            rules,
        };
        space.count();
        space
    }

    /// Counts the places in use from the map.
    fn count(&mut self) {
        let blocks = u64::from(self.layout.segment_blocks);
        (self.used_places, self.shared_places) = (0, 0);
        for segment in 0..u64::from(self.layout.segments) {
            let places = segment * blocks..(segment + 1) * blocks;
            let shared = places.clone().filter(|place| self.is_shared(*place)).count();
            let used = places.filter(|place| self.is_used(*place)).count();
            self.shared_places += shared as u64;
            self.used[segment as usize] = used as u16;
            self.used_places += used as u64;
        }
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn map(&mut self) -> &mut Paged {
        &mut self.map
    }

    /// The page of the map, the byte in it and the bit of a place.
    fn bit(&self, place: u64) -> (usize, usize, u8) {
        let in_page = self.layout.places_in_page();
        let at = (place % in_page) as usize;
        ((place / in_page) as usize, at / 8, 1 << (at % 8))
    }

    pub(crate) fn is_used(&self, place: u64) -> bool {
        let (page, byte, bit) = self.bit(place);
        self.map.page(page)[byte] & bit != 0
    }

    /// Whether any of these places is in use, as far as they exist.
    pub(crate) fn is_any_used(&self, places: Range<u64>) -> bool {
        let end = places.end.min(self.layout.places());
        (places.start..end).any(|place| self.is_used(place))
    }

    /// Whether more than one entry of a map may refer to a place.
    pub(crate) fn is_shared(&self, place: u64) -> bool {
        let (page, byte, bit) = self.bit(place);
        self.map.page(page)[SPACE_BITS + byte] & bit != 0
    }

    /// One more entry of a map will refer to a place in use.
    pub(crate) fn share(&mut self, place: u64) {
        self.take(place);
        let (page, byte, bit) = self.bit(place);
        if self.map.page(page)[SPACE_BITS + byte] & bit == 0 {
            self.map.change(page)[SPACE_BITS + byte] |= bit;
            self.shared_places += 1;
        }
    }

    /// Something refers to a place now.
    pub(crate) fn take(&mut self, place: u64) {
        if self.rules.marks_new {
            self.mark(place);
        }
        let (page, byte, bit) = self.bit(place);
        if self.map.page(page)[byte] & bit == 0 {
            self.map.change(page)[byte] |= bit;
            self.used[self.layout.segment(place) as usize] += 1;
            self.used_places += 1;
        }
    }

    /// The page table refers to a place now, which becomes that of a page of a map.
    pub(crate) fn take_for_page(&mut self, place: u64) {
        self.take(place);
        if let Some(byte) = self.page_places.get_mut(place as usize / 8) {
            *byte |= 1 << (place % 8);
        }
    }

    /// Whether a place exists and is in use by a block of data.
    pub(crate) fn has_data(&self, place: u64) -> bool {
        let page = self.page_places.get(place as usize / 8);
        page.is_some_and(|byte| byte >> (place % 8) & 1 == 0) && self.is_used(place)
    }

    /// Nothing refers to a place any more.
    pub(crate) fn free(&mut self, place: u64) {
        let (page, byte, bit) = self.bit(place);
        if self.map.page(page)[byte] & bit != 0 {
            let bits = self.map.change(page);
            if let Some(pages) = self.page_places.get_mut(place as usize / 8) {
                *pages &= !(1 << (place % 8));
            }
            self.shared_places -= u64::from(bits[SPACE_BITS + byte] & bit != 0);
            bits[byte] &= !bit;
            bits[SPACE_BITS + byte] &= !bit;
            self.used[self.layout.segment(place) as usize] -= 1;
            self.used_places -= 1;
            self.freed += 1;
        }
    }

    /// An opening has found these segments to be those of batches that it brings into the maps.
    /// They are not chosen before the next checkpoint. Then chooses segments with so many free
    /// places for its pages.
    pub(crate) fn open(&mut self, searched: impl Iterator<Item = u32>, page_places: usize) {
        for segment in searched {
            self.states[segment as usize] = SegmentState::Spent;
        }
        let mut left = 0;
        for segment in self.candidates() {
            if left >= page_places {
                break;
            }
            let chosen = self.pick(segment);
            left += chosen.left();
            self.pages.waiting.push_back(chosen);
        }
        self.open_copies(page_places);
    }

    /// The places in use.
    pub(crate) fn used_places(&self) -> u64 {
        self.used_places
    }

    /// The places to which several entries of maps may refer, because their blocks were equal.
    pub(crate) fn shared_places(&self) -> u64 {
        self.shared_places
    }

    /// The places that the next checkpoint may make usable, about.
    pub(crate) fn gain(&self) -> u64 {
        self.freed + u64::from(self.spent) * u64::from(self.layout.segment_blocks) / 8
    }

    /// The free places for batches that may be used now.
    pub(crate) fn left(&self) -> usize {
        self.log.left()
    }

    /// Chooses places for a batch with up to `count` blocks of data: a batch gets fewer if its
    /// segment has no more. `None` if there is no place now.
    pub(crate) fn place_batch(&mut self, count: usize) -> Option<BatchPlaces> {
        let least = if count == 0 { 1 } else { 2 };
        loop {
            if let Some(open) = &mut self.log.open {
                if open.left() >= least {
                    self.headers += 1;
                    return Some(Self::cut(open, count, &self.layout));
                }
                self.states[open.segment as usize] = SegmentState::Spent;
                self.spent += 1;
                self.log.open = None;
            }
            if self.hollow.len() >= HOLLOW_MAX as usize {
                break;
            }
            let Some(next) = self.log.waiting.pop_front() else { break };
            self.hollow.push(next.segment);
            self.log.open = Some(next);
        }
        let kept = self.kept.as_mut().filter(|kept| count == 0 && kept.left() > 0)?;
        Some(Self::cut(kept, 0, &self.layout))
    }

    fn cut(open: &mut Chosen, count: usize, layout: &Layout) -> BatchPlaces {
        let first = u64::from(open.segment) * u64::from(layout.segment_blocks);
        let end = (open.next + 1 + count).min(open.free.len());
        let mut places = open.free[open.next..end].iter().map(|index| first + u64::from(*index));
        open.next = end;
        let header = places.next().unwrap_or_default();
        BatchPlaces { segment: open.segment, header, data: places.collect() }
    }

    /// A batch begins to be written to a segment.
    pub(crate) fn begin(&mut self, segment: u32) {
        *self.busy.entry(segment).or_default() += 1;
    }

    /// A batch in a segment has been written, or has failed.
    pub(crate) fn end(&mut self, segment: u32, outcome: Outcome) {
        if let Some(count) = self.busy.get_mut(&segment) {
            *count -= 1;
            if *count == 0 {
                self.busy.remove(&segment);
            }
        }
        match outcome {
            Ok(()) => return self.hollow.retain(|hollow| *hollow != segment),
            // The segment is sound: the device beneath is full.
            Err(ErrorKind::NoSpace) => return,
            Err(_) => {}
        }
        self.states[segment as usize] = SegmentState::Retired;
        // A checkpoint may choose another one.
        self.spent += 1;
        if self.log.open.as_ref().is_some_and(|open| open.segment == segment) {
            self.log.open = None;
        }
        if self.kept.as_ref().is_some_and(|kept| kept.segment == segment) {
            self.kept = None;
        }
    }

    /// Whether so few segments are left to open that a checkpoint has to choose more, and can.
    pub(crate) fn is_scarce(&self) -> bool {
        let (left, target) = (self.log.left(), self.log_target());
        let few = left < self.layout.segment_blocks as usize && self.gain() > 0;
        few || left < target / 2 && self.gain() >= target as u64 / 8 || self.is_hollow()
    }

    /// Whether no further segment may be opened before the next checkpoint.
    pub(crate) fn is_hollow(&self) -> bool {
        self.hollow.len() >= HOLLOW_MAX as usize
    }

    /// The places for pages of maps that may be used now.
    pub(crate) fn pages_left(&self) -> usize {
        self.pages.left()
    }

    /// The free places that a checkpoint provides for batches, if the pool has them.
    fn log_target(&self) -> usize {
        let blocks = self.layout.segment_blocks as usize;
        (self.layout.segments as usize / 4).clamp(2, LOG_SEGMENTS_MAX) * blocks
    }

    /// Chooses places for pages of maps.
    pub(crate) fn place_pages(&mut self, count: usize) -> Option<Vec<u64>> {
        if self.pages.left() < count {
            return None;
        }
        let Self { pages, states, layout, .. } = self;
        Some(Self::take_in_order(pages, states, layout, count))
    }

    /// The next places of a reserve, at most `count`.
    fn take_in_order(
        reserve: &mut Reserve,
        states: &mut [SegmentState],
        layout: &Layout,
        count: usize,
    ) -> Vec<u64> {
        let mut places = Vec::with_capacity(count);
        while places.len() < count {
            if reserve.open.as_ref().is_none_or(|open| open.left() == 0) {
                if let Some(open) = reserve.open.take() {
                    states[open.segment as usize] = SegmentState::Spent;
                }
                reserve.open = reserve.waiting.pop_front();
            }
            let Some(open) = reserve.open.as_mut() else { break };
            let first = u64::from(open.segment) * u64::from(layout.segment_blocks);
            let end = open.free.len().min(open.next + count - places.len());
            let cut = open.free[open.next..end].iter().map(|index| first + u64::from(*index));
            places.extend(cut);
            open.next = end;
        }
        places
    }

    /// Chooses segments at the instant of a checkpoint. `page_places` are the free places that the
    /// next one needs for pages of maps. They come first, and as many are left for the one after
    /// it, in which those become free that this one has replaced. `guaranteed` places are only for
    /// batches.
    pub(crate) fn choose(&mut self, page_places: usize, guaranteed: usize) {
        (self.freed, self.spent, self.headers) = (0, 0, 0);
        self.hollow.clear();
        for segment in 0..self.layout.segments {
            let is_spent = self.states[segment as usize] == SegmentState::Spent;
            if is_spent && !self.busy.contains_key(&segment) {
                self.states[segment as usize] = SegmentState::Idle;
            }
        }
        if self.moved_wanted > 0 {
            self.give_back_log();
        }
        self.give_back_hidden();
        self.give_back_copies();
        let candidates = self.candidates();
        let holes = |segment: &u32| {
            self.layout.segment_blocks as usize - usize::from(self.used[*segment as usize])
        };
        let mut idle: usize = candidates.iter().map(holes).sum();
        let mut candidates = candidates.into_iter();
        let kept_min = self.layout.segment_blocks as usize / 2;
        if self.kept.as_ref().is_none_or(|kept| kept.left() < kept_min) && self.next_kept.is_none()
        {
            self.next_kept = candidates.next().map(|segment| self.pick(segment));
            idle -= self.next_kept.as_ref().map_or(0, Chosen::left);
        }
        let mut left = self.pages.left() + left_of(&self.pages.prepared);
        while left < page_places {
            let Some(segment) = candidates.next() else { break };
            let chosen = self.pick(segment);
            left += chosen.left();
            idle -= chosen.left();
            self.pages.prepared.push(chosen);
        }
        let mut candidates = candidates.collect::<Vec<_>>();
        idle -= self.choose_copies(&mut candidates, idle.saturating_sub(guaranteed), page_places);
        let mut candidates = candidates.into_iter();
        let spare = idle.saturating_sub(page_places.saturating_add(guaranteed));
        idle -= self.choose_moved(&mut candidates, spare);
        let mut left = self.log.left() + left_of(&self.log.prepared);
        let target = self.log_target();
        // A batch with data needs two places. A segment with fewer would be opened in vain, again
        // and again, and the pool would never be full.
        let most_used = self.layout.segment_blocks as u16 - 2;
        while left < target && idle > page_places {
            let Some(segment) = candidates.next() else { break };
            if self.used[segment as usize] > most_used {
                break;
            }
            let chosen = self.pick(segment);
            left += chosen.left();
            idle -= chosen.left();
            self.log.prepared.push(chosen);
        }
        self.note_spare(candidates, page_places);
        self.note_empty();
    }

    /// The segments with free places, the emptiest first.
    fn candidates(&self) -> Vec<u32> {
        let blocks = self.layout.segment_blocks as u16;
        let is_idle = |segment: &u32| self.states[*segment as usize] == SegmentState::Idle;
        let used = |segment: &u32| self.used[*segment as usize];
        let all = (0..self.layout.segments).filter(|segment| is_idle(segment));
        let mut found: Vec<u32> = all.filter(|segment| used(segment) < blocks).collect();
        found.sort_by_key(used);
        found
    }

    fn pick(&mut self, segment: u32) -> Chosen {
        self.states[segment as usize] = SegmentState::Chosen;
        self.punches.note_use(segment);
        let first = u64::from(segment) * u64::from(self.layout.segment_blocks);
        let all = 0..self.layout.segment_blocks as u16;
        let free = all.filter(|index| !self.is_used(first + u64::from(*index))).collect();
        Chosen { segment, free, next: 0 }
    }

    /// The segments that recovery has to read after the checkpoint of this instant: those that it
    /// reads in any case, and those that it reads in order until it finds no more batches.
    pub(crate) fn searched(&self) -> (Vec<u32>, Vec<u32>) {
        let kept = [&self.kept, &self.next_kept, &self.log.open];
        let open = kept.into_iter().flatten().map(|chosen| chosen.segment);
        let mut busy: Vec<u32> = self.busy.keys().copied().chain(open).collect();
        busy.sort_unstable();
        busy.dedup();
        (busy, self.log.segments().collect())
    }

    /// The checkpoint is durable, and no read needs a place that was free at its instant.
    pub(crate) fn activate(&mut self) {
        let Self { log, pages, copies, moved, .. } = self;
        for reserve in [log, pages, copies, moved] {
            reserve.waiting.extend(reserve.prepared.drain(..));
        }
        self.punches.activate();
        if let Some(next) = self.next_kept.take() {
            if let Some(old) = self.kept.replace(next) {
                self.states[old.segment as usize] = SegmentState::Spent;
            }
        }
    }

    /// The bytes of memory that this takes.
    pub(crate) fn memory(&self) -> u64 {
        self.map.memory() + (self.used.len() * 3 + self.page_places.len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> Space {
        let layout = Layout::new(3 << 20, 3 << 20, 16).unwrap();
        let mut space = Space::new(
            layout,
            Paged::new(layout.space_map(), layout.space_pages),
            Rules::default(),
        );
        space.choose(20, 0);
        space
    }

    #[test]
    fn chosen_places_are_used_in_order_and_only_after_the_checkpoint() {
        let mut space = space();
        assert_eq!(space.place_batch(3), None);
        space.activate();
        let one = space.place_batch(3).unwrap();
        assert_eq!((one.header + 1, one.data.len()), (one.data[0], 3));
        let other = space.place_batch(30).unwrap();
        assert_eq!((other.segment, other.header), (one.segment, one.data[2] + 1));
        assert_eq!(other.data.len(), 16 - 5, "the rest of the segment");
        assert_ne!(space.place_batch(1).unwrap().segment, one.segment);
    }

    #[test]
    fn what_is_freed_is_chosen_by_the_next_checkpoint_at_the_earliest() {
        let mut space = space();
        space.activate();
        let batch = space.place_batch(15).unwrap();
        space.begin(batch.segment);
        for place in &batch.data {
            space.take(*place);
        }
        space.free(batch.data[0]);
        let next = space.place_batch(1).unwrap();
        assert_ne!(next.segment, batch.segment);
        space.choose(20, 0);
        assert!(space.searched().0.contains(&batch.segment), "its batch is in flight");
        assert!(!space.log.segments().any(|segment| segment == batch.segment));
        space.end(batch.segment, Ok(()));
        space.activate();
        // Other segments are emptier, so it comes last.
        while space.candidates().contains(&batch.segment) {
            space.choose(space.pages.left() + 16, 0);
            space.activate();
        }
        let all = space.pages.waiting.iter().chain(&space.log.waiting);
        let chosen = all.chain(&space.kept).find(|chosen| chosen.segment == batch.segment);
        if let Some(chosen) = chosen {
            assert_eq!(chosen.free, [0, 1], "its header and the freed block");
        }
    }

    #[test]
    fn few_segments_are_open_without_a_completed_batch() {
        let mut space = space();
        space.activate();
        let mut placed = Vec::new();
        while let Some(batch) = space.place_batch(15) {
            space.begin(batch.segment);
            placed.push(batch);
        }
        assert!(placed.len() <= HOLLOW_MAX as usize && space.is_scarce());
        // Batches without data have a segment of their own.
        assert!(space.place_batch(0).is_some());
        space.end(placed[0].segment, Ok(()));
        let has_more = space.log.waiting.is_empty() || space.place_batch(15).is_some();
        assert!(has_more);
        space.end(placed[1].segment, Err(ErrorKind::Io));
        assert_eq!(space.states[placed[1].segment as usize], SegmentState::Retired);
    }
}
