//! Puts parts of changes into batches, writes these, and brings them into the maps.

use fathom_block::{BackendContext, ErrorKind, Operation, Outcome, Request};

use super::change::{Part, is_zero};
use super::device::Purpose;
use super::{StoreQueue, Wanted};
use crate::batch::{BatchHeader, Run, fits};
use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::pages::Fault;
use crate::state::Placed;

/// The most blocks of data of a batch: with the header, as much memory as a request keeps for its
/// next use.
const BLOCKS_MAX: usize = 63;
/// The most ranges of zeroes of a batch.
const ZEROES_MAX: usize = 64;
/// The most batches of a queue in flight.
const BATCHES_MAX: usize = 16;

/// A batch in flight.
pub(super) struct Batch {
    runs: Vec<Run>,
    /// The parts of changes that it has.
    parts: Vec<(u64, Part)>,
    requests: usize,
    outcome: Outcome,
    /// The run that is brought into the maps next, and the blocks of it that are there.
    next: (usize, usize),
}

/// A batch that has no place yet. Block 0 of the request's memory is for the header, and the data
/// of the parts follows.
struct Draft {
    own: Box<Request>,
    /// The parts, each with the checksum of its data, if it has any.
    parts: Vec<(u64, Part, Option<u32>)>,
    blocks: usize,
}

impl StoreQueue {
    /// Writes waiting changes in batches, as far as there is place.
    pub(super) fn write_batches(&mut self, context: &mut BackendContext<'_>) {
        while self.batches.len() < BATCHES_MAX {
            let Some(draft) = self.draft() else { return };
            if !self.place(draft, context) {
                return;
            }
        }
    }

    /// Gathers parts of changes for a batch.
    fn draft(&mut self) -> Option<Draft> {
        let Wanted::Volume(_) = self.wanted else { return None };
        let mut taken = Vec::new();
        let (mut blocks, mut zeroes) = (0, 0);
        for number in &self.pending {
            let Some(change) = self.changes.get_mut(number).filter(|change| change.is_ready())
            else {
                continue;
            };
            while blocks < BLOCKS_MAX && zeroes < ZEROES_MAX {
                let Some(part) = change.next_part() else { break };
                match part {
                    Part::Data(_) => blocks += 1,
                    Part::Zeroes(_) => zeroes += 1,
                }
                taken.push((*number, part));
            }
        }
        if taken.is_empty() {
            return None;
        }
        let mut own = self.device.take();
        own.buffers.allocate((1 + blocks) * BLOCK_BYTES);
        let mut draft = Draft { own, parts: Vec::new(), blocks: 0 };
        for (number, part) in taken {
            self.compose(number, part, &mut draft);
        }
        Some(draft)
    }

    /// Adds a part to a draft.
    fn compose(&mut self, number: u64, part: Part, draft: &mut Draft) {
        let Part::Data(block) = part else {
            return draft.parts.push((number, part, None));
        };
        let Some(change) = self.changes.get_mut(&number) else { return };
        let Some(memory) = draft.own.buffers.owned_mut() else { return };
        let bytes = &mut memory[(1 + draft.blocks) * BLOCK_BYTES..][..BLOCK_BYTES];
        if let Err(kind) = change.compose(block, bytes) {
            change.outcome = Err(kind);
            return;
        }
        if !is_zero(bytes) {
            draft.blocks += 1;
            return draft.parts.push((number, part, Some(crc32c::crc32c(bytes))));
        }
        // Zeroes need no place.
        match draft.parts.last_mut() {
            Some((last, Part::Zeroes(range), _)) if *last == number && range.end == block => {
                range.end += 1;
            }
            _ => draft.parts.push((number, Part::Zeroes(block..block + 1), None)),
        }
    }

