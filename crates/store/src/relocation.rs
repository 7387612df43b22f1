//! Puts blocks together that adjoin in a volume and lie apart on the device, where each seek takes
//! time.
//!
//! 1. A walk *surveys* the maps of the volumes: it notes the leaves whose blocks lie apart.
//! 2. The blocks of such a leaf are copied, in their order, to places that follow each other. They
//!    are copied in lots: a lot is read in the order of places, compared with the checksums of the
//!    leaf, written, and read again.
//! 3. The next walk puts the new place into each entry that has the old one, in volumes and
//!    snapshots alike, and frees the old ones, as it does after a [merge](crate::merge).
//!
//! From the beginning of a lot on, its old and new places are *held*: nothing frees them. When the
//! block has been copied, the old place becomes a victim, to which nothing comes to refer any more,
//! and which only a walk frees. A new place is shared if the old one was. Otherwise the old one had
//! one entry that is fresh, or none, and so has the new one.
//!
//! A reference is made to a new place only after a checkpoint that has it in use: a recovery from
//! an earlier one finds it free, and no batch that wrote it.
//!
//! Disks go on meanwhile. A block that is overwritten while it is copied leaves two places to which
//! nothing refers: the walk meets neither. A crash leaves the old places, the new ones, or some of
//! both, all with the same content, and a walk after the opening frees what is not met.

use std::collections::VecDeque;

use crate::catalogue::PageId;
use crate::fingerprint::Fingerprint;
use crate::pages::{Page, Pages};
use crate::state::State;

/// The most blocks that are moved between two walks. Each takes about 60 bytes of memory.
const BLOCKS_MAX: usize = 1 << 18;
/// The share of the places in use whose entries have to be new since the last relocation.
const NEW_SHARE: u64 = 16;
/// A block is moved so often, on average, at most: places between blocks of others are used if none
/// are together, so that a leaf may be moved twice.
const MOVES_MAX: u64 = 3;

/// Where a page is in the map of a volume: the root, and the first block of the volume that it
/// describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Origin {
    pub(crate) root: PageId,
    pub(crate) first: u64,
}

/// A block that lies apart from its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Source {
    place: u64,
    /// The low bits of the CRC-32C of its content, as the entry of a map has it.
    checksum: u32,
}

/// A block that is to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Relocated {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) checksum: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Survey,
    Copy,
    /// A walk replaces the old places.
    Replace,
}

/// What a relocation does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RelocationStep {
    /// A walk has to end, or to be carried out.
    AwaitWalk,
    /// A checkpoint has to choose places.
    AwaitPlaces,
    /// This lot has to be copied, and passed to [`end_lot`](State::end_lot).
    Copy(Vec<Relocated>),
    Done,
}

/// See the module.
pub(crate) struct Relocation {
    phase: Phase,
    /// The leaves that a survey has found, with their blocks, and the number of these.
    leaves: Vec<(Origin, Vec<Source>)>,
    found: usize,
    /// The blocks to be copied, in order.
    sources: VecDeque<Source>,
    /// The blocks that may still be moved; `None` until the first survey has ended.
    budget: Option<u64>,
    /// The blocks that further surveys would find.
    more: u64,
    /// The number of checkpoints after which there is no place if there is none then.
    asked: Option<u64>,
}

/// Whether the blocks of a leaf lie so far apart that it pays to move them: their runs are shorter
/// than `run` on average, and they are not in order with few others between them.
fn is_scattered(sources: &[Source], run: usize) -> bool {
    let (Some(first), Some(last)) = (sources.first(), sources.last()) else { return false };
    let breaks = sources.windows(2).filter(|pair| pair[1].place != pair[0].place + 1).count();
    let is_ascending = sources.windows(2).all(|pair| pair[1].place > pair[0].place);
    let count = sources.len() as u64;
    let is_dense = is_ascending && (last.place - first.place + 1) * 8 <= count * 9;
    sources.len() >= run && (breaks + 1) * run > sources.len() && !is_dense
}

impl State {
    /// Whether so many blocks were written that some may lie apart.
    pub(crate) fn wants_relocation(&self) -> bool {
        self.unsettled > 0
            && self.unsettled >= self.space.used_places() / NEW_SHARE
            && self.relocation.is_none()
            && self.merge.is_none()
            && self.walk.is_none()
            && self.moves.is_empty()
            && self.failed.is_none()
            && self.damage.is_none()
    }

    pub(crate) fn begin_relocation(&mut self) {
        self.unsettled = 0;
        self.relocation = Some(Relocation {
            phase: Phase::Survey,
            leaves: Vec::new(),
            found: 0,
            sources: VecDeque::new(),
            budget: None,
            more: 0,
            asked: None,
        });
    }

    /// Whether the walk that begins now is a survey.
    pub(crate) fn is_surveying(&self) -> bool {
        let relocation = self.relocation.as_ref().filter(|_| self.moves.is_empty());
        relocation.is_some_and(|relocation| relocation.phase == Phase::Survey)
    }

