//! The content of a checkpoint, from its instant until it is durable.

use std::sync::Arc;

use super::State;
use crate::catalogue::PageId;
use crate::paged::FrozenPages;
use crate::pages::Page;
use crate::record::CheckpointRecord;

/// The content of a checkpoint, at its instant.
pub(crate) struct Frozen {
    pub(crate) number: u64,
    pub(crate) generation: u64,
    /// Pages of maps, and the block for each.
    pub(crate) pages: Vec<(PageId, Arc<Page>, u64)>,
    /// The block for the second copy of each; 0 for none.
    pub(crate) copies: Vec<u64>,
    pub(crate) space: FrozenPages,
    pub(crate) record: CheckpointRecord,
    /// The reads that began until now may need places that the checkpoint makes usable.
    interval: u64,
}

impl State {
    /// The instant of a checkpoint. `None` if there is no place for it: then the pool has failed.
    pub(crate) fn freeze(&mut self) -> Option<Frozen> {
        self.is_checkpointing = true;
        (self.is_checkpoint_wanted, self.has_changes) = (false, false);
        let interval = self.interval;
        self.interval += 1;
        for block in self.pages.bury() {
            self.release(block);
        }
        let layout = self.layout();
        let dirty = self.pages.freeze();
        let places = self.space.place_pages(dirty.len())?;
        let copies = self.space.place_copies(&places);
        let mut pages = Vec::with_capacity(dirty.len());
        let mut blocks_of_copies = Vec::with_capacity(dirty.len());
        for ((id, page), (place, copy)) in dirty.into_iter().zip(places.into_iter().zip(copies)) {
            for old in self.pages.entry(id).blocks() {
                self.release(old);
            }
            self.space.take_for_page(place);
            if let Some(copy) = copy {
                self.space.take_for_page(copy);
            }
            pages.push((id, page, layout.block(place)));
            blocks_of_copies.push(copy.map_or(0, |copy| layout.block(copy)));
        }
        let copies = blocks_of_copies;
        let guaranteed = usize::try_from(self.guaranteed()).unwrap_or(usize::MAX);
        self.space.choose(self.dirty_max, guaranteed);
        if !self.rules.waits_for_checkpoint {
            self.space.activate();
        }
        let (busy, order) = self.space.searched();
        let record = CheckpointRecord {
            sequence: self.next_sequence - 1,
            in_flight: self
                .in_flight()
                .into_iter()
                .filter(|_| self.rules.record_names_batches)
                .collect(),
            busy,
            order,
            pages: self.pages.count(),
            has_garbage: self.has_garbage
                || self.walk.is_some()
                || !self.moves.is_empty()
                || self.relocation.is_some(),
            catalogue: self.catalogue.clone(),
        };
        self.saving.extend(self.unsaved.drain());
        let space = self.space.map().freeze();
        let (number, generation) = (self.number + 1, self.generation);
        Some(Frozen { number, generation, pages, copies, space, record, interval })
    }

    /// The pages of a checkpoint have been written, with these checksums. Returns the pages of the
    /// table.
    pub(crate) fn pages_written(&mut self, frozen: &Frozen, checksums: &[u32]) -> FrozenPages {
        let written = frozen.pages.iter().zip(&frozen.copies).zip(checksums);
        for (((id, _, block), copy), checksum) in written {
            self.pages.written(*id, (*block, *copy), *checksum);
        }
        let copies = frozen.copies.iter().filter(|copy| **copy != 0);
        self.counts.page_copies += copies.count() as u64;
        self.counts.map_pages += frozen.pages.len() as u64;
        self.pages.table().freeze()
    }

    /// A checkpoint is durable. Returns whether places have become usable.
    pub(crate) fn commit(&mut self, frozen: &Frozen, table: &FrozenPages) -> bool {
        self.space.map().commit(frozen.space.iter().map(|(index, _)| *index));
        self.pages.table().commit(table.iter().map(|(index, _)| *index));
        self.number = frozen.number;
        // Those that failed after its instant are still looked for.
        let CheckpointRecord { sequence, in_flight, .. } = &frozen.record;
        self.failed_batches.retain(|failed| failed > sequence || in_flight.contains(failed));
        self.is_checkpointing = false;
        self.saving.clear();
        self.inactive = Some(frozen.interval);
        self.counts.checkpoints += 1;
        self.activate()
    }
}
