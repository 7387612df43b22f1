//! What deleting volumes and snapshots would free.
//!
//! A block or a page of a map becomes free when nothing refers to it any more. What several owners
//! refer to, none of them frees alone. An owner is a volume or a snapshot, or several of them that
//! are deleted together.
//!
//! The maps are visited owner by owner, three times. First, a page that another owner has had
//! before belongs to several, and all below it does. A block to which a page of an earlier owner
//! refers does, too: a bit for each place says whether one does. Next, the bits are set for the
//! blocks of this owner, so that it does not meet itself. Last, what belongs to one owner alone is
//! counted, each place once.
//!
//! The pool is used meanwhile, and what changes may be counted or not: the result is a hint about
//! what was there.

use std::io;
use std::sync::Arc;

use fathom_block::{Shared, StoreAccess};

use crate::catalogue::PageId;
use crate::error::PoolError;
use crate::layout::{BLOCK, BLOCK_BYTES, Layout};
use crate::pages::{Page, Pages, TableEntry, WORDS, from_bytes};
use crate::place_bits::PlaceBits;
use crate::pool::Pool;
use crate::state::State;
use crate::tree::ROOT_LEVEL;

/// The pages that are visited at once, and the most adjoining ones that one request reads.
const LOT: usize = 64;
/// How often a page is looked up that has moved before it was read.
const TRIES: usize = 3;
/// The most pages that could not be read before the search is given up.
const UNREADABLE_MAX: u64 = 16;

/// The owner of a page that several have.
const SEVERAL: u32 = u32::MAX;
/// The bits of an owner that say what has been done with its page.
const NOTED: u32 = 1 << 31;
const COUNTED: u32 = 1 << 30;
const OWNER: u32 = COUNTED - 1;

/// What a deletion would free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimable {
    /// Blocks of data that nothing else refers to.
    pub blocks: u64,
    /// The places of the pages of maps that nothing else has, with their second copies.
    pub map_places: u64,
}

impl Reclaimable {
    /// All of it, in bytes.
    pub fn bytes(&self) -> u64 {
        (self.blocks + self.map_places) * BLOCK
    }
}

/// What was found about several deletions, each of which happens without the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReclaimReport {
    /// For each group, what its deletion would free.
    pub groups: Vec<Reclaimable>,
    /// The pages of maps that could not be read: what only they lead to is not counted.
    pub unread_pages: u64,
    /// The pages that were visited, each of them up to three times.
    pub visited_pages: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Finds what several owners have.
    Find,
    /// Notes the places of an owner for those that follow.
    Note,
    Count,
}

#[derive(Clone, Copy, Debug)]
struct Visit {
    id: PageId,
    level: u32,
    /// Whether several owners have a page above it.
    is_several: bool,
}

struct Survey<'a> {
    state: &'a Shared<State>,
    access: StoreAccess,
    layout: Layout,
    /// The owner of each page, from 1.
    owners: Vec<u32>,
    /// The places of earlier owners, those of several, and those that were counted.
    seen: PlaceBits,
    several: PlaceBits,
    counted: PlaceBits,
    report: ReclaimReport,
    /// Why the last page could not be read.
    failure: Option<io::Error>,
}

impl Pool {
    /// About as many visits as a search makes at most: see [`reclaimable`](Self::reclaimable).
    pub fn map_visits(&self) -> u64 {
        3 * self.inner.shared.access(|state| u64::from(state.pages.count()))
    }

