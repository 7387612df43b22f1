//! The replacement of a cache: which blocks are let in, and which one leaves.

use crate::access::Access;
use crate::engine::Engine;
use crate::hash;
use crate::ranks::{Ranks, group};
use crate::trials::Trials;

/// The most slots of a [`Replacement`].
pub const SLOTS_MAX: u32 = 1 << 31;

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
    engine: Engine,
    /// What the policy `auto` learns from.
    trials: Option<Box<Trials>>,
}

impl Replacement {
    /// Makes the replacement for `slots_max` slots, at most [`SLOTS_MAX`].
    pub fn new(options: &ReplacementOptions, slots_max: u32) -> Self {
        let slots = slots_max.clamp(1, SLOTS_MAX) as usize;
        let (ranks, trials) = match options.policy {
            Policy::None => (Ranks::equal(), None),
            Policy::Sky => (Ranks::sky(), None),
            Policy::Auto => (Ranks::guess(), Some(Box::new(Trials::new(slots)))),
        };
        Self { engine: Engine::new(ranks, slots), trials }
    }

    /// A request for the block of `key` in `slot`.
    pub fn hit(&mut self, slot: u32, key: u64, access: &Access) {
        let group = group(access);
        self.engine.hit(slot, group);
        self.learn(key, group, access);
    }

    /// A request for the block of `key`, which is in no slot. Returns whether it is worth a slot.
    pub fn admits(&mut self, key: u64, access: &Access) -> bool {
        let group = group(access);
        self.learn(key, group, access);
        !self.engine.ranks.is_refused(group)
    }

    fn learn(&mut self, key: u64, group: usize, access: &Access) {
        let Some(trials) = &mut self.trials else { return };
        if let Some(ranks) = trials.observe(hash(key), group, access) {
            self.engine.ranks.clone_from(ranks);
        }
    }

    /// The block of `key` has been put into `slot`, which was free.
    pub fn insert(&mut self, slot: u32, key: u64, access: &Access) {
        self.engine.insert(slot, hash(key), group(access));
    }

    /// The caller has taken the block out of `slot`. The ghosts do not remember it.
    pub fn remove(&mut self, slot: u32) {
        self.engine.remove(slot);
    }

    /// Takes a block out of the queues, so that its slot is free. `key` returns the key of the block
    /// in a slot. Returns `None` if there are no blocks.
    pub fn victim(&mut self, key: impl Fn(u32) -> u64) -> Option<u32> {
        self.engine.victim(|slot| hash(key(slot)))
    }

    /// The number of blocks.
    pub fn len(&self) -> u32 {
        self.engine.len()
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory of the replacement, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let trials = self.trials.as_ref().map_or(0, |trials| trials.memory_bytes());
        size_of::<Self>() + self.engine.memory_bytes() + trials
    }
}
