//! Verifies a pool in use: each page of each map, each page of the two tables, and the content of
//! each block, against their checksums.
//!
//! A scrub visits the volumes and snapshots in the order of their numbers, and the blocks of each
//! in order. At each step it looks up where the next blocks are *now*, and reads them at once. So
//! an entry of a map that is the same from the beginning of the scrub to its end is visited,
//! whatever happens to the pages that lead to it: it is in the map when the scrub passes. Volumes
//! and snapshots that are made meanwhile have higher numbers, and are visited as well.
//!
//! From the look until the end of the read, the read counts as one of a guest: a place that becomes
//! free meanwhile is not used again before. So what is found to be damaged was in use, and is.
//!
//! - A page that several lead to is visited once, and so is all below it. A page that is
//!   shared does not change any more. If the number of a page is given to another one, that one
//!   has not been visited.
//! - A block that several entries refer to is read once. A place that gets another block
//!   meanwhile was written meanwhile.
//! - The copy of a page on the device is read even if the page is in memory. If only the copy is
//!   damaged, the next checkpoint writes the page anew, to another place. A page that a checkpoint
//!   is writing has a new copy, and the place of the old one may be used again: it is not read.

mod control;
mod marks;
mod report;
mod tables;

use std::ops::Bound;
use std::sync::Arc;

use crate::bitmap::ALL;
use crate::catalogue::{PageId, VOLUME_SIZE_MAX};
use crate::layout::BLOCK;
use crate::pages::{Fault, Page, Pages, TableEntry, WORDS};
use crate::state::State;
use crate::tree::{ROOT_LEVEL, index, span};

pub(crate) use control::Scrubs;
pub(crate) use marks::PageMarks;
pub use report::{
    DAMAGES_MAX, DamageKind, FoundDamage, ScrubOptions, ScrubPosition, ScrubReport, ScrubState,
};
pub(crate) use tables::TableRead;

/// The levels of a map.
const LEVELS: usize = ROOT_LEVEL as usize + 1;
/// The most places at which a step looks.
const LOOKS_MAX: usize = 64;
/// After so many blocks and pages that cannot be read, the device has failed.
const UNREADABLE_MAX: u64 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Maps,
    /// The pages of what has changed since snapshots.
    Sets,
    Tables,
    Done,
}

/// What is done next.
pub(crate) enum ScrubStep {
    /// A page has to be read, and passed to [`scrub_page`](State::scrub_page).
    Page(PageRead),
    /// Blocks have to be read, and the outcome passed to [`end_lot_of_scrub`].
    ///
    /// [`end_lot_of_scrub`]: State::end_lot_of_scrub
    Blocks(ScrubLot),
    /// Pages of a table have to be read, and passed to [`scrub_tables`](State::scrub_tables).
    Tables(TableRead),
    /// The step is repeated.
    Again,
    Done,
}

/// A page of a map that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageRead {
    /// The number of the scrub.
    scrub: u64,
    id: PageId,
    level: u32,
    pub(crate) entry: TableEntry,
    /// What it describes: the volume or snapshot and the first block; `None` for a page of a set.
    of: Option<ScrubPosition>,
    /// The number that ends the read in the state.
    pub(crate) interval: Option<u64>,
    /// Whether the second copy is read.
    is_copy: bool,
}

impl PageRead {
    /// The block that is read.
    pub(crate) fn block(&self) -> u64 {
        if self.is_copy { self.entry.copy } else { self.entry.block }
    }
}

/// What the first copy of a page was, while the second one is read.
struct FirstCopy {
    id: PageId,
    entry: TableEntry,
    page: Result<Box<Page>, DamageKind>,
}

/// A block that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScrubBlock {
    /// The block of the volume or snapshot.
    block: u64,
    pub(crate) place: u64,
    /// The low bits of the CRC-32C of its content, as the entry of the map has it.
    pub(crate) checksum: u32,
}

/// Blocks that are read together, in the order of their places.
pub(crate) struct ScrubLot {
    /// The number of the scrub.
    scrub: u64,
    at: ScrubPosition,
    pub(crate) blocks: Vec<ScrubBlock>,
    /// The pages that count as done because of it.
    done: Vec<PageId>,
    pub(crate) interval: Option<u64>,
}

/// A leaf that is not in memory, as the device has it.
struct LeafCopy {
    id: PageId,
    entry: TableEntry,
    page: Arc<Page>,
}

