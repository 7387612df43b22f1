//! Brings batches, and changes of the catalogue, into the maps.

use std::ops::Range;

use crate::batch::Run;
use crate::catalogue::Change;
use crate::entry::MapEntry;
use crate::guarantee::Guarantees;
use crate::layout::BLOCK;
use crate::pages::{Fault, Pages, WORDS};
use crate::state::State;
use crate::tree::{BLOCKS_MAX, Branch, Cleared};

impl State {
    fn branch(&self, volume: u32) -> Option<Branch> {
        let found = self.catalogue.volumes.get(&volume)?;
        Some(Branch { root: found.root, floor: found.floor, epoch: self.catalogue.epoch })
    }

    /// Carries out `change` with the map of a volume, which may have been deleted.
    fn with_branch(
        &mut self,
        volume: u32,
        change: impl FnOnce(&mut Pages, &mut Branch) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let Some(mut branch) = self.branch(volume) else { return Ok(()) };
        let done = change(&mut self.pages, &mut branch);
        if let Some(found) = self.catalogue.volumes.get_mut(&volume) {
            found.root = branch.root;
        }
        done
    }

    /// A block of a volume is now at this entry's block.
    ///
    /// # Errors
    /// If a page is missing. The call may then be repeated.
    pub(crate) fn map(&mut self, volume: u32, block: u64, entry: MapEntry) -> Result<(), Fault> {
        let size = self.catalogue.volumes.get(&volume).map_or(0, |found| found.size);
        if block >= size.div_ceil(BLOCK) {
            // The volume has been deleted, or has become smaller.
            return Ok(());
        }
        let mut old = MapEntry::HOLE;
        self.with_branch(volume, |pages, branch| {
            old = pages.set(branch, block, entry)?;
            Ok(())
        })?;
        self.note_fresh(volume, block, old.is_fresh(), entry.is_fresh());
        self.note_change();
        self.unsettled += 1;
        let layout = self.layout();
        if let Some(place) = layout.place(entry.block()) {
            self.space.take(place);
        }
        if old.is_fresh() && old.block() != entry.block() {
            self.release_data(old.block());
        } else if !old.is_hole() && !old.is_fresh() {
            self.unsure += 1;
        }
        Ok(())
    }

    /// A range of blocks of a volume reads as zeroes now.
    ///
    /// # Errors
    /// If a page is missing. The call may then be repeated.
    pub(crate) fn unmap(&mut self, volume: u32, range: Range<u64>) -> Result<(), Fault> {
        self.note_changed(volume, &range)?;
        let mut cleared = Cleared::default();
        let done = self
            .with_branch(volume, |pages, branch| pages.clear(branch, range.clone(), &mut cleared));
        self.note_cleared(volume, &range, cleared.blocks.len(), !cleared.has_garbage);
        self.note_change();
        for block in cleared.blocks {
            self.release_data(block);
        }
        self.has_garbage |= cleared.has_garbage;
        done
    }

    /// The entry for which a block was written does not refer to it any more. If others may, a walk
    /// finds whether they do.
    fn release_data(&mut self, block: u64) {
        let Some(place) = self.layout().place(block) else { return };
        let is_shared = self.space.is_shared(place) && self.rules.keeps_shared;
        if is_shared || self.is_held(place) {
            self.unsure += 1;
        } else {
            self.space.free(place);
        }
    }

    /// Nothing refers to a block any more.
    pub(crate) fn release(&mut self, block: u64) {
        if let Some(place) = self.layout().place(block) {
            self.space.free(place);
        }
    }

    /// Prepares the maps for a batch, which is then applied as a whole: a snapshot has all of it or
    /// nothing, as a recovery.
    ///
    /// # Errors
    /// If a page is missing. The call is repeated when it is there.
    pub(crate) fn prepare(&mut self, runs: &[Run]) -> Result<(), Fault> {
        if !self.rules.applies_at_once {
            return Ok(());
        }
        for run in runs {
            if let Some((volume, blocks)) = run.blocks() {
                self.note_changed(volume, &blocks)?;
            }
            match run {
                Run::Data { volume, first, checksums, .. }
                | Run::References { volume, first, checksums, .. } => {
                    let size = self.catalogue.volumes.get(volume).map_or(0, |found| found.size);
                    let end = (first + checksums.len() as u64).min(size.div_ceil(BLOCK));
                    let mut at = *first;
                    while at < end {
                        let touch = |pages: &mut Pages, branch: &mut Branch| {
                            pages.touch(branch, at).map(drop)
                        };
                        self.with_branch(*volume, touch)?;
                        at = (at / WORDS as u64 + 1) * WORDS as u64;
                    }
                }
                Run::Zeroes { volume, first, count } => {
                    let Some(branch) = self.branch(*volume) else { continue };
                    let range = *first..first + count;
                    self.pages.probe(branch.root, &range, range.start)?;
                    self.pages.probe(branch.root, &range, range.end.saturating_sub(1))?;
                }
                Run::Change(_) => {}
            }
        }
        Ok(())
    }

    /// Applies a run of a batch, from its block `done` on, which counts what was applied already.
    ///
    /// # Errors
    /// If a page is missing: the call is repeated when it is there.
    pub(crate) fn apply(&mut self, run: &Run, done: &mut usize) -> Result<(), Fault> {
        match run {
            Run::Data { volume, first, block, checksums }
            | Run::References { volume, first, block, checksums } => {
                let is_data = matches!(run, Run::Data { .. });
                let blocks = *first + *done as u64..*first + checksums.len() as u64;
                self.note_changed(*volume, &blocks)?;
                while let Some(checksum) = checksums.get(*done) {
                    let entry = MapEntry::new(block + *done as u64, *checksum);
                    let entry = if is_data { entry.fresh() } else { entry };
                    self.map(*volume, first + *done as u64, entry)?;
                    *done += 1;
                }
                Ok(())
            }
            Run::Zeroes { volume, first, count } => {
                let end = first.checked_add(*count).ok_or(Fault::Damaged)?;
                self.unmap(*volume, *first..end)
            }
            // Changes are applied when they get their place.
            Run::Change(_) => Ok(()),
        }
    }

    /// Applies a change of the catalogue.
    pub(crate) fn change(&mut self, change: &Change) -> Option<()> {
        self.has_garbage |= self.catalogue.apply(change)?;
        self.is_united = false;
        self.guarantees = Guarantees::of(&self.catalogue);
        if !self.rules.raises_floor {
            self.catalogue.volumes.values_mut().for_each(|volume| volume.floor = 0);
        }
        self.note_change();
        if let Some(walk) = &mut self.walk {
            // What was made during a walk has pages that the walk may have to see.
            walk.add(&self.catalogue);
        }
        Some(())
    }

    /// What lies behind the end of a volume.
    pub(crate) fn behind(&self, volume: u32) -> Option<Range<u64>> {
        let found = self.catalogue.volumes.get(&volume)?;
        Some(found.size.div_ceil(BLOCK)..BLOCKS_MAX)
    }

    /// A volume has become smaller: drops what lies behind its end.
    ///
    /// # Errors
    /// If a page is missing. The call may then be repeated.
    pub(crate) fn trim(&mut self, volume: u32) -> Result<(), Fault> {
        self.behind(volume).map_or(Ok(()), |blocks| self.unmap(volume, blocks))
    }
}
