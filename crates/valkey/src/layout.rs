//! Where a volume's blocks are: 16 blocks make a group, and a group belongs to one of 256 shards.
//! All keys of a shard have the same hash tag, so that they are on one node, and one script can
//! change several.

use std::ops::Range;

use crate::format::BLOCK;

/// The blocks of a group.
pub(crate) const GROUP_BLOCKS: u64 = 16;
/// The length of a group, in bytes.
pub(crate) const GROUP: u64 = GROUP_BLOCKS * BLOCK;
/// The number of shards.
pub(crate) const SHARDS: u64 = 256;
/// The longest name of a volume, in bytes.
pub const NAME_MAX: usize = 64;

/// Whether a volume can have this name: letters, digits, and `.`, `_` and `-`.
pub fn is_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !name.is_empty() && name.len() <= NAME_MAX && name.chars().all(is_plain)
}

/// The shard of a group.
pub(crate) fn shard(group: u64) -> u64 {
    group % SHARDS
}

/// The key of the volume itself.
pub(crate) fn volume_key(name: &str) -> String {
    format!("fathom:{{{name}}}:volume")
}

/// The key of a shard's state.
pub(crate) fn state_key(name: &str, shard: u64) -> String {
    format!("fathom:{{{name}#{shard}}}:state")
}

/// The key of a block.
pub(crate) fn block_key(name: &str, block: u64) -> String {
    let shard = shard(block / GROUP_BLOCKS);
    format!("fathom:{{{name}#{shard}}}:{block}")
}

/// The parts of a range of bytes that lie in one group each.
pub(crate) fn parts(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let end = (at / GROUP + 1).saturating_mul(GROUP).min(range.end);
        (at < range.end).then(|| std::mem::replace(&mut at, end)..end)
    })
}

/// The blocks of which a range has bytes.
pub(crate) fn blocks(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_divided_at_groups() {
        let all: Vec<_> = parts(GROUP - 512..3 * GROUP + 1).collect();
        assert_eq!(
            all,
            [GROUP - 512..GROUP, GROUP..2 * GROUP, 2 * GROUP..3 * GROUP, 3 * GROUP..3 * GROUP + 1]
        );
        assert_eq!(parts(7..7).count(), 0);
        assert_eq!(blocks(&(4095..4097)), 0..2);
        assert_eq!(blocks(&(4096..8192)), 1..2);
    }

    #[test]
    fn keys_of_a_shard_are_in_one_slot() {
        let tag = |key: String| key[key.find('{').unwrap()..=key.find('}').unwrap()].to_owned();
        let group = SHARDS + 3;
        let block = group * GROUP_BLOCKS + 5;
        assert_eq!(tag(block_key("a.b", block)), tag(state_key("a.b", 3)));
        assert_ne!(tag(block_key("a.b", 0)), tag(state_key("a.b", 3)));
        assert!(is_name("host1-web.data") && !is_name("") && !is_name("a{b") && !is_name("a b"));
    }
}
