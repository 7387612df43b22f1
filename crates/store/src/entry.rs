//! An entry of a leaf of a volume's map: where a block is, and the checksum of its content.
//!
//! | bits | meaning |
//! |---|---|
//! | 0–35 | the block on the device; 0 with all other bits for a hole, which reads as zeroes |
//! | 36 | fresh: the block was written for this entry, since its page became its branch's own |
//! | 37–39 | zero |
//! | 40–63 | the low 24 bits of the CRC-32C of the content |

/// The bits of a block's number.
const BLOCK_MASK: u64 = (1 << 36) - 1;
const FRESH: u64 = 1 << 36;
const UNUSED: u64 = 7 << 37;
const CHECKSUM_AT: u32 = 40;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MapEntry(u64);

impl MapEntry {
    /// A hole.
    pub(crate) const HOLE: Self = Self(0);

    /// An entry for the block `block` of the device, whose content has this CRC-32C.
    pub(crate) fn new(block: u64, checksum: u32) -> Self {
        Self(block & BLOCK_MASK | u64::from(checksum) << CHECKSUM_AT)
    }

    /// What a page has; `None` if no entry has these bits.
    pub(crate) fn from_bits(bits: u64) -> Option<Self> {
        let is_sane = bits == 0 || bits & BLOCK_MASK != 0 && bits & UNUSED == 0;
        is_sane.then_some(Self(bits))
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    pub(crate) fn is_hole(self) -> bool {
        self.0 == 0
    }

    /// The block on the device; 0 for a hole.
    pub(crate) fn block(self) -> u64 {
        self.0 & BLOCK_MASK
    }

    pub(crate) fn is_fresh(self) -> bool {
        self.0 & FRESH != 0
    }

    /// The same entry, fresh unless it is a hole.
    pub(crate) fn fresh(self) -> Self {
        if self.is_hole() { self } else { Self(self.0 | FRESH) }
    }

    /// An entry for the same content in the block `block` of the device, which others have as well.
    pub(crate) fn moved_to(self, block: u64) -> Self {
        Self(self.0 & !(BLOCK_MASK | FRESH) | block & BLOCK_MASK)
    }

    /// The same entry, not fresh.
    pub(crate) fn stale(self) -> Self {
        Self(self.0 & !FRESH)
    }

    /// The low 24 bits of the CRC-32C of the content.
    pub(crate) fn checksum(self) -> u32 {
        (self.0 >> CHECKSUM_AT) as u32
    }

    /// Whether content with this CRC-32C may be the block's.
    pub(crate) fn has_checksum(self, checksum: u32) -> bool {
        self.0 >> CHECKSUM_AT == u64::from(checksum) & 0xff_ffff
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_keeps_block_and_checksum() {
        let entry = MapEntry::new(BLOCK_MASK, 0xdead_beef);
        assert_eq!((entry.block(), entry.is_fresh()), (BLOCK_MASK, false));
        assert!(entry.has_checksum(0xdead_beef) && !entry.has_checksum(0xdead_beee));
        assert_eq!(entry.fresh().stale(), entry);
        assert!(entry.fresh().is_fresh() && entry.fresh().has_checksum(0xdead_beef));
        assert_eq!(MapEntry::HOLE.fresh(), MapEntry::HOLE);
        for (bits, is_sane) in [(0, true), (FRESH, false), (5 << 40, false), (1 | 1 << 37, false)] {
            assert_eq!(MapEntry::from_bits(bits).is_some(), is_sane, "{bits:x}");
        }
        assert_eq!(MapEntry::from_bits(entry.fresh().bits()), Some(entry.fresh()));
    }
}
