//! Groups of blocks, and the levels that they have in the queues.

use crate::access::{
    BlockAccess, CLASS_INDEX, CLASS_JOURNAL, CLASS_LOG, CLASS_SWAP, CLASS_TABLE, CLASS_UNKNOWN,
    CLASSES,
};
use crate::slots::GROUPS;

/// The levels of groups.
pub const LEVELS: usize = 6;
/// The level of a group whose worth is the mean.
pub const LEVEL_MEAN: u8 = 2;
/// The ratio of lives of neighbouring levels, as a power of two.
pub const LEVEL_SHIFT: u32 = 2;
/// The ratio of lives of neighbouring classes with the policy `sky`, as a power of two.
const SKY_SHIFT: u32 = 4;

/// The costs of misses that are told apart in groups, and those for writes.
const COSTS: usize = GROUPS / CLASSES;
const COST_WRITE: usize = COSTS - 1;
const COST_WRITE_SEQUENTIAL: usize = COSTS - 2;
/// Costs below this one, in nanoseconds, are the lowest; each further one has four times the cost.
const COST_BASE_SHIFT: u32 = 12;

/// How the queues treat blocks of one level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// The blocks that the small queue has at least before one of them leaves, in percent of the
    /// slots. With 0, there is no small queue: new blocks enter the main queue.
    pub small_percent: u8,
    /// The rounds that a block of the main queue gets at most.
    pub rounds: u8,
    /// How long the blocks are remembered that have left the small queue, in periods of the ghosts,
    /// of which seven are about the time in which as many blocks leave as the cache has slots.
    pub ghost_periods: u8,
}

impl Base {
    /// S3-FIFO.
    pub const S3_FIFO: Self = Self { small_percent: 10, rounds: 3, ghost_periods: 7 };
    /// CLOCK: all blocks are in one queue, in which a block that was hit gets one more round. It is
    /// near to LRU.
    pub const CLOCK: Self = Self { small_percent: 0, rounds: 1, ghost_periods: 0 };
    /// New blocks leave at once unless they are hit or remembered: the main queue does not change
    /// by blocks that are requested once.
    pub const STRICT: Self = Self { small_percent: 1, rounds: 3, ghost_periods: 7 };
    /// Only what was used lately counts: blocks are remembered for a short time, and hits of the
    /// main queue are forgotten after one round.
    pub const BRIEF: Self = Self { small_percent: 10, rounds: 1, ghost_periods: 2 };
    /// Nearly all slots are for blocks that are worth more than others.
    pub const NARROW: Self = Self { small_percent: 2, rounds: 3, ghost_periods: 7 };
}

/// The levels of groups.
#[derive(Clone, Debug)]
pub struct Ranks {
    levels: [u8; GROUPS],
    is_refused: [bool; GROUPS],
    /// Blocks of this level and above skip the small queue, and those of groups with a mark.
    high: u8,
    skips: [bool; GROUPS],
    /// Whether blocks with a meaning skip it while the cache has free slots.
    fills: bool,
    /// Whether a write is a use of its block, although its class is known.
    uses_writes: bool,
    shift: u32,
    base: Base,
}

impl Ranks {
    /// All groups have one level.
    pub fn equal() -> Self {
        Self {
            levels: [LEVEL_MEAN; GROUPS],
            is_refused: [false; GROUPS],
            high: LEVEL_MEAN + 1,
            skips: [false; GROUPS],
            fills: false,
            uses_writes: true,
            shift: LEVEL_SHIFT,
            base: Base::S3_FIFO,
        }
    }

    /// The classes 0 to 5 of the Sky paper's Table 6 are the levels. Rows of databases are one
    /// level above the lowest, which other classes have, such as indices. Journals are refused.
    pub fn sky() -> Self {
        let mut ranks = Self { high: 1, shift: SKY_SHIFT, base: Base::NARROW, ..Self::equal() };
        for group in 0..GROUPS {
            let class = (group / COSTS) as u8;
            let level = match class {
                CLASS_TABLE => 1,
                class if usize::from(class) < LEVELS => class,
                _ => 0,
            };
            ranks.set(group, level, class == CLASS_JOURNAL);
        }
        ranks
    }

