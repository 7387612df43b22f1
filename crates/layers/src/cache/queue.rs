//! What the requests of a queue have in common.

mod read;
mod silent;

use std::collections::VecDeque;
use std::sync::Arc;

use fathom_block::{
    Capabilities, Crossing, ErrorKind, LayerQueue, Operation, Outcome, Request, StoreId, Waker,
    Work,
};
use fathom_cache::{BlockAccess, Continued, Hits, MissCost, Seams};
use hashbrown::HashMap;

use super::Inner;
use super::account::{Account, Looked};
use super::ahead::Ahead;
use super::change::Changing;
use super::class::class;
use super::format::{BLOCK_BITS, GRANULE};
use super::insert::{Inserting, Part, SPARE_MAX, SpareRooms};
use super::load::Loading;
use super::sweep::Sweeps;
use super::tables::Writing;

/// The purposes of the layer's own requests, in the low bits of their tokens.
pub(super) mod purpose {
    pub(crate) const BITS: u32 = 3;
    /// A part of a read, in the store. Its number is that of the read.
    pub(crate) const PIECE: u64 = 0;
    pub(crate) const FILL: u64 = 1;
    pub(crate) const WRITE: u64 = 2;
    pub(crate) const PAGE: u64 = 3;
    pub(crate) const VOLUME_FLUSH: u64 = 4;
    pub(crate) const LOAD: u64 = 5;
    pub(crate) const HOME_FLUSH: u64 = 6;
    pub(crate) const PROBE: u64 = 7;
}

/// The time between a flush of home that has failed and the next one, in nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;

/// A part of a read that a slot has.
#[derive(Clone, Copy)]
struct Hit {
    key: u64,
    shard: usize,
    slot: u32,
    /// The range, in bytes of the disk.
    start: u64,
    length: u64,
}

/// How the answer to a read begins.
#[derive(Clone, Copy)]
struct Begin {
    /// When, in nanoseconds.
    time_ns: u64,
    /// Whether the read has waited for a read-ahead.
    was_parked: bool,
    /// Whether it was looked up without a lock, and not found.
    is_missed: bool,
    /// The blocks that a request shortly before it has used.
    continued: Continued,
}

/// A read in flight that uses the cache.
struct Reading {
    /// The request, if its data is read into other memory first. It is gone if it was sent home
    /// because the store did not answer.
    request: Option<Box<Request>>,
    /// The parts that the store has not answered, and when they were sent, in nanoseconds.
    in_store: u32,
    asked_ns: u64,
    /// Whether the store has not answered in time, and not since.
    is_late: bool,
    /// Whether memory for a copy is reserved.
    is_reserved: bool,
    hits: Vec<Hit>,
    /// The parts that will be inserted.
    parts: Vec<Part>,
    access: BlockAccess,
    looked: Looked,
    /// Whether the cache has all of it.
    is_hit: bool,
    /// When it began, in nanoseconds.
    begin_ns: u64,
    /// When it was sent to home as a whole, in nanoseconds; 0 if it was not.
    sent_ns: u64,
    /// Whether it goes home and belongs to no stream that is read ahead.
    is_other: bool,
}