/// A page to look at.
enum Access {
    Content(Arc<Page>),
    Read(PageRead),
    /// There is no such page.
    Broken,
}

/// See the module.
pub(crate) struct Scrub {
    maps_only: bool,
    pause: u32,
    report: ScrubReport,
    phase: Phase,
    position: ScrubPosition,
    /// The numbers of what is visited are below this, which is raised once.
    end: u32,
    is_extended: bool,
    /// The pages on the way to the current block, from the leaf up, and those of them at whose
    /// beginning the scrub was.
    path: [PageId; LEVELS],
    entered: [PageId; LEVELS],
    leaf: Option<LeafCopy>,
    first: Option<FirstCopy>,
    /// The pages of sets to visit, and their levels.
    sets: Vec<(PageId, u32)>,
    /// The next page of the tables, which count one behind the other.
    table: u32,
    /// A bit for each place to which an entry that was visited refers.
    visited: Vec<u64>,
    unreadable: u64,
}

impl Scrub {
    fn new(options: ScrubOptions, earlier: ScrubReport, number: u64, state: &State) -> Self {
        let report = ScrubReport {
            number,
            state: ScrubState::Running,
            maps_only: options.maps_only,
            used_places: state.space.used_places(),
            ..earlier
        };
        Self {
            maps_only: options.maps_only,
            pause: options.pause,
            phase: Phase::Maps,
            position: report.position,
            report,
            end: state.catalogue.next_id,
            is_extended: false,
            path: [0; LEVELS],
            entered: [0; LEVELS],
            leaf: None,
            first: None,
            sets: Vec::new(),
            table: 0,
            visited: vec![0; (state.layout().places() as usize).div_ceil(64)],
            unreadable: 0,
        }
    }

    /// What is to be done next. A lot has up to `count` blocks.
    fn step(&mut self, state: &mut State, count: usize) -> ScrubStep {
        for _ in 0..LOOKS_MAX {
            let step = match self.phase {
                Phase::Maps => self.step_maps(state, count),
                Phase::Sets => self.step_sets(state),
                Phase::Tables => self.step_tables(state),
                Phase::Done => return ScrubStep::Done,
            };
            if let Some(step) = step {
                return step;
            }
        }
        ScrubStep::Again
    }

    fn step_maps(&mut self, state: &mut State, count: usize) -> Option<ScrubStep> {
        let ScrubPosition { branch, block } = self.position;
        let found = state.catalogue.branch(branch);
        let Some((root, _)) = found.filter(|(_, size)| block < size.div_ceil(BLOCK)) else {
            self.next_branch(state);
            return None;
        };
        self.path = [0; LEVELS];
        let mut id = root;
        for level in (0..=ROOT_LEVEL).rev() {
            self.path[level as usize] = id;
            if block % span(level + 1) == 0 {
                self.entered[level as usize] = id;
            }
            if id == 0 || state.pages.is_done(id) {
                self.skip(state, level);
                return None;
            }
            let first = block / span(level + 1) * span(level + 1);
            let of = ScrubPosition { branch, block: first };
            let page = match self.access(state, id, level, Some(of)) {
                Access::Content(page) => page,
                Access::Read(read) => return Some(ScrubStep::Page(read)),
                Access::Broken => {
                    self.note_page(state, Some(of), level, DamageKind::Map);
                    self.skip(state, level);
                    return None;
                }
            };
            if level == 0 {
                return self.step_leaf(state, &page, count);
            }
            let Ok(child) = Pages::child(&page, index(block, level)) else {
                self.note_page(state, Some(self.position), level - 1, DamageKind::Map);
                self.skip(state, level - 1);
                return None;
            };
            id = child;
        }
        None
    }

