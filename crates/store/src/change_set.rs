//! What has changed since a snapshot.
//!
//! A volume has the set of the blocks that were written, or became zeroes, since the snapshot from
//! which it goes on: the last one that was taken of it, the one to which it was rolled back, or the
//! one from which it was cloned. A snapshot takes the set over, and the volume begins a new one. So
//! what differs between two snapshots of a line is in the sets behind the earlier one, up to that
//! of the later one. A set may have blocks that do not differ, and lacks none that does.
//!
//! When a snapshot is deleted, its set is *retired*: the sets that follow are based on it. It is
//! brought into the one that follows, in the background. A set that cannot be read is forgotten:
//! then maps are compared.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::bitmap::United;
use crate::catalogue::{Catalogue, PageId};
use crate::difference::ReadPages;
use crate::pages::Fault;
use crate::state::State;
use crate::walk::SET_LEVEL;
use crate::words::{WordReader, WordWriter};

/// The pages that a step of a union changes at most.
const UNION_PAGES: usize = 64;

/// The blocks that have changed since a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangeSet {
    /// The snapshot; 0 if it is not known what has changed.
    pub(crate) since: u32,
    /// The root of the bitmap; 0 if nothing has changed.
    pub(crate) root: PageId,
}

impl ChangeSet {
    /// Nothing has changed since this snapshot.
    pub(crate) fn none_since(snapshot: u32) -> Self {
        Self { since: snapshot, root: 0 }
    }

    pub(crate) fn encode(self, out: &mut WordWriter) {
        out.u32(self.since);
        out.u32(self.root);
    }

    pub(crate) fn decode(input: &mut WordReader<'_>) -> Option<Self> {
        let (since, root) = (input.u32()?, input.u32()?);
        Some(Self { since, root })
    }
}

/// The sets of deleted snapshots, by their numbers.
pub(crate) type RetiredSets = BTreeMap<u32, ChangeSet>;

/// How far unions have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnionProgress {
    /// There is none until a snapshot is deleted.
    Done,
    /// There is no room for changed pages now.
    Waits,
    GoesOn,
}

impl Catalogue {
    fn set(&self, id: u32) -> Option<ChangeSet> {
        let volume = self.volumes.get(&id).map(|volume| volume.changes);
        let snapshot = || self.snapshots.get(&id).map(|snapshot| snapshot.changes);
        volume.or_else(snapshot).or_else(|| self.retired.get(&id).copied())
    }

    fn set_mut(&mut self, id: u32) -> Option<&mut ChangeSet> {
        if let Some(volume) = self.volumes.get_mut(&id) {
            return Some(&mut volume.changes);
        }
        match self.snapshots.get_mut(&id) {
            Some(snapshot) => Some(&mut snapshot.changes),
            None => self.retired.get_mut(&id),
        }
    }

    /// The snapshot with which the set of a volume or snapshot begins.
    pub(crate) fn since(&self, id: u32) -> Option<u32> {
        self.set(id).map(|set| set.since).filter(|since| *since != 0)
    }

    /// All sets, with the numbers of what has them.
    pub(crate) fn sets(&self) -> impl Iterator<Item = (u32, ChangeSet)> {
        let volumes = self.volumes.values().map(|volume| (volume.id, volume.changes));
        let snapshots = self.snapshots.values().map(|snapshot| (snapshot.id, snapshot.changes));
        let retired = self.retired.iter().map(|(id, set)| (*id, *set));
        volumes.chain(snapshots).chain(retired)
    }

    /// The roots of the sets.
    pub(crate) fn set_roots(&self) -> impl Iterator<Item = PageId> {
        self.sets().map(|(_, set)| set.root).filter(|root| *root != 0)
    }

