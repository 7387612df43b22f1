//! Puts parts of changes into batches, writes these, and brings them into the maps.

use fathom_block::{BackendContext, ErrorKind, Operation, Outcome, Request};

use super::change::Part;
use super::device::Purpose;
use super::draft::{Content, Draft, references};
use super::{StoreQueue, Wanted};
use crate::batch::{BatchHeader, Run};
use crate::fingerprint::Fingerprint;
use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::pages::Fault;
use crate::state::{Placed, State};

/// The most batches of a queue in flight, with those that are being made.
const BATCHES_MAX: usize = 16;

/// A batch in flight.
pub(super) struct Batch {
    runs: Vec<Run>,
    /// The parts of changes that it has.
    parts: Vec<(u64, Part)>,
    /// The places to which it refers, which are pinned.
    pub(super) pins: Vec<u64>,
    /// The places of its blocks, with their fingerprints.
    fingerprints: Vec<(u64, Option<Fingerprint>)>,
    requests: usize,
    outcome: Outcome,
    /// The run that is brought into the maps next, and the blocks of it that are there.
    next: (usize, usize),
}

/// Whether the blocks of what a queue has are shared with others: not those that are guaranteed.
pub(super) fn is_shared(state: &State, wanted: Wanted) -> bool {
    !matches!(wanted, Wanted::Volume(volume) if state.guarantees.has(volume))
}

impl StoreQueue {
    /// Writes waiting changes in batches, as far as there is place.
    pub(super) fn write_batches(&mut self, context: &mut BackendContext<'_>) {
        loop {
            if self.batches.len() >= BATCHES_MAX {
                return;
            }
            if let Some(draft) = self.ready.pop_front() {
                if let Some(unplaced) = self.place(draft, context) {
                    return self.ready.push_front(unplaced);
                }
            } else if self.batches.len() + self.drafts.len() < BATCHES_MAX {
                let Some(draft) = self.draft() else { return };
                self.share(draft, context);
            } else {
                return;
            }
        }
    }

    /// Finds a place for a batch, and writes it. Returns the draft if there is none now.
    fn place(&mut self, mut draft: Draft, context: &mut BackendContext<'_>) -> Option<Draft> {
        let Wanted::Volume(volume) = self.wanted else { return None };
        if draft.parts.is_empty() {
            self.device.give(draft.own);
            return None;
        }
        let blocks = draft.blocks();
        let mut is_full = false;
        let placed = self.inner.shared.attempt(&self.waker, |state| {
            let placed = state.place(volume, blocks);
            is_full = placed.is_none() && state.is_full_for(volume, blocks);
            placed
        });
        let Some(placed) = placed else {
            if is_full {
                self.refuse(draft);
                return None;
            }
            return Some(draft);
        };
        draft.close_gaps();
        let Content { runs, blocks, parts: count } =
            Content::new(volume, &draft.parts, &placed, self.inner.first_segment);
        let left = draft.parts.split_off(count);
        self.put_back(left);
        let Draft { mut own, parts, .. } = draft;
        let header = BatchHeader {
            generation: placed.generation,
            sequence: placed.sequence,
            frontier: placed.frontier,
            runs,
        };
        if let Some(memory) = own.buffers.owned_mut() {
            header.encode(self.inner.identity, &self.inner.key, &mut memory[..BLOCK_BYTES]);
        }
        let zeroes = parts.iter().filter(|part| part.data.is_none()).count();
        let BatchHeader { sequence, runs, .. } = header;
        let pins = references(&parts);
        let data = parts.iter().filter_map(|part| part.data);
        let written = data.filter(|data| data.reference().is_none());
        let written = written.map(|data| data.fingerprint);
        let mut fingerprints: Vec<_> = placed.places.data.iter().copied().zip(written).collect();
        let pages = self.inner.shared.access(|state| {
            state.counts.written_blocks += blocks as u64;
            state.counts.zero_blocks += zeroes as u64;
            state.counts.shared_blocks += pins.len() as u64;
            if !self.sharing.is_active() && state.index.is_empty() {
                fingerprints.clear();
            }
            let noted = fingerprints.iter().filter(|(_, fingerprint)| fingerprint.is_some());
            let places: Vec<u64> = noted.map(|(place, _)| *place).collect();
            if self.sharing.is_active() {
                state.counts.unique_blocks += (fingerprints.len() - places.len()) as u64;
            }
            state.admit_fingerprints(&places)
        });
        let parts = parts.into_iter().map(|part| (part.change, part.part)).collect();
        let (requests, outcome, next) = (0, Ok(()), (0, 0));
        let batch = Batch { runs, parts, pins, fingerprints, requests, outcome, next };
        self.batches.insert(sequence, batch);
        self.submit_batch(own, &placed, blocks, context);
        self.load_for_batch(sequence, context);
        self.load_fingerprints(&pages, context);
        None
    }