    /// A first guess of what groups are worth, from their classes alone. A level lives four times
    /// as long as the one below.
    ///
    /// Writes are no uses: that a block is written again says nothing of reads, and only reads save
    /// time. Blocks without a meaning are treated as if they were all alike.
    pub fn guess() -> Self {
        let mut ranks =
            Self { fills: true, uses_writes: false, base: Base::NARROW, ..Self::equal() };
        for group in 0..GROUPS {
            let class = (group / COSTS) as u8;
            ranks.set(group, guess(class, is_write(group)), class == CLASS_JOURNAL);
            // Rows that are written and not in the guest's memory are soon read, even if once only:
            // they must not leave with the indices that are made of them.
            ranks.skips[group] = class == CLASS_TABLE && is_write(group);
        }
        ranks
    }

    /// Sets the level of a group, and whether its blocks are refused.
    pub fn set(&mut self, group: usize, level: u8, is_refused: bool) {
        self.levels[group] = level.min(LEVELS as u8 - 1);
        self.is_refused[group] = is_refused;
    }

    /// The level of a group.
    pub fn level(&self, group: usize) -> u8 {
        self.levels[group]
    }

    /// Whether blocks of a group are not worth a slot.
    pub fn is_refused(&self, group: usize) -> bool {
        self.is_refused[group]
    }

    /// Whether a request of a group is a use of its block, for which the block stays longer.
    pub fn is_use(&self, group: usize) -> bool {
        self.uses_writes || !is_write(group) || group / COSTS == usize::from(CLASS_UNKNOWN)
    }

    /// Whether blocks of a group skip the small queue.
    pub fn is_high(&self, group: usize) -> bool {
        self.levels[group] >= self.high || self.skips[group]
    }

    /// Whether blocks of a group skip the small queue while the cache has free slots.
    pub fn fills(&self, group: usize) -> bool {
        self.fills && group / COSTS != usize::from(CLASS_UNKNOWN)
    }

    /// All groups have one level, which is treated like this.
    pub fn of_base(base: Base) -> Self {
        Self { base, ..Self::equal() }
    }

    /// How the queues treat blocks of one level.
    pub fn base(&self) -> Base {
        self.base
    }

    /// The ratio of lives of neighbouring levels, as a power of two.
    pub fn shift(&self) -> u32 {
        self.shift
    }
}

/// The first guess of the level of blocks of a class, from their last access.
///
/// A guest that writes data keeps it in its own memory, so that it is not soon read from the disk.
/// Metadata is written again and again, and what is read of it is scattered. Indices are written
/// when they are made, and logs are read only after a crash.
fn guess(class: u8, is_write: bool) -> u8 {
    let (read, written) = match class {
        0 | 1 => (1, 0),
        2 | 3 => (2, 1),
        4 => (3, 1),
        5 => (5, 5),
        CLASS_TABLE => (3, 2),
        CLASS_INDEX => (2, 0),
        CLASS_LOG => (1, 0),
        CLASS_SWAP => (2, 1),
        _ => (LEVEL_MEAN, LEVEL_MEAN),
    };
    if is_write { written } else { read }
}

/// Whether the last access of a group's blocks was a write.
fn is_write(group: usize) -> bool {
    group % COSTS >= COST_WRITE_SEQUENTIAL
}

/// The group of a block after an access.
pub fn group(access: &BlockAccess) -> usize {
    let class = usize::from(access.class).min(CLASSES - 1);
    let cost = match (access.is_write, access.is_sequential) {
        (true, true) => COST_WRITE_SEQUENTIAL,
        (true, false) => COST_WRITE,
        (false, _) => {
            let octaves = (access.miss_ns >> COST_BASE_SHIFT).max(1).ilog2() as usize;
            (octaves / 2).min(COST_WRITE_SEQUENTIAL - 1)
        }
    };
    class * COSTS + cost
}

/// The class of the blocks of a group.
pub fn class(group: usize) -> u8 {
    (group / COSTS).min(CLASSES - 1) as u8
}
