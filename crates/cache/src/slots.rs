//! The state of each slot, in two bytes.

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
