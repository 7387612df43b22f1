//! What is known of a request for a block.

/// The number of classes of an access.
pub const CLASSES: usize = 32;

/// The class of a file system's journal. The policy `sky` does not admit it.
pub const CLASS_JOURNAL: u8 = 31;
/// The class of requests whose meaning is unknown.
pub const CLASS_UNKNOWN: u8 = 30;
/// The class of swapped memory.
pub const CLASS_SWAP: u8 = 29;
/// The class of the rows of a database's tables.
pub const CLASS_TABLE: u8 = 28;
/// The class of a database's indices beside its rows.
pub const CLASS_INDEX: u8 = 27;
/// The class of a database's logs.
pub const CLASS_LOG: u8 = 26;
/// The lowest of these classes. A class that the host's table of classes gives is below it.
pub const CLASS_NAMED: u8 = CLASS_LOG;

/// A request for a block of the cache. All of it is a hint: a wrong one costs hits, nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockAccess {
    /// The class by which blocks are told apart, below [`CLASSES`]; greater ones count as the last.
    /// The classes from 0 to 5 are those of the Sky paper's Table 6.
    pub class: u8,
    /// Whether the request writes the block.
    pub is_write: bool,
    /// Whether the request continues the one before it.
    pub is_sequential: bool,
    /// What a miss of this block costs, or has cost, in nanoseconds of the slow disk's time. It is
    /// 0 if a hit saves nothing, as a hit of a write does while the cache writes through.
    pub miss_ns: u32,
    /// Whether this and a request shortly before it are one use of the block; see
    /// [`Seams`](crate::Seams).
    pub is_continued: bool,
}

impl Default for BlockAccess {
    fn default() -> Self {
        Self {
            class: CLASS_UNKNOWN,
            is_write: false,
            is_sequential: false,
            miss_ns: 0,
            is_continued: false,
        }
    }
}