pub(super) struct CacheQueue {
    pub(super) inner: Arc<Inner>,
    pub(super) account: Account,
    /// The number of the queue within the volume.
    pub(super) number: u64,
    pub(super) store: StoreId,
    pub(super) waker: Waker,
    /// The capabilities of the disk beneath.
    pub(super) below: Capabilities,
    reads: HashMap<u64, Reading>,
    pub(super) changes: HashMap<u64, Changing>,
    pub(super) sweeps: Sweeps,
    pub(super) insertions: HashMap<u64, Inserting>,
    pub(super) ahead: Ahead,
    /// Slots whose content is being read again to find out whether the volume is sound, and since
    /// when, in nanoseconds.
    probes: HashMap<u64, (Hit, u64)>,
    /// When to look for requests that the store does not answer, in nanoseconds; 0 is never.
    watch_ns: u64,
    /// Whether requests besides reads are late.
    is_late: bool,
    /// Changes that wait for the bits of their regions, or for the end of the cache, and since when
    /// the first one is the first, in nanoseconds.
    pub(super) waiting: VecDeque<Box<Request>>,
    pub(super) waiting_ns: u64,
    pub(super) writing: Option<Writing>,
    pub(super) loading: Option<Loading>,
    /// The number of the flush of home that this queue has begun by itself.
    pub(super) flushing_home: Option<u64>,
    /// When this queue may begin the next one, in nanoseconds: later if the last one has failed.
    pub(super) flush_home_ns: u64,
    /// Ends the use of the image's mark.
    pub(super) ending: Work<bool>,
    /// Reads the modification time of the disk's store.
    pub(super) noting: Work<u64>,
    /// Writes a mark that could not be written before, next at this time, in nanoseconds.
    pub(super) marking: Work<()>,
    pub(super) mark_ns: u64,
    pub(super) is_closed: bool,
    pub(super) count: u64,
    /// The end of the last read, in bytes.
    last_end: u64,
    /// Where the requests of this queue follow each other within a block.
    pub(super) seams: Seams,
    /// What reads cost at home.
    cost: MissCost,
    pub(super) hits: Hits,
    /// The blocks of a batch's reads, and the slots that they are probably in.
    pub(super) prepared: VecDeque<(u64, (usize, u32))>,
    /// Kept to reuse their memory.
    spare_hits: Vec<Hit>,
    spare_parts: Vec<Vec<Part>>,
    pub(super) spare_rooms: Vec<SpareRooms>,
}

impl CacheQueue {
    pub(super) fn new(
        inner: Arc<Inner>,
        account: Account,
        store: StoreId,
        waker: Waker,
        below: Capabilities,
        (ending, noting, marking): (Work<bool>, Work<u64>, Work<()>),
    ) -> Self {
        // The tables may have to be loaded.
        waker.wake();
        let hits = inner.volume.hits();
        let number = inner.volume.keeper.access(|keeper| {
            keeper.opened += 1;
            keeper.queues.push((keeper.opened, waker.clone()));
            keeper.opened
        });
        Self {
            inner,
            account,
            number,
            store,
            waker,
            below,
            reads: HashMap::new(),
            changes: HashMap::new(),
            sweeps: Sweeps::default(),
            insertions: HashMap::new(),
            ahead: Ahead::default(),
            probes: HashMap::new(),
            watch_ns: 0,
            is_late: false,
            waiting: VecDeque::new(),
            waiting_ns: 0,
            writing: None,
            loading: None,
            flushing_home: None,
            flush_home_ns: 0,
            ending,
            noting,
            marking,
            mark_ns: 0,
            is_closed: false,
            count: 0,
            last_end: 0,
            seams: Seams::default(),
            cost: MissCost::new(),
            hits,
            prepared: VecDeque::new(),
            spare_hits: Vec::new(),
            spare_parts: Vec::new(),
            spare_rooms: Vec::new(),
        }
    }

    /// What the replacement learns of a request.
    pub(super) fn access(&self, request: &Request) -> BlockAccess {
        let class = class(&request.insight);
        let is_write = request.operation != Operation::Read;
        let is_sequential = request.offset == self.last_end;
        // A write is at home before it completes, so that a hit of it saves nothing.
        let miss_ns = if is_write { 0 } else { self.cost_of(is_sequential, request.length) };
        BlockAccess { class, is_write, is_sequential, miss_ns, is_continued: false }
    }

    /// The blocks of a request that another request shortly before it has used.
    pub(super) fn continued(&mut self, request: &Request) -> Continued {
        let size = u64::from(self.inner.volume.format.block_size);
        self.seams.request(0, request.offset, request.length, size)
    }

    /// The expected time of a block of a read of `length` bytes at home, in nanoseconds.
    fn cost_of(&self, is_sequential: bool, length: u64) -> u32 {
        self.cost.block_ns(is_sequential, self.count_of(length))
    }

