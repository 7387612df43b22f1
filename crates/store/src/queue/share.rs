//! Finds the blocks of drafts that are there already.
//!
//! 1. The fingerprint of each block is looked up. Pages of the fingerprint table are read where a
//!    hook leads to one.
//! 2. The blocks that may be equal are read and compared.
//! 3. Equal ones are pinned, and become references.
//!
//! A block whose content is that of the volume's own block needs no change at all.

use fathom_block::{BackendContext, Outcome, Request};

use super::change::Part;
use super::device::Purpose;
use super::draft::Draft;
use super::{StoreQueue, Wanted};
use crate::fingerprint::{Fingerprint, Fingerprinter};
use crate::index::{Found, read_page};
use crate::layout::BLOCK_BYTES;
use crate::state::State;

/// The pages of the fingerprint table that a queue may read in vain before some were of use.
const CREDIT_MAX: u32 = 256;
/// The blocks that are written for each page that may be read in vain.
const BLOCKS_OF_PAGE: u32 = 64;
/// The fewest adjoining blocks that are shared on a device where each seek takes time.
const ROTATIONAL_RUN: usize = 16;

/// What a queue has to find equal blocks with.
pub(super) struct Sharing {
    /// `None` if the blocks of the volume are not shared.
    fingerprinter: Option<Fingerprinter>,
    bits: u32,
    /// The fewest adjoining blocks that are shared.
    run_min: usize,
    credit: u32,
    /// The blocks since a page was credited.
    blocks: u32,
}

impl Sharing {
    pub(super) fn new(
        fingerprinter: Option<Fingerprinter>,
        is_rotational: bool,
        bits: u32,
    ) -> Self {
        let run_min = if is_rotational { ROTATIONAL_RUN } else { 1 };
        Self { fingerprinter, bits, run_min, credit: CREDIT_MAX, blocks: 0 }
    }

    /// The fingerprint of a block with this CRC-32C, if blocks are shared.
    pub(super) fn fingerprint(&self, block: &[u8], checksum: u32) -> Option<Fingerprint> {
        let found = self.fingerprinter.as_ref()?.fingerprint(block, checksum);
        Fingerprint::from_bits(found.bits() >> (56 - self.bits))
    }

    /// Whether blocks are shared.
    pub(super) fn is_active(&self) -> bool {
        self.fingerprinter.is_some()
    }

    /// Blocks have been looked up, of which so many were found.
    fn note(&mut self, blocks: usize, found: usize) {
        self.blocks += blocks as u32;
        let earned = found as u32 + self.blocks / BLOCKS_OF_PAGE;
        self.blocks %= BLOCKS_OF_PAGE;
        self.credit = (self.credit + earned).min(CREDIT_MAX);
    }
}

impl Draft {
    /// Looks up the blocks for which no place was found yet. Returns whether any has one.
    fn find_candidates(&mut self, state: &mut State) -> bool {
        let mut has_candidate = false;
        for data in self.parts.iter_mut().filter_map(|part| part.data.as_mut()) {
            let is_there = |place: &u64| state.space.has_data(*place) && state.may_refer_to(*place);
            data.candidate = data.candidate.filter(is_there);
            let Some(fingerprint) = data.fingerprint else { continue };
            if data.candidate.is_none() {
                if let Found::Place(place) = state.find_equal(fingerprint) {
                    data.candidate = Some(place);
                }
            }
            has_candidate |= data.candidate.is_some();
        }
        has_candidate
    }
}

/// Adjoining parts of a draft, whose candidates adjoin as well.
#[derive(Clone, Copy, Debug)]
struct CandidateRun {
    /// The index of the first part.
    part: usize,
    place: u64,
    count: usize,
}

/// The runs of candidates of a draft.
fn candidate_runs(draft: &Draft) -> Vec<CandidateRun> {
    let mut runs: Vec<CandidateRun> = Vec::new();
    for (index, part) in draft.parts.iter().enumerate() {
        let Some(place) = part.data.and_then(|data| data.candidate) else { continue };
        match runs.last_mut() {
            Some(run) if run.part + run.count == index && run.place + run.count as u64 == place => {
                run.count += 1;
            }
            _ => runs.push(CandidateRun { part: index, place, count: 1 }),
        }
    }
    runs
}

impl StoreQueue {
    /// Looks for the blocks of a new draft. It is ready when nothing is in flight for it.
    pub(super) fn share(&mut self, mut draft: Draft, context: &mut BackendContext<'_>) {
        if !self.sharing.is_active() || draft.parts.iter().all(|part| part.data.is_none()) {
            return self.ready.push_back(draft);
        }
        let number = self.number();
        let mut wanted: Vec<(u32, Option<u64>)> = Vec::new();
        let mut credit = self.sharing.credit;
        self.inner.shared.access(|state| {
            let data = draft.parts.iter().filter_map(|part| part.data);
            for fingerprint in data.filter_map(|data| data.fingerprint) {
                let (page, is_new) = match state.find_equal(fingerprint) {
                    Found::Page(page) if credit > 0 => (page, true),
                    Found::Loading(page) if self.index_loads.contains_key(&page) => (page, false),
                    Found::Place(_) | Found::Page(_) | Found::Loading(_) | Found::Nothing => {
                        continue;
                    }
                };
                if wanted.iter().any(|(other, _)| *other == page) {
                    continue;
                }
                credit -= u32::from(is_new);
                let block = is_new.then(|| state.load_fingerprints(page));
                wanted.push((page, block));
            }
        });
        self.sharing.credit = credit;
        draft.waits = wanted.len();
        self.drafts.insert(number, draft);
        for (page, block) in wanted {
            self.index_loads.entry(page).or_default().push(number);
            if let Some(block) = block {
                let own = self.device.read(block, 1);
                self.device.submit(own, Purpose::Fingerprints { page }, context);
            }
        }
        self.compare(number, context);
    }

