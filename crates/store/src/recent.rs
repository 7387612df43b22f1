//! What was read lately from a volume, by its fingerprints: what a program copies, it has read
//! before.
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
/// The blocks that are read until a copy of which nothing is written has ended: 256 MiB. A guest
/// writes what was copied some time later.
const QUIET_MAX: u64 = 1 << 16;

/// The places of the blocks that were read last. When there are too many, the older half is
/// dropped.
#[derive(Debug)]
pub(crate) struct RecentReads {
    latest: HashMap<Fingerprint, u64>,
    earlier: HashMap<Fingerprint, u64>,
    /// The blocks that were read since one of a copy was written.
    quiet: u64,
}

impl Default for RecentReads {
    fn default() -> Self {
        Self { latest: HashMap::new(), earlier: HashMap::new(), quiet: QUIET_MAX }
    }
}

impl RecentReads {
    /// A block with this fingerprint was read from a place.
    pub(crate) fn note(&mut self, fingerprint: Fingerprint, place: u64) {
        if self.latest.len() >= RECENT_MAX / 2 {
            self.earlier = std::mem::take(&mut self.latest);
        }
        self.latest.insert(fingerprint, place);
        self.quiet = self.quiet.saturating_add(1);
    }

    /// Something was written that had been read.
    pub(crate) fn note_copy(&mut self) {
        self.quiet = 0;
    }

    /// Whether what is read now will probably be written.
    pub(crate) fn is_copying(&self) -> bool {
        self.quiet < QUIET_MAX
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
        assert!(!recent.is_copying());
        recent.note_copy();
        recent.note(of(last), 9);
        assert!(recent.is_copying());
        assert_eq!(recent.find(of(last)), Some(9), "the last read");
        recent.forget(of(last));
        assert_eq!(recent.find(of(last)), None);
    }
}