    /// A page that is in memory, or was just read, if its copy on the device need not be read.
    fn access(
        &mut self,
        state: &mut State,
        id: PageId,
        level: u32,
        of: Option<ScrubPosition>,
    ) -> Access {
        let entry = state.pages.entry(id);
        let is_new = entry.block == 0 || state.pages.is_written(id);
        let is_seen = state.pages.is_seen(id) || is_new;
        match state.pages.get(id) {
            Ok(page) if is_seen => return Access::Content(Arc::clone(page)),
            Err(Fault::Damaged) => return Access::Broken,
            Ok(_) | Err(Fault::Missing(_)) => {}
        }
        if let Some(leaf) = self.leaf.as_ref().filter(|leaf| (leaf.id, leaf.entry) == (id, entry)) {
            if is_seen && state.pages.get(id).is_err() {
                return Access::Content(Arc::clone(&leaf.page));
            }
        }
        if state.layout().place(entry.block).is_none() {
            return Access::Broken;
        }
        let interval = state.rules.protects_scrubbed.then(|| state.begin_read());
        let scrub = self.report.number;
        let first = self.first.take_if(|first| (first.id, first.entry) == (id, entry));
        let is_copy = first.is_some();
        self.first = first;
        Access::Read(PageRead { scrub, id, level, entry, of, interval, is_copy })
    }

    /// Visits the next entries of a leaf.
    fn step_leaf(&mut self, state: &mut State, page: &Page, count: usize) -> Option<ScrubStep> {
        let at = self.position;
        let end = (at.block / WORDS as u64 + 1) * WORDS as u64;
        let layout = state.layout();
        let mut blocks = Vec::new();
        let mut block = at.block;
        while block < end && blocks.len() < count {
            let entry = Pages::leaf_entry(page, index(block, 0)).ok();
            let place = entry.and_then(|entry| layout.place(entry.block()));
            let place = place.filter(|place| state.space.is_used(*place));
            match (entry, place) {
                (Some(entry), _) if entry.is_hole() => {}
                (Some(entry), Some(place)) => {
                    let word = &mut self.visited[place as usize / 64];
                    let bit = 1 << (place % 64);
                    if *word & bit == 0 {
                        *word |= bit;
                        self.report.blocks += 1;
                        let checksum = entry.checksum();
                        blocks.push(ScrubBlock { block, place, checksum });
                    }
                }
                _ => self.note_block(state, at.branch, block, DamageKind::Map),
            }
            block += 1;
        }
        let done = self.advance(state, block);
        if blocks.is_empty() || self.maps_only {
            return None;
        }
        blocks.sort_unstable_by_key(|block| block.place);
        let interval = state.rules.protects_scrubbed.then(|| state.begin_read());
        let scrub = self.report.number;
        Some(ScrubStep::Blocks(ScrubLot { scrub, at, blocks, done, interval }))
    }

    /// The blocks up to `block` have been visited. Returns the pages that are done now.
    fn advance(&mut self, state: &mut State, block: u64) -> Vec<PageId> {
        let mut done = Vec::new();
        self.position.block = block;
        for level in 0..LEVELS {
            if block % span(level as u32 + 1) != 0 {
                break;
            }
            let entered = std::mem::take(&mut self.entered[level]);
            if entered != 0 && entered == self.path[level] {
                state.pages.set_done(entered);
                done.push(entered);
            }
        }
        if block % span(1) == 0 {
            self.leaf = None;
        }
        done
    }

    /// What the page of this level describes is not visited.
    fn skip(&mut self, state: &mut State, level: u32) {
        self.entered[..level as usize].fill(0);
        let length = span(level + 1);
        self.advance(state, (self.position.block / length + 1) * length);
    }

    fn next_branch(&mut self, state: &mut State) {
        let catalogue = &state.catalogue;
        let behind = (Bound::Excluded(self.position.branch), Bound::Unbounded);
        let volume = catalogue.volumes.range(behind).next().map(|(id, _)| *id);
        let snapshot = catalogue.snapshots.range(behind).next().map(|(id, _)| *id);
        self.leaf = None;
        self.entered = [0; LEVELS];
        match volume.into_iter().chain(snapshot).min() {
            Some(id) if id < self.end => {
                self.position = ScrubPosition { branch: id, block: 0 };
                let is_volume = catalogue.volumes.contains_key(&id);
                self.report.volumes += u64::from(is_volume);
                self.report.snapshots += u64::from(!is_volume);
            }
            // Those that were made meanwhile.
            Some(_) if !self.is_extended => {
                (self.end, self.is_extended) = (catalogue.next_id, true);
            }
            _ => {
                self.phase = Phase::Sets;
                let roots = catalogue.set_roots();
                self.sets = roots.map(|root| (root, ROOT_LEVEL)).collect();
            }
        }
    }