    /// Finds what deleting each of these groups of volumes and snapshots would free, by their
    /// numbers ([`Volume::id`](crate::Volume::id), [`Snapshot::id`](crate::Snapshot::id)). What is
    /// in no group stays in each case; a number that is in two groups belongs to the first of
    /// them. Numbers that do not exist are ignored.
    ///
    /// Reads all maps, and takes three bits of memory for each 4 KiB of the pool. `progress` is
    /// called with the number of visited pages, and ends the search by returning false.
    ///
    /// # Errors
    /// If the device fails, or the search was ended ([`io::ErrorKind::Interrupted`]).
    pub fn reclaimable(
        &self,
        groups: &[Vec<u32>],
        mut progress: impl FnMut(u64) -> bool,
    ) -> Result<ReclaimReport, PoolError> {
        let state = &self.inner.shared;
        let access = StoreAccess::open(&self.inner.device)?;
        let (layout, pages, all) = state.access(|state| {
            let catalogue = &state.catalogue;
            let volumes = catalogue.volumes.iter().map(|(id, volume)| (*id, volume.root));
            let snapshots = catalogue.snapshots.iter().map(|(id, snapshot)| (*id, snapshot.root));
            let all: Vec<(u32, PageId)> = volumes.chain(snapshots).collect();
            (state.layout(), state.pages.count(), all)
        });
        let places = layout.places();
        let report = ReclaimReport {
            groups: vec![Reclaimable::default(); groups.len()],
            ..ReclaimReport::default()
        };
        let mut survey = Survey {
            state,
            access,
            layout,
            owners: vec![0; pages as usize],
            seen: PlaceBits::new(places),
            several: PlaceBits::new(places),
            counted: PlaceBits::new(places),
            report,
            failure: None,
        };
        let of = |id: u32| groups.iter().position(|group| group.contains(&id));
        // What stays is the first owner, and each group is a further one.
        let mut roots: Vec<Vec<PageId>> = vec![Vec::new(); groups.len() + 1];
        for (id, root) in all.into_iter().filter(|(_, root)| *root != 0) {
            roots[of(id).map_or(0, |group| group + 1)].push(root);
        }
        for (owner, roots) in (1..).zip(&roots) {
            survey.go_through(owner, roots, Phase::Find, &mut progress)?;
            survey.go_through(owner, roots, Phase::Note, &mut progress)?;
        }
        for (owner, roots) in (1..).zip(&roots).skip(1) {
            survey.go_through(owner, roots, Phase::Count, &mut progress)?;
        }
        Ok(survey.report)
    }
}