    /// Reads pages of the fingerprint table, into which blocks that are being written will come.
    pub(super) fn load_fingerprints(&mut self, pages: &[u32], context: &mut BackendContext<'_>) {
        for page in pages {
            let block = self.inner.shared.access(|state| {
                let block = state.load_fingerprints(*page);
                state.index.expect(*page);
                block
            });
            self.index_loads.entry(*page).or_default();
            let own = self.device.read(block, 1);
            self.device.submit(own, Purpose::Fingerprints { page: *page }, context);
        }
    }

    /// A page of the fingerprint table has been read.
    pub(super) fn fingerprints_read(
        &mut self,
        page: u32,
        own: Box<Request>,
        outcome: Outcome,
        context: &mut BackendContext<'_>,
    ) {
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok());
        let words = bytes.and_then(|bytes| read_page(self.inner.identity, page, bytes));
        self.device.give(own);
        self.inner.shared.access(|state| state.fingerprints_loaded(page, words.as_deref()));
        for number in self.index_loads.remove(&page).unwrap_or_default() {
            if let Some(draft) = self.drafts.get_mut(&number) {
                draft.waits -= 1;
                // The page may be dropped before the others have been read.
                self.inner.shared.access(|state| draft.find_candidates(state));
                self.compare(number, context);
            }
        }
    }

    /// Reads the blocks that may be equal to those of a draft, unless it waits for pages.
    fn compare(&mut self, number: u64, context: &mut BackendContext<'_>) {
        let Some(draft) = self.drafts.get_mut(&number).filter(|draft| draft.waits == 0) else {
            return;
        };
        self.inner.shared.access(|state| {
            let has_candidate = draft.find_candidates(state);
            draft.interval = has_candidate.then(|| state.begin_read());
        });
        let run_min = self.sharing.run_min;
        let (runs, short): (Vec<_>, Vec<_>) =
            candidate_runs(draft).into_iter().partition(|run| run.count >= run_min);
        for run in short {
            for part in &mut draft.parts[run.part..run.part + run.count] {
                part.data.iter_mut().for_each(|data| data.candidate = None);
            }
        }
        draft.waits = runs.len();
        let first = self.inner.first_segment;
        for CandidateRun { part, place, count } in runs {
            let own = self.device.read(first + place, count);
            self.device.submit(own, Purpose::Compare { draft: number, part }, context);
        }
        self.pin(number);
    }

    /// Blocks have been read that may be equal to those of a draft, from one of its parts on.
    pub(super) fn compared(
        &mut self,
        (number, part): (u64, usize),
        own: Box<Request>,
        outcome: Outcome,
    ) {
        if let Some(draft) = self.drafts.get_mut(&number) {
            draft.waits -= 1;
            let bytes = own.buffers.owned().filter(|_| outcome.is_ok()).unwrap_or_default();
            let mut unequal = Vec::new();
            for (index, bytes) in (part..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
                let Some(mut data) = draft.parts.get(index).and_then(|part| part.data) else {
                    continue;
                };
                data.is_equal =
                    draft.data(data.slot) == bytes || !self.inner.options.rules.compares_equals;
                if !data.is_equal {
                    unequal.extend(data.fingerprint.zip(data.candidate));
                }
                draft.parts[index].data = Some(data);
            }
            if !unequal.is_empty() {
                self.inner.shared.access(|state| {
                    state.counts.unequal_blocks += unequal.len() as u64;
                    for (fingerprint, place) in unequal {
                        state.index.forget(fingerprint, place);
                    }
                });
            }
        }
        self.device.give(own);
        self.pin(number);
    }

    /// Pins the blocks that are equal, when all have been compared. Then the draft is ready.
    fn pin(&mut self, number: u64) {
        let Wanted::Volume(volume) = self.wanted else { return };
        if self.drafts.get(&number).is_none_or(|draft| draft.waits > 0) {
            return;
        }
        let Some(mut draft) = self.drafts.remove(&number) else { return };
        let (mut found, mut unchanged) = (0, Vec::new());
        let first = self.inner.first_segment;
        let has_places = self.inner.shared.access(|state| {
            for (index, part) in draft.parts.iter_mut().enumerate() {
                let (Part::Data(block), Some(data)) = (&part.part, &mut part.data) else {
                    continue;
                };
                let Some(place) = data.reference() else { continue };
                let entry = state.known_entry(volume, *block);
                if entry.is_some_and(|entry| entry.block() == first + place) {
                    data.is_equal = false;
                    unchanged.push(index);
                } else {
                    data.is_equal = state.pin(place);
                }
                found += usize::from(data.is_equal);
            }
            state.counts.unchanged_blocks += unchanged.len() as u64;
            draft.interval.take().is_some_and(|interval| state.end_read(interval))
        });
        if has_places {
            self.inner.shared.wake();
        }
        self.sharing.note(draft.parts.len(), found + unchanged.len());
        for index in unchanged.into_iter().rev() {
            let part = draft.parts.remove(index);
            self.changes.entry(part.change).and_modify(|change| change.parts -= 1);
        }
        self.ready.push_back(draft);
    }
}