    /// Finds a place for a batch, and writes it. Returns false if there is none.
    fn place(&mut self, draft: Draft, context: &mut BackendContext<'_>) -> bool {
        let Wanted::Volume(volume) = self.wanted else { return false };
        let Draft { mut own, parts, blocks } = draft;
        if parts.is_empty() {
            self.device.give(own);
            return true;
        }
        let mut is_full = false;
        let placed = self.inner.shared.attempt(&self.waker, |state| {
            let placed = state.place(blocks);
            is_full = placed.is_none() && state.is_full();
            placed
        });
        let Some(placed) = placed else {
            self.device.give(own);
            for (number, part, _) in parts.into_iter().rev() {
                if let Some(change) = self.changes.get_mut(&number) {
                    change.put_back(part);
                    if is_full {
                        change.outcome = Err(ErrorKind::NoSpace);
                    }
                }
            }
            return is_full;
        };
        let (runs, used, count) = runs(volume, &parts, &placed, self.inner.first_segment);
        let mut parts: Vec<_> = parts.into_iter().map(|(number, part, _)| (number, part)).collect();
        for (number, part) in parts.split_off(count).into_iter().rev() {
            if let Some(change) = self.changes.get_mut(&number) {
                change.put_back(part);
            }
        }
        let mut last = None;
        for (number, _) in &parts {
            if last.replace(*number) != Some(*number) {
                self.changes.entry(*number).and_modify(|change| change.batches += 1);
            }
        }
        let header = BatchHeader {
            generation: placed.generation,
            sequence: placed.sequence,
            frontier: placed.frontier,
            runs,
        };
        if let Some(memory) = own.buffers.owned_mut() {
            header.encode(self.inner.identity, &self.inner.key, &mut memory[..BLOCK_BYTES]);
        }
        let zeroes = parts.iter().filter(|(_, part)| matches!(part, Part::Zeroes(_))).count();
        let BatchHeader { sequence, runs, .. } = header;
        let batch = Batch { runs, parts, requests: 0, outcome: Ok(()), next: (0, 0) };
        self.batches.insert(sequence, batch);
        self.inner.shared.access(|state| {
            state.counts.written_blocks += used as u64;
            state.counts.zero_blocks += zeroes as u64;
        });
        self.submit_batch(own, &placed, used, context);
        self.load_for_batch(sequence, context);
        true
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
                if let Run::Data { first, checksums, .. } = run {
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
                state.end_batch(sequence, outcome);
            });
            if let Some(id) = missing {
                self.load(id, context);
            }
            match missing {
                Some(id) if self.broken.contains(&id) => {
                    self.inner.shared.access(|state| state.end_batch(sequence, Err(ErrorKind::Io)));
                    self.end_batch(sequence, Err(ErrorKind::Io), true);
                }
                Some(_) => {}
                None => self.end_batch(sequence, outcome, false),
            }
        }
    }

    /// A batch has ended. Its parts go into another one if it has failed, unless that `is_final`.
    fn end_batch(&mut self, sequence: u64, outcome: Outcome, is_final: bool) {
        let Some(batch) = self.batches.remove(&sequence) else { return };
        // Another place would be as full, and a device that has lost writes takes none.
        let is_final = is_final
            || outcome == Err(ErrorKind::NoSpace)
            || outcome.is_err() && self.inner.device.has_lost_writes();
        let mut last = None;
        for (number, part) in batch.parts.into_iter().rev() {
            let Some(change) = self.changes.get_mut(&number) else { continue };
            let is_new = last.replace(number) != Some(number);
            if is_new {
                change.batches -= 1;
            }
            if let Err(kind) = outcome {
                change.put_back(part);
                if is_new {
                    change.note_failure(kind);
                    if let Err(at) = self.pending.binary_search(&number) {
                        self.pending.insert(at, number);
                    }
                }
                if is_final {
                    change.outcome = Err(kind);
                }
            }
        }
        self.inner.shared.wake();
    }
}

/// The runs of a batch whose first `blocks of parts` fit: the runs, the blocks of data that they
/// have, and the parts.
fn runs(
    volume: u32,
    parts: &[(u64, Part, Option<u32>)],
    placed: &Placed,
    first_segment: u64,
) -> (Vec<Run>, usize, usize) {
    let mut runs: Vec<Run> = Vec::new();
    let (mut used, mut data_runs, mut zeroes, mut count) = (0, 0, 0, 0);
    for (_, part, checksum) in parts {
        match (part, checksum) {
            (Part::Data(block), Some(checksum)) => {
                let Some(place) = placed.places.data.get(used) else { break };
                let place = first_segment + place;
                let extends = |run: &Run| {
                    let Run::Data { first, block: start, checksums, .. } = run else {
                        return false;
                    };
                    let length = checksums.len() as u64;
                    first + length == *block && start + length == place
                };
                let is_new = !runs.last().is_some_and(extends);
                if !fits(data_runs + usize::from(is_new), used + 1, zeroes) {
                    break;
                }
                data_runs += usize::from(is_new);
                if is_new {
                    let checksums = Vec::new();
                    runs.push(Run::Data { volume, first: *block, block: place, checksums });
                }
                if let Some(Run::Data { checksums, .. }) = runs.last_mut() {
                    checksums.push(*checksum);
                }
                used += 1;
            }
            (Part::Zeroes(range), _) => {
                if !fits(data_runs, used, zeroes + 1) {
                    break;
                }
                zeroes += 1;
                let (first, length) = (range.start, range.end - range.start);
                runs.push(Run::Zeroes { volume, first, count: length });
            }
            (Part::Data(_), None) => break,
        }
        count += 1;
    }
    (runs, used, count)
}