impl Survey<'_> {
    fn go_through(
        &mut self,
        owner: u32,
        roots: &[PageId],
        phase: Phase,
        progress: &mut impl FnMut(u64) -> bool,
    ) -> Result<(), PoolError> {
        let visit = |id: &PageId| Visit { id: *id, level: ROOT_LEVEL, is_several: false };
        let mut todo: Vec<Visit> = roots.iter().map(visit).collect();
        while !todo.is_empty() {
            let rest = todo.split_off(todo.len().saturating_sub(LOT));
            let mut lot: Vec<Visit> = Vec::with_capacity(rest.len());
            lot.extend(rest.into_iter().filter_map(|visit| self.enter(owner, visit, phase)));
            for (visit, entry, page) in self.read(lot)? {
                self.visit(owner, visit, entry, &page, phase, &mut todo);
            }
            if !progress(self.report.visited_pages) {
                return Err(io::Error::from(io::ErrorKind::Interrupted).into());
            }
        }
        Ok(())
    }

    /// The visit, if there is something to do at its page.
    fn enter(&mut self, owner: u32, visit: Visit, phase: Phase) -> Option<Visit> {
        let at = visit.id as usize;
        if at >= self.owners.len() {
            // It was made since the beginning.
            self.owners.resize(at + 1, 0);
        }
        let known = &mut self.owners[at];
        match (phase, *known) {
            (Phase::Find, SEVERAL) => None,
            (Phase::Find, 0) if !visit.is_several => {
                *known = owner;
                Some(visit)
            }
            (Phase::Find, other) if !visit.is_several && other & OWNER == owner => None,
            (Phase::Find, _) => {
                *known = SEVERAL;
                Some(Visit { is_several: true, ..visit })
            }
            (_, SEVERAL) => None,
            (_, other) if other & OWNER != owner => None,
            (Phase::Note, other) if other & NOTED != 0 => None,
            (Phase::Count, other) if other & COUNTED != 0 => None,
            (_, _) => {
                *known |= if phase == Phase::Note { NOTED } else { COUNTED };
                Some(visit)
            }
        }
    }

    /// The pages, as far as they can be read.
    fn read(&mut self, lot: Vec<Visit>) -> Result<Vec<(Visit, TableEntry, Arc<Page>)>, PoolError> {
        self.report.visited_pages += lot.len() as u64;
        let mut found = Vec::with_capacity(lot.len());
        let mut missing = lot;
        for _ in 0..TRIES {
            if missing.is_empty() {
                break;
            }
            // What a read finds is the page only while nothing else gets its place.
            let (mut reads, interval) = self.state.access(|state| {
                let mut reads = Vec::new();
                for visit in missing.drain(..) {
                    let entry = state.pages.entry(visit.id);
                    match state.pages.get(visit.id) {
                        Ok(page) => found.push((visit, entry, Arc::clone(page))),
                        // It was removed.
                        Err(_) if entry.block == 0 => {}
                        Err(_) => reads.push((visit, entry)),
                    }
                }
                (reads, state.begin_read())
            });
            reads.sort_by_key(|(_, entry)| entry.block);
            for run in reads.chunk_by(|(_, a), (_, b)| a.block + 1 == b.block) {
                missing.extend(self.read_run(run, &mut found));
            }
            self.state.access(|state| state.end_read(interval));
            self.state.wake();
        }
        self.report.unread_pages += missing.len() as u64;
        match self.failure.take() {
            Some(error) if self.report.unread_pages > UNREADABLE_MAX => Err(error.into()),
            _ => Ok(found),
        }
    }

    /// Reads adjoining pages. Returns those that have other content than they should.
    fn read_run(
        &mut self,
        run: &[(Visit, TableEntry)],
        found: &mut Vec<(Visit, TableEntry, Arc<Page>)>,
    ) -> Vec<Visit> {
        let length = run.len() as u64 * BLOCK;
        // What cannot be read, or is wrong, is read again one by one, in both copies.
        let whole = self.access.read(run[0].1.block * BLOCK, length).unwrap_or_default();
        let mut parts = whole.chunks_exact(BLOCK_BYTES);
        let mut wrong = Vec::new();
        for (visit, entry) in run {
            let is_right = |bytes: &&[u8]| crc32c::crc32c(bytes) == entry.checksum;
            let page = parts.next().filter(is_right).map(from_bytes);
            match page.or_else(|| self.read_copies(entry)) {
                Some(page) => found.push((*visit, *entry, Arc::from(page))),
                None => wrong.push(*visit),
            }
        }
        wrong
    }

    fn read_copies(&mut self, entry: &TableEntry) -> Option<Box<Page>> {
        entry.blocks().find_map(|block| match self.access.read(block * BLOCK, BLOCK) {
            Ok(bytes) => (crc32c::crc32c(&bytes) == entry.checksum).then(|| from_bytes(&bytes)),
            Err(error) => {
                self.failure = Some(error);
                None
            }
        })
    }

    /// The group of an owner; what stays is in none.
    fn group(&mut self, owner: u32) -> Option<&mut Reclaimable> {
        self.report.groups.get_mut((owner as usize).checked_sub(2)?)
    }

    fn visit(
        &mut self,
        owner: u32,
        visit: Visit,
        entry: TableEntry,
        page: &Page,
        phase: Phase,
        todo: &mut Vec<Visit>,
    ) {
        if let Some(counted) = self.group(owner).filter(|_| phase == Phase::Count) {
            counted.map_places += entry.blocks().count() as u64;
        }
        if visit.level > 0 {
            for index in 0..WORDS {
                if let Ok(id @ 1..) = Pages::child(page, index) {
                    todo.push(Visit { id, level: visit.level - 1, ..visit });
                }
            }
            return;
        }
        for index in 0..WORDS {
            let place = Pages::leaf_entry(page, index).ok().filter(|entry| !entry.is_hole());
            let Some(place) = place.and_then(|entry| self.layout.place(entry.block())) else {
                continue;
            };
            match phase {
                Phase::Find if visit.is_several || self.seen.has(place) => {
                    self.several.set(place);
                }
                Phase::Note => {
                    self.seen.set(place);
                }
                Phase::Count
                    if !self.several.has(place) && self.counted.set(place) == Some(true) =>
                {
                    self.group(owner).into_iter().for_each(|counted| counted.blocks += 1);
                }
                Phase::Find | Phase::Count => {}
            }
        }
    }
}
