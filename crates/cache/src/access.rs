//! What is known of a request for a block.

/// The number of classes of an access.
pub const CLASSES: usize = 32;

/// A request for a block of the cache. All of it is a hint: a wrong one costs hits, nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The class by which blocks are told apart, below [`CLASSES`]; greater ones count as the last.
    pub class: u8,
    /// Whether the request writes the block.
    pub is_write: bool,
    /// Whether the request continues the one before it.
    pub is_sequential: bool,
    /// What a miss of this block costs, or has cost, in nanoseconds of the slow disk's time.
    pub miss_ns: u32,
}