    /// A survey has come to a leaf of a volume.
    pub(crate) fn survey(&mut self, origin: Origin, page: &Page) {
        let layout = self.layout();
        let run = self.rules.run_min;
        let Some(relocation) = &mut self.relocation else { return };
        let entries = (0..page.len()).filter_map(|index| Pages::leaf_entry(page, index).ok());
        let sources: Vec<Source> = entries
            .filter(|entry| !entry.is_hole())
            .filter_map(|entry| {
                let place = layout.place(entry.block())?;
                Some(Source { place, checksum: entry.checksum() })
            })
            .collect();
        if !is_scattered(&sources, run) {
            return;
        }
        if relocation.found + sources.len() > BLOCKS_MAX {
            relocation.more += sources.len() as u64;
            return;
        }
        relocation.found += sources.len();
        relocation.leaves.push((origin, sources));
    }

    /// A survey has ended.
    pub(crate) fn end_survey(&mut self) {
        let Some(relocation) = &mut self.relocation else { return };
        let mut leaves = std::mem::take(&mut relocation.leaves);
        leaves.sort_unstable_by_key(|(origin, _)| *origin);
        relocation.sources = leaves.into_iter().flat_map(|(_, sources)| sources).collect();
        let all = std::mem::take(&mut relocation.found) as u64 + relocation.more;
        relocation.more = 0;
        let budget = *relocation.budget.get_or_insert(MOVES_MAX * all);
        relocation.sources.truncate(usize::try_from(budget).unwrap_or(usize::MAX));
        relocation.phase = Phase::Copy;
        relocation.asked = None;
    }

    /// What is to be done next, while no lot is being copied. A lot has up to `count` blocks.
    pub(crate) fn step_relocation(&mut self, count: usize) -> RelocationStep {
        // Batches need the places, or a walk finds no end.
        let is_hindered = self.failed.is_some() || self.damage.is_some() || self.space.left() == 0;
        if is_hindered && self.walk.is_none() {
            self.give_up_relocation();
        }
        let Some(relocation) = &mut self.relocation else { return RelocationStep::Done };
        match relocation.phase {
            Phase::Survey => {
                self.has_garbage |= self.walk.is_none();
                RelocationStep::AwaitWalk
            }
            Phase::Copy if relocation.sources.is_empty() => {
                if self.moves.is_empty() && self.walk.is_none() {
                    self.give_up_relocation();
                    return RelocationStep::Done;
                }
                relocation.phase = Phase::Replace;
                self.space.return_moved();
                self.has_garbage |= self.walk.is_none();
                RelocationStep::AwaitWalk
            }
            Phase::Copy => self.next_lot(count),
            // Another walk may have begun before the last lot was copied.
            Phase::Replace if !self.moves.is_empty() || self.walk.is_some() => {
                self.has_garbage |= self.walk.is_none();
                RelocationStep::AwaitWalk
            }
            Phase::Replace if self.is_merge_wanted => {
                self.give_up_relocation();
                RelocationStep::Done
            }
            Phase::Replace => {
                relocation.phase = Phase::Survey;
                self.has_garbage = true;
                RelocationStep::AwaitWalk
            }
        }
    }

    fn next_lot(&mut self, count: usize) -> RelocationStep {
        let checkpoints = self.counts.checkpoints;
        let is_checkpointing = self.is_checkpointing;
        let Some(relocation) = &mut self.relocation else { return RelocationStep::Done };
        self.space.want_moved(relocation.sources.len());
        let count = count.min(relocation.sources.len()).min(self.space.moved_left());
        if count == 0 {
            // A checkpoint in progress has chosen its segments already.
            let asked = *relocation.asked.get_or_insert(checkpoints + u64::from(is_checkpointing));
            if checkpoints > asked && self.may_checkpoint() {
                // There are none.
                self.relocation.iter_mut().for_each(|relocation| relocation.sources.clear());
            } else {
                self.is_checkpoint_wanted |= !is_checkpointing;
            }
            return RelocationStep::AwaitPlaces;
        }
        relocation.asked = None;
        let mut sources = Vec::with_capacity(count);
        while sources.len() < count {
            let Some(source) = self.relocation.as_mut().and_then(|found| found.sources.pop_front())
            else {
                break;
            };
            let Source { place, .. } = source;
            // It may have been overwritten since the survey, or adjoin two blocks.
            if self.may_move(place) && !self.held.contains(&place) {
                self.hold(place);
                sources.push(source);
            }
        }
        let places = self.space.place_moved(sources.len());
        for place in &places {
            self.hold(*place);
            self.contents.drop_place(*place);
        }
        self.note_change();
        let lot = sources.into_iter().zip(places);
        let lot =
            lot.map(|(Source { place, checksum }, to)| Relocated { from: place, to, checksum });
        RelocationStep::Copy(lot.collect())
    }

    /// Whether a place has a block of data that may become a victim.
    fn may_move(&self, place: u64) -> bool {
        self.space.has_data(place)
            && !self.moves.contains_key(&place)
            && !self.pinned.contains_key(&place)
    }

    fn hold(&mut self, place: u64) {
        if self.rules.holds_relocated {
            self.held.insert(place);
            self.space.mark(place);
        }
    }