    fn count_of(&self, length: u64) -> u64 {
        let size = u64::from(self.inner.volume.format.block_size);
        (length + size - 1) >> size.trailing_zeros()
    }

    /// The key of a block of this disk.
    pub(super) fn key(&self, block: u64) -> u64 {
        u64::from(self.inner.disk.number) << BLOCK_BITS | block
    }

    /// Each block of a range, and the part of the range in it: the start and the length, in bytes
    /// of the disk. `size` is a power of two.
    pub(super) fn blocks(
        offset: u64,
        length: u64,
        size: u64,
    ) -> impl Iterator<Item = (u64, u64, u64)> {
        let (end, shift) = (offset + length, size.trailing_zeros());
        (offset >> shift..(end + size - 1) >> shift).map(move |block| {
            let (start, stop) = ((block * size).max(offset), ((block + 1) * size).min(end));
            (block, start, stop - start)
        })
    }

    /// The granules that a range within a block touches, as bits.
    pub(super) fn touched(start: u64, length: u64, size: u64) -> u16 {
        let (start, granule) = (start & (size - 1), u64::from(GRANULE));
        mask(start / granule, (start + length).div_ceil(granule))
    }

    /// The granules that a range within a block covers wholly, as bits.
    pub(super) fn covered(start: u64, length: u64, size: u64) -> u16 {
        let (start, granule) = (start & (size - 1), u64::from(GRANULE));
        mask(start.div_ceil(granule), (start + length) / granule)
    }

    /// Gives expected insertions up.
    pub(super) fn cancel(&self, parts: &mut Vec<Part>) {
        for part in parts.drain(..) {
            self.inner.volume.shard(part.shard).cancel(part.key, part.number);
        }
    }

    /// An empty list of parts, with memory that was kept.
    pub(super) fn parts(&mut self) -> Vec<Part> {
        self.spare_parts.pop().unwrap_or_default()
    }

    /// Keeps the memory of a list of parts.
    pub(super) fn keep_parts(&mut self, mut parts: Vec<Part>) {
        if self.spare_parts.len() < SPARE_MAX {
            parts.clear();
            self.spare_parts.push(parts);
        }
    }
}

/// The bits from `from` to `end`.
fn mask(from: u64, end: u64) -> u16 {
    if from >= end {
        return 0;
    }
    (u16::MAX >> (16 - (end - from))) << from
}

