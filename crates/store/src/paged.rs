//! Arrays whose pages have two copies on the device: the space map and the page table.
//!
//! A checkpoint writes each changed page over the copy that is not valid, with the checkpoint's
//! number. So an interrupted checkpoint never damages what the one before it has. A reader takes,
//! of the copies with a valid checksum, the one with the highest number that the superblock
//! confirms.
//!
//! ```text
//!  0          8        12         16                                4096
//!  ┌──────────┬────────┬──────────┬─────────────────────────────────┐
//!  │ number   │ index  │ CRC-32C  │ payload                         │
//!  └──────────┴────────┴──────────┴─────────────────────────────────┘
//! ```
//! The checksum begins with the pool's identity, so that no page of an earlier pool is taken.

use std::sync::Arc;

use fathom_persistence::Identity;
use fathom_persistence::bytes::{put, u32_at, u64_at};

use crate::layout::{BLOCK_BYTES, PAYLOAD};

/// The payload of a page.
pub(crate) type Payload = [u8; PAYLOAD];

/// An array of pages, of which changed ones are copied while a checkpoint has them.
pub(crate) struct Paged {
    /// The first block of the array on the device.
    first: u64,
    /// The page of zeroes, which stands for all of them.
    zero: Arc<Payload>,
    /// The pages that are not that one.
    own: usize,
    pages: Vec<Arc<Payload>>,
    /// Which of its two copies is valid, for each page.
    valid: Vec<bool>,
    is_dirty: Vec<bool>,
    dirty: Vec<u32>,
}

/// Pages that are being written: each with its index.
pub(crate) type FrozenPages = Vec<(u32, Arc<Payload>)>;

/// The checksum of a page.
fn checksum(identity: Identity, bytes: &[u8]) -> u32 {
    let start = crc32c::crc32c_append(crc32c::crc32c(&identity.0), &bytes[..12]);
    crc32c::crc32c_append(start, &bytes[16..])
}

/// The bytes of a page.
pub(crate) fn encode(
    identity: Identity,
    number: u64,
    index: u32,
    payload: &Payload,
) -> Box<[u8; BLOCK_BYTES]> {
    let mut bytes = Box::new([0; BLOCK_BYTES]);
    put(&mut bytes[..], 0, &number.to_le_bytes());
    put(&mut bytes[..], 8, &index.to_le_bytes());
    put(&mut bytes[..], 16, payload);
    let checksum = checksum(identity, &bytes[..]);
    put(&mut bytes[..], 12, &checksum.to_le_bytes());
    bytes
}

/// The number of a copy; `None` if it is not valid.
fn number(identity: Identity, index: u32, bytes: &[u8]) -> Option<u64> {
    let is_valid = u32_at(bytes, 8) == index && u32_at(bytes, 12) == checksum(identity, bytes);
    is_valid.then(|| u64_at(bytes, 0))
}

/// The payload of page `index`, of which there is one copy; `None` if it is not valid.
pub(crate) fn payload(identity: Identity, index: u32, bytes: &[u8]) -> Option<&[u8]> {
    number(identity, index, bytes).map(|_| &bytes[BLOCK_BYTES - PAYLOAD..])
}

impl Paged {
    /// An array of `count` zero pages whose first copies begin at block `first`.
    pub(crate) fn new(first: u64, count: u32) -> Self {
        let zero = Arc::new([0; PAYLOAD]);
        let count = count as usize;
        Self {
            first,
            pages: vec![Arc::clone(&zero); count],
            zero,
            own: 0,
            valid: vec![false; count],
            is_dirty: vec![false; count],
            dirty: Vec::new(),
        }
    }

    /// Takes page `index` from the bytes of its two copies, as checkpoint `latest` has left it.
    /// Returns false if neither is valid.
    ///
    /// A copy of a later, interrupted checkpoint must be overwritten before another checkpoint has
    /// its number. So such a page is among the changed ones.
    pub(crate) fn load(
        &mut self,
        identity: Identity,
        latest: u64,
        index: u32,
        copies: &[u8],
        overwrites_later: bool,
    ) -> bool {
        let (one, other) = copies.split_at(BLOCK_BYTES);
        let numbers = [one, other].map(|copy| number(identity, index, copy));
        let has_later = numbers.iter().flatten().any(|number| *number > latest);
        let numbers = numbers.map(|number| number.filter(|number| *number <= latest));
        let Some(best) = numbers.into_iter().max().flatten() else { return false };
        let is_second = numbers[0] != Some(best);
        let mut payload = [0; PAYLOAD];
        payload.copy_from_slice(&(if is_second { other } else { one })[16..]);
        if payload != *self.zero {
            self.pages[index as usize] = Arc::new(payload);
            self.own += 1;
        }
        self.valid[index as usize] = is_second;
        if has_later && overwrites_later {
            self.change(index as usize);
        }
        true
    }

