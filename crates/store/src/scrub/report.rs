//! What a scrub verifies, and what it has found.

use crate::layout::BLOCK;

/// The most damaged parts that a report describes.
pub const DAMAGES_MAX: usize = 100;

/// How a pool is scrubbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubOptions {
    /// Only the maps and the tables, not the content of each block.
    pub maps_only: bool,
    /// For how long the scrub pauses after a step while the pool is used, in durations of that
    /// step.
    pub pause: u32,
}

/// How far a scrub has come: volumes and snapshots are visited in the order of their numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ScrubPosition {
    /// The number of the volume or snapshot; 0 at the beginning.
    pub branch: u32,
    /// The next block of it.
    pub block: u64,
}

/// What is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DamageKind {
    /// Blocks have other content than was written.
    Content,
    /// Blocks, or a page of a map, cannot be read.
    Unreadable,
    /// A page of a map, so that what it describes cannot be read.
    Map,
    /// A page of what has changed since a snapshot, without which maps are compared.
    Changes,
}

/// A part of a volume or a snapshot that is damaged. Others that share its blocks have the same
/// damage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDamage {
    /// The volume; `None` if it was deleted, and snapshots of it exist.
    pub volume: Option<String>,
    /// The snapshot; `None` if it is the volume itself.
    pub snapshot: Option<String>,
    /// The first byte.
    pub offset: u64,
    /// The length, in bytes.
    pub length: u64,
    /// What is damaged.
    pub kind: DamageKind,
}

/// How a scrub goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScrubState {
    /// It is in progress.
    #[default]
    Running,
    /// All was visited.
    Complete,
    /// It was ended before.
    Ended,
    /// It has ended because the device or the pool fails.
    Failed,
}

/// What a scrub has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// Its number since the opening of the pool.
    pub number: u64,
    /// How it goes on.
    pub state: ScrubState,
    /// How far it has come. Another scrub can go on from there.
    pub position: ScrubPosition,
    /// Whether only maps and tables are verified.
    pub maps_only: bool,
    /// The volumes that were visited.
    pub volumes: u64,
    /// The snapshots that were visited.
    pub snapshots: u64,
    /// The pages of maps that were read, and are right.
    pub map_pages: u64,
    /// The blocks of data to which maps refer, each counted once.
    pub blocks: u64,
    /// Those of them that were read and are right.
    pub verified_blocks: u64,
    /// The places in use when it began, by blocks and pages.
    pub used_places: u64,
    /// Pages that were damaged on the device, and right in memory: the next checkpoint writes them
    /// anew.
    pub mended_pages: u64,
    /// The blocks that are damaged or cannot be read; of a damaged page of a map it is not known
    /// how many it describes.
    pub damaged_blocks: u64,
    /// The damaged pages of maps and of change sets.
    pub damaged_pages: u64,
    /// The first damaged parts.
    pub damages: Vec<FoundDamage>,
}

impl ScrubReport {
    /// Whether anything is damaged.
    pub fn is_damaged(&self) -> bool {
        self.damaged_blocks + self.damaged_pages > 0
    }

    /// Notes a damaged part. It becomes one with the part before if they adjoin.
    pub(super) fn note(&mut self, damage: FoundDamage) {
        match damage.kind {
            DamageKind::Map | DamageKind::Changes => self.damaged_pages += 1,
            DamageKind::Content | DamageKind::Unreadable => {
                self.damaged_blocks += damage.length / BLOCK;
            }
        }
        let adjoins = |last: &&mut FoundDamage| {
            (&last.volume, &last.snapshot, last.kind)
                == (&damage.volume, &damage.snapshot, damage.kind)
                && last.offset + last.length == damage.offset
        };
        let has_room = self.damages.len() < DAMAGES_MAX;
        match self.damages.last_mut().filter(adjoins) {
            Some(last) => last.length += damage.length,
            None if has_room => self.damages.push(damage),
            None => {}
        }
    }
}
