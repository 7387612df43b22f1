//! Reads of a volume or a snapshot, and reads of pages of its map.

use std::ops::Range;

use fathom_block::{
    Allocation, BackendContext, ErrorKind, Extent, Operation, Outcome, Request, faults,
};

use super::change::EdgeContent;
use super::device::Purpose;
use super::{StoreQueue, Wanted};
use crate::catalogue::PageId;
use crate::difference::Comparison;
use crate::entry::MapEntry;
use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::pages::{Fault, TableEntry, WORDS, from_bytes};
use crate::recent::RECENT_RUN;
use crate::tree::BLOCKS_MAX as TREE_BLOCKS_MAX;

/// The most blocks that a read looks up, and has in memory of the queue, at a time.
const BLOCKS_MAX: u64 = 256;
/// The blocks whose pages of the map are read ahead: 16 pages.
const BLOCKS_AHEAD: u64 = 16 * WORDS as u64;
/// The most extents of an answer, and the most blocks that it is about.
const EXTENTS_MAX: usize = 1024;
const EXTENT_BLOCKS_MAX: u64 = 1 << 23;
/// The most blocks of a map that are looked up at once for extents.
const EXTENT_STEP: u64 = 1 << 15;

/// A read, or a request for extents.
pub(super) struct Read {
    /// `None` while the request itself is in flight to the device.
    request: Option<Box<Request>>,
    offset: u64,
    length: u64,
    /// The first block that was looked up, and the entries from there on.
    pub(super) first: u64,
    entries: Vec<MapEntry>,
    /// The number that ends the read in the state, if places are being read.
    interval: Option<u64>,
    pieces: usize,
    pub(super) outcome: Outcome,
    is_extents: bool,
    /// The steps of a comparison.
    pub(super) steps: usize,
}

impl Read {
    pub(super) fn new(request: Box<Request>) -> Self {
        let (offset, length) = (request.offset, request.length);
        Self {
            is_extents: request.operation == Operation::Extents,
            request: Some(request),
            offset,
            length,
            first: offset / BLOCK,
            entries: Vec::new(),
            interval: None,
            pieces: 0,
            outcome: Ok(()),
            steps: 0,
        }
    }

    /// The number that ends it in the state.
    pub(super) fn interval(&self) -> Option<u64> {
        self.interval
    }

    /// The block behind the last one.
    pub(super) fn end(&self) -> u64 {
        (self.offset + self.length).div_ceil(BLOCK)
    }

    /// Copies a block of data to where the request needs it.
    fn put(&mut self, block: u64, data: Option<&[u8]>) {
        let Some(request) = &mut self.request else { return };
        let start = block * BLOCK;
        let from = self.offset.max(start);
        let to = (self.offset + self.length).min(start + BLOCK);
        let before = faults();
        match data {
            Some(data) => {
                let data = &data[(from - start) as usize..(to - start) as usize];
                request.buffers.copy_from(from - self.offset, data);
            }
            None => request.buffers.fill_zero(from - self.offset, (to - from) as usize),
        }
        if faults() != before {
            self.outcome = Err(ErrorKind::Memory);
        }
    }

    /// Adds blocks to the answer.
    pub(super) fn put_extent(&mut self, blocks: Range<u64>, allocation: Allocation) {
        let Some(request) = &mut self.request else { return };
        let offset = (blocks.start * BLOCK).max(self.offset);
        let length = (blocks.end * BLOCK).min(self.offset + self.length) - offset;
        match request.extents.last_mut() {
            Some(last) if last.allocation == allocation => last.length += length,
            _ => request.extents.push(Extent { offset, length, allocation }),
        }
    }

    /// The answer describes all up to block `next`. It is complete if it has many extents, or
    /// `is_long`.
    pub(super) fn end_extents(&mut self, next: u64, is_long: bool) {
        self.first = next;
        let count = self.request.as_ref().map_or(0, |request| request.extents.len());
        if count >= EXTENTS_MAX || is_long {
            self.first = self.end();
        }
    }
}

