//! A batch that is being made: parts of changes, and a copy of their data.

use fathom_block::{Insight, IoClass, Kind, Request};

use super::change::{Part, is_zero};
use super::{StoreQueue, Wanted};
use crate::batch::{Run, fits};
use crate::fingerprint::Fingerprint;
use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::state::Placed;

/// The most blocks of data of a batch: with the header, as much memory as a request keeps for its
/// next use.
pub(super) const BLOCKS_MAX: usize = 63;
/// The most ranges of zeroes of a batch.
const ZEROES_MAX: usize = 64;

/// The data of a part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Data {
    /// The block of the draft's memory, without that of the header.
    pub(super) slot: usize,
    pub(super) checksum: u32,
    /// `None` if the block is not shared.
    pub(super) fingerprint: Option<Fingerprint>,
    /// The place of a block that may be equal, and whether it is: then it is pinned, and the part
    /// becomes a reference.
    pub(super) candidate: Option<u64>,
    pub(super) is_equal: bool,
    /// Whether the volume has read the block of that place lately.
    pub(super) was_read: bool,
}

impl Data {
    /// The place to which the part refers.
    pub(super) fn reference(&self) -> Option<u64> {
        self.candidate.filter(|_| self.is_equal)
    }
}

/// A part of a change.
#[derive(Clone, Debug)]
pub(super) struct DraftPart {
    /// The number of the change.
    pub(super) change: u64,
    pub(super) part: Part,
    /// `None` for zeroes.
    pub(super) data: Option<Data>,
}

/// The places to which parts refer.
pub(super) fn references(parts: &[DraftPart]) -> Vec<u64> {
    let data = parts.iter().filter_map(|part| part.data);
    data.filter_map(|data| data.reference()).collect()
}

/// See the module. Block 0 of the request's memory is for the header, and the data follows.
pub(super) struct Draft {
    pub(super) own: Box<Request>,
    pub(super) parts: Vec<DraftPart>,
    /// The reads in flight that it waits for.
    pub(super) waits: usize,
    /// The number that ends its reads of blocks in the state.
    pub(super) interval: Option<u64>,
    slots: usize,
}

/// Whether looking for equal blocks of the one at an offset of a request is in vain: by a hint of
/// the program that writes, because it is new ciphertext, or because it is a structure of a file
/// system or swapped memory. A wrong hint costs space.
fn is_unique(insight: &Insight, offset: u64) -> bool {
    let part = insight.parts.iter().rev().find(|part| part.offset <= offset);
    let kind = part.map_or(insight.facts.kind, |part| part.facts.kind);
    let is_whole = insight.is_unique || insight.class == Some(IoClass::UNIQUE);
    is_whole || kind.is_structure() || kind == Kind::Swap
}

impl Draft {
    /// The data of a part.
    pub(super) fn data(&self, slot: usize) -> &[u8] {
        let memory = self.own.buffers.owned().unwrap_or_default();
        memory.get((1 + slot) * BLOCK_BYTES..(2 + slot) * BLOCK_BYTES).unwrap_or_default()
    }

    /// The blocks of data that need a place.
    pub(super) fn blocks(&self) -> usize {
        let data = self.parts.iter().filter_map(|part| part.data);
        data.filter(|data| data.reference().is_none()).count()
    }

    /// Moves the data that needs places together, behind the header.
    pub(super) fn close_gaps(&mut self) {
        let Some(memory) = self.own.buffers.owned_mut() else { return };
        let data = self.parts.iter_mut().filter_map(|part| part.data.as_mut());
        for (slot, data) in data.filter(|data| data.reference().is_none()).enumerate() {
            let from = (1 + data.slot) * BLOCK_BYTES;
            if data.slot != slot {
                memory.copy_within(from..from + BLOCK_BYTES, (1 + slot) * BLOCK_BYTES);
                data.slot = slot;
            }
        }
    }
}

impl StoreQueue {
    /// Gathers parts of changes for a batch.
    pub(super) fn draft(&mut self) -> Option<Draft> {
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
        let (parts, interval) = (Vec::new(), None);
        let mut draft = Draft { own, parts, waits: 0, interval, slots: 0 };
        for (number, part) in taken {
            self.compose(number, part, &mut draft);
        }
        Some(draft)
    }

