//! What was read lately from a volume, by its fingerprints: what a program copies, it has read before.
//!
//! So a copy is found without the fingerprint table, however few of its pages are in memory, and
//! also if the table does not have its source. As all fingerprints, these only propose a block: it
//! is compared before it takes the place of another one. They are made of memory that the guest may
//! change meanwhile, so that they may be wrong. Therefore no other volume uses them.

use hashbrown::HashMap;

use crate::fingerprint::Fingerprint;

/// The most fingerprints: 512 MiB of blocks, which a guest may read before it begins to write
/// them.
const RECENT_MAX: usize = 1 << 17;
/// The fewest adjoining blocks of a read that are noted. Files are read ahead.
pub(crate) const RECENT_RUN: usize = 4;

/// The places of the blocks that were read last. When there are too many, the older half is
/// dropped.
#[derive(Debug, Default)]
pub(crate) struct RecentReads {
    latest: HashMap<Fingerprint, u64>,
    earlier: HashMap<Fingerprint, u64>,
}

impl RecentReads {
    /// A block with this fingerprint was read from a place.
    pub(crate) fn note(&mut self, fingerprint: Fingerprint, place: u64) {
        if self.latest.len() >= RECENT_MAX / 2 {
            self.earlier = std::mem::take(&mut self.latest);
        }
        self.latest.insert(fingerprint, place);
    }

    /// The place from which a block with this fingerprint was read last.
    pub(crate) fn find(&self, fingerprint: Fingerprint) -> Option<u64> {
        self.latest.get(&fingerprint).or_else(|| self.earlier.get(&fingerprint)).copied()
    }

    /// The place has another block, or is free.
    pub(crate) fn forget(&mut self, fingerprint: Fingerprint) {
        self.latest.remove(&fingerprint);
        self.earlier.remove(&fingerprint);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_reads_are_found_and_their_number_is_bounded() {
        let of = |number: u64| Fingerprint::from_bits(number).unwrap();
        let mut recent = RecentReads::default();
        for number in 1..=3 * RECENT_MAX as u64 {
            recent.note(of(number), number + 7);
        }
        let last = 3 * RECENT_MAX as u64;
        assert!(recent.latest.len() + recent.earlier.len() <= RECENT_MAX);
        let found = (1..=last).filter(|number| recent.find(of(*number)) == Some(number + 7));
        assert!(found.count() >= RECENT_MAX / 2);
        assert_eq!((recent.find(of(last)), recent.find(of(1))), (Some(last + 7), None));
        recent.note(of(last), 9);
        assert_eq!(recent.find(of(last)), Some(9), "the last read");
        recent.forget(of(last));
        assert_eq!(recent.find(of(last)), None);
    }
}