    /// A volume or snapshot, and all that came before it, as far as that is known. Snapshots have
    /// higher numbers than those before them.
    fn line(&self, id: u32) -> impl Iterator<Item = (u32, ChangeSet)> {
        std::iter::successors(self.set(id).map(|set| (id, set)), |(_, set)| {
            let before = self.set(set.since).filter(|_| !self.volumes.contains_key(&set.since))?;
            Some((set.since, before))
        })
    }

    /// The roots of sets that together have all that differs between two volumes or snapshots.
    /// `None` if that is not known.
    pub(crate) fn sets_between(&self, base: u32, target: u32) -> Option<Vec<PageId>> {
        let before: Vec<(u32, ChangeSet)> = self.line(base).collect();
        let numbers: BTreeSet<u32> = before.iter().map(|(id, _)| *id).collect();
        let mut roots = Vec::new();
        for (id, set) in self.line(target) {
            if numbers.contains(&id) {
                let own = before.iter().take_while(|(other, _)| *other != id);
                roots.extend(own.map(|(_, set)| set.root));
                roots.retain(|root| *root != 0);
                return Some(roots);
            }
            roots.push(set.root);
        }
        None
    }

    fn has_followers(&self, id: u32) -> bool {
        self.sets().any(|(_, set)| set.since == id)
    }

    /// A set has come to an end. Returns whether pages may have become unused.
    pub(crate) fn end_set(&mut self, set: ChangeSet) -> bool {
        let mut has_garbage = set.root != 0;
        let mut since = set.since;
        while self.retired.contains_key(&since) && !self.has_followers(since) {
            let retired = self.retired.remove(&since).unwrap_or_default();
            has_garbage |= retired.root != 0;
            since = retired.since;
        }
        has_garbage
    }

    /// It is not known any more what has changed in a volume or snapshot. Returns whether pages may
    /// have become unused.
    pub(crate) fn forget_set(&mut self, id: u32) -> bool {
        let set = self.set_mut(id).map(std::mem::take);
        set.is_some_and(|set| self.end_set(set))
    }

    /// The snapshot `id` has been deleted, which had this set. Returns whether pages may have
    /// become unused.
    pub(crate) fn retire_set(&mut self, id: u32, set: ChangeSet) -> bool {
        if !self.has_followers(id) {
            return self.end_set(set);
        }
        let is_needed = self.line(set.since).any(|(id, _)| self.snapshots.contains_key(&id));
        self.retired.insert(id, set);
        if is_needed {
            return false;
        }
        // There is nothing before it any more with which those behind it could be compared.
        let mut has_garbage = false;
        let mut ended = vec![id];
        while let Some(id) = ended.pop() {
            let followers = self.sets().filter(|(_, set)| set.since == id);
            for follower in followers.map(|(follower, _)| follower).collect::<Vec<_>>() {
                ended.extend(Some(follower).filter(|it| self.retired.contains_key(it)));
                has_garbage |= self.forget_set(follower);
            }
            has_garbage |= self.retired.remove(&id).is_some_and(|set| set.root != 0);
        }
        has_garbage
    }

    /// A retired set that only one other is based on, and this one.
    fn next_union(&self) -> Option<(u32, u32)> {
        let mut followers: BTreeMap<u32, Option<u32>> = BTreeMap::new();
        for (id, set) in self.sets().filter(|(_, set)| self.retired.contains_key(&set.since)) {
            followers.entry(set.since).and_modify(|only| *only = None).or_insert(Some(id));
        }
        followers.into_iter().find_map(|(retired, only)| Some((retired, only?)))
    }
}

impl State {
    /// Blocks of a volume are about to change.
    ///
    /// # Errors
    /// If a page is missing. The call may then be repeated.
    pub(crate) fn note_changed(&mut self, volume: u32, blocks: &Range<u64>) -> Result<(), Fault> {
        let birth = self.catalogue.epoch;
        let Some(found) = self.catalogue.volumes.get_mut(&volume) else { return Ok(()) };
        if found.changes.since == 0 || !self.rules.notes_changes {
            return Ok(());
        }
        match self.pages.put_bits(&mut found.changes.root, birth, blocks) {
            Ok(has_garbage) => self.has_garbage |= has_garbage,
            Err(Fault::Missing(id)) => return Err(Fault::Missing(id)),
            Err(Fault::Damaged) => self.has_garbage |= self.catalogue.forget_set(volume),
        }
        Ok(())
    }

