//! Groups of blocks, and the levels that they have in the queues.

use crate::access::{Access, CLASS_JOURNAL, CLASSES};
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

/// The levels of groups.
#[derive(Clone, Debug)]
pub struct Ranks {
    levels: [u8; GROUPS],
    is_refused: [bool; GROUPS],
    /// Blocks of this level and above skip the small queue.
    high: u8,
    shift: u32,
}

impl Ranks {
    /// All groups have one level.
    pub fn equal() -> Self {
        Self {
            levels: [LEVEL_MEAN; GROUPS],
            is_refused: [false; GROUPS],
            high: LEVEL_MEAN + 1,
            shift: LEVEL_SHIFT,
        }
    }

    /// The classes 0 to 5 of the Sky paper's Table 6 are the levels. Other classes have the lowest
    /// level, and journals are refused.
    pub fn sky() -> Self {
        let mut ranks = Self { high: 1, shift: SKY_SHIFT, ..Self::equal() };
        for group in 0..GROUPS {
            let class = (group / COSTS) as u8;
            let level = if usize::from(class) < LEVELS { class } else { 0 };
            ranks.set(group, level, class == CLASS_JOURNAL);
        }
        ranks
    }

    /// The classes of the Sky paper's Table 6 as a first guess of what groups are worth: other
    /// classes have the mean, and a class lives four times as long as the one below.
    pub fn guess() -> Self {
        let mut ranks = Self::equal();
        for group in 0..GROUPS {
            let class = (group / COSTS) as u8;
            let level = if usize::from(class) < LEVELS { class } else { LEVEL_MEAN };
            ranks.set(group, level, class == CLASS_JOURNAL);
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

    /// Whether blocks of a level skip the small queue.
    pub fn is_high(&self, level: u8) -> bool {
        level >= self.high
    }

    /// The ratio of lives of neighbouring levels, as a power of two.
    pub fn shift(&self) -> u32 {
        self.shift
    }
}

/// The group of a block after an access.
pub fn group(access: &Access) -> usize {
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
