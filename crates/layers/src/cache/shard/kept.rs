//! What keeps the tables of a shard on a volume up to date.

use fathom_cache::BlockAccess;

use super::{CAPTURED, EMPTY, FRESH, IMAGED, Leaving, MAPPED, STABLE, Shard, SlotEntry};

impl Shard {
    /// Whether tables have to be written, or a flush is needed.
    pub(in crate::cache) fn has_changes(&self) -> bool {
        !(self.fresh.is_empty() && self.dirty.is_empty() && self.leaving.is_empty())
    }

    /// A flush of the volume is about to begin: notes the content that it will cover.
    pub(in crate::cache) fn capture(&mut self) {
        // The memory of a burst is not kept.
        for slot in std::mem::take(&mut self.fresh) {
            let flags = &mut self.flags[slot as usize];
            if *flags & FRESH != 0 {
                *flags = *flags & !FRESH | CAPTURED;
                self.captured.push(slot);
            }
        }
    }

    /// All tables with changes are about to be built, as those with the number `number`.
    pub(in crate::cache) fn begin_tables(&mut self, number: u64) {
        // A change from now on may be missing in some of them.
        self.building = number + 1;
    }

    /// A flush has completed: the captured content is stable. If all tables with the number
    /// `tables` are durable now, slots without a mapping in them become free.
    pub(in crate::cache) fn flushed(&mut self, tables: Option<u64>) {
        for slot in std::mem::take(&mut self.captured) {
            let flags = &mut self.flags[slot as usize];
            if *flags & CAPTURED != 0 {
                *flags = *flags & !CAPTURED | STABLE;
                self.dirty.insert(slot / self.per_page);
            }
        }
        let Some(tables) = tables else { return };
        let durable = self.leaving.iter().take_while(|leaving| leaving.tables <= tables).count();
        let durable: Vec<Leaving> = self.leaving.drain(..durable).collect();
        for Leaving { mut slots, .. } in durable {
            while let Some(slot) = slots.pop(&self.blocks) {
                self.flags[slot as usize] &= !IMAGED;
                self.release(slot);
            }
        }
        self.halve_owed();
    }

    /// The flush in flight was given up: its content needs another flush.
    pub(in crate::cache) fn abandon_capture(&mut self) {
        for slot in std::mem::take(&mut self.captured) {
            let flags = &mut self.flags[slot as usize];
            if *flags & CAPTURED != 0 {
                *flags = *flags & !CAPTURED | FRESH;
                self.fresh.push(slot);
            }
        }
    }

    /// Takes the next page to write from `from` on, counted within the shard.
    pub(in crate::cache) fn take_dirty(&mut self, from: u32) -> Option<u32> {
        let page = self.dirty.range(from..).next().copied()?;
        self.dirty.remove(&page);
        Some(page)
    }

    /// Marks a page as not written.
    pub(in crate::cache) fn put_dirty(&mut self, page: u32) {
        self.dirty.insert(page);
    }

    /// The entries of a page. From now on, its mappings may be on the volume.
    pub(in crate::cache) fn entries(
        &mut self,
        page: u32,
    ) -> impl Iterator<Item = Option<SlotEntry<'_>>> {
        let first = page * self.per_page;
        let slots = first..(first + self.per_page).min(self.slots());
        for slot in slots.clone() {
            let flags = &mut self.flags[slot as usize];
            if *flags & (MAPPED | STABLE) == MAPPED | STABLE {
                *flags |= IMAGED;
            }
        }
        let shard = &*self;
        slots.map(move |slot| {
            let at = slot as usize;
            let is_stable = shard.flags[at] & (MAPPED | STABLE) == MAPPED | STABLE;
            is_stable.then(|| SlotEntry {
                key: shard.key(slot),
                valid: shard.valid(slot),
                class: shard.replacement.class(slot),
                sums: shard.sums_of(slot),
            })
        })
    }

    /// Puts a mapping that a table on the volume has into a free slot. If `is_current` is false, or
    /// the block is mapped already, the slot becomes free when a table without the mapping is
    /// durable.
    pub(in crate::cache) fn load(
        &mut self,
        slot: u32,
        entry: &SlotEntry<'_>,
        is_current: bool,
        access: &BlockAccess,
    ) {
        let at = slot as usize;
        self.flags[at] |= IMAGED;
        let granules = self.blocks.granules;
        let valid = entry.valid & self.blocks.granule_mask();
        let is_usable = is_current && valid != 0 && self.find(entry.key).is_none();
        if !is_usable || !self.map(slot, entry.key) {
            return self.push_leaving(slot);
        }
        self.sums[at * granules..][..granules].copy_from_slice(entry.sums);
        self.blocks.add_valid(slot, valid);
        self.flags[at] |= STABLE;
        self.admit(slot, entry.key, access, None);
    }

    /// Begins to load: no slot is free.
    pub(in crate::cache) fn begin_load(&mut self) {
        (self.free, self.unused) = (EMPTY, self.slots());
    }

    /// The slots from `first` on, `count` of them, were loaded: those without a mapping are free.
    pub(in crate::cache) fn end_load(&mut self, first: u32, count: u32) {
        for slot in (first..first + count).rev() {
            if self.flags[slot as usize] & (MAPPED | IMAGED) == 0 {
                self.push_free(slot);
            }
        }
    }
}