    /// The page on the way to the first of some blocks in the set of a volume that is not in
    /// memory.
    pub(crate) fn missing_of_set(&self, volume: u32, blocks: &Range<u64>) -> Option<PageId> {
        let root = self.catalogue.volumes.get(&volume)?.changes.root;
        match self.pages.bits_at(root, blocks.start, &ReadPages::default()) {
            Err(Fault::Missing(id)) => Some(id),
            _ => None,
        }
    }

    /// Forgets what has changed in a volume if these blocks cannot come into its set, because of a
    /// page that `is_broken`. Returns whether that is so.
    pub(crate) fn forget_broken_set(
        &mut self,
        volume: u32,
        blocks: &Range<u64>,
        is_broken: impl Fn(PageId) -> bool,
    ) -> bool {
        match self.note_changed(volume, blocks) {
            Err(Fault::Missing(id)) if is_broken(id) => {
                self.has_garbage |= self.catalogue.forget_set(volume);
                true
            }
            _ => false,
        }
    }

    /// Whether a retired set may be there to be united with another one.
    pub(crate) fn wants_union(&self) -> bool {
        !self.catalogue.retired.is_empty() && !self.is_united
    }

    /// Goes on with the union of a retired set and the one that follows.
    ///
    /// # Errors
    /// If a page is missing. The call may then be repeated.
    pub(crate) fn unite_sets(&mut self) -> Result<UnionProgress, Fault> {
        let is_valid = |(retired, follower): &(u32, u32)| {
            let set = self.catalogue.set(*follower);
            self.catalogue.retired.contains_key(retired)
                && set.is_some_and(|set| set.since == *retired)
        };
        if !self.wants_union() {
            return Ok(UnionProgress::Done);
        }
        self.union = self.union.filter(is_valid).or_else(|| self.catalogue.next_union());
        let Some((retired, follower)) = self.union else {
            self.is_united = true;
            return Ok(UnionProgress::Done);
        };
        if !self.has_room_for_pages(UNION_PAGES) {
            return Ok(UnionProgress::Waits);
        }
        let (mut from, mut into) = (self.set_root(retired), self.set_root(follower));
        let mut united = United::default();
        let done = self.pages.unite_bits(&mut from, &mut into, &mut united);
        self.note_change();
        self.has_garbage |= united.has_garbage;
        if let Some(walk) = &mut self.walk {
            walk.revisit(united.moved.into_iter().map(|(id, level)| (id, SET_LEVEL + level)));
        }
        for (id, root) in [(retired, from), (follower, into)] {
            self.catalogue.set_mut(id).into_iter().for_each(|set| set.root = root);
        }
        match done {
            Ok(true) => self.end_union(retired, follower),
            Ok(false) => {}
            Err(Fault::Missing(id)) => return Err(Fault::Missing(id)),
            Err(Fault::Damaged) => self.give_up_union(),
        }
        Ok(UnionProgress::GoesOn)
    }

    fn set_root(&self, id: u32) -> PageId {
        self.catalogue.set(id).unwrap_or_default().root
    }

    /// The set `retired` is empty.
    fn end_union(&mut self, retired: u32, follower: u32) {
        let since = self.catalogue.retired.remove(&retired).unwrap_or_default().since;
        if let Some(set) = self.catalogue.set_mut(follower) {
            set.since = since;
        }
        if since == 0 {
            self.has_garbage |= self.catalogue.forget_set(follower);
        }
        self.counts.united_sets += 1;
    }

