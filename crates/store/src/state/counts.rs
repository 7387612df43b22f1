//! What a pool counts.

/// Counts since the pool was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Blocks that volumes wrote, without zeroes.
    pub written_blocks: u64,
    /// Blocks that were zeroes, and took no place.
    pub zero_blocks: u64,
    /// Blocks that became references to equal ones.
    pub shared_blocks: u64,
    /// Blocks that were looked for by their fingerprints.
    pub looked_up_blocks: u64,
    /// Blocks that became references to blocks that the volume had read before: copies.
    pub copied_blocks: u64,
    /// Blocks that were compared with what was read before, without another read.
    pub kept_blocks: u64,
    /// Blocks that were known to be equal to no others, so that none were looked for.
    pub unique_blocks: u64,
    /// Blocks that were equal to what they replaced.
    pub unchanged_blocks: u64,
    /// Blocks that had the fingerprint of another one, and were not equal to it.
    pub unequal_blocks: u64,
    /// Pages of the fingerprint table that were read.
    pub fingerprint_reads: u64,
    /// Searches for equal blocks that were written several times, and the blocks that they gave to
    /// walks to be freed.
    pub merges: u64,
    /// The blocks that merges gave to walks to be freed.
    pub merged_blocks: u64,
    /// Blocks that were put where their neighbours are.
    pub relocated_blocks: u64,
    /// Segments that were given back to what is beneath the pool.
    pub punched_segments: u64,
    /// Batches written.
    pub batches: u64,
    /// Pages of maps that checkpoints wrote.
    pub map_pages: u64,
    /// The second copies of these that checkpoints wrote.
    pub page_copies: u64,
    /// Pages of maps of which one copy was damaged, or could not be read: the next checkpoint
    /// writes both anew.
    pub mended_pages: u64,
    /// Pages of maps that were read.
    pub map_reads: u64,
    /// Checkpoints.
    pub checkpoints: u64,
    /// Walks that have ended, and the blocks that they have freed.
    pub walks: u64,
    /// The blocks that walks have freed.
    pub walk_freed_blocks: u64,
    /// Change sets of deleted snapshots that were brought into those that follow.
    pub united_sets: u64,
    /// Blocks whose content did not have the right checksum.
    pub wrong_blocks: u64,
}
