//! Finds blocks that were written several times, and keeps one of each.
//!
//! What a write does not find in the index is found later: the fingerprints of all places are
//! looked through, part by part. Of two places with the same fingerprint, one becomes the *victim*.
//! When both blocks have been compared, the next walk puts the other place into each entry that has
//! the victim, so that it meets the victim nowhere, and frees it.
//!
//! From the comparison on, nothing comes to refer to a victim: it is not found by its fingerprint,
//! and cannot be pinned. It is not freed before the walk either, since it could be used for another
//! block then. Entries with it are those that exist. A leaf that is copied before the walk has
//! visited it is visited as well as its copy.

use hashbrown::HashMap;

use crate::fingerprint::Fingerprint;
use crate::index::Index;
use crate::layout::FINGERPRINTS;
use crate::state::State;

/// The most fingerprints of a part: each takes 17 bytes of memory or more.
const PART_MAX: u64 = 1 << 21;
/// The most pairs of places that are compared, and given to a walk, at a time.
const PAIRS_MAX: usize = 1 << 16;
/// The share of the places in use that have to be new since the last search.
const NEW_SHARE: u64 = 8;

/// Two places whose blocks may be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) victim: u64,
    pub(crate) keep: u64,
}

/// What a merge does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MergeStep {
    /// Reads the pages of the fingerprint table from `first` on, and passes them to
    /// [`look_through`](State::look_through).
    Read {
        first: u32,
        count: u32,
    },
    /// Compares the blocks of [`take_pairs`](State::take_pairs).
    Compare,
    /// A walk has to end, or to be carried out.
    AwaitWalk,
    Done,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Merge {
    part: u64,
    parts: u64,
    /// The next page of the fingerprint table.
    page: u32,
    seen: HashMap<Fingerprint, u64>,
    pairs: Vec<Pair>,
    /// Whether the pairs of the part have been compared.
    is_compared: bool,
}

impl State {
    /// Whether enough blocks were written since the last search.
    pub(crate) fn wants_merge(&self) -> bool {
        self.failed.is_none()
            && self.merge.is_none()
            && self.relocation.is_none()
            && self.index.is_scanned()
            && (self.is_merge_wanted
                || self.unmerged > 0 && self.unmerged >= self.space.used_places() / NEW_SHARE)
    }

    pub(crate) fn begin_merge(&mut self) {
        let parts = self.space.used_places() / PART_MAX + 1;
        (self.unmerged, self.is_merge_wanted) = (0, false);
        self.merge = Some(Merge { parts, ..Merge::default() });
    }

    /// What is to be done next. Up to `count` pages of the table are read at once.
    pub(crate) fn step_merge(&mut self, count: u32) -> MergeStep {
        let end = self.index.count();
        if self.failed.is_some() {
            self.give_up_merge();
        }
        let Some(merge) = &mut self.merge else { return MergeStep::Done };
        if merge.page < end && merge.pairs.len() < PAIRS_MAX && !merge.is_compared {
            let first = merge.page;
            return MergeStep::Read { first, count: count.min(end - first) };
        }
        merge.seen = HashMap::new();
        if !merge.is_compared {
            // What the walk in progress has visited, it does not visit again.
            return if self.walk.is_none() { MergeStep::Compare } else { MergeStep::AwaitWalk };
        }
        if !self.moves.is_empty() {
            // The next walk takes them.
            self.has_garbage |= self.walk.is_none();
            return MergeStep::AwaitWalk;
        }
        merge.part += 1;
        (merge.page, merge.is_compared) = (0, false);
        if merge.part >= merge.parts {
            self.merge = None;
            return MergeStep::Done;
        }
        MergeStep::Read { first: 0, count: count.min(end) }
    }

    /// Looks through a page of the fingerprint table, of which the device has these fingerprints.
    pub(crate) fn look_through(&mut self, page: u32, words: Option<&[u64; FINGERPRINTS]>) {
        let Self { merge: Some(merge), index, space, .. } = self else { return };
        merge.page = merge.page.max(page + 1);
        for (at, place) in Index::places_of(page).enumerate() {
            let known = index.known(place).or(words.map(|words| words[at]));
            let Some(fingerprint) = known.and_then(Fingerprint::from_bits) else { continue };
            let is_part = (fingerprint.bits() >> 24) % merge.parts == merge.part;
            if !is_part || !space.has_data(place) {
                continue;
            }
            let Some(other) = merge.seen.insert(fingerprint, place) else { continue };
            // Fewer entries change if the one stays that is shared already.
            let (victim, keep) =
                if space.is_shared(place) { (other, place) } else { (place, other) };
            merge.seen.insert(fingerprint, keep);
            merge.pairs.push(Pair { victim, keep });
        }
    }

    /// Takes the pairs of the part, to be compared.
    pub(crate) fn take_pairs(&mut self) -> Vec<Pair> {
        let Some(merge) = &mut self.merge else { return Vec::new() };
        merge.is_compared = true;
        let mut pairs = std::mem::take(&mut merge.pairs);
        pairs.sort_unstable_by_key(|pair| pair.victim);
        pairs
    }

    /// The blocks of two places are equal. The places have not been used for other blocks since
    /// they were read. What is kept is pinned, so that it does not become a victim itself.
    pub(crate) fn merge(&mut self, Pair { victim, keep }: Pair) {
        let is_free = self.walk.is_none()
            && !self.moves.contains_key(&victim)
            && !self.pinned.contains_key(&victim)
            && self.space.has_data(victim);
        if is_free && self.pin(keep) {
            // It is not freed, and used for something else, before the walk.
            self.space.share(victim);
            self.moves.insert(victim, keep);
        }
    }

    /// The place that is put in the place of a victim.
    pub(crate) fn moved(&self, place: u64) -> Option<u64> {
        if self.moves.is_empty() { None } else { self.moves.get(&place).copied() }
    }

    /// A walk has ended, which has met the victims nowhere if it is complete.
    pub(crate) fn end_moves(&mut self) {
        let keeps: Vec<u64> = self.moves.drain().map(|(_, keep)| keep).collect();
        if self.relocation.is_some() {
            self.counts.relocated_blocks += keeps.len() as u64;
        } else {
            self.unpin(&keeps);
            self.counts.merged_blocks += keeps.len() as u64;
        }
    }

    /// Gives a merge up.
    pub(crate) fn give_up_merge(&mut self) {
        self.merge = None;
        if self.walk.is_none() && self.relocation.is_none() {
            self.end_moves();
        }
    }
}
