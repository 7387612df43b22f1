//! The state of a pool that its queues share. Nothing here does I/O.

mod counts;
mod frozen;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use fathom_block::{ErrorKind, Outcome};
use fathom_persistence::Identity;
use hashbrown::{HashMap, HashSet};

use crate::bitmap;
use crate::catalogue::{Catalogue, Change};
use crate::contents::Contents;
use crate::guarantee::{Guarantees, Share};
use crate::index::Index;
use crate::layout::{BLOCK, Layout};
use crate::locks::Locks;
use crate::merge::Merge;
use crate::pages::{Pages, WORDS};
use crate::relocation::Relocation;
use crate::rules::Rules;
use crate::scrub::Scrubs;
use crate::seal::Key;
use crate::space::{BatchPlaces, Space};
use crate::tree::{BLOCKS_MAX, ROOT_LEVEL};
use crate::walk::Walk;
pub use counts::PoolCounts;
pub(crate) use frozen::Frozen;

/// The most batches in flight. A snapshot's change names all of them.
pub(crate) const IN_FLIGHT_MAX: usize = 256;
/// The pages that change when a map is trimmed: those on the way to the new end, and those of the
/// set of changed blocks.
const TRIM_PAGES: usize = ROOT_LEVEL as usize + 1 + bitmap::PATH;
/// The most changed pages of maps in memory.
pub(crate) const DIRTY_PAGES_MAX: u64 = 1 << 16;

/// Whether a change may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It has begun, with a promise of so many pages, and has to be [ended](State::end_change).
    Begun(usize),
    /// The caller asks again when the state has changed.
    Wait,
    Refused(ErrorKind),
}

/// A batch that is to be written.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) places: BatchPlaces,
    pub(crate) sequence: u64,
    pub(crate) generation: u64,
    pub(crate) frontier: u64,
}

/// A batch in flight.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    segment: u32,
    /// The volume that it changes, 0 for none, and the places of its data.
    volume: u32,
    places: u64,
}

pub(crate) struct State {
    pub(crate) identity: Identity,
    pub(crate) key: Key,
    pub(crate) catalogue: Catalogue,
    pub(crate) guarantees: Guarantees,
    pub(crate) space: Space,
    pub(crate) pages: Pages,
    pub(crate) index: Index,
    pub(crate) contents: Contents,
    /// The places to which references are being made, and how many.
    pub(crate) pinned: BTreeMap<u64, u32>,
    pub(crate) merge: Option<Merge>,
    /// The retired set that is being united with another one, and that.
    pub(crate) union: Option<(u32, u32)>,
    /// Whether no retired set can be united with another one until the catalogue changes.
    pub(crate) is_united: bool,
    /// The places that the next walk puts in the places of others.
    pub(crate) moves: HashMap<u64, u64>,
    pub(crate) relocation: Option<Relocation>,
    pub(crate) scrubs: Scrubs,
    /// The places whose blocks are being relocated, and those to which they are copied.
    pub(crate) held: HashSet<u64>,
    /// The places to which blocks were relocated that no durable checkpoint has in use, and those
    /// of them that the checkpoint which is being written has.
    pub(crate) unsaved: HashSet<u64>,
    pub(crate) saving: HashSet<u64>,
    /// The entries of maps that have changed since the last relocation.
    pub(crate) unsettled: u64,
    /// The blocks with fingerprints that were written since the last merge.
    pub(crate) unmerged: u64,
    /// Whether a merge is wanted at once.
    pub(crate) is_merge_wanted: bool,
    pub(crate) generation: u64,
    /// The number of the latest checkpoint that is durable.
    pub(crate) number: u64,
    next_sequence: u64,
    /// Batches up to this sequence are durable.
    frontier: u64,
    /// The batches in flight.
    in_flight: BTreeMap<u64, InFlight>,
    /// Those of them that change the catalogue, which was done when they got their place.
    catalogue_batches: BTreeSet<u64>,
    locks: BTreeMap<u32, Locks>,
    /// The batches that have failed, or were given up, until a checkpoint that came after them is
    /// durable. A recovery may find any part of them: no frontier lies behind them, and they are in
    /// no snapshot.
    failed_batches: BTreeSet<u64>,
    /// Overwritten blocks to which a snapshot may refer, or nothing.
    pub(crate) unsure: u64,
    /// The pages that the changes in flight may change at most.
    promised: usize,
    dirty_max: usize,
    /// Counts checkpoints' instants.
    interval: u64,
    /// The reads in flight, by the interval in which they began.
    reading: BTreeMap<u64, usize>,
    /// A durable checkpoint, whose segments may be used when no read is in flight from its interval
    /// or before.
    inactive: Option<u64>,
    /// Whether a checkpoint is being written.
    pub(crate) is_checkpointing: bool,
    /// Whether the device has no space for the checkpoint that is being written.
    pub(crate) is_out_of_space: bool,
    /// Whether a checkpoint is wanted at once.
    pub(crate) is_checkpoint_wanted: bool,
    /// Whether anything has changed since the last checkpoint's instant.
    has_changes: bool,
    pub(crate) has_garbage: bool,
    pub(crate) walk: Option<Walk>,
    /// The volumes in use.
    pub(crate) users: BTreeSet<u32>,
    /// How often volumes and snapshots are compared now.
    pub(crate) readers: BTreeMap<u32, usize>,
    pub(crate) failed: Option<ErrorKind>,
    /// What was found to be wrong.
    pub(crate) damage: Option<String>,
    pub(crate) counts: PoolCounts,
    pub(crate) rules: Rules,
}

