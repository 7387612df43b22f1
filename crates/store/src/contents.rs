//! The content of blocks that were read while a copy goes on, so that they need not be read again
//! to be compared with what is written.
//!
//! The bytes are those that the device gave, in memory that no guest can change. A place has the
//! same content until a batch or a relocation gets it, and then the content is
//! [dropped](Contents::drop_place).

use std::sync::Arc;

use hashbrown::HashMap;

/// The most blocks for a pool: 64 MiB.
const BLOCKS_MAX: usize = 1 << 14;
/// After this time without a use, all are dropped, in nanoseconds.
const IDLE_NS: u64 = 20_000_000_000;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    blocks: HashMap<u64, Arc<[u8]>>,
    /// When the last block was kept or taken.
    used_ns: u64,
}

impl Contents {
    /// Keeps the content of a place, if there is room: what is kept already is needed sooner.
    pub(crate) fn keep(&mut self, place: u64, block: &[u8], now_ns: u64) {
        if self.blocks.len() < BLOCKS_MAX {
            self.blocks.insert(place, block.into());
            self.used_ns = now_ns;
        }
    }

    /// Takes the content of adjoining places out, if all of it is there.
    pub(crate) fn take(
        &mut self,
        places: std::ops::Range<u64>,
        now_ns: u64,
    ) -> Option<Vec<Arc<[u8]>>> {
        if self.blocks.is_empty() || !places.clone().all(|place| self.blocks.contains_key(&place)) {
            return None;
        }
        self.used_ns = now_ns;
        places.map(|place| self.blocks.remove(&place)).collect()
    }

    /// A place gets another content.
    pub(crate) fn drop_place(&mut self, place: u64) {
        if !self.blocks.is_empty() {
            self.blocks.remove(&place);
        }
    }

    /// Drops what was not used for long. Returns when that is to be looked at again.
    pub(crate) fn expire(&mut self, now_ns: u64) -> Option<u64> {
        let end_ns = self.used_ns.saturating_add(IDLE_NS);
        if now_ns >= end_ns {
            self.blocks = HashMap::new();
        }
        (!self.blocks.is_empty()).then_some(end_ns)
    }

    /// The bytes of memory that this takes, about.
    pub(crate) fn memory(&self) -> u64 {
        (self.blocks.len() * crate::layout::BLOCK_BYTES) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_taken_once_and_bounded_in_memory_and_time() {
        let mut contents = Contents::default();
        for place in 0..2 * BLOCKS_MAX as u64 {
            contents.keep(place, &[place as u8; 4], 100);
        }
        assert_eq!(contents.memory(), 64 << 20);
        let end = BLOCKS_MAX as u64;
        assert_eq!(contents.take(end - 2..end + 1, 200), None);
        let taken = contents.take(3..5, 200).unwrap();
        assert_eq!(taken.iter().map(|block| block[0]).collect::<Vec<_>>(), [3, 4]);
        assert_eq!(contents.take(4..5, 200), None);
        contents.drop_place(9);
        assert_eq!(contents.take(9..10, 200), None);
        assert_eq!(contents.expire(300), Some(200 + IDLE_NS));
        assert_eq!(contents.expire(200 + IDLE_NS), None);
        assert_eq!((contents.memory(), contents.take(5..6, 0)), (0, None));
    }
}
