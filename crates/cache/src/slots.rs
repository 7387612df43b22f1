//! The state of each slot, in two bytes.

use std::sync::atomic::{AtomicU16, Ordering};

const QUEUE_SHIFT: u32 = 0;
const HITS_SHIFT: u32 = 3;
const STALE_SHIFT: u32 = 5;
const GROUP_SHIFT: u32 = 7;
const QUEUE_MASK: u16 = 7;
const HITS_MASK: u16 = 3;
const STALE_MASK: u16 = 3;

/// The queues in which a block can be, at most.
pub const QUEUES: usize = QUEUE_MASK as usize;
/// The greatest count of hits of a slot.
pub const HITS_MAX: u8 = HITS_MASK as u8;
/// The most entries of a slot in the queues beyond the one for its block.
pub const STALE_MAX: u8 = STALE_MASK as u8;
/// The number of groups into which blocks are divided.
pub const GROUPS: usize = 1 << (16 - GROUP_SHIFT);

/// The state of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot(u16);

impl Slot {
    fn set(&mut self, mask: u16, shift: u32, value: u16) {
        self.0 = self.0 & !(mask << shift) | value << shift;
    }

    /// The queue in which the block is; `None` if the slot has no block.
    pub fn queue(self) -> Option<usize> {
        usize::from(self.0 >> QUEUE_SHIFT & QUEUE_MASK).checked_sub(1)
    }

    /// Sets the queue in which the block is, below [`QUEUES`].
    pub fn set_queue(&mut self, queue: Option<usize>) {
        let value = queue.map_or(0, |queue| queue.min(QUEUES - 1) as u16 + 1);
        self.set(QUEUE_MASK, QUEUE_SHIFT, value);
    }

    /// The hits since the block was last considered, at most [`HITS_MAX`].
    pub fn hits(self) -> u8 {
        (self.0 >> HITS_SHIFT & HITS_MASK) as u8
    }

    /// Sets the hits, at most [`HITS_MAX`].
    pub fn set_hits(&mut self, hits: u8) {
        self.set(HITS_MASK, HITS_SHIFT, hits.min(HITS_MAX).into());
    }

    /// The entries in the queues that are left over from blocks that the caller removed.
    pub fn stale(self) -> u8 {
        (self.0 >> STALE_SHIFT & STALE_MASK) as u8
    }

    /// Sets the stale entries, at most [`STALE_MAX`].
    pub fn set_stale(&mut self, stale: u8) {
        self.set(STALE_MASK, STALE_SHIFT, stale.min(STALE_MAX).into());
    }

    /// The group of the block's last access.
    pub fn group(self) -> usize {
        usize::from(self.0 >> GROUP_SHIFT)
    }

    /// Sets the group of the block's last access, below [`GROUPS`].
    pub fn set_group(&mut self, group: usize) {
        self.set((GROUPS - 1) as u16, GROUP_SHIFT, group.min(GROUPS - 1) as u16);
    }
}

/// The states of a replacement's slots. The replacement changes them; others may read them at any
/// time.
#[derive(Debug)]
pub struct SlotStates(Box<[AtomicU16]>);

impl SlotStates {
    /// The states of `count` slots without a block.
    pub(crate) fn new(count: usize) -> Self {
        // Memory of zeroes is used only when it is written.
        let zeroes = vec![0_u16; count];
        Self(zeroes.into_iter().map(AtomicU16::new).collect())
    }

    /// The number of slots.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The state of a slot; that of a slot without a block for a number that no slot has.
    #[inline]
    pub(crate) fn get(&self, slot: u32) -> Slot {
        Slot(self.0.get(slot as usize).map_or(0, |state| state.load(Ordering::Relaxed)))
    }

    /// Changes the state of a slot. Only the replacement calls this.
    #[inline]
    pub(crate) fn set(&self, slot: u32, state: Slot) {
        if let Some(place) = self.0.get(slot as usize) {
            place.store(state.0, Ordering::Relaxed);
        }
    }

    /// Whether another read of the block in `slot`, which belongs to `group`, changes nothing: it
    /// has been hit as often as is counted, and in the same group. The answer may be out of date.
    #[inline]
    pub(crate) fn is_settled(&self, slot: u32, group: usize) -> bool {
        let state = self.get(slot);
        state.hits() == HITS_MAX && state.group() == group
    }

    /// The address of a slot's state, to fetch it into the processor's caches.
    #[inline]
    pub fn address(&self, slot: u32) -> *const u8 {
        self.0.as_ptr().wrapping_add(slot as usize).cast()
    }

    /// The memory, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&self.0[..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_state_do_not_touch_each_other() {
        let mut random = fastrand::Rng::with_seed(1);
        let (mut slot, mut model) = (Slot::default(), (None, 0, 0, 0));
        for _ in 0..10_000 {
            match random.u32(0..4) {
                0 => model.0 = random.usize(0..=QUEUES).checked_sub(1),
                1 => model.1 = random.u8(0..=HITS_MAX),
                2 => model.2 = random.u8(0..=STALE_MAX),
                _ => model.3 = random.usize(0..GROUPS),
            }
            slot.set_queue(model.0);
            slot.set_hits(model.1);
            slot.set_stale(model.2);
            slot.set_group(model.3);
            assert_eq!((slot.queue(), slot.hits(), slot.stale(), slot.group()), model);
        }
    }
}