impl StoreQueue {
    /// The root of what this queue reads.
    fn look_up(&self, range: Range<u64>) -> Result<(Vec<MapEntry>, u64), (Fault, Vec<PageId>)> {
        let (mut entries, mut missing) = (Vec::new(), Vec::new());
        let found = self.inner.shared.access(|state| {
            let root = match self.wanted {
                Wanted::Volume(id) | Wanted::Snapshot(id) => state.catalogue.branch(id),
                Wanted::Difference(Comparison { target, .. }) => state.catalogue.branch(target),
                Wanted::Nothing => None,
            };
            let (root, _) = root.ok_or(Fault::Damaged)?;
            state.pages.look_up(root, range, &mut entries, &mut missing)?;
            let layout = state.layout();
            let is_place =
                |entry: &MapEntry| entry.is_hole() || layout.place(entry.block()).is_some();
            if !entries.iter().all(is_place) {
                return Err(Fault::Damaged);
            }
            Ok(state.begin_read())
        });
        found.map(|interval| (entries, interval)).map_err(|fault| (fault, missing))
    }

    /// Goes on with a read, until it waits for the device or is complete.
    pub(super) fn go_on_reading(&mut self, number: u64, context: &mut BackendContext<'_>) {
        loop {
            let Some(read) = self.reads.get_mut(&number) else { return };
            if read.pieces > 0 || read.request.is_none() {
                return;
            }
            if let Some(interval) = read.interval.take() {
                read.first += read.entries.len() as u64;
                read.entries.clear();
                self.end_interval(interval);
            }
            let Some(read) = self.reads.get_mut(&number) else { return };
            if read.first >= read.end() || read.outcome.is_err() {
                let Some(read) = self.reads.remove(&number) else { return };
                let Some(request) = read.request else { return };
                return context.complete(request, read.outcome);
            }
            if read.is_extents {
                let goes_on = if self.is_comparison() {
                    self.go_on_comparing(number, context)
                } else {
                    self.go_on_with_extents(number, context)
                };
                if !goes_on {
                    return;
                }
                continue;
            }
            let range = read.first..read.end().min(read.first + BLOCKS_MAX);
            match self.look_up(range.clone()) {
                Ok((entries, interval)) => self.read_entries(number, entries, interval, context),
                Err((fault, missing)) => {
                    if !self.load_all(fault, &missing, context) {
                        return self.load_ahead(&range, context);
                    }
                    let kind = Err(ErrorKind::Io);
                    self.reads.entry(number).and_modify(|read| read.outcome = kind);
                }
            }
        }
    }

    /// Begins to read the next pages of the map behind a range that is read, of which pages were
    /// missing, if the device reads them with less seeks now than later.
    fn load_ahead(&mut self, range: &Range<u64>, context: &mut BackendContext<'_>) {
        let is_long = range.end - range.start >= RECENT_RUN as u64;
        if !is_long || !self.inner.device.capabilities().rotational {
            return;
        }
        match self.look_up(range.end..(range.end + BLOCKS_AHEAD).min(TREE_BLOCKS_MAX)) {
            Ok((_, interval)) => self.end_interval(interval),
            Err((_, missing)) => missing.into_iter().for_each(|id| self.load(id, context)),
        }
    }

    /// Begins to read missing pages. Returns whether they cannot be read.
    pub(super) fn load_all(
        &mut self,
        fault: Fault,
        missing: &[PageId],
        context: &mut BackendContext<'_>,
    ) -> bool {
        if fault == Fault::Damaged || missing.iter().any(|id| self.broken.contains(id)) {
            return true;
        }
        for id in missing {
            self.load(*id, context);
        }
        // One that has no place cannot be read at all.
        missing.iter().any(|id| self.broken.contains(id))
    }

