//! The replacement: S3-FIFO.
//!
//! A new block enters the small queue, a tenth of the slots. If it is hit there, it moves to the
//! main queue when its turn comes; otherwise it leaves the cache, and the ghosts remember it. A
//! block that the ghosts remember enters the main queue at once. A block of the main queue that has
//! been hit gets another round for each hit, at most three.
//!
//! A hit only counts: it moves nothing. A block that the caller removes leaves its entry in a queue,
//! because entries are not linked both ways. Such a stale entry is dropped when its turn comes. At
//! any time a slot has as many entries in the queues as its state has stale ones, and one more if it
//! has a block. If a slot is reused while many stale entries exist, the block takes over a stale
//! entry and its place.

use crate::access::Access;
use crate::ghost::Ghost;
use crate::hash;
use crate::queues::Queues;
use crate::slots::{HITS_MAX, Place, STALE_MAX, Slot};

/// The most slots of a [`Replacement`].
pub const SLOTS_MAX: u32 = 1 << 31;

/// The number of blocks that a search for a victim passes over. The next one is taken even if it
/// has been hit, so that a search takes a bounded time.
const STEPS_MAX: u32 = 512;

const SMALL: usize = 0;
const MAIN: usize = 1;
const QUEUES: usize = 2;

/// What decides which blocks are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// The classes of blocks are ignored.
    None,
    /// Blocks of higher classes are kept longer, as in the Sky paper.
    Sky,
    /// The cost of a miss of each class, and how soon its blocks are used again, are learned.
    #[default]
    Auto,
}

/// The options of a [`Replacement`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplacementOptions {
    /// What decides which blocks are kept.
    pub policy: Policy,
}

/// The replacement of one shard, or of one disk's part of a cache.
///
/// The caller holds the blocks in slots, which are numbers below the `slots_max` of
/// [`new`](Self::new), and calls for each request for a block:
///
/// - [`hit`](Self::hit) if the block is in a slot;
/// - otherwise [`admits`](Self::admits), and if the block is let in, and no slot is free,
///   [`victim`](Self::victim), then [`insert`](Self::insert).
///
/// A wrong order of calls costs hits, but no call panics.
#[derive(Debug)]
pub struct Replacement {
    slots: Vec<Slot>,
    queues: Queues,
    ghost: Ghost,
    /// The blocks in the small queue and in the main queue.
    small: u32,
    main: u32,
    /// The blocks that the small queue has at least before one of them leaves.
    small_min: u32,
    /// The entries of slots beyond one for each slot, and their limit.
    extra: usize,
    extra_max: usize,
}

impl Replacement {
    /// Makes the replacement for `slots_max` slots, at most [`SLOTS_MAX`].
    pub fn new(options: &ReplacementOptions, slots_max: u32) -> Self {
        let _ = options;
        let slots = slots_max.clamp(1, SLOTS_MAX) as usize;
        let extra_max = slots / 64;
        Self {
            slots: vec![Slot::default(); slots],
            queues: Queues::new(QUEUES, slots + extra_max),
            ghost: Ghost::new(slots * 7 / 10),
            small: 0,
            main: 0,
            small_min: (slots / 10).max(1) as u32,
            extra: 0,
            extra_max,
        }
    }

    /// A request for the block of `key` in `slot`.
    pub fn hit(&mut self, slot: u32, key: u64, access: &Access) {
        let _ = (key, access);
        if let Some(state) = self.slots.get_mut(slot as usize) {
            state.set_hits((state.hits() + 1).min(HITS_MAX));
        }
    }

    /// A request for the block of `key`, which is in no slot. Returns whether it is worth a slot.
    pub fn admits(&mut self, key: u64, access: &Access) -> bool {
        let _ = (key, access);
        true
    }

