//! The versions of blocks that this opening of a volume knows, and the counts of shards' writes.

use std::collections::HashMap;

use parking_lot::{Mutex, MutexGuard};

use crate::format::BlockVersion;
use crate::layout::{GROUP_BLOCKS, SHARDS};

/// The newest version of each block that has been read or whose write has completed. Nothing older
/// may be read.
#[derive(Debug, Default)]
pub(crate) struct Versions {
    groups: Mutex<HashMap<u64, Box<[BlockVersion; GROUP_BLOCKS as usize]>>>,
}

impl Versions {
    fn groups(&self) -> MutexGuard<'_, HashMap<u64, Box<[BlockVersion; GROUP_BLOCKS as usize]>>> {
        self.groups.lock()
    }

    /// The newest known version of a block.
    pub(crate) fn get(&self, block: u64) -> BlockVersion {
        let groups = self.groups();
        let group = groups.get(&(block / GROUP_BLOCKS));
        group.map_or(BlockVersion::default(), |group| group[(block % GROUP_BLOCKS) as usize])
    }

    /// A block has this version, or a newer one.
    pub(crate) fn learn(&self, block: u64, version: BlockVersion) {
        if version == BlockVersion::default() {
            return;
        }
        let mut groups = self.groups();
        let group = groups.entry(block / GROUP_BLOCKS).or_default();
        let known = &mut group[(block % GROUP_BLOCKS) as usize];
        *known = version.max(*known);
    }
}

/// A shard, and how many writes it had.
pub(crate) type Witness = (u64, u64);

#[derive(Debug)]
struct Counted {
    counts: Vec<u64>,
    /// Shards whose counts no other shard has.
    fresh: Vec<u64>,
}

/// How many writes each shard has had, and which of these counts no other shard witnesses yet.
#[derive(Debug)]
pub(crate) struct Witnesses {
    counted: Mutex<Counted>,
}

impl Default for Witnesses {
    fn default() -> Self {
        let counted = Counted { counts: vec![0; SHARDS as usize], fresh: Vec::new() };
        Self { counted: Mutex::new(counted) }
    }
}

impl Witnesses {
    fn counted(&self) -> MutexGuard<'_, Counted> {
        self.counted.lock()
    }

    /// A count that a write of `shard` can witness: the latest of another shard.
    pub(crate) fn take(&self, shard: u64) -> Option<Witness> {
        let mut counted = self.counted();
        let at = counted.fresh.iter().rposition(|other| *other != shard)?;
        let other = counted.fresh.remove(at);
        Some((other, counted.counts[other as usize]))
    }

    /// A write of `shard` has completed, as its write number `count`.
    pub(crate) fn note(&self, shard: u64, count: u64) {
        let mut counted = self.counted();
        let known = &mut counted.counts[shard as usize];
        *known = count.max(*known);
        if !counted.fresh.contains(&shard) {
            counted.fresh.push(shard);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_only_grow() {
        let versions = Versions::default();
        let version = |epoch, sequence| BlockVersion { epoch, sequence };
        assert_eq!(versions.get(40), version(0, 0));
        versions.learn(40, version(2, 5));
        versions.learn(40, version(1, 9));
        versions.learn(41, version(0, 0));
        assert_eq!((versions.get(40), versions.get(41)), (version(2, 5), version(0, 0)));
        versions.learn(40, version(2, 6));
        assert_eq!(versions.get(40), version(2, 6));
    }

    #[test]
    fn a_shard_is_witnessed_by_others_once_for_each_count() {
        let witnesses = Witnesses::default();
        assert_eq!(witnesses.take(1), None);
        witnesses.note(1, 7);
        witnesses.note(2, 3);
        assert_eq!(witnesses.take(2), Some((1, 7)));
        assert_eq!(witnesses.take(2), None);
        assert_eq!(witnesses.take(1), Some((2, 3)));
        witnesses.note(1, 8);
        assert_eq!(witnesses.take(1), None);
        assert_eq!(witnesses.take(9), Some((1, 8)));
    }
}
