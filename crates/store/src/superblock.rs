//! The superblock of a pool: what the device is, and where its latest checkpoint is.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 8 | `FATHOMBP` |
//! | 8 | 4 | version: 4; 3 without second copies of pages; 2 without guarantees either; 1 without change sets either |
//! | 16 | 16 | identity |
//! | 32 | 32 | key of the headers and records, drawn at random |
//! | 64 | 8 | number of the checkpoint |
//! | 72 | 8 | generation: the openings of the pool |
//! | 80 | 4 each | blocks of a segment; segments; blocks of a record; pages of the space map, of the page table and of the fingerprint table |
//! | 104 | 4 | length of the record, in bytes |
//! | 112 | 16 | code of the record |

use fathom_persistence::bytes::{array, put, u32_at, u64_at};
use fathom_persistence::{CopyOrder, Identity, Superblock, SuperblockBytes};

use crate::layout::Layout;
use crate::seal::{Code, Key};

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSuperblock {
    /// The version of the format in which the record was written.
    pub(crate) version: u32,
    /// The pool's identity.
    pub identity: Identity,
    pub(crate) key: Key,
    /// The number of the latest checkpoint.
    pub number: u64,
    /// How often the pool was opened.
    pub generation: u64,
    /// The pool's sizes.
    pub layout: Layout,
    /// The length of the checkpoint's record, in bytes, and its code.
    pub(crate) record: (u32, Code),
}

impl Superblock for PoolSuperblock {
    const NOUN: &'static str = "pool";
    const MAGIC: [u8; 8] = *b"FATHOMBP";
    const NEWEST: u32 = 4;
    const ORDER: CopyOrder = CopyOrder::Alternating;

    fn version(&self) -> u32 {
        self.version
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn number(&self) -> u64 {
        self.number
    }

    fn put(&self, copy: &mut SuperblockBytes) {
        put(copy, 16, &self.identity.0);
        put(copy, 32, &self.key.0);
        put(copy, 64, &self.number.to_le_bytes());
        put(copy, 72, &self.generation.to_le_bytes());
        let layout = &self.layout;
        let sizes = [
            layout.segment_blocks,
            layout.segments,
            layout.record_blocks,
            layout.space_pages,
            layout.table_pages,
            layout.fingerprint_pages,
            self.record.0,
        ];
        for (index, size) in sizes.into_iter().enumerate() {
            put(copy, 80 + 4 * index, &size.to_le_bytes());
        }
        put(copy, 112, &self.record.1.0);
    }

    fn get(version: u32, copy: &SuperblockBytes) -> Option<Self> {
        let size = |index: usize| u32_at(copy, 80 + 4 * index);
        let layout = Layout {
            segment_blocks: size(0),
            segments: size(1),
            record_blocks: size(2),
            space_pages: size(3),
            table_pages: size(4),
            fingerprint_pages: size(5),
        };
        let superblock = Self {
            version,
            identity: Identity(array(copy, 16)),
            key: Key(array(copy, 32)),
            number: u64_at(copy, 64),
            generation: u64_at(copy, 72),
            layout,
            record: (size(6), Code(array(copy, 112))),
        };
        // Numbers that no pool reaches would overflow.
        let is_sane = layout.is_sane()
            && superblock.number < 1 << 56
            && superblock.generation < 1 << 56
            && u64::from(size(6)) <= u64::from(layout.record_blocks) * crate::layout::BLOCK;
        is_sane.then_some(superblock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_superblock_is_read_as_written_unless_its_layout_is_impossible() {
        let layout = Layout::new(64 << 20, 64 << 20, 64).unwrap();
        let superblock = PoolSuperblock {
            version: PoolSuperblock::NEWEST,
            identity: Identity(*b"0123456789abcdef"),
            key: Key([7; 32]),
            number: 5,
            generation: 3,
            layout,
            record: (100, Code([9; 16])),
        };
        assert_eq!(PoolSuperblock::decode(&superblock.encode()), Ok(superblock.clone()));
        let other = |change: fn(&mut PoolSuperblock)| {
            let mut other = superblock.clone();
            change(&mut other);
            PoolSuperblock::decode(&other.encode()).is_ok()
        };
        assert!(!other(|superblock| superblock.layout.segment_blocks = 48));
        assert!(!other(|superblock| superblock.layout.segments = u32::MAX));
        assert!(!other(|superblock| superblock.layout.space_pages = 0));
        assert!(!other(|superblock| superblock.layout.record_blocks = u32::MAX));
        assert!(!other(|superblock| superblock.number = u64::MAX));
        assert!(!other(|superblock| superblock.record.0 = u32::MAX));
    }
}
