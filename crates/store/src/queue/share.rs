//! Finds the blocks of drafts that are there already.
//!
//! 1. The fingerprint of each block is looked up: among those of the blocks that the volume has
//!    read lately, and then in the index. Pages of the fingerprint table are read where a hook
//!    leads to one.
//! 2. The blocks that may be equal are read and compared.
//! 3. Equal ones are pinned, and become references.
//!
//! A block whose content is that of the volume's own block needs no change at all.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{BackendContext, Outcome, Request};
use parking_lot::Mutex;

use super::batch::is_shared;
use super::change::Part;
use super::device::Purpose;
use super::draft::Draft;
use super::{StoreQueue, Wanted};
use crate::fingerprint::{Fingerprint, Fingerprinter};
use crate::index::{Found, read_page};
use crate::layout::BLOCK_BYTES;
use crate::recent::{RECENT_RUN, RecentReads};
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
    /// The fewest adjoining blocks that are shared, and the place behind the last ones that were
    /// compared.
    run_min: usize,
    stretch_end: u64,
    credit: u32,
    /// The blocks since a page was credited.
    blocks: u32,
    /// What the queues of the volume have read.
    recent: Arc<Mutex<RecentReads>>,
    /// What is being noted there.
    noted: Vec<(Fingerprint, u64)>,
}

