//! The walk over all maps, which finds what nothing refers to.
//!
//! Blocks and pages that only one branch had are freed at once. All else is found by a walk: it
//! visits each page that a root leads to, and then frees what it has not met. Disks go on
//! meanwhile: what is taken or made since the walk began stays, and the original of a page that is
//! copied is walked. What was there before can come to be referred to in another way only by a
//! change of the catalogue, which gives the walk its roots.
//!
//! On its way, a walk replaces the places that a [merge](crate::merge) or a
//! [relocation](crate::relocation) has found, or finds blocks that lie apart.

use crate::bitmap::ALL;
use crate::catalogue::{Catalogue, PageId};
use crate::pages::{Fault, Page, Pages, TableEntry, WORDS};
use crate::relocation::Origin;
use crate::state::State;
use crate::tree::{ROOT_LEVEL, span};

/// A page to visit, and its level.
#[derive(Clone, Copy, Debug)]
struct Visit {
    id: PageId,
    level: u32,
    /// Where it is in the map of a volume, if the walk came from the volume's root.
    origin: Option<Origin>,
}

/// Pages of [sets](crate::bitmap) have their level and this.
pub(crate) const SET_LEVEL: u32 = ROOT_LEVEL + 1;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    todo: Vec<Visit>,
    /// Whether it finds blocks that lie apart.
    is_survey: bool,
    /// The pages that are being read.
    reading: usize,
    /// Leaves in which places have to be replaced, and copies of leaves.
    again: Vec<PageId>,
    /// Whether one of them waits for a checkpoint.
    is_blocked: bool,
}

impl Walk {
    /// The roots of this catalogue exist now.
    pub(crate) fn add(&mut self, catalogue: &Catalogue) {
        let visit = |level| move |id| Visit { id, level, origin: None };
        self.todo.extend(catalogue.roots().map(visit(ROOT_LEVEL)));
        self.todo.extend(catalogue.set_roots().map(visit(SET_LEVEL + ROOT_LEVEL)));
    }

    /// What refers to these pages may have been visited before it did.
    pub(crate) fn revisit(&mut self, pages: impl Iterator<Item = (PageId, u32)>) {
        self.todo.extend(pages.map(|(id, level)| Visit { id, level, origin: None }));
    }

    /// Whether it waits for reads or for a checkpoint.
    pub(crate) fn is_waiting(&self) -> bool {
        self.is_blocked || self.todo.is_empty() && self.again.is_empty()
    }

    /// These are the roots of volumes, whose maps are visited next.
    fn add_live(&mut self, roots: impl Iterator<Item = PageId>) {
        let visit = |id| {
            let origin = Some(Origin { root: id, first: 0 });
            Visit { id, level: ROOT_LEVEL, origin }
        };
        self.todo.extend(roots.map(visit));
    }
}

/// A page that the walk has to read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WalkRead {
    pub(crate) id: PageId,
    pub(crate) level: u32,
    origin: Option<Origin>,
    pub(crate) entry: TableEntry,
}

impl State {
    /// Begins a walk, unless one is in progress. Returns false if a checkpoint is in progress: the
    /// places that it has taken for pages are not in the page table yet.
    pub(crate) fn begin_walk(&mut self) -> bool {
        if self.is_checkpointing && self.rules.walks_between_checkpoints {
            return false;
        }
        if self.walk.is_none() {
            let mut walk = Walk { is_survey: self.is_surveying(), ..Walk::default() };
            walk.add(&self.catalogue);
            // The last ones are visited first.
            walk.add_live(self.catalogue.live_roots());
            self.walk = Some(walk);
            self.has_garbage = false;
            self.space.begin_marking();
            if self.rules.pins_references {
                self.mark_pinned();
            }
            self.mark_held();
            self.pages.begin_finding();
        }
        true
    }

