//! The replacement of a cache: which blocks are let in, and which one leaves.

use std::sync::Arc;

use crate::access::{BlockAccess, CLASS_TABLE};
use crate::engine::Engine;
pub use crate::engine::Kept;
use crate::hash;
use crate::hits::Hits;
use crate::learner::Learner;
use crate::ranks::{Ranks, class, group};
use crate::slots::SlotStates;
use crate::trials::Trials;

/// The most slots of a [`Replacement`].
pub const SLOTS_MAX: u32 = 1 << 31;

/// The most disks with a share of a [`Replacement`].
pub const SHARES_MAX: usize = 63;
/// A key has the number of its disk from this bit on.
pub const DISK_SHIFT: u32 = 48;

/// The pool of the block of a key: 0 for those of disks that have never had a share.
#[inline]
fn pool(pools: &[(u64, usize)], key: u64) -> usize {
    let found = pools.iter().find(|(disk, _)| *disk == key >> DISK_SHIFT);
    found.map_or(0, |(_, pool)| *pool)
}

/// What decides which blocks are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// The classes of blocks are ignored. What new blocks have to pass follows what misses least.
    None,
    /// Blocks of higher classes are kept longer, as in the Sky paper.
    Sky,
    /// The cost of a miss of each class, and how soon its blocks are used again, are learned.
    #[default]
    Auto,
}

/// The longest write whose blocks are inserted, in bytes, and the longest one of rows of databases
/// if the policy knows of them: rows that are written and not in the guest's memory are soon read,
/// and a guest's kernel combines its writes to longer requests. What a longer one writes leaves the
/// cache.
const WRITE_INSERTED_MAX: u64 = 1 << 20;
const TABLE_INSERTED_MAX: u64 = 4 << 20;

impl Policy {
    /// The longest write of a class whose blocks are inserted, in bytes. What a longer one writes
    /// leaves the cache.
    pub fn write_inserted_max(self, class: u8) -> u64 {
        match self {
            Self::Sky | Self::Auto if class == CLASS_TABLE => TABLE_INSERTED_MAX,
            _ => WRITE_INSERTED_MAX,
        }
    }
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
    /// The disks with a share, and their pools.
    pools: Vec<(u64, usize)>,
    /// What the policies `none` and `auto` learn, for all shards of a cache, and the number of the
    /// levels that this shard follows.
    learner: Option<Arc<Learner>>,
    version: u32,
}

impl Replacement {
    /// Makes the replacement for `slots_max` slots, at most [`SLOTS_MAX`].
    pub fn new(options: &ReplacementOptions, slots_max: u32) -> Self {
        let learner = Self::learner(options, slots_max.into());
        Self::part(options, slots_max, learner)
    }

    /// Makes the replacements of the shards of a cache, which have at most these numbers of slots
    /// and learn together.
    pub fn shards(options: &ReplacementOptions, slots_max: &[u32]) -> Vec<Self> {
        let slots = slots_max.iter().map(|slots| u64::from(*slots)).sum();
        let learner = Self::learner(options, slots);
        let part = |slots: &u32| Self::part(options, *slots, learner.clone());
        slots_max.iter().map(part).collect()
    }

    fn learner(options: &ReplacementOptions, slots: u64) -> Option<Arc<Learner>> {
        let trials = match options.policy {
            Policy::None => Trials::of_bases(slots),
            Policy::Sky => return None,
            Policy::Auto => Trials::of_classes(slots),
        };
        Some(Arc::new(Learner::new(trials)))
    }

    fn part(options: &ReplacementOptions, slots_max: u32, learner: Option<Arc<Learner>>) -> Self {
        let slots = slots_max.clamp(1, SLOTS_MAX) as usize;
        let ranks = match options.policy {
            Policy::None => Ranks::equal(),
            Policy::Sky => Ranks::sky(),
            Policy::Auto => Ranks::guess(),
        };
        Self { engine: Engine::new(ranks, slots), pools: Vec::new(), learner, version: 0 }
    }

    /// What one queue needs for hits without the lock of a shard.
    pub fn hits(&self) -> Hits {
        Hits::new(self.learner.clone())
    }

    /// The states of the slots.
    pub fn states(&self) -> &Arc<SlotStates> {
        self.engine.states()
    }

    /// A request for the block of `key` in `slot`. One that continues the last use of its block
    /// changes nothing.
    pub fn hit(&mut self, slot: u32, key: u64, access: &BlockAccess) {
        if access.is_continued {
            return;
        }
        let group = group(access);
        self.engine.hit(slot, group);
        self.learn(key, group, access);
    }

    /// A request for the block of `key`, which is in no slot. Returns whether it is worth a slot.
    pub fn admits(&mut self, key: u64, access: &BlockAccess) -> bool {
        let group = group(access);
        self.learn(key, group, access);
        if let Some(learner) = &self.learner {
            learner.update(&mut self.version, &mut self.engine.ranks);
        }
        !self.engine.ranks.is_refused(group)
    }

    /// Whether a block with such requests is worth a slot. Nothing is learned from the question.
    pub fn has_place(&self, access: &BlockAccess) -> bool {
        !self.engine.ranks.is_refused(group(access))
    }

