//! Figures about equal blocks, for the metrics.

use fathom_block::Figure;

use crate::pool::PoolStatus;

/// What was looked for and found.
pub(crate) fn of_sharing(status: &PoolStatus) -> Vec<Figure> {
    let counts = &status.counts;
    vec![
        Figure::gauge(
            "pool_shared_bytes",
            "The bytes of blocks that are kept once for several equal ones.",
            status.shared_bytes,
        ),
        Figure::counter(
            "pool_shared_blocks_total",
            "The blocks that became references to equal ones.",
            counts.shared_blocks,
        ),
        Figure::counter(
            "pool_looked_up_blocks_total",
            "The blocks for which equal ones were looked for.",
            counts.looked_up_blocks,
        ),
        Figure::counter(
            "pool_copied_blocks_total",
            "The blocks that became references to blocks that their volume had read before.",
            counts.copied_blocks,
        ),
        Figure::counter(
            "pool_kept_blocks_total",
            "The blocks that were compared with what was read before, without another read.",
            counts.kept_blocks,
        ),
        Figure::counter(
            "pool_unique_blocks_total",
            "The blocks that were known to be equal to no others.",
            counts.unique_blocks,
        ),
        Figure::counter(
            "pool_unchanged_blocks_total",
            "The blocks that were equal to what they replaced.",
            counts.unchanged_blocks,
        ),
        Figure::counter(
            "pool_merges_total",
            "The searches for equal blocks that were written several times.",
            counts.merges,
        ),
        Figure::counter(
            "pool_merged_blocks_total",
            "The blocks that merges gave to walks to be freed.",
            counts.merged_blocks,
        ),
        Figure::counter(
            "pool_fingerprint_reads_total",
            "The pages of the fingerprint table that the pool read.",
            counts.fingerprint_reads,
        ),
    ]
}