    /// Visits some pages. Returns up to `reads_max` pages to read, each of which goes to
    /// [`walked`](Self::walked).
    ///
    /// # Errors
    /// If a map is damaged. The walk has ended then, and has freed nothing.
    pub(crate) fn step_walk(&mut self, reads_max: usize) -> Result<Vec<WalkRead>, Fault> {
        let mut reads = Vec::new();
        self.walk_copied();
        self.walk_again(&mut reads, reads_max)?;
        for _ in 0..self.rules.walk_step {
            let Some(walk) = self.walk.as_mut().filter(|_| reads.len() < reads_max) else { break };
            let Some(Visit { id, level, origin }) = walk.todo.pop() else { break };
            let entry = self.pages.entry(id);
            if entry == TableEntry::default() || !self.pages.find(id) {
                continue;
            }
            let place = self.layout().place(entry.block);
            if let Some(place) = place {
                self.space.mark(place);
            }
            if let Some(copy) = self.layout().place(entry.copy).filter(|_| self.rules.marks_copies)
            {
                self.space.mark(copy);
            }
            match self.pages.get(id).cloned() {
                Ok(page) => self.visit((id, entry), &page, (level, origin))?,
                Err(Fault::Missing(_)) if place.is_some() => {
                    reads.push(WalkRead { id, level, origin, entry });
                }
                // It was removed before a checkpoint wrote it. What it had goes with it.
                Err(Fault::Missing(_)) if entry.block == 0 => {}
                Err(Fault::Missing(_) | Fault::Damaged) => return Err(self.give_up_walk()),
            }
        }
        if let Some(walk) = &mut self.walk {
            walk.reading += reads.len();
        }
        Ok(reads)
    }

    /// What was copied is walked, too, and the copies of leaves if places are replaced.
    fn walk_copied(&mut self) {
        if let Some(walk) = &mut self.walk {
            let copied = self.pages.take_copied().into_iter();
            walk.todo.extend(copied.map(|(id, level)| Visit { id, level, origin: None }));
            let copies = self.pages.take_leaf_copies();
            if !self.moves.is_empty() && self.rules.visits_copies {
                walk.again.extend(copies);
            }
        }
    }

    /// Visits leaves that have to be visited in any case.
    fn walk_again(&mut self, reads: &mut Vec<WalkRead>, reads_max: usize) -> Result<(), Fault> {
        let Some(walk) = &mut self.walk else { return Ok(()) };
        walk.is_blocked = false;
        for id in std::mem::take(&mut walk.again) {
            let entry = self.pages.entry(id);
            if entry == TableEntry::default() || self.pages.is_dead(id) {
                continue;
            }
            match self.pages.get(id).cloned() {
                Ok(page) => self.visit((id, entry), &page, (0, None))?,
                Err(Fault::Missing(_)) if self.layout().place(entry.block).is_none() => {}
                Err(Fault::Missing(_)) if reads.len() < reads_max => {
                    reads.push(WalkRead { id, level: 0, origin: None, entry });
                }
                Err(Fault::Missing(_)) => {
                    self.walk.iter_mut().for_each(|walk| walk.again.push(id));
                }
                Err(Fault::Damaged) => return Err(self.give_up_walk()),
            }
        }
        Ok(())
    }

    /// Replaces the places of a leaf that is in memory, or has this content on the device.
    fn replace(&mut self, (id, entry): (PageId, TableEntry), page: &Page) -> Result<(), Fault> {
        if self.pages.is_dead(id) {
            return Ok(());
        }
        if self.pages.get(id).is_err() {
            self.pages.insert(id, entry, Box::new(*page));
        }
        let is_free = self.pages.is_dirty(id) || self.has_room_for_pages(1);
        if !is_free || self.pages.get(id).is_err() {
            // After a checkpoint, or when it was read from where it is now.
            if let Some(walk) = &mut self.walk {
                walk.again.push(id);
                walk.is_blocked |= !is_free;
            }
            return Ok(());
        }
        let layout = self.layout();
        for index in 0..WORDS {
            let page = self.pages.get(id)?;
            let entry = Pages::leaf_entry(page, index).map_err(|_| self.give_up_walk())?;
            let place = layout.place(entry.block()).filter(|_| !entry.is_hole());
            let Some(keep) = place.and_then(|place| self.moved(place)) else { continue };
            // A block that was relocated is the only one of its content, as it was before.
            let new = entry.moved_to(layout.block(keep));
            let is_fresh = entry.is_fresh() && self.relocation.is_some();
            let new = if is_fresh { new.fresh() } else { new };
            self.pages.change(id)?[index] = new.bits();
            self.space.mark(keep);
        }
        self.note_change();
        Ok(())
    }