/// What a state is made of at an opening.
pub(crate) struct Parts {
    pub(crate) identity: Identity,
    pub(crate) key: Key,
    pub(crate) catalogue: Catalogue,
    pub(crate) space: Space,
    pub(crate) pages: Pages,
    pub(crate) index: Index,
    pub(crate) generation: u64,
    pub(crate) number: u64,
    pub(crate) sequence: u64,
    pub(crate) has_garbage: bool,
    pub(crate) rules: Rules,
}

/// The pages of a map on the way to so many adjoining blocks.
fn pages_of(range: &Range<u64>) -> usize {
    let count = |level: u32| {
        let span = (WORDS as u64).pow(level + 1);
        (range.end.saturating_sub(1) / span - range.start / span + 1) as usize
    };
    (0..=ROOT_LEVEL).map(count).sum()
}

impl State {
    pub(crate) fn new(parts: Parts) -> Self {
        let places = parts.space.layout().places();
        let Parts { mut space, pages, .. } = parts;
        for block in pages.blocks() {
            if let Some(place) = space.layout().place(block).filter(|place| space.is_used(*place)) {
                space.take_for_page(place);
            }
        }
        Self {
            identity: parts.identity,
            key: parts.key,
            guarantees: Guarantees::of(&parts.catalogue),
            catalogue: parts.catalogue,
            space,
            pages,
            index: parts.index,
            contents: Contents::default(),
            pinned: BTreeMap::new(),
            merge: None,
            union: None,
            is_united: false,
            moves: HashMap::new(),
            relocation: None,
            scrubs: Scrubs::default(),
            held: HashSet::new(),
            unsaved: HashSet::new(),
            saving: HashSet::new(),
            unsettled: 0,
            unmerged: 0,
            is_merge_wanted: false,
            generation: parts.generation,
            number: parts.number,
            next_sequence: parts.sequence + 1,
            frontier: parts.sequence,
            in_flight: BTreeMap::new(),
            catalogue_batches: BTreeSet::new(),
            locks: BTreeMap::new(),
            failed_batches: BTreeSet::new(),
            unsure: 0,
            promised: 0,
            dirty_max: (places / 32).clamp(parts.rules.dirty_pages_min as u64, DIRTY_PAGES_MAX)
                as usize,
            interval: 1,
            reading: BTreeMap::new(),
            inactive: None,
            is_checkpointing: false,
            is_out_of_space: false,
            is_checkpoint_wanted: false,
            has_changes: false,
            has_garbage: parts.has_garbage,
            walk: None,
            users: BTreeSet::new(),
            readers: BTreeMap::new(),
            failed: None,
            damage: None,
            counts: PoolCounts::default(),
            rules: parts.rules,
        }
    }

