//! A queue's read-ahead.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{Crossing, Operation, Outcome, Request};
use fathom_cache::BlockAccess;
use fathom_insight::{Facts, IoClass, RequestFlags};

use super::joints::{File, Piece};
use super::pieces;
use super::streams::{self, Limits, Streams};
use crate::cache::format::GRANULE;
use crate::cache::insert::Part;
use crate::cache::queue::{CacheQueue, purpose};

/// The longest request of a read-ahead, in bytes: a guest's read waits for no more than this.
const LENGTH_MAX: u64 = 256 << 10;
/// How often a read waits for what is on its way.
const WAITS_MAX: u32 = 4;
/// The part of the cache that one stream, and all streams of a queue, may have filled ahead.
const SHARE_OF_STREAM: u64 = 32;
const SHARE_OF_QUEUE: u64 = 16;

/// A queue's state.
#[derive(Default)]
pub(in crate::cache) struct Ahead {
    reads: Streams,
    writes: Streams,
    fetches: Vec<Fetch>,
    parked: Vec<Parked>,
    /// The queue's part of the reads at home that belong to no stream.
    others: u32,
    /// Kept to reuse its memory.
    spare: Vec<Part>,
}

/// A part of a file that is on its way into the cache.
struct Fetch {
    number: u64,
    /// The range, in bytes of the disk.
    start: u64,
    length: u64,
    /// The blocks that will be inserted; empty when their insertion has begun.
    parts: Vec<Part>,
    access: BlockAccess,
}

impl Fetch {
    /// Whether `request` is for some of its bytes.
    fn meets(&self, request: &Request) -> bool {
        request.offset < self.start + self.length
            && self.start < request.offset.saturating_add(request.length)
    }
}

/// A read that waits for what is on its way.
pub(in crate::cache) struct Parked {
    pub(in crate::cache) request: Box<Request>,
    pub(in crate::cache) access: BlockAccess,
    pub(in crate::cache) begin_ns: u64,
    waits: u32,
}

/// What is to be read ahead.
pub(in crate::cache) struct Wanted {
    file: File,
    ahead: streams::Ahead,
    facts: Facts,
    class: Option<IoClass>,
    io_priority: u16,
    flags: RequestFlags,
    access: BlockAccess,
}

/// What is known of a read.
#[derive(Default)]
pub(in crate::cache) struct Followed {
    /// It goes home, and belongs to no stream whose file is read ahead.
    pub(in crate::cache) is_other: bool,
    pub(in crate::cache) wanted: Option<Wanted>,
}

impl CacheQueue {
    /// Follows a read. `is_miss` says whether the cache lacks a part of it.
    #[inline]
    pub(in crate::cache) fn follow(
        &mut self,
        request: &Request,
        access: &BlockAccess,
        is_miss: bool,
    ) -> Followed {
        let window_max = self.inner.ahead.window_max();
        if window_max == 0 || !self.inner.inserts_reads() {
            return Followed::default();
        }
        self.follow_files(request, access, is_miss, window_max)
    }

    fn follow_files(
        &mut self,
        request: &Request,
        access: &BlockAccess,
        is_miss: bool,
        window_max: u64,
    ) -> Followed {
        // Without a new reference, which all queues would count.
        let inner = &self.inner;
        let cache = u64::from(inner.volume.slots()) * u64::from(inner.volume.format.block_size);
        let limits = Limits {
            window: window_max.min(cache / SHARE_OF_STREAM),
            unused: cache / SHARE_OF_QUEUE,
        };
        let mut followed = Followed { is_other: is_miss, wanted: None };
        for (file, piece, facts) in pieces(request) {
            let seen = self.ahead.reads.read(file, piece, facts.file_size, is_miss, limits);
            if seen.is_joint {
                inner.ahead.joints.lock().note(file, piece.file_offset, piece.place);
            }
            followed.is_other &= !seen.is_followed;
            let Some(ahead) = seen.ahead else { continue };
            let insight = &request.insight;
            followed.wanted = Some(Wanted {
                file,
                ahead,
                facts,
                class: insight.class,
                io_priority: insight.io_priority,
                flags: insight.flags,
                access: *access,
            });
        }
        followed
    }