    /// The pool is full.
    fn refuse(&mut self, draft: Draft) {
        let Draft { own, parts, .. } = draft;
        self.device.give(own);
        for part in &parts {
            let change = self.changes.entry(part.change);
            change.and_modify(|change| change.outcome = Err(ErrorKind::NoSpace));
        }
        self.put_back(parts);
    }

    /// Submits the writes of a batch with `used` blocks of data: one for each run of places.
    fn submit_batch(
        &mut self,
        mut own: Box<Request>,
        placed: &Placed,
        used: usize,
        context: &mut BackendContext<'_>,
    ) {
        let first = self.inner.first_segment;
        let places: Vec<u64> = std::iter::once(placed.places.header)
            .chain(placed.places.data[..used].iter().copied())
            .map(|place| first + place)
            .collect();
        let mut writes = Vec::new();
        let mut start = 0;
        for end in 1..=places.len() {
            if end == places.len() || places[end] != places[end - 1] + 1 {
                writes.push((start, end));
                start = end;
            }
        }
        self.batches.entry(placed.sequence).and_modify(|batch| batch.requests = writes.len());
        let mut requests = Vec::with_capacity(writes.len());
        if let [(_, end)] = writes[..] {
            own.buffers.truncate((end * BLOCK_BYTES) as u64);
            requests.push((own, places[0]));
        } else {
            for (start, end) in writes {
                let mut request = self.device.take();
                request.buffers.allocate((end - start) * BLOCK_BYTES);
                if let Some(memory) = own.buffers.owned() {
                    let bytes = &memory[start * BLOCK_BYTES..end * BLOCK_BYTES];
                    request.buffers.copy_from(0, bytes);
                }
                requests.push((request, places[start]));
            }
            self.device.give(own);
        }
        for (mut request, block) in requests {
            (request.operation, request.offset) = (Operation::Write, block * BLOCK);
            request.length = request.buffers.length();
            self.device.submit(request, Purpose::Batch(placed.sequence), context);
        }
    }

    /// Reads the pages that a batch will need, while it is being written.
    fn load_for_batch(&mut self, sequence: u64, context: &mut BackendContext<'_>) {
        let (Wanted::Volume(volume), Some(batch)) = (self.wanted, self.batches.get(&sequence))
        else {
            return;
        };
        let mut missing = Vec::new();
        self.inner.shared.access(|state| {
            let Some(root) = state.catalogue.volumes.get(&volume).map(|volume| volume.root) else {
                return;
            };
            for run in &batch.runs {
                let page =
                    run.blocks().and_then(|(_, blocks)| state.missing_of_set(volume, &blocks));
                missing.extend(page);
                if let Run::Data { first, checksums, .. }
                | Run::References { first, checksums, .. } = run
                {
                    let range = *first..first + checksums.len() as u64;
                    // What else is missing is found when the batch is brought into the map.
                    let _ = state.pages.look_up(root, range, &mut Vec::new(), &mut missing);
                }
            }
        });
        for id in missing {
            self.load(id, context);
        }
    }