    /// The first block of the array on the device.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    pub(crate) fn count(&self) -> u32 {
        self.pages.len() as u32
    }

    pub(crate) fn page(&self, index: usize) -> &Payload {
        &self.pages[index]
    }

    /// A page to change.
    pub(crate) fn change(&mut self, index: usize) -> &mut Payload {
        if !self.is_dirty[index] {
            self.is_dirty[index] = true;
            self.dirty.push(index as u32);
        }
        self.own += usize::from(Arc::ptr_eq(&self.pages[index], &self.zero));
        Arc::make_mut(&mut self.pages[index])
    }

    /// Takes the changed pages, to be written.
    pub(crate) fn freeze(&mut self) -> FrozenPages {
        let mut dirty = std::mem::take(&mut self.dirty);
        dirty.sort_unstable();
        let frozen = dirty.into_iter().map(|index| {
            self.is_dirty[index as usize] = false;
            (index, Arc::clone(&self.pages[index as usize]))
        });
        frozen.collect()
    }

    /// The block of the copy of page `index` that the next checkpoint writes.
    pub(crate) fn target(&self, index: u32) -> u64 {
        let is_second = !self.valid[index as usize];
        self.first + 2 * u64::from(index) + u64::from(is_second)
    }

    /// The block of the valid copy of page `index`.
    pub(crate) fn current(&self, index: u32) -> u64 {
        self.first + 2 * u64::from(index) + u64::from(self.valid[index as usize])
    }

    /// The checkpoint that has written these pages is valid.
    pub(crate) fn commit(&mut self, written: impl Iterator<Item = u32>) {
        for index in written {
            self.valid[index as usize] ^= true;
        }
    }

    /// The bytes of memory that the array takes.
    pub(crate) fn memory(&self) -> u64 {
        (self.pages.len() * 16 + self.own * PAYLOAD) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: Identity = Identity(*b"0123456789abcdef");

    fn page(number: u64, fill: u8) -> Vec<u8> {
        encode(IDENTITY, number, 3, &[fill; PAYLOAD]).to_vec()
    }

    fn load(latest: u64, one: &[u8], other: &[u8]) -> Option<(u8, bool)> {
        let mut paged = Paged::new(100, 4);
        let found = paged.load(IDENTITY, latest, 3, &[one, other].concat(), true);
        found.then(|| (paged.page(3)[0], paged.valid[3]))
    }

    #[test]
    fn the_copy_of_the_latest_valid_checkpoint_is_taken() {
        let torn = [&page(8, 8)[..2048], &page(7, 7)[2048..]].concat();
        let zero = vec![0; BLOCK_BYTES];
        let cases = [
            (8, page(7, 7), page(8, 8), Some((8, true))),
            (7, page(7, 7), page(8, 8), Some((7, false))),
            (9, page(9, 9), page(8, 8), Some((9, false))),
            (8, page(7, 7), torn.clone(), Some((7, false))),
            (8, torn.clone(), page(6, 6), Some((6, true))),
            (0, page(0, 1), zero.clone(), Some((1, false))),
            (6, page(7, 7), page(8, 8), None),
            (8, torn, zero, None),
        ];
        for (latest, one, other, expected) in cases {
            assert_eq!(load(latest, &one, &other), expected, "at {latest}");
        }
        let mut paged = Paged::new(100, 4);
        assert!(paged.load(IDENTITY, 7, 3, &[page(8, 8), page(7, 7)].concat(), true));
        let frozen = paged.freeze();
        assert_eq!((frozen.len(), paged.target(3)), (1, 106), "the later copy is overwritten");
        let elsewhere = encode(Identity::NONE, 7, 3, &[7; PAYLOAD]).to_vec();
        let misplaced = encode(IDENTITY, 7, 2, &[7; PAYLOAD]).to_vec();
        assert_eq!(load(7, &elsewhere, &misplaced), None);
    }

    #[test]
    fn a_frozen_page_does_not_change_and_the_next_checkpoint_writes_the_other_copy() {
        let mut paged = Paged::new(100, 4);
        paged.change(3)[0] = 1;
        paged.change(1)[0] = 2;
        let frozen = paged.freeze();
        assert_eq!(frozen.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [1, 3]);
        paged.change(3)[0] = 9;
        assert_eq!((frozen[1].1[0], paged.page(3)[0], paged.target(3)), (1, 9, 107));
        paged.commit(frozen.iter().map(|(index, _)| *index));
        assert_eq!((paged.target(3), paged.target(2), paged.target(1)), (106, 105, 102));
        assert_eq!(paged.freeze().len(), 1);
        assert_eq!(paged.freeze().len(), 0);
    }
}