    /// A page has been read.
    ///
    /// # Errors
    /// As for [`step_walk`](Self::step_walk).
    pub(crate) fn walked(&mut self, read: &WalkRead, page: &Page) -> Result<(), Fault> {
        if let Some(walk) = &mut self.walk {
            walk.reading -= 1;
        }
        self.visit((read.id, read.entry), page, (read.level, read.origin))
    }

    /// A page could not be read, or has other content than it should have. If it was written
    /// elsewhere meanwhile, the walk visits it again.
    pub(crate) fn not_walked(&mut self, read: &WalkRead) -> Result<(), Fault> {
        if self.pages.entry(read.id) == read.entry {
            return Err(self.give_up_walk());
        }
        let Some(walk) = &mut self.walk else { return Ok(()) };
        walk.reading -= 1;
        match self.pages.get(read.id).cloned() {
            Ok(page) => self.visit((read.id, read.entry), &page, (read.level, read.origin)),
            // It was removed, or has changed and was dropped: the next walk finds what it has.
            Err(_) => Err(self.give_up_walk()),
        }
    }

    fn visit(
        &mut self,
        of: (PageId, TableEntry),
        page: &Page,
        (level, origin): (u32, Option<Origin>),
    ) -> Result<(), Fault> {
        let layout = self.layout();
        let mut has_victim = false;
        if level == SET_LEVEL {
            return Ok(());
        }
        for index in 0..WORDS {
            if level > SET_LEVEL && page[index] == ALL {
                continue;
            }
            if level > 0 {
                let child = Pages::child(page, index).map_err(|_| self.give_up_walk())?;
                if let Some(walk) = self.walk.as_mut().filter(|_| child != 0) {
                    let origin = origin.map(|Origin { root, first }| {
                        let first = first + index as u64 * span(level);
                        Origin { root, first }
                    });
                    walk.todo.push(Visit { id: child, level: level - 1, origin });
                }
                continue;
            }
            let entry = Pages::leaf_entry(page, index).map_err(|_| self.give_up_walk())?;
            if !entry.is_hole() {
                let place = layout.place(entry.block()).ok_or_else(|| self.give_up_walk())?;
                if self.moved(place).is_some() {
                    has_victim = true;
                } else {
                    self.space.mark(place);
                }
            }
        }
        if has_victim {
            return self.replace(of, page);
        }
        let is_survey = level == 0 && self.walk.as_ref().is_some_and(|walk| walk.is_survey);
        if let Some(origin) = origin.filter(|_| is_survey) {
            self.survey(origin, page);
        }
        Ok(())
    }

    /// Ends the walk if it has visited everything and no checkpoint is being written. Returns
    /// whether it has ended.
    pub(crate) fn end_walk(&mut self) -> bool {
        self.walk_copied();
        let is_done =
            |walk: &Walk| walk.todo.is_empty() && walk.reading == 0 && walk.again.is_empty();
        if self.is_checkpointing && self.rules.walks_between_checkpoints
            || !self.walk.as_ref().is_some_and(is_done)
        {
            return false;
        }
        let is_survey = self.walk.take().is_some_and(|walk| walk.is_survey);
        self.end_moves();
        if is_survey {
            self.end_survey();
        }
        self.note_change();
        self.counts.walks += 1;
        self.counts.walk_freed_blocks += self.space.sweep();
        self.pages.sweep();
        true
    }

    /// Ends the walk without a result.
    pub(crate) fn give_up_walk(&mut self) -> Fault {
        self.walk = None;
        self.end_moves();
        self.space.forget_marks();
        self.pages.forget_found();
        Fault::Damaged
    }
}