    /// Whether a block is being copied from or to a place.
    pub(crate) fn is_held(&self, place: u64) -> bool {
        !self.held.is_empty() && self.held.contains(&place)
    }

    /// Whether a reference may be made to a place: its content stays, and a recovery knows it.
    pub(crate) fn may_refer_to(&self, place: u64) -> bool {
        let is_saved = !self.unsaved.contains(&place) && !self.saving.contains(&place);
        !self.is_held(place) && (is_saved || !self.rules.refers_to_saved)
    }

    /// A walk has begun: it does not free what is held.
    pub(crate) fn mark_held(&mut self) {
        for place in &self.held {
            self.space.mark(*place);
        }
    }

    /// A lot has been copied, as far as `is_copied` says. Returns false if a walk is in progress:
    /// the call is repeated when it has ended.
    pub(crate) fn end_lot(&mut self, lot: &[Relocated], is_copied: &[bool]) -> bool {
        if self.walk.is_some() {
            return false;
        }
        let is_going_on = self.relocation.is_some();
        for (Relocated { from, to, .. }, is_copied) in lot.iter().copied().zip(is_copied) {
            self.held.remove(&from);
            self.held.remove(&to);
            if !*is_copied || !is_going_on || !self.may_move(from) {
                self.space.free(to);
                continue;
            }
            if self.space.is_shared(from) && self.rules.keeps_relocated_shared {
                self.space.share(to);
            }
            // It is not freed, and used for something else, before the walk.
            if self.rules.shares_victims {
                self.space.share(from);
            }
            let known = self.index.known(from).and_then(Fingerprint::from_bits);
            self.index.set(to, known);
            self.unsaved.insert(to);
            self.moves.insert(from, to);
        }
        if let Some(budget) = self.relocation.as_mut().and_then(|found| found.budget.as_mut()) {
            *budget = budget.saturating_sub(lot.len() as u64);
        }
        self.note_change();
        true
    }

    /// A lot is given up in the middle. If the kernel may still write to its new places, they are
    /// not used again while the pool is open.
    pub(crate) fn give_up_lot(&mut self, lot: &[Relocated], is_stuck: bool) {
        for Relocated { from, to, .. } in lot {
            self.held.remove(from);
            if !is_stuck {
                self.held.remove(to);
                self.space.free(*to);
            }
        }
    }

    /// Ends the relocation. What was copied, and no walk has put into the maps, is garbage.
    pub(crate) fn give_up_relocation(&mut self) {
        if self.relocation.is_some() && !self.moves.is_empty() {
            self.moves.clear();
            self.has_garbage = true;
        }
        self.relocation = None;
        self.space.return_moved();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Change;
    use crate::entry::MapEntry;
    use crate::rules::Rules;
    use crate::sharing::tests::state;

    /// A block is relocated from place 5 to place 7, and overwritten before a walk has replaced
    /// place 5. Returns whether place 5 is in use then, and both after the walk.
    fn overwritten_victim(rules: Rules) -> (bool, [bool; 2]) {
        let mut state = state(rules);
        let (name, domain) = ("a".to_owned(), String::new());
        state.change(&Change::Create { id: 1, size: 1 << 20, name, domain }).unwrap();
        let block = |state: &State, place| state.layout().block(place);
        let entry = MapEntry::new(block(&state, 5), 1).fresh();
        state.map(1, 0, entry).unwrap();
        state.begin_relocation();
        state.space.take(7);
        state.hold(5);
        state.hold(7);
        assert!(state.end_lot(&[Relocated { from: 5, to: 7, checksum: 1 }], &[true]));
        let entry = MapEntry::new(block(&state, 9), 2).fresh();
        state.map(1, 0, entry).unwrap();
        let is_used = state.space.is_used(5);
        assert!(state.begin_walk());
        while !state.end_walk() {
            state.step_walk(9).unwrap();
        }
        (is_used, [state.space.is_used(5), state.space.is_used(7)])
    }

    #[test]
    fn a_victim_is_used_for_nothing_else_before_a_walk_has_replaced_it() {
        assert_eq!(overwritten_victim(Rules::default()), (true, [false, false]));
        let rules = Rules { shares_victims: false, ..Rules::default() };
        assert!(!overwritten_victim(rules).0);
    }

    fn sources(places: impl IntoIterator<Item = u64>) -> Vec<Source> {
        places.into_iter().map(|place| Source { place, checksum: 0 }).collect()
    }

    #[test]
    fn blocks_in_long_runs_or_in_order_are_not_scattered() {
        assert!(!is_scattered(&sources(0..512), 64));
        assert!(!is_scattered(&sources((0..256).chain(1000..1256)), 64), "two runs");
        assert!(!is_scattered(&sources((0..512).map(|at| at + at / 10)), 64), "few others between");
        assert!(is_scattered(&sources((0..512).map(|at| 2 * at)), 64), "every second one");
        assert!(is_scattered(&sources((0..512).rev()), 64), "against the order");
        assert!(is_scattered(&sources((0..512).map(|at| at * 7919 % 100_003)), 64));
        assert!(!is_scattered(&sources((0..63).map(|at| at * 100)), 64), "too few");
        assert!(!is_scattered(&[], 1));
    }
}