    fn step_sets(&mut self, state: &mut State) -> Option<ScrubStep> {
        let Some((id, level)) = self.sets.last().copied() else {
            self.phase = Phase::Tables;
            return None;
        };
        // A set may have been united with another one meanwhile.
        let is_gone = state.pages.entry(id) == TableEntry::default() || state.pages.is_dead(id);
        if is_gone || state.pages.is_done(id) {
            self.sets.pop();
            return None;
        }
        match self.access(state, id, level, None) {
            Access::Content(page) => {
                self.sets.pop();
                let words = page.iter().filter(|word| level > 0 && **word != 0 && **word != ALL);
                let children = words.filter_map(|word| PageId::try_from(*word).ok());
                self.sets.extend(children.map(|child| (child, level.saturating_sub(1))));
            }
            Access::Read(read) => return Some(ScrubStep::Page(read)),
            Access::Broken => self.note_page(state, None, level, DamageKind::Changes),
        }
        state.pages.set_done(id);
        None
    }

    /// A page has been read, and has the right content; or it has not.
    fn page_read(
        &mut self,
        state: &mut State,
        read: &PageRead,
        page: Result<Box<Page>, DamageKind>,
    ) {
        let PageRead { id, level, entry, of, .. } = *read;
        let is_there = state.pages.entry(id) == entry && !state.pages.is_dead(id);
        if !is_there {
            // It was written elsewhere meanwhile, and is looked up again.
            return;
        }
        if !read.is_copy && state.layout().place(entry.copy).is_some() {
            self.first = Some(FirstCopy { id, entry, page });
            return;
        }
        let first = self.first.take().filter(|first| (first.id, first.entry) == (id, entry));
        let is_half = first.as_ref().is_some_and(|first| first.page.is_ok() != page.is_ok());
        let page = page.or_else(|kind| first.map_or(Err(kind), |first| first.page));
        if let Some(page) = page.as_ref().ok().filter(|_| is_half) {
            state.pages.insert(id, entry, page.clone());
            self.report.mended_pages += u64::from(state.mend(id));
        }
        match page {
            Ok(page) => {
                self.report.map_pages += u64::from(!state.pages.is_seen(id));
                state.pages.set_seen(id);
                if state.pages.get(id).is_ok() {
                } else if level > 0 {
                    state.pages.insert(id, entry, page);
                } else {
                    // Those of other disks stay in memory.
                    self.leaf = Some(LeafCopy { id, entry, page: Arc::from(page) });
                }
            }
            Err(kind) => {
                state.pages.set_seen(id);
                if state.pages.get(id).is_ok() && state.rewrite(id) {
                    self.report.mended_pages += 1;
                    return;
                }
                self.note_page(state, of, level, kind);
                state.pages.set_done(id);
            }
        }
    }

    fn lot_read(&mut self, state: &State, lot: &ScrubLot, damaged: &[Option<DamageKind>]) {
        let mut found: Vec<(u64, DamageKind)> = Vec::new();
        for (block, damage) in lot.blocks.iter().zip(damaged) {
            match damage {
                Some(kind) => found.push((block.block, *kind)),
                None => self.report.verified_blocks += 1,
            }
        }
        found.sort_unstable();
        for (block, kind) in found {
            self.note_block(state, lot.at.branch, block, kind);
        }
    }

    /// Blocks were not read: they are looked up again.
    fn lot_undone(&mut self, state: &mut State, lot: &ScrubLot) {
        for block in &lot.blocks {
            self.visited[block.place as usize / 64] &= !(1 << (block.place % 64));
        }
        self.report.blocks -= lot.blocks.len() as u64;
        for id in &lot.done {
            state.pages.clear_marks(*id);
        }
        self.entered = [0; LEVELS];
        self.leaf = None;
        self.position = lot.at;
        self.phase = Phase::Maps;
    }

    fn note_block(&mut self, state: &State, branch: u32, block: u64, kind: DamageKind) {
        self.note(state, Some(branch), (block, 1), kind);
    }

    /// Notes that a page of a map is damaged.
    fn note_page(
        &mut self,
        state: &State,
        of: Option<ScrubPosition>,
        level: u32,
        kind: DamageKind,
    ) {
        let (first, count) = of.map_or((0, 0), |of| (of.block, span(level + 1)));
        self.unreadable += u64::from(kind == DamageKind::Unreadable);
        let kind = if of.is_none() { DamageKind::Changes } else { DamageKind::Map };
        self.note(state, of.map(|of| of.branch), (first, count), kind);
    }