    /// Reads the blocks of these entries.
    fn read_entries(
        &mut self,
        number: u64,
        entries: Vec<MapEntry>,
        interval: u64,
        context: &mut BackendContext<'_>,
    ) {
        let Some(read) = self.reads.get_mut(&number) else { return };
        read.interval = Some(interval);
        let first = read.first;
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            if entry.is_hole() {
                read.put(first + index as u64, None);
                continue;
            }
            match runs.last_mut() {
                Some((start, count))
                    if *start + *count == index
                        && entries[*start].block() + *count as u64 == entry.block() =>
                {
                    *count += 1;
                }
                _ => runs.push((index, 1)),
            }
        }
        let is_whole = runs == [(0, entries.len())]
            && read.offset % BLOCK == 0
            && read.length == entries.len() as u64 * BLOCK
            // What is kept must be in memory that the guest cannot change.
            && !self.sharing.is_copying(entries.len());
        read.entries = entries;
        read.pieces = runs.len();
        if is_whole {
            let block = read.entries[0].block();
            let Some(mut request) = read.request.take() else { return };
            request.offset = block * BLOCK;
            return self.device.submit(request, Purpose::Whole { read: number }, context);
        }
        let blocks: Vec<u64> = runs.iter().map(|(start, _)| read.entries[*start].block()).collect();
        for ((from, count), block) in runs.into_iter().zip(blocks) {
            let own = self.device.read(block, count);
            self.device.submit(
                own,
                Purpose::Piece { read: number, from, is_again: false },
                context,
            );
        }
    }

    /// A read that was the guest's own request has completed.
    pub(super) fn whole_read(
        &mut self,
        number: u64,
        mut request: Box<Request>,
        outcome: Outcome,
        context: &mut BackendContext<'_>,
    ) {
        let Some(read) = self.reads.get_mut(&number) else { return };
        request.offset = read.offset;
        let mut is_wrong = false;
        if outcome.is_ok() {
            let mut block = [0; BLOCK_BYTES];
            for (index, entry) in read.entries.iter().enumerate() {
                request.buffers.copy_to(index as u64 * BLOCK, &mut block);
                let checksum = crc32c::crc32c(&block);
                is_wrong |= !entry.has_checksum(checksum);
                let place = entry.block().saturating_sub(self.inner.first_segment);
                self.sharing.note_read(&block, checksum, place);
            }
            self.sharing.end_read(read.entries.len());
        } else {
            read.outcome = outcome;
        }
        read.request = Some(request);
        if is_wrong {
            // The guest may have written to the memory meanwhile.
            let (block, count) = (read.entries[0].block(), read.entries.len());
            let own = self.device.read(block, count);
            let purpose = Purpose::Piece { read: number, from: 0, is_again: true };
            return self.device.submit(own, purpose, context);
        }
        read.pieces -= 1;
        self.go_on_reading(number, context);
    }

    /// A part of a read has completed.
    pub(super) fn piece_read(
        &mut self,
        (number, from, is_again): (u64, usize, bool),
        own: Box<Request>,
        outcome: Outcome,
        context: &mut BackendContext<'_>,
    ) {
        let Some(read) = self.reads.get_mut(&number) else { return self.device.give(own) };
        let mut wrong = 0;
        let mut kept = Vec::new();
        let is_kept = self.sharing.is_copying(read.entries.len());
        match (outcome, own.buffers.owned()) {
            (Ok(()), Some(bytes)) => {
                for (index, bytes) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
                    let entry = read.entries[from + index];
                    let checksum = crc32c::crc32c(bytes);
                    if entry.has_checksum(checksum) {
                        read.put(read.first + (from + index) as u64, Some(bytes));
                        let place = entry.block().saturating_sub(self.inner.first_segment);
                        self.sharing.note_read(bytes, checksum, place);
                        kept.extend(is_kept.then_some((place, bytes)));
                    } else {
                        wrong += 1;
                    }
                }
                self.sharing.end_read(read.entries.len());
                if !kept.is_empty() {
                    let now_ns = context.now_ns();
                    self.inner.shared.access(|state| {
                        for (place, bytes) in kept {
                            state.contents.keep(place, bytes, now_ns);
                        }
                    });
                }
            }
            (Err(kind), _) => read.outcome = Err(kind),
            (Ok(()), None) => read.outcome = Err(ErrorKind::Io),
        }
        if wrong > 0 && !is_again {
            let purpose = Purpose::Piece { read: number, from, is_again: true };
            return self.device.submit(own, purpose, context);
        }
        if wrong > 0 {
            read.outcome = Err(ErrorKind::Io);
            let block = own.offset / BLOCK;
            self.report_wrong(wrong, &format!("{wrong} of the blocks from {block} on"));
        }
        self.device.give(own);
        if let Some(read) = self.reads.get_mut(&number) {
            read.pieces -= 1;
        }
        self.go_on_reading(number, context);
    }

    /// Notes that blocks do not have their content.
    pub(super) fn report_wrong(&self, count: u64, what: &str) {
        self.inner.shared.access(|state| {
            state.counts.wrong_blocks += count;
            state
                .damage
                .get_or_insert_with(|| format!("{what} have other content than was written"));
        });
    }

    /// A read has ended in the state.
    pub(super) fn end_interval(&self, interval: u64) {
        if self.inner.shared.access(|state| state.end_read(interval)) {
            self.inner.shared.wake();
        }
    }

    /// Looks up more extents. Returns false if a page is missing.
    fn go_on_with_extents(&mut self, number: u64, context: &mut BackendContext<'_>) -> bool {
        let Some(read) = self.reads.get(&number) else { return false };
        let range = read.first..read.end().min(read.first + EXTENT_STEP);
        let found = self.look_up(range.clone());
        if let Ok((_, interval)) = &found {
            self.end_interval(*interval);
        }
        let entries = match found {
            Ok((entries, _)) => entries,
            Err((fault, missing)) => {
                let is_broken = self.load_all(fault, &missing, context);
                if let Some(read) = self.reads.get_mut(&number).filter(|_| is_broken) {
                    read.outcome = Err(ErrorKind::Io);
                }
                return is_broken;
            }
        };
        let Some(read) = self.reads.get_mut(&number) else { return false };
        let mut block = range.start;
        for run in entries.chunk_by(|one, next| one.is_hole() == next.is_hole()) {
            let allocation = if run[0].is_hole() { Allocation::Hole } else { Allocation::Data };
            let next = block + run.len() as u64;
            read.put_extent(block..next, allocation);
            block = next;
        }
        let is_long = range.end - read.offset / BLOCK >= EXTENT_BLOCKS_MAX;
        read.end_extents(range.end, is_long);
        true
    }

    /// Begins to read a page of a map, unless that is in progress.
    pub(super) fn load(&mut self, id: PageId, context: &mut BackendContext<'_>) {
        if self.broken.contains(&id) || !self.loading.insert(id) {
            return;
        }
        let found = self.inner.shared.access(|state| {
            let entry = state.pages.entry(id);
            state.layout().place(entry.block)?;
            state.counts.map_reads += 1;
            Some((entry, state.begin_read()))
        });
        let Some((entry, interval)) = found else {
            self.loading.remove(&id);
            self.broken.insert(id);
            return self.report_wrong(0, &format!("pages of maps ({id})"));
        };
        let own = self.device.read(entry.block, 1);
        let purpose = Purpose::Load { id, entry, interval, is_copy: false };
        self.device.submit(own, purpose, context);
    }

    /// Whether a page could not be read, or has other content than it should have.
    pub(super) fn is_wrong(own: &Request, outcome: Outcome, entry: &TableEntry) -> bool {
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok());
        bytes.is_none_or(|bytes| crc32c::crc32c(bytes) != entry.checksum)
    }

    /// Whether a page still is where it was, and has a second copy.
    pub(super) fn has_copy(&self, id: PageId, entry: &TableEntry) -> bool {
        self.inner.shared.access(|state| {
            state.pages.entry(id) == *entry && state.layout().place(entry.copy).is_some()
        })
    }

    /// A page of a map has been read.
    pub(super) fn loaded(
        &mut self,
        (id, entry, interval, is_copy): (PageId, TableEntry, u64, bool),
        own: Box<Request>,
        outcome: Outcome,
        context: &mut BackendContext<'_>,
    ) {
        if !is_copy && Self::is_wrong(&own, outcome, &entry) && self.has_copy(id, &entry) {
            self.device.give(own);
            let own = self.device.read(entry.copy, 1);
            let purpose = Purpose::Load { id, entry, interval, is_copy: true };
            return self.device.submit(own, purpose, context);
        }
        self.loading.remove(&id);
        let is_compared = self.to_compare.remove(&id);
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok());
        match bytes.filter(|bytes| crc32c::crc32c(bytes) == entry.checksum) {
            Some(bytes) if is_compared => {
                self.compared.insert(id, entry, from_bytes(bytes));
            }
            Some(bytes) => {
                let page = from_bytes(bytes);
                self.inner.shared.access(|state| {
                    state.pages.insert(id, entry, page);
                    if is_copy {
                        state.mend(id);
                    }
                });
            }
            // Unless it has been written elsewhere meanwhile.
            None if self.inner.shared.access(|state| state.pages.entry(id)) == entry => {
                self.broken.insert(id);
                if outcome.is_ok() {
                    self.report_wrong(0, &format!("pages of maps ({id})"));
                } else {
                    self.unread.push(id);
                }
            }
            None => {}
        }
        self.device.give(own);
        self.end_interval(interval);
    }

    /// Begins to read the old content of the edges of a change. Returns whether that may make the
    /// change ready.
    pub(super) fn read_edges(&mut self, number: u64, context: &mut BackendContext<'_>) {
        let Some(change) = self.changes.get(&number) else { return };
        let unknown = |edge: &super::change::Edge| matches!(edge.content, EdgeContent::Unknown);
        let edges = change.edges.iter().enumerate().filter(|(_, edge)| unknown(edge));
        let edges: Vec<_> = edges.map(|(index, edge)| (index, edge.block)).collect();
        for (edge, block) in edges {
            let found = self.look_up(block..block + 1);
            let content = match found {
                Ok((entries, interval)) => match entries.first() {
                    Some(entry) if !entry.is_hole() => {
                        let purpose =
                            Purpose::Edge { change: number, edge, entry: *entry, interval };
                        let own = self.device.read(entry.block(), 1);
                        self.device.submit(own, purpose, context);
                        EdgeContent::Reading
                    }
                    _ => {
                        self.end_interval(interval);
                        EdgeContent::Known(vec![0; BLOCK_BYTES].into())
                    }
                },
                Err((fault, missing)) => {
                    if self.load_all(fault, &missing, context) {
                        self.changes
                            .entry(number)
                            .and_modify(|change| change.outcome = Err(ErrorKind::Io));
                    }
                    continue;
                }
            };
            self.changes.entry(number).and_modify(|change| change.edges[edge].content = content);
        }
    }

    /// The old content of an edge has been read.
    pub(super) fn edge_read(
        &mut self,
        (number, edge, entry, interval): (u64, usize, MapEntry, u64),
        own: Box<Request>,
        outcome: Outcome,
    ) {
        let bytes = own.buffers.owned().filter(|_| outcome.is_ok());
        let right = bytes.filter(|bytes| entry.has_checksum(crc32c::crc32c(bytes)));
        if outcome.is_ok() && right.is_none() {
            self.report_wrong(1, &format!("block {}", entry.block()));
        }
        if let Some(change) = self.changes.get_mut(&number) {
            let content = right.map(Box::from).unwrap_or_default();
            change.edges[edge].content = EdgeContent::Known(content);
            if right.is_none() {
                change.outcome = Err(outcome.err().unwrap_or(ErrorKind::Io));
            }
        }
        self.device.give(own);
        self.end_interval(interval);
    }
}