    /// A write of a batch has completed.
    pub(super) fn batch_written(&mut self, sequence: u64, outcome: Outcome) {
        let Some(batch) = self.batches.get_mut(&sequence) else { return };
        batch.requests -= 1;
        if outcome.is_err() {
            batch.outcome = outcome;
        }
    }

    /// Brings the written batches into the maps, as far as no page is missing.
    pub(super) fn apply_batches(&mut self, context: &mut BackendContext<'_>) {
        let written = self.batches.iter().filter(|(_, batch)| batch.requests == 0);
        let written: Vec<u64> = written.map(|(sequence, _)| *sequence).collect();
        for sequence in written {
            let Some(batch) = self.batches.get_mut(&sequence) else { continue };
            let mut outcome = batch.outcome;
            let mut missing = None;
            self.inner.shared.access(|state| {
                while let (Some(run), Ok(())) = (batch.runs.get(batch.next.0), outcome) {
                    let is_first = batch.next == (0, 0);
                    let prepared = if is_first { state.prepare(&batch.runs) } else { Ok(()) };
                    match prepared.and_then(|()| state.apply(run, &mut batch.next.1)) {
                        Ok(()) => batch.next = (batch.next.0 + 1, 0),
                        Err(Fault::Missing(id)) => {
                            missing = Some(id);
                            return;
                        }
                        Err(Fault::Damaged) => {
                            state.damage.get_or_insert("a map leads to no page".into());
                            outcome = Err(ErrorKind::Io);
                        }
                    }
                }
                if outcome.is_ok() {
                    let is_shared = is_shared(state, self.wanted);
                    for (place, fingerprint) in batch.fingerprints.drain(..) {
                        let fingerprint = fingerprint.filter(|_| is_shared);
                        state.note_fingerprint(place, fingerprint);
                    }
                }
                state.end_batch(sequence, outcome);
            });
            if let Some(id) = missing {
                self.load(id, context);
            }
            match missing {
                Some(id) if self.broken.contains(&id) && self.forget_broken_sets(sequence) => {
                    // It is applied without the set.
                    self.waker.wake();
                }
                Some(id) if self.broken.contains(&id) => {
                    self.inner.shared.access(|state| state.end_batch(sequence, Err(ErrorKind::Io)));
                    self.end_batch(sequence, Err(ErrorKind::Io), true);
                }
                Some(_) => {}
                None => self.end_batch(sequence, outcome, false),
            }
        }
    }

    /// Forgets what has changed in the volume of a batch if that cannot be noted, because of a page
    /// that cannot be read. Returns whether that is so.
    fn forget_broken_sets(&self, sequence: u64) -> bool {
        let Some(batch) = self.batches.get(&sequence) else { return false };
        let is_broken = |id: u32| self.broken.contains(&id);
        self.inner.shared.access(|state| {
            let mut blocks = batch.runs.iter().filter_map(Run::blocks);
            blocks.any(|(volume, blocks)| state.forget_broken_set(volume, &blocks, is_broken))
        })
    }

    /// A batch has ended. Its parts go into another one if it has failed, unless that `is_final`.
    fn end_batch(&mut self, sequence: u64, outcome: Outcome, is_final: bool) {
        let Some(batch) = self.batches.remove(&sequence) else { return };
        // Another place would be as full, and a device that has lost writes takes none.
        let is_final = is_final
            || outcome == Err(ErrorKind::NoSpace)
            || outcome.is_err() && self.inner.device.has_lost_writes();
        if !batch.pins.is_empty() {
            self.inner.shared.access(|state| state.unpin(&batch.pins));
        }
        let mut last = None;
        for (number, part) in batch.parts.into_iter().rev() {
            let is_new = last.replace(number) != Some(number);
            let Some(change) = self.changes.get_mut(&number) else { continue };
            let Err(kind) = outcome else {
                change.parts -= 1;
                continue;
            };
            change.put_back(part);
            if is_new {
                change.note_failure(kind);
            }
            if is_final {
                change.outcome = Err(kind);
            }
            self.make_pending(number);
        }
        self.inner.shared.wake();
    }
}