    pub(crate) fn layout(&self) -> Layout {
        *self.space.layout()
    }

    /// The bytes of memory that the pool takes, about.
    pub(crate) fn memory(&self) -> u64 {
        let tables = self.space.memory() + self.pages.memory() + self.index.memory();
        tables + self.contents.memory() + self.scrub_memory()
    }

    /// The most changed pages: those for which the next checkpoint has places.
    fn dirty_limit(&self) -> usize {
        self.dirty_max.min(self.space.pages_left())
    }

    /// Begins a change of a range of blocks of a volume. `has_data` is false if all become zeroes.
    pub(crate) fn begin_change(
        &mut self,
        volume: u32,
        range: &Range<u64>,
        has_data: bool,
    ) -> Admission {
        if let Some(kind) = self.failed {
            return Admission::Refused(kind);
        }
        let Some(found) = self.catalogue.volumes.get(&volume) else {
            return Admission::Refused(ErrorKind::ShuttingDown);
        };
        if range.end > found.size.div_ceil(BLOCK) {
            return Admission::Refused(ErrorKind::OutOfRange);
        }
        let promise = if has_data { pages_of(range) } else { self.pages_at_ends(range) };
        let promise = promise + bitmap::pages_of(range);
        if self.pages.dirty_count() + self.promised + promise > self.dirty_limit() {
            self.is_checkpoint_wanted |= self.pages.dirty_count() > 0;
            // Changes in flight may need fewer pages than they were promised.
            return if self.promised == 0 && self.is_full() {
                Admission::Refused(ErrorKind::NoSpace)
            } else {
                Admission::Wait
            };
        }
        if !self.pages.has_numbers(self.promised + promise) {
            return Admission::Refused(ErrorKind::NoSpace);
        }
        if !self.locks.entry(volume).or_default().lock(range) && self.rules.is_serial {
            return Admission::Wait;
        }
        self.promised += promise;
        Admission::Begun(promise)
    }

    /// The pages that change if a range becomes zeroes: those of the two lower levels change only
    /// at its ends, and none is made but copies.
    fn pages_at_ends(&self, range: &Range<u64>) -> usize {
        let below = BLOCKS_MAX >> 18;
        let upper = (range.end.div_ceil(below) - range.start / below) as usize + 1;
        pages_of(range).min(upper + 4).min(self.pages.count() as usize + 8)
    }

    /// Promises pages for the trimming of a map. Returns false if there are none now.
    pub(crate) fn begin_trim(&mut self) -> bool {
        let is_free = self.pages.dirty_count() + self.promised + TRIM_PAGES <= self.dirty_limit();
        // It may find places for more pages.
        self.is_checkpoint_wanted |= !is_free;
        self.promised += if is_free { TRIM_PAGES } else { 0 };
        is_free
    }

    /// Whether nothing more is to be expected if [`begin_trim`](Self::begin_trim) has failed since
    /// so many checkpoints.
    pub(crate) fn has_no_room_since(&self, checkpoints: u64) -> bool {
        self.is_full() || self.promised == 0 && self.counts.checkpoints > checkpoints + 1
    }

    /// Whether background work may change as many pages now.
    pub(crate) fn has_room_for_pages(&mut self, pages: usize) -> bool {
        let pages = pages.min(self.dirty_limit() / 2);
        let is_free = self.pages.dirty_count() + self.promised + pages <= self.dirty_limit();
        self.is_checkpoint_wanted |= !is_free && self.pages.dirty_count() > 0;
        is_free
    }

    /// Ends what [`begin_trim`](Self::begin_trim) has begun.
    pub(crate) fn end_trim(&mut self) {
        self.promised -= TRIM_PAGES;
    }