    /// The first request for the block of `key`, which was put into its slot before it was
    /// requested.
    pub fn first_use(&self, key: u64, access: &BlockAccess) {
        self.learn(key, group(access), access);
    }

    #[inline]
    fn learn(&self, key: u64, group: usize, access: &BlockAccess) {
        if let Some(learner) = &self.learner {
            learner.observe(hash(key), group, access);
        }
    }

    /// The block of `key` has been put into `slot`, which was free.
    pub fn insert(&mut self, slot: u32, key: u64, access: &BlockAccess) {
        let pool = self.pool(key);
        self.engine.insert(slot, hash(key), group(access), pool);
    }

    /// Guarantees `slots` slots to a disk: its blocks are not victims for those of other disks
    /// while it has no more than these. `blocks` are the slots that have blocks of the disk, for a
    /// disk without a share so far. At most [`SHARES_MAX`] disks can have had a share; returns
    /// false if there are more. The caller ensures that the sum of all shares is at most the number
    /// of slots.
    pub fn set_share(
        &mut self,
        disk: u64,
        slots: u32,
        blocks: impl IntoIterator<Item = u32>,
    ) -> bool {
        let known = self.pools.iter().find(|(other, _)| *other == disk);
        let pool = match known {
            Some((_, pool)) => *pool,
            None if slots == 0 => return true,
            None if self.pools.len() >= SHARES_MAX => return false,
            None => {
                let pool = self.engine.add_pool();
                blocks.into_iter().for_each(|slot| self.engine.move_block(slot, 0, pool));
                self.pools.push((disk, pool));
                pool
            }
        };
        self.engine.set_share(pool, slots);
        true
    }

    /// The number of blocks of a disk that has had a share.
    pub fn blocks_of(&self, disk: u64) -> Option<u32> {
        let pool = self.pools.iter().find(|(other, _)| *other == disk);
        pool.map(|(_, pool)| self.engine.blocks_of(*pool))
    }

    /// The slots that the disk of the block `key` lacks to its share.
    pub fn lacks(&self, key: u64) -> u32 {
        self.engine.lacks(self.pool(key))
    }

    #[inline]
    fn pool(&self, key: u64) -> usize {
        pool(&self.pools, key)
    }

    /// The class of the block in `slot`, as of its last request.
    pub fn class(&self, slot: u32) -> u8 {
        class(self.engine.group(slot))
    }

    /// The caller has taken the block out of `slot`. The ghosts do not remember it. Returns its
    /// place, for [`insert_again`](Self::insert_again) if its content is replaced.
    pub fn remove(&mut self, slot: u32, key: u64) -> Option<Kept> {
        let pool = self.pool(key);
        self.engine.remove(slot, pool)
    }

    /// The new content of the block of `key` has been put into `slot`, which was free. `kept` is
    /// the place of the block before its content was written: that is a hit of the block, although
    /// its slot may be another one.
    pub fn insert_again(&mut self, slot: u32, key: u64, access: &BlockAccess, kept: Kept) {
        let (pool, group) = (self.pool(key), group(access));
        self.engine.insert_again(slot, hash(key), group, pool, kept);
        self.learn(key, group, access);
    }

    /// Takes a block out of the queues, so that its slot is free for the block of the key
    /// `wanting`, or for any. `key` returns the key of the block in a slot. Returns `None` if there
    /// are no blocks, or if all belong to the shares of other disks.
    pub fn victim(&mut self, wanting: Option<u64>, key: impl Fn(u32) -> u64) -> Option<u32> {
        let Self { engine, pools, .. } = self;
        let wanting = wanting.map(|key| pool(pools, key));
        engine.victim(wanting, |slot| hash(key(slot)), |slot| pool(pools, key(slot)))
    }

    /// The number of blocks.
    pub fn len(&self) -> u32 {
        self.engine.len()
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory of the replacement, in bytes, without what the shards of a cache have learned
    /// together.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.engine.memory_bytes()
    }

    /// The memory of what all shards of a cache have learned together, in bytes.
    pub fn learned_bytes(&self) -> usize {
        self.learner.as_ref().map_or(0, |learner| learner.memory_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_follow_what_they_have_learned_together() {
        let options = ReplacementOptions { policy: Policy::Auto };
        let mut shards = Replacement::shards(&options, &[2000, 2000, 1000]);
        assert_eq!(shards[0].learned_bytes(), shards[2].learned_bytes());
        let access = BlockAccess { class: 3, miss_ns: 1_000_000, ..BlockAccess::default() };
        for key in 0..10_000 {
            shards[0].admits(key % 3000, &access);
        }
        assert_eq!(shards[2].version, 0);
        assert!(shards[0].version > 0);
        shards[2].admits(1, &access);
        assert!(shards[2].version >= shards[0].version);
        let levels = |shard: &Replacement| {
            (0..crate::slots::GROUPS)
                .map(|group| shard.engine.ranks.level(group))
                .collect::<Vec<_>>()
        };
        assert_eq!(levels(&shards[2]), levels(&shards[0]));
        // The shards of another cache learn nothing of it.
        let alone = Replacement::new(&options, 1000);
        assert_eq!(alone.version, 0);
    }
}
