//! Lists of slots without a block.

use super::Blocks;

/// The end of a list of slots.
pub(super) const NONE: u32 = u32::MAX;

/// A list of slots without a block. The entry of each has the number of the next one.
#[derive(Clone, Copy)]
pub(super) struct List {
    pub first: u32,
    pub length: u32,
}

/// A list without slots.
pub(super) const EMPTY: List = List { first: NONE, length: 0 };

impl List {
    /// Adds a slot.
    pub fn push(&mut self, blocks: &Blocks, slot: u32) {
        // No disk has the number 0, so that this is the entry of no block.
        blocks.set_entry(slot, self.first.into());
        self.first = slot;
        self.length += 1;
    }

    /// Takes the slot that was added last.
    pub fn pop(&mut self, blocks: &Blocks) -> Option<u32> {
        let slot = self.first;
        if slot == NONE {
            return None;
        }
        self.first = blocks.entry(slot) as u32;
        blocks.set_entry(slot, 0);
        self.length -= 1;
        Some(slot)
    }
}