    /// Ends a change.
    pub(crate) fn end_change(&mut self, volume: u32, range: &Range<u64>, promise: usize) {
        self.promised -= promise;
        if let Some(locks) = self.locks.get_mut(&volume) {
            locks.unlock(range);
            if locks.is_empty() {
                self.locks.remove(&volume);
            }
        }
    }

    /// Whether a change is in flight behind the end of a volume.
    pub(crate) fn has_change_behind(&self, volume: u32) -> bool {
        let Some(found) = self.catalogue.volumes.get(&volume) else { return false };
        let end = found.size.div_ceil(BLOCK);
        self.locks.get(&volume).is_some_and(|locks| locks.reach_behind(end))
    }

    /// Chooses places for a batch with up to `count` blocks of data of a volume. `None` if there is
    /// no place now: then a checkpoint is wanted, unless the pool
    /// [is full](Self::is_full_for).
    pub(crate) fn place(&mut self, volume: u32, count: usize) -> Option<Placed> {
        if self.in_flight.len() >= IN_FLIGHT_MAX {
            return None;
        }
        let Share::Blocks(count) = self.share_of(volume, count) else {
            self.await_room();
            return None;
        };
        let Some(places) = self.space.place_batch(count) else {
            self.is_checkpoint_wanted |= self.space.gain() > 0 || self.space.is_hollow();
            self.has_garbage |= std::mem::take(&mut self.unsure) > 0;
            return None;
        };
        self.space.begin(places.segment);
        for place in places.data.iter().filter(|_| self.rules.drops_contents) {
            self.contents.drop_place(*place);
        }
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let (segment, data) = (places.segment, places.data.len() as u64);
        self.in_flight.insert(sequence, InFlight { segment, volume, places: data });
        self.has_changes = true;
        let (generation, frontier) = (self.generation, self.frontier);
        Some(Placed { places, sequence, generation, frontier })
    }

    /// Whether no place is free, and nothing that is in progress frees one.
    pub(crate) fn is_full(&self) -> bool {
        let is_awaited = self.is_checkpointing
            || self.is_checkpoint_wanted
            || self.inactive.is_some()
            || self.in_flight.len() >= IN_FLIGHT_MAX
            || self.has_garbage
            || self.walk.is_some()
            || self.relocation.is_some();
        !is_awaited || self.is_out_of_space
    }

    /// The same for a batch with `count` blocks of a volume.
    pub(crate) fn is_full_for(&self, volume: u32, count: usize) -> bool {
        match self.share_of(volume, count) {
            Share::Blocks(_) => self.is_full(),
            Share::Later => false,
            Share::None => true,
        }
    }

    /// The places of data in batches of a volume that are in flight.
    pub(crate) fn places_in_flight(&self, volume: u32) -> u64 {
        let own = self.in_flight.values().filter(|batch| batch.volume == volume);
        own.map(|batch| batch.places).sum()
    }

    /// The same of all volumes.
    pub(crate) fn all_places_in_flight(&self) -> BTreeMap<u32, u64> {
        let mut places = BTreeMap::new();
        for batch in self.in_flight.values() {
            *places.entry(batch.volume).or_default() += batch.places;
        }
        places
    }

    /// The pages that changes in flight may change.
    pub(crate) fn promised(&self) -> usize {
        self.promised
    }

    /// The batches in flight that are not in the maps.
    fn in_flight(&self) -> Vec<u64> {
        self.in_flight
            .keys()
            .filter(|batch| !self.catalogue_batches.contains(batch))
            .copied()
            .collect()
    }

    /// Chooses a place for the batch of a change of the catalogue, and carries the change out:
    /// this is its instant. `None` if there is no place now.
    pub(crate) fn place_change(&mut self, mut change: Change) -> Option<(Placed, Change)> {
        if let Change::Snapshot { in_flight, failed, .. } = &mut change {
            if self.rules.snapshot_names_batches {
                *in_flight = self.in_flight();
            }
            if self.rules.names_failed {
                failed.extend(&self.failed_batches);
            }
        }
        if !change.fits() {
            // After a checkpoint, fewer failed batches have to be named.
            self.is_checkpoint_wanted = true;
            return None;
        }
        let placed = self.place(0, 0)?;
        self.catalogue_batches.insert(placed.sequence);
        self.change(&change);
        Some((placed, change))
    }