impl Sharing {
    pub(super) fn new(
        fingerprinter: Option<Fingerprinter>,
        is_rotational: bool,
        bits: u32,
        recent: Arc<Mutex<RecentReads>>,
    ) -> Self {
        let run_min = if is_rotational { ROTATIONAL_RUN } else { 1 };
        let (stretch_end, credit, blocks, noted) = (u64::MAX - 1, CREDIT_MAX, 0, Vec::new());
        Self { fingerprinter, bits, run_min, stretch_end, credit, blocks, recent, noted }
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

    /// A block of the volume with this CRC-32C has been read from a place.
    pub(super) fn note_read(&mut self, block: &[u8], checksum: u32, place: u64) {
        let fingerprint = self.fingerprint(block, checksum);
        self.noted.extend(fingerprint.map(|fingerprint| (fingerprint, place)));
    }

    /// All blocks of a part of a read of so many blocks have been [noted](Self::note_read).
    pub(super) fn end_read(&mut self, blocks: usize) {
        if blocks >= RECENT_RUN && !self.noted.is_empty() {
            let mut recent = self.recent.lock();
            for (fingerprint, place) in &self.noted {
                recent.note(*fingerprint, *place);
            }
        }
        self.noted.clear();
    }

    /// Whether a read of so many blocks is probably part of a copy.
    pub(super) fn is_copying(&self, blocks: usize) -> bool {
        self.is_active() && blocks >= RECENT_RUN && self.recent.lock().is_copying()
    }

    /// Finds the blocks of a draft that the volume has read lately.
    fn find_read(&self, draft: &mut Draft) {
        let recent = self.recent.lock();
        for data in draft.parts.iter_mut().filter_map(|part| part.data.as_mut()) {
            data.candidate = data.fingerprint.and_then(|fingerprint| recent.find(fingerprint));
            data.was_read = data.candidate.is_some();
        }
    }

    /// Blocks with these fingerprints are not where they were read.
    fn forget_reads(&self, unequal: &[(Fingerprint, u64)]) {
        let mut recent = self.recent.lock();
        for (fingerprint, place) in unequal {
            if recent.find(*fingerprint) == Some(*place) {
                recent.forget(*fingerprint);
            }
        }
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
            let candidate = data.candidate.map(|place| state.moved(place).unwrap_or(place));
            let is_there = |place: &u64| state.space.has_data(*place) && state.may_refer_to(*place);
            data.candidate = candidate.filter(is_there);
            let Some(fingerprint) = data.fingerprint else { continue };
            if data.candidate.is_none() {
                data.was_read = false;
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

impl CandidateRun {
    /// The place behind the last one.
    fn end(&self) -> u64 {
        self.place + self.count as u64
    }
}

/// Whether a place is the next one for data behind a run that ends at `end`. A header may lie
/// between them.
fn is_next(end: u64, place: u64) -> bool {
    place == end || place == end + 1
}

/// The runs of candidates of a draft.
fn candidate_runs(draft: &Draft) -> Vec<CandidateRun> {
    let mut runs: Vec<CandidateRun> = Vec::new();
    for (index, part) in draft.parts.iter().enumerate() {
        let Some(place) = part.data.and_then(|data| data.candidate) else { continue };
        match runs.last_mut() {
            Some(run) if run.part + run.count == index && run.end() == place => {
                run.count += 1;
            }
            _ => runs.push(CandidateRun { part: index, place, count: 1 }),
        }
    }
    runs
}

impl Sharing {
    /// Divides runs into those that are compared, and those that are not worth a seek. Runs that
    /// the device reads one behind the other count as one, from one draft to the next.
    fn worthwhile(&mut self, runs: &[CandidateRun]) -> (Vec<CandidateRun>, Vec<CandidateRun>) {
        let (mut long, mut short) = (Vec::new(), Vec::new());
        let adjoin = |one: &CandidateRun, next: &CandidateRun| {
            one.part + one.count == next.part && is_next(one.end(), next.place)
        };
        for stretch in runs.chunk_by(adjoin) {
            let count: usize = stretch.iter().map(|run| run.count).sum();
            let goes_on = is_next(self.stretch_end, stretch[0].place);
            if count >= self.run_min || goes_on {
                self.stretch_end = stretch.last().map_or(0, CandidateRun::end);
                long.extend(stretch);
            } else {
                short.extend(stretch);
            }
        }
        (long, short)
    }
}

impl StoreQueue {
    /// Looks for the blocks of a new draft. It is ready when nothing is in flight for it.
    pub(super) fn share(&mut self, mut draft: Draft, context: &mut BackendContext<'_>) {
        if !self.sharing.is_active() || draft.parts.iter().all(|part| part.data.is_none()) {
            return self.ready.push_back(draft);
        }
        if self.inner.has_guarantees.load(Ordering::Relaxed)
            && !self.inner.shared.access(|state| is_shared(state, self.wanted))
        {
            let data = draft.parts.iter_mut().filter_map(|part| part.data.as_mut());
            data.for_each(|data| data.fingerprint = None);
            return self.ready.push_back(draft);
        }
        let number = self.number();
        let mut wanted: Vec<(u32, Option<u64>)> = Vec::new();
        let mut credit = self.sharing.credit;
        self.sharing.find_read(&mut draft);
        self.inner.shared.access(|state| {
            let data = draft.parts.iter().filter_map(|part| part.data);
            for (fingerprint, was_read) in
                data.filter_map(|data| Some((data.fingerprint?, data.was_read)))
            {
                state.counts.looked_up_blocks += 1;
                if was_read {
                    continue;
                }
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
        let (runs, short) = self.sharing.worthwhile(&candidate_runs(draft));
        for run in short {
            for part in &mut draft.parts[run.part..run.part + run.count] {
                part.data.iter_mut().for_each(|data| data.candidate = None);
            }
        }
        draft.waits = runs.len();
        let first = self.inner.first_segment;
        let now_ns = context.now_ns();
        let kept: Vec<_> = self.inner.shared.access(|state| {
            let take = |run: &CandidateRun| state.contents.take(run.place..run.end(), now_ns);
            runs.iter().map(take).collect()
        });
        for (CandidateRun { part, place, count }, kept) in runs.into_iter().zip(kept) {
            if let Some(kept) = kept {
                self.inner.shared.access(|state| state.counts.kept_blocks += count as u64);
                self.compare_with(number, part, kept.iter().map(|block| &**block));
                continue;
            }
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
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok()).unwrap_or_default();
        self.compare_with(number, part, bytes.chunks_exact(BLOCK_BYTES));
        self.device.give(own);
        self.pin(number);
    }

    /// Compares the blocks of a draft, from one of its parts on, with those that may be equal.
    fn compare_with<'b>(
        &mut self,
        number: u64,
        part: usize,
        blocks: impl Iterator<Item = &'b [u8]>,
    ) {
        let Some(draft) = self.drafts.get_mut(&number) else { return };
        draft.waits -= 1;
        let mut unequal = Vec::new();
        for (index, bytes) in (part..).zip(blocks) {
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
            self.sharing.forget_reads(&unequal);
            self.inner.shared.access(|state| {
                state.counts.unequal_blocks += unequal.len() as u64;
                for (fingerprint, place) in unequal {
                    state.index.forget(fingerprint, place);
                }
            });
        }
    }

    /// Pins the blocks that are equal, when all have been compared. Then the draft is ready.
    fn pin(&mut self, number: u64) {
        let Wanted::Volume(volume) = self.wanted else { return };
        if self.drafts.get(&number).is_none_or(|draft| draft.waits > 0) {
            return;
        }
        let Some(mut draft) = self.drafts.remove(&number) else { return };
        let (mut found, mut unchanged, mut copied) = (0, Vec::new(), 0);
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
                copied += u64::from(data.is_equal && data.was_read);
            }
            state.counts.unchanged_blocks += unchanged.len() as u64;
            state.counts.copied_blocks += copied;
            draft.interval.take().is_some_and(|interval| state.end_read(interval))
        });
        if has_places {
            self.inner.shared.wake();
        }
        if copied > 0 {
            self.sharing.recent.lock().note_copy();
        }
        self.sharing.note(draft.parts.len(), found + unchanged.len());
        for index in unchanged.into_iter().rev() {
            let part = draft.parts.remove(index);
            self.changes.entry(part.change).and_modify(|change| change.parts -= 1);
        }
        self.ready.push_back(draft);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_runs_are_compared_on_a_rotational_device_if_they_go_on_with_others() {
        let run = |part: usize, place: u64, count: usize| CandidateRun { part, place, count };
        let mut sharing = Sharing::new(None, true, 56, Arc::default());
        let mut compared = |runs: &[CandidateRun]| {
            let (long, short) = sharing.worthwhile(runs);
            assert_eq!(long.len() + short.len(), runs.len());
            long.iter().map(|run| run.place).collect::<Vec<_>>()
        };
        // Alone, and too far from each other: on the device, or in the draft.
        assert_eq!(
            compared(&[run(0, 100, 15), run(15, 117, 5), run(21, 122, 1)]),
            Vec::<u64>::new()
        );
        // With a header between them.
        assert_eq!(compared(&[run(0, 500, 10), run(10, 511, 6)]), [500, 511]);
        // The next draft goes on, and ends far away.
        assert_eq!(compared(&[run(0, 517, 3), run(3, 900, 2)]), [517]);
        assert_eq!(compared(&[run(0, 521, 2), run(5, 700, 16)]), [521, 700]);
        assert_eq!(compared(&[run(0, 523, 2)]), Vec::<u64>::new());
        let mut sharing = Sharing::new(None, false, 56, Arc::default());
        assert_eq!(sharing.worthwhile(&[run(3, 7, 1)]).0.len(), 1);
    }
}
