//! Requests that follow each other within a block.
//!
//! A stream whose requests do not end at the borders of blocks has two requests for the block in
//! which one ends and the next one begins. That is one use of the block, and says nothing of a
//! later one: if it counted as a hit, the blocks at the borders of a scan would stay in the cache,
//! and the rest of the scan, without which they save no request, would not.

use crate::hash;

/// The places that are remembered, at most.
const PLACES: usize = 64;

/// The places within blocks at which recent requests began or ended, each until a request has
/// continued there.
#[derive(Debug)]
pub struct Seams {
    /// The places by their hash. A newer place replaces an older one.
    places: [u64; PLACES],
}

/// Which blocks of a request continue the use of another request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Continued {
    /// The first block: another request ended where this one begins.
    pub first: bool,
    /// The last block: another request began where this one ends.
    pub last: bool,
}

impl Continued {
    /// Whether a block is one of these, of a request from the first of two blocks to the last.
    pub fn is_of(self, block: u64, (first, last): (u64, u64)) -> bool {
        self.first && block == first || self.last && block == last
    }
}

impl Default for Seams {
    fn default() -> Self {
        Self { places: [0; PLACES] }
    }
}

impl Seams {
    /// A request for a range of a disk, in bytes, in blocks of `block` bytes, a power of two.
    pub fn request(&mut self, disk: u32, offset: u64, length: u64, block: u64) -> Continued {
        let end = offset.saturating_add(length);
        let is_within = |place: u64| place & (block - 1) != 0;
        let first = is_within(offset).then(|| name(disk, offset));
        let last = is_within(end).then(|| name(disk, end));
        // The lowest bit says whether a request begins or ends there.
        let continued = Continued {
            first: first.is_some_and(|first| self.take(first | 1)),
            last: last.is_some_and(|last| self.take(last)),
        };
        if let Some(first) = first.filter(|_| !continued.first) {
            self.put(first);
        }
        if let Some(last) = last.filter(|_| !continued.last) {
            self.put(last | 1);
        }
        continued
    }

    /// Forgets a place. Returns whether it was remembered.
    fn take(&mut self, name: u64) -> bool {
        let entry = &mut self.places[index(name)];
        let is_known = *entry == name;
        if is_known {
            *entry = 0;
        }
        is_known
    }

    fn put(&mut self, name: u64) {
        self.places[index(name)] = name;
    }
}

/// The name of a place, whose lowest bit is free.
fn name(disk: u32, place: u64) -> u64 {
    hash(place ^ u64::from(disk) << 44) & !1
}

fn index(name: u64) -> usize {
    (name >> 1) as usize % PLACES
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEITHER: Continued = Continued { first: false, last: false };

    #[test]
    fn the_requests_of_a_stream_share_a_block() {
        let mut seams = Seams::default();
        assert_eq!(seams.request(0, 512, 65_536, 4096), NEITHER);
        for number in 1..100 {
            let continued = seams.request(0, 512 + number * 65_536, 65_536, 4096);
            assert_eq!(continued, Continued { first: true, last: false });
        }
        // On another disk.
        assert_eq!(seams.request(1, 512 + 65_536 * 100, 65_536, 4096), NEITHER);
    }

    #[test]
    fn requests_backwards_share_a_block() {
        let mut seams = Seams::default();
        assert_eq!(seams.request(0, 512 + 65_536 * 9, 65_536, 4096), NEITHER);
        for number in (0..9).rev() {
            let continued = seams.request(0, 512 + number * 65_536, 65_536, 4096);
            assert_eq!(continued, Continued { first: false, last: true });
        }
    }

    #[test]
    fn whole_blocks_share_nothing() {
        let mut seams = Seams::default();
        for number in 0..100 {
            assert_eq!(seams.request(0, number * 65_536, 65_536, 4096), NEITHER);
        }
    }

    #[test]
    fn a_loop_uses_a_shared_block_in_each_round() {
        let mut seams = Seams::default();
        let mut uses = 0;
        for _ in 0..100 {
            uses += u32::from(!seams.request(0, 512, 65_536, 4096).last);
            uses += u32::from(!seams.request(0, 512 + 65_536, 65_536, 4096).first);
        }
        assert_eq!(uses, 100);
        // The same request again continues nothing.
        for _ in 0..100 {
            assert_eq!(seams.request(0, 1 << 30 | 512, 1024, 4096), NEITHER);
        }
    }
}