    /// Adds a part to a draft.
    fn compose(&mut self, number: u64, part: Part, draft: &mut Draft) {
        let Part::Data(block) = part else {
            return draft.parts.push(DraftPart { change: number, part, data: None });
        };
        let Some(change) = self.changes.get_mut(&number) else { return };
        let Some(memory) = draft.own.buffers.owned_mut() else { return };
        let slot = draft.slots;
        let bytes = &mut memory[(1 + slot) * BLOCK_BYTES..][..BLOCK_BYTES];
        if let Err(kind) = change.compose(block, bytes) {
            change.outcome = Err(kind);
            change.parts -= 1;
            return;
        }
        if !is_zero(bytes) {
            draft.slots += 1;
            let checksum = crc32c::crc32c(bytes);
            let offset = (block * BLOCK).saturating_sub(change.request.offset);
            let is_shared = !is_unique(&change.request.insight, offset);
            let fingerprint =
                is_shared.then(|| self.sharing.fingerprint(bytes, checksum)).flatten();
            let (candidate, is_equal, was_read) = (None, false, false);
            let data = Data { slot, checksum, fingerprint, candidate, is_equal, was_read };
            let data = Some(data);
            return draft.parts.push(DraftPart { change: number, part, data });
        }
        // Zeroes need no place.
        match draft.parts.last_mut() {
            Some(DraftPart { change: last, part: Part::Zeroes(range), .. })
                if *last == number && range.end == block =>
            {
                range.end += 1;
                change.parts -= 1;
            }
            _ => {
                let part = Part::Zeroes(block..block + 1);
                draft.parts.push(DraftPart { change: number, part, data: None });
            }
        }
    }

    /// Gives the parts of a draft back to their changes.
    pub(super) fn put_back(&mut self, parts: Vec<DraftPart>) {
        let pins = references(&parts);
        if !pins.is_empty() {
            self.inner.shared.access(|state| state.unpin(&pins));
        }
        for DraftPart { change, part, .. } in parts.into_iter().rev() {
            if let Some(found) = self.changes.get_mut(&change) {
                found.put_back(part);
                self.make_pending(change);
            }
        }
    }

    /// A change has parts that are in no batch.
    pub(super) fn make_pending(&mut self, change: u64) {
        if let Err(at) = self.pending.binary_search(&change) {
            self.pending.insert(at, change);
        }
    }
}

/// What goes into a batch of a draft: its first parts, as far as they fit.
#[derive(Debug, Default)]
pub(super) struct Content {
    pub(super) runs: Vec<Run>,
    /// The blocks of data that they have.
    pub(super) blocks: usize,
    /// The parts.
    pub(super) parts: usize,
}

impl Content {
    pub(super) fn new(
        volume: u32,
        parts: &[DraftPart],
        placed: &Placed,
        first_segment: u64,
    ) -> Self {
        let mut made = Self::default();
        // Runs of data and references, their blocks, and ranges of zeroes.
        let (mut runs, mut blocks, mut zeroes) = (0, 0, 0);
        for DraftPart { part, data, .. } in parts {
            match (part, data) {
                (Part::Data(block), Some(data)) => {
                    let reference = data.reference();
                    let place = reference.or_else(|| placed.places.data.get(made.blocks).copied());
                    let Some(place) = place.map(|place| first_segment + place) else { break };
                    let is_new = !made
                        .runs
                        .last()
                        .is_some_and(|run| run.goes_on_with(reference.is_some(), *block, place));
                    if !fits(runs + usize::from(is_new), blocks + 1, zeroes) {
                        break;
                    }
                    if is_new {
                        let (first, block, checksums) = (*block, place, Vec::new());
                        runs += 1;
                        made.runs.push(if reference.is_some() {
                            Run::References { volume, first, block, checksums }
                        } else {
                            Run::Data { volume, first, block, checksums }
                        });
                    }
                    if let Some(Run::Data { checksums, .. } | Run::References { checksums, .. }) =
                        made.runs.last_mut()
                    {
                        checksums.push(data.checksum);
                    }
                    blocks += 1;
                    made.blocks += usize::from(reference.is_none());
                }
                (Part::Zeroes(range), _) => {
                    if !fits(runs, blocks, zeroes + 1) {
                        break;
                    }
                    zeroes += 1;
                    let (first, count) = (range.start, range.end - range.start);
                    made.runs.push(Run::Zeroes { volume, first, count });
                }
                (Part::Data(_), None) => break,
            }
            made.parts += 1;
        }
        made
    }
}
