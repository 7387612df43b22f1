//! Finds slots for new blocks. On a volume, a slot that a block has left becomes free only when
//! tables without the block are durable, so that blocks leave before their slots are needed.

use super::{IMAGED, Room, Shard};

/// The part of the slots that leaves within a writing of the tables for a disk below its share.
const SHARE_PARTS: usize = 8;
/// The most blocks that leave for one insertion.
const EVICTIONS_MAX: usize = 64;

impl Shard {
    /// The place for the granules `mask` of a block.
    pub(super) fn room(
        &mut self,
        key: u64,
        mask: u16,
        may_replace: impl FnOnce() -> bool,
    ) -> Option<Room> {
        if let Some(slot) = self.find(key) {
            let mask = mask & !self.valid(slot);
            // A read of a granule that has become invalid may still be in flight.
            let may_write = mask != 0
                && self.blocks.pins.is_unpinned(slot)
                && (self.flags[slot as usize] & IMAGED == 0 || may_replace());
            return may_write.then_some(Room { slot, mask });
        }
        if self.free_count() == 0 && !self.is_kept {
            self.evict(Some(key));
        }
        let lacks = if self.is_kept { self.replacement.lacks(key) as usize } else { 0 };
        self.make_reserve(key, lacks);
        let is_owed = lacks == 0 && self.free_count() <= self.owed;
        let Some(slot) = (if is_owed { None } else { self.pop_free() }) else {
            self.counts.no_room += 1;
            return None;
        };
        if lacks > 0 {
            self.owed = self.owed.saturating_sub(1);
        }
        Some(Room { slot, mask })
    }

    /// Takes blocks out so that slots become free in time: more of them, and for itself, for a disk
    /// that lacks so many blocks of its share.
    fn make_reserve(&mut self, wanting: u64, lacks: usize) {
        let owed = lacks.min(self.slots() as usize / SHARE_PARTS);
        let wanted = self.reserve.max(owed);
        for _ in 0..EVICTIONS_MAX {
            if self.free_count() + self.leaving_count() >= wanted || !self.evict(Some(wanting)) {
                return;
            }
            self.owed += usize::from(lacks > 0);
        }
    }

    /// Tables are durable: slots are free. What a disk does not use of the room that it has made,
    /// others get step by step.
    pub(super) fn halve_owed(&mut self) {
        self.owed = (self.owed / 2).min(self.free_count() + self.leaving_count());
    }
}