    /// Learns from a write where its files are.
    pub(in crate::cache) fn follow_write(&mut self, request: &Request) {
        if self.inner.ahead.window_max() == 0 {
            return;
        }
        for (file, piece, _) in pieces(request) {
            if self.ahead.writes.write(file, piece) {
                self.inner.ahead.joints.lock().note(file, piece.file_offset, piece.place);
            }
        }
    }

    /// A read that belongs to no stream goes home.
    pub(in crate::cache) fn other_begins(&mut self) {
        self.ahead.others += 1;
        self.inner.ahead.others.fetch_add(1, Ordering::Relaxed);
    }

    /// It has ended.
    pub(in crate::cache) fn other_ends(&mut self) {
        self.ahead.others -= 1;
        self.inner.ahead.others.fetch_sub(1, Ordering::Relaxed);
    }

    /// Begins to read a file ahead.
    pub(in crate::cache) fn read_ahead(&mut self, wanted: &Wanted, next: &mut Crossing<'_>) {
        if self.is_closed
            || next.is_draining()
            || self.inner.ahead.others.load(Ordering::Relaxed) > 0
        {
            // The stream asks again with its next read.
            return;
        }
        let inner = Arc::clone(&self.inner);
        let mut at = wanted.ahead.from;
        while at.0 < wanted.ahead.end {
            let mut piece =
                inner.ahead.joints.lock().piece(wanted.file, at, wanted.ahead.end, LENGTH_MAX);
            let Some(end) = piece.place.checked_add(piece.length) else { return };
            // Only one insertion of a block can be on its way: a block is read as a whole.
            let size = u64::from(inner.volume.format.block_size);
            let whole = (end / size * size).saturating_sub(piece.place);
            let is_more = piece.file_offset + piece.length == wanted.ahead.end
                && wanted.ahead.end < wanted.facts.file_size;
            piece.length = match whole {
                // The rest of the block follows with the next window.
                0 if is_more => return,
                0 => piece.length,
                whole => whole,
            };
            if piece.length == 0 {
                return;
            }
            let Some(is_read) = self.fetch(piece, wanted, next) else { return };
            self.ahead.reads.sent(wanted.ahead.stream, piece, is_read);
            at = (piece.file_offset + piece.length, piece.place + piece.length);
        }
    }

    /// Reads the blocks of a piece that the cache lacks. Returns whether there are any; `None` if
    /// too much is on its way.
    fn fetch(&mut self, piece: Piece, wanted: &Wanted, next: &mut Crossing<'_>) -> Option<bool> {
        let inner = Arc::clone(&self.inner);
        let volume = &inner.volume;
        let (granule, size) = (u64::from(GRANULE), u64::from(volume.format.block_size));
        let start = piece.place.next_multiple_of(granule);
        let end = (piece.place + piece.length) / granule * granule;
        let (mut run, mut is_read) = (start..start, false);
        let mut parts = std::mem::take(&mut self.ahead.spare);
        for (block, from, length) in Self::blocks(start, end.saturating_sub(start), size) {
            let key = self.key(block);
            let shard = volume.shard_of(key);
            let mask = Self::covered(from, length, size);
            let number = volume.shard(shard).read_ahead(key, mask, &wanted.access);
            if number != 0 {
                if parts.is_empty() {
                    run = from..from;
                }
                run.end = from + length;
                parts.push(Part { key, shard, number, mask, block: block * size });
            } else if !parts.is_empty() {
                parts = self.send_ahead((run.start, run.end), parts, piece, wanted, next)?;
                is_read = true;
            }
        }
        if parts.is_empty() {
            self.ahead.spare = parts;
            return Some(is_read);
        }
        self.ahead.spare = self.send_ahead((run.start, run.end), parts, piece, wanted, next)?;
        Some(true)
    }