    /// The block of `key` has been put into `slot`, which was free.
    pub fn insert(&mut self, slot: u32, key: u64, access: &Access) {
        let _ = access;
        if slot as usize >= self.slots.len() {
            return;
        }
        self.remove(slot);
        let hash = hash(key);
        let place = if self.ghost.contains(hash) {
            self.ghost.remove(hash);
            Place::Main
        } else {
            Place::Small
        };
        let state = &mut self.slots[slot as usize];
        state.set_hits(0);
        state.set_place(place);
        let stale = state.stale();
        if stale == STALE_MAX || stale > 0 && self.extra >= self.extra_max {
            state.set_stale(stale - 1);
        } else {
            self.extra += usize::from(stale > 0);
            self.queues.push(queue(place), slot);
        }
        *self.count(place) += 1;
    }

    /// The caller has taken the block out of `slot`. The ghosts do not remember it.
    pub fn remove(&mut self, slot: u32) {
        let Some(state) = self.slots.get_mut(slot as usize) else { return };
        let place = state.place();
        if place != Place::Absent {
            state.set_place(Place::Absent);
            state.set_stale(state.stale() + 1);
            *self.count(place) -= 1;
        }
    }

    /// Takes a block out of the queues, so that its slot is free. `key` returns the key of the block
    /// in a slot. Returns `None` if there are no blocks.
    pub fn victim(&mut self, key: impl Fn(u32) -> u64) -> Option<u32> {
        let mut steps = 0;
        while self.small + self.main > 0 {
            steps += 1;
            let place = if self.small >= self.small_min || self.main == 0 {
                Place::Small
            } else {
                Place::Main
            };
            let (slot, place) = self.next(place)?;
            let state = &mut self.slots[slot as usize];
            if state.hits() > 0 && steps < STEPS_MAX {
                let hits = if place == Place::Small { 0 } else { state.hits() - 1 };
                state.set_hits(hits);
                state.set_place(Place::Main);
                self.queues.push(MAIN, slot);
                *self.count(place) -= 1;
                self.main += 1;
                continue;
            }
            state.set_place(Place::Absent);
            *self.count(place) -= 1;
            if place == Place::Small {
                self.ghost.insert(hash(key(slot)));
            }
            return Some(slot);
        }
        None
    }

    /// Takes the first entry with a block out of a queue, or out of the other one if the queue has
    /// none. Returns the slot, and the place of its block. Stale entries before it are dropped, and
    /// entries of blocks that are in the other queue are moved there.
    fn next(&mut self, place: Place) -> Option<(u32, Place)> {
        while let Some(slot) = self.queues.pop(queue(place)) {
            match self.entry(slot) {
                Some(found) if found == place => return Some((slot, place)),
                Some(other) => self.queues.push(queue(other), slot),
                None => {}
            }
        }
        // The blocks have taken over stale entries of the other queue.
        let other = if place == Place::Small { Place::Main } else { Place::Small };
        while let Some(slot) = self.queues.pop(queue(other)) {
            if let Some(found) = self.entry(slot) {
                return Some((slot, found));
            }
        }
        None
    }

    /// Where the block of an entry is that was taken out of a queue; `None` if the entry is stale.
    fn entry(&mut self, slot: u32) -> Option<Place> {
        let state = &mut self.slots[slot as usize];
        if state.stale() == 0 {
            return Some(state.place());
        }
        state.set_stale(state.stale() - 1);
        let rest = state.stale() + u8::from(state.place() != Place::Absent);
        self.extra -= usize::from(rest > 0);
        None
    }

    fn count(&mut self, place: Place) -> &mut u32 {
        if place == Place::Small { &mut self.small } else { &mut self.main }
    }

    /// The number of blocks.
    pub fn len(&self) -> u32 {
        self.small + self.main
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory of the replacement, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + size_of_val(&self.slots[..])
            + self.queues.memory_bytes()
            + self.ghost.memory_bytes()
    }
}

/// The queue of a place.
fn queue(place: Place) -> usize {
    if place == Place::Small { SMALL } else { MAIN }
}
