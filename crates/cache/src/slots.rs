//! The state of each slot, in two bytes.

/// Where the block of a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The slot has no block.
    Absent,
    /// In the small queue, for blocks that were seen once.
    Small,
    /// In the main queue.
    Main,
}

const PLACE_SHIFT: u32 = 0;
const HITS_SHIFT: u32 = 2;
const STALE_SHIFT: u32 = 4;
const MASK: u16 = 3;

/// The greatest count of hits of a slot.
pub const HITS_MAX: u8 = 3;
/// The most entries of a slot in the queues beyond the one for its block.
pub const STALE_MAX: u8 = 3;

/// The state of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot(u16);

impl Slot {
    /// Where the block is.
    pub fn place(self) -> Place {
        match self.0 >> PLACE_SHIFT & MASK {
            0 => Place::Absent,
            1 => Place::Small,
            _ => Place::Main,
        }
    }

    /// Sets where the block is.
    pub fn set_place(&mut self, place: Place) {
        self.0 = self.0 & !(MASK << PLACE_SHIFT) | (place as u16) << PLACE_SHIFT;
    }

    /// The hits since the block was last considered, at most [`HITS_MAX`].
    pub fn hits(self) -> u8 {
        (self.0 >> HITS_SHIFT & MASK) as u8
    }

    /// Sets the hits, at most [`HITS_MAX`].
    pub fn set_hits(&mut self, hits: u8) {
        self.0 = self.0 & !(MASK << HITS_SHIFT) | u16::from(hits.min(HITS_MAX)) << HITS_SHIFT;
    }

    /// The entries in the queues that are left over from blocks that the caller removed.
    pub fn stale(self) -> u8 {
        (self.0 >> STALE_SHIFT & MASK) as u8
    }

    /// Sets the stale entries, at most [`STALE_MAX`].
    pub fn set_stale(&mut self, stale: u8) {
        self.0 = self.0 & !(MASK << STALE_SHIFT) | u16::from(stale.min(STALE_MAX)) << STALE_SHIFT;
    }
}