    /// A page of the sets that are being united cannot be read.
    pub(crate) fn give_up_union(&mut self) {
        if let Some((_, follower)) = self.union.take() {
            self.has_garbage |= self.catalogue.forget_set(follower);
            self.note_change();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Change;

    /// A volume 1 with the snapshots 2, 3, …, each with a set of its own.
    fn catalogue(snapshots: u32) -> Catalogue {
        let mut catalogue = Catalogue::new();
        let create =
            Change::Create { id: 1, size: 1 << 30, name: "a".into(), domain: String::new() };
        catalogue.apply(&create).unwrap();
        for id in 2..2 + snapshots {
            snapshot(&mut catalogue, 1, id);
        }
        catalogue
    }

    fn snapshot(catalogue: &mut Catalogue, volume: u32, id: u32) {
        if catalogue.volumes[&volume].changes.since != 0 {
            catalogue.volumes.get_mut(&volume).unwrap().changes.root = 100 + id;
        }
        let (name, in_flight, failed) = (format!("s{id}"), Vec::new(), Vec::new());
        let members = vec![(volume, id)];
        let taken = Change::Snapshot { members, name, time_s: 0, in_flight, failed };
        catalogue.apply(&taken).unwrap();
    }

    fn delete(catalogue: &mut Catalogue, id: u32) -> bool {
        catalogue.apply(&Change::DeleteSnapshot { id }).unwrap()
    }

    #[test]
    fn what_differs_is_in_the_sets_of_the_ways_to_a_common_snapshot() {
        let mut catalogue = catalogue(4);
        assert_eq!(catalogue.sets_between(2, 5), Some(vec![105, 104, 103]));
        assert_eq!(catalogue.sets_between(5, 2), Some(vec![105, 104, 103]));
        assert_eq!(catalogue.sets_between(5, 1), Some(vec![]));
        assert_eq!(catalogue.sets_between(3, 3), Some(vec![]));
        catalogue.apply(&Change::Clone { snapshot: 3, id: 6, name: "c".into() }).unwrap();
        snapshot(&mut catalogue, 6, 7);
        assert_eq!(catalogue.sets_between(5, 7), Some(vec![107, 105, 104]));
        // A roll-back gives up what came after its snapshot.
        catalogue.volumes.get_mut(&1).unwrap().changes.root = 99;
        catalogue.apply(&Change::Rollback { id: 1, snapshot: 3 }).unwrap();
        assert_eq!(catalogue.sets_between(3, 1), Some(vec![]));
        assert_eq!(catalogue.sets_between(5, 1), Some(vec![105, 104]));
        let create =
            Change::Create { id: 8, size: 1 << 30, name: "b".into(), domain: String::new() };
        catalogue.apply(&create).unwrap();
        assert_eq!(catalogue.sets_between(2, 8), None);
    }

    #[test]
    fn the_set_of_a_deleted_snapshot_stays_as_long_as_it_is_needed() {
        let mut one = catalogue(4);
        assert!(!delete(&mut one, 3));
        assert_eq!(one.sets_between(2, 5), Some(vec![105, 104, 103]));
        assert_eq!(one.next_union(), Some((3, 4)));
        // Nothing is left before the others.
        assert!(delete(&mut one, 2));
        assert!(one.retired.is_empty() && one.sets_between(4, 5) == Some(vec![105]));
        assert_eq!((one.snapshots[&4].changes, one.next_union()), (ChangeSet::default(), None));

        // Two are based on one.
        let mut two = catalogue(3);
        two.apply(&Change::Clone { snapshot: 3, id: 6, name: "c".into() }).unwrap();
        delete(&mut two, 3);
        assert_eq!((two.retired.len(), two.next_union()), (1, None));
        two.apply(&Change::Delete { id: 6 }).unwrap();
        assert_eq!(two.next_union(), Some((3, 4)));
        // The last one that needs it goes.
        two.apply(&Change::Rollback { id: 1, snapshot: 2 }).unwrap();
        assert!(delete(&mut two, 4) && two.retired.is_empty());
    }
}