impl LayerQueue for CacheQueue {
    fn expect(&mut self, requests: &[Box<Request>], next: &mut Crossing<'_>) {
        self.prepare(requests, next);
    }

    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        match request.operation {
            Operation::Read => self.read(request, next),
            Operation::Write | Operation::WriteZeroes | Operation::Discard => {
                self.change(request, next);
            }
            Operation::Flush => {
                if self.inner.volume.is_kept {
                    *next.word(&mut request) =
                        self.inner.disk.regions.access(super::regions::Regions::begin_flush);
                }
                next.submit(request);
            }
            Operation::Extents | Operation::GetId => next.submit(request),
        }
    }

    fn complete(&mut self, mut request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let number = std::mem::take(next.word(&mut request));
        match request.operation {
            Operation::Read if number != 0 => {
                if number & 1 == 1 {
                    self.other_ends();
                }
                if outcome.is_ok() {
                    let class = self.access(&request).class;
                    let looked = self.account.look(&request.insight, class);
                    let time_ns = next.round_ns().saturating_sub(number >> 1);
                    self.account.read_ended(looked, false, time_ns);
                }
            }
            Operation::Flush if number != 0 && outcome.is_ok() => {
                self.inner.disk.home_flushed(number);
            }
            Operation::Write | Operation::WriteZeroes | Operation::Discard if number != 0 => {
                self.end_change(number, None, outcome, next);
            }
            Operation::Read
            | Operation::Flush
            | Operation::Write
            | Operation::WriteZeroes
            | Operation::Discard
            | Operation::GetId
            | Operation::Extents => {}
        }
        next.complete(request, outcome);
    }

    fn returned(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let (which, number) =
            (request.token & ((1 << purpose::BITS) - 1), request.token >> purpose::BITS);
        if let (Err(kind), true) = (outcome, request.store().is_some()) {
            // The guest's memory is not the volume's.
            if kind != ErrorKind::Memory {
                self.inner.volume.fail(kind);
            }
        }
        match which {
            purpose::PIECE => self.piece_returned(number),
            purpose::FILL if self.is_fetch(number) => {
                return self.fetched(number, request, outcome, next);
            }
            purpose::FILL => return self.end_read(request, outcome, next),
            purpose::WRITE => return self.written(number, request, outcome, next),
            purpose::PAGE | purpose::VOLUME_FLUSH => {
                next.recycle(request);
                return self.table_returned(outcome, next);
            }
            purpose::LOAD => return self.loaded(request, outcome, next),
            purpose::HOME_FLUSH => {
                match (self.flushing_home.take(), outcome) {
                    (Some(number), Ok(())) => self.inner.disk.home_flushed(number),
                    // It may fail at once each time.
                    _ => self.flush_home_ns = next.now_ns() + RETRY_NS,
                }
                next.recycle(request);
                return self.tend(next);
            }
            purpose::PROBE => {
                let request = self.probed(number, request, outcome);
                return next.recycle(request);
            }
            _ => {}
        }
        next.recycle(request);
    }

    fn gathered(&mut self, mut parent: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let number = *next.word(&mut parent);
        match self.insertions.remove(&number) {
            Some(inserting) => {
                next.recycle(parent);
                self.inserted(inserting, outcome, next);
            }
            None => self.end_read(parent, outcome, next),
        }
    }

    fn advance(&mut self, next: &mut Crossing<'_>) {
        self.continue_sweeps(next);
        self.look_for_late(next);
        self.tend(next);
    }

    fn withdraw(&mut self, next: &mut Crossing<'_>) {
        for request in std::mem::take(&mut self.waiting) {
            next.complete(request, Err(ErrorKind::Withdrawn));
        }
    }

    fn close(&mut self, next: &mut Crossing<'_>) {
        self.is_closed = true;
        self.tend(next);
    }

    fn may_be_left(&self) -> bool {
        self.inner.volume.is_silent()
    }

    fn reopen(&mut self, next: &mut Crossing<'_>) {
        self.is_closed = false;
        self.tend(next);
    }
}

impl Drop for CacheQueue {
    /// What the kernel or the disk beneath may still carry out is never undone: such a block stays
    /// busy, such a slot is not used any more, and such a region keeps its bit.
    fn drop(&mut self) {
        for (_, reading) in std::mem::take(&mut self.reads) {
            let Reading { hits, mut parts, request, is_late, is_reserved, .. } = reading;
            self.unpin(&hits);
            if is_late {
                self.inner.volume.end_late();
            }
            if is_reserved {
                let length = request.map_or(0, |request| request.length);
                self.inner.volume.end_copy(length);
            }
            self.cancel(&mut parts);
        }
        if self.is_late {
            self.inner.volume.end_late();
        }
        let hits: Vec<Hit> = self.probes.drain().map(|(_, (hit, _))| hit).collect();
        self.unpin(&hits);
        self.abandon_ahead();
        for (_, inserting) in std::mem::take(&mut self.insertions) {
            self.inner.volume.end_copy(inserting.length);
            for (part, _) in inserting.rooms {
                self.inner.volume.shard(part.shard).cancel(part.key, part.number);
            }
        }
        self.abandon_sweeps();
        for (_, changing) in std::mem::take(&mut self.changes) {
            self.inner.volume.end_copy(changing.copied);
        }
        self.abandon_tables();
        self.abandon_note();
        self.abandon_mark();
        self.inner.volume.keeper.access(|keeper| {
            keeper.queues.retain(|(number, _)| *number != self.number);
            if keeper.loader == Some(self.number) {
                keeper.loader = None;
            }
            keeper.wake_queues();
        });
    }
}