    fn note(
        &mut self,
        state: &State,
        branch: Option<u32>,
        (first, count): (u64, u64),
        kind: DamageKind,
    ) {
        self.unreadable += u64::from(kind == DamageKind::Unreadable);
        let catalogue = &state.catalogue;
        let snapshot = branch.and_then(|id| catalogue.snapshots.get(&id));
        let volume = snapshot.map_or(branch, |snapshot| Some(snapshot.volume));
        let volume = volume.and_then(|id| catalogue.volumes.get(&id));
        let size =
            branch.and_then(|id| catalogue.branch(id)).map_or(VOLUME_SIZE_MAX, |(_, size)| size);
        let offset = first * BLOCK;
        self.report.note(FoundDamage {
            volume: volume.map(|volume| volume.name.clone()),
            snapshot: snapshot.map(|snapshot| snapshot.name.clone()),
            offset,
            // As far as the volume goes.
            length: (count * BLOCK).min(size.next_multiple_of(BLOCK).saturating_sub(offset)),
            kind,
        });
    }
}

impl State {
    /// The copies of a page that lie in segments.
    pub(crate) fn copies_of(&self, entry: &TableEntry) -> Vec<u64> {
        let layout = self.layout();
        entry.blocks().filter(|block| layout.place(*block).is_some()).collect()
    }

    /// One copy of a page is damaged, and memory has the page: the next checkpoint writes both
    /// anew. Returns whether that is so.
    pub(crate) fn mend(&mut self, id: PageId) -> bool {
        let is_mended = self.pages.get(id).is_ok() && self.rewrite(id);
        self.counts.mended_pages += u64::from(is_mended);
        is_mended
    }

    /// A page is right in memory, and its copy on the device is not: the next checkpoint writes it
    /// to another place. Returns whether that is so.
    fn rewrite(&mut self, id: PageId) -> bool {
        let is_pending = self.pages.is_dirty(id) || self.pages.is_written(id);
        let is_taken = is_pending || self.has_room_for_pages(1) && self.pages.change(id).is_ok();
        if is_taken {
            self.note_change();
        }
        is_taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Change;
    use crate::entry::MapEntry;
    use crate::rules::Rules;
    use crate::sharing::tests::state;

    /// The blocks of pages that a scrub wants to read now.
    fn wanted(state: &mut State) -> Option<u64> {
        state.pages.mark_scrubbed(true);
        let options = ScrubOptions { maps_only: false, pause: 0 };
        let mut scrub = Scrub::new(options, ScrubReport::default(), 1, state);
        match scrub.step(state, 64) {
            ScrubStep::Page(read) => Some(read.entry.block),
            ScrubStep::Blocks(_) | ScrubStep::Tables(_) | ScrubStep::Again | ScrubStep::Done => {
                None
            }
        }
    }

    #[test]
    fn the_old_copy_of_a_page_that_is_being_written_is_not_read() {
        let mut state = state(Rules::default());
        let (name, domain) = ("a".to_owned(), String::new());
        state.change(&Change::Create { id: 1, size: 1 << 20, name, domain }).unwrap();
        let layout = state.layout();
        let write = |state: &mut State, place| {
            let entry = MapEntry::new(layout.block(place), 1).fresh();
            state.map(1, 3, entry).unwrap();
        };
        state.space.choose(40, 0);
        state.space.activate();
        write(&mut state, 5);
        assert_eq!(wanted(&mut state), None, "no page is on the device");
        let frozen = state.freeze().unwrap();
        let table = state.pages_written(&frozen, &vec![7; frozen.pages.len()]);
        state.commit(&frozen, &table);
        let root = state.catalogue.branch(1).unwrap().0;
        let block = state.pages.entry(root).block;
        assert_eq!(wanted(&mut state), Some(block));
        state.rewrite(root);
        assert_eq!(wanted(&mut state), Some(block), "a recovery needs it");
        // Its place may be used again when the checkpoint is durable.
        let frozen = state.freeze().unwrap();
        assert_ne!(wanted(&mut state), Some(block));
        let table = state.pages_written(&frozen, &vec![8; frozen.pages.len()]);
        state.commit(&frozen, &table);
        let moved = state.pages.entry(root).block;
        assert!(moved != block && wanted(&mut state) == Some(moved));
    }
}