    /// A batch has been written and applied, or it has failed.
    pub(crate) fn end_batch(&mut self, sequence: u64, outcome: Outcome) {
        self.catalogue_batches.remove(&sequence);
        if let Some(batch) = self.in_flight.remove(&sequence) {
            self.space.end(batch.segment, outcome);
            self.counts.batches += u64::from(outcome.is_ok());
            if outcome.is_err() {
                self.failed_batches.insert(sequence);
            }
        }
    }

    /// The sequence up to which all batches have completed. A flush that begins now makes them
    /// durable.
    pub(crate) fn completed(&self) -> u64 {
        let first = self.in_flight.keys().next().copied().unwrap_or(self.next_sequence);
        first.min(self.failed_batches.first().copied().unwrap_or(u64::MAX)) - 1
    }

    /// A flush has ended that began when batches up to `sequence` had completed.
    pub(crate) fn flushed(&mut self, sequence: u64) {
        self.frontier = self.frontier.max(sequence);
    }

    /// A read begins. It has to be [ended](Self::end_read) with the returned number.
    pub(crate) fn begin_read(&mut self) -> u64 {
        *self.reading.entry(self.interval).or_default() += 1;
        self.interval
    }

    /// Returns whether places have become usable.
    pub(crate) fn end_read(&mut self, interval: u64) -> bool {
        if let Some(count) = self.reading.get_mut(&interval) {
            *count -= 1;
            if *count == 0 {
                self.reading.remove(&interval);
            }
        }
        self.activate()
    }

    fn activate(&mut self) -> bool {
        let Some(inactive) = self.inactive else { return false };
        let is_read = self.reading.keys().next().is_some_and(|interval| *interval <= inactive);
        if is_read && self.rules.waits_for_reads {
            return false;
        }
        self.inactive = None;
        self.space.activate();
        true
    }

    /// Whether a checkpoint may begin.
    pub(crate) fn may_checkpoint(&self) -> bool {
        !self.is_checkpointing && self.inactive.is_none() && self.failed.is_none()
    }

    /// Whether a checkpoint should begin. `is_due` is whether the last one was long ago.
    pub(crate) fn wants_checkpoint(&self, is_due: bool) -> bool {
        if !self.may_checkpoint() {
            return false;
        }
        let is_crowded = self.pages.dirty_count() > self.dirty_limit() / 2;
        self.is_checkpoint_wanted
            || self.space.is_scarce()
            || is_crowded
            || is_due && self.has_changes
    }

    /// Whether there is background work that need not wait.
    pub(crate) fn has_work(&self) -> bool {
        let is_wanted = self.has_garbage
            || self.walk.is_some()
            || self.merge.is_some()
            || self.is_merge_wanted
            || self.relocation.is_some()
            || self.is_scrubbing()
            || self.has_uncounted()
            || self.wants_union();
        is_wanted && self.failed.is_none()
    }

    /// Something has changed that the next checkpoint has to have.
    pub(crate) fn note_change(&mut self) {
        self.has_changes = true;
    }

    /// Whether a checkpoint is due at some time.
    pub(crate) fn awaits_checkpoint(&self) -> bool {
        self.has_changes && self.failed.is_none()
    }

    /// Whether there are changes that are in no checkpoint.
    pub(crate) fn has_changes(&self) -> bool {
        self.has_changes
    }

    /// Whether a disk has a volume or a snapshot, or it is compared.
    pub(crate) fn is_used(&self, id: u32) -> bool {
        self.users.contains(&id) || self.readers.contains_key(&id)
    }

    /// Takes no more changes.
    pub(crate) fn fail(&mut self, kind: ErrorKind) {
        self.failed.get_or_insert(kind);
    }
}