    /// Reads a range of the disk into the cache. Returns memory for the next parts; `None` if too
    /// much is on its way.
    fn send_ahead(
        &mut self,
        (start, end): (u64, u64),
        mut parts: Vec<Part>,
        piece: Piece,
        wanted: &Wanted,
        next: &mut Crossing<'_>,
    ) -> Option<Vec<Part>> {
        let (inner, length) = (Arc::clone(&self.inner), end - start);
        let is_reserved = inner.ahead.reserve(&inner.volume.ahead.0, length);
        if !is_reserved || !inner.volume.reserve_copy(length) {
            if is_reserved {
                inner.ahead.release(&inner.volume.ahead.0, length);
            }
            self.cancel(&mut parts);
            self.ahead.spare = parts;
            return None;
        }
        self.count += 1;
        let mut own = next.request();
        own.operation = Operation::Read;
        (own.offset, own.length) = (start, length);
        own.token = self.count << purpose::BITS | purpose::FILL;
        let insight = &mut own.insight;
        (insight.facts, insight.class) = (wanted.facts, wanted.class);
        (insight.io_priority, insight.flags) = (wanted.io_priority, wanted.flags);
        insight.flags.insert(RequestFlags::READ_AHEAD);
        insight.file_offset = Some(piece.file_offset + (start - piece.place));
        own.buffers.allocate(length as usize);
        let access = wanted.access;
        self.ahead.fetches.push(Fetch { number: self.count, start, length, parts, access });
        next.submit(own);
        Some(Vec::new())
    }

    /// Whether a part of a read is on its way.
    #[inline]
    pub(in crate::cache) fn is_on_its_way(&self, request: &Request) -> bool {
        self.ahead.fetches.iter().any(|fetch| fetch.meets(request))
    }

    /// Keeps a read until what is on its way has come.
    pub(in crate::cache) fn park(
        &mut self,
        request: Box<Request>,
        access: BlockAccess,
        begin_ns: u64,
    ) {
        self.ahead.parked.push(Parked { request, access, begin_ns, waits: 0 });
    }

    /// Whether `number` is that of a read-ahead.
    pub(in crate::cache) fn is_fetch(&self, number: u64) -> bool {
        self.ahead.fetches.iter().any(|fetch| fetch.number == number)
    }

    /// What was read ahead has come from home.
    pub(in crate::cache) fn fetched(
        &mut self,
        number: u64,
        data: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) {
        let at = self.ahead.fetches.iter().position(|fetch| fetch.number == number);
        let Some(fetch) = at.and_then(|at| self.ahead.fetches.get_mut(at)) else {
            return next.recycle(data);
        };
        let (mut parts, access) = (std::mem::take(&mut fetch.parts), fetch.access);
        if outcome.is_ok() {
            return self.insert(data, parts, access, number, next);
        }
        let (place, length) = (data.offset, data.length);
        next.recycle(data);
        self.cancel(&mut parts);
        self.inner.volume.end_copy(length);
        // The guest's own read reports the error, if the guest gets there.
        self.ahead.reads.failed(place);
        self.fetch_ended(number, next);
    }

    /// What was read ahead is in the cache, or will not be. The reads that wait for it continue.
    pub(in crate::cache) fn fetch_ended(&mut self, number: u64, next: &mut Crossing<'_>) {
        let fetches = &mut self.ahead.fetches;
        let Some(at) = fetches.iter().position(|fetch| fetch.number == number) else { return };
        let fetch = fetches.swap_remove(at);
        self.inner.ahead.release(&self.inner.volume.ahead.0, fetch.length);
        let mut at = 0;
        while let Some(parked) = self.ahead.parked.get(at) {
            if !fetch.meets(&parked.request) {
                at += 1;
                continue;
            }
            let mut parked = self.ahead.parked.remove(at);
            parked.waits += 1;
            if parked.waits < WAITS_MAX && self.is_on_its_way(&parked.request) {
                self.ahead.parked.insert(at, parked);
                at += 1;
                continue;
            }
            self.read_parked(parked, next);
        }
    }

    /// The queue is dropped.
    pub(in crate::cache) fn abandon_ahead(&mut self) {
        for mut fetch in std::mem::take(&mut self.ahead.fetches) {
            if !fetch.parts.is_empty() {
                self.inner.volume.end_copy(fetch.length);
                self.cancel(&mut fetch.parts);
            }
            self.inner.ahead.release(&self.inner.volume.ahead.0, fetch.length);
        }
        self.inner.ahead.others.fetch_sub(self.ahead.others, Ordering::Relaxed);
        self.ahead.others = 0;
    }
}
