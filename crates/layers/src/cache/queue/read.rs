//! The reads of a queue.

use std::sync::atomic::Ordering;

use fathom_block::{CacheHit, Crossing, ErrorKind, Operation, Outcome, Request, faults};
use fathom_cache::{BlockAccess, Continued};

use super::super::ahead::{Followed, Parked};
use super::super::format::{GRANULE, checksum};
use super::super::hit::AtOnce;
use super::super::insert::Part;
use super::super::shard::Lookup;
use super::{Begin, CacheQueue, Hit, Reading, purpose};

impl CacheQueue {
    /// A read of the disk.
    pub(super) fn read(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        if !self.inner.volume.is_usable() {
            return next.submit(request);
        }
        let mut access = self.access(&request);
        let continued = self.continued(&request);
        let begin_ns = next.round_ns();
        self.last_end = request.offset + request.length;
        if !self.is_on_its_way(&request) {
            // That is for reads of one block.
            access.is_continued = continued.first || continued.last;
            let (request, is_missed) = match self.serve_at_once(request, &access, begin_ns, next) {
                AtOnce::Served => return,
                AtOnce::Missed(request) => (request, true),
                AtOnce::Unknown(request) => (request, false),
            };
            let begin = Begin { time_ns: begin_ns, was_parked: false, is_missed, continued };
            return self.serve(request, access, begin, next);
        }
        if let Some(wanted) = self.follow(&request, &access, false).wanted {
            self.read_ahead(&wanted, next);
        }
        self.park(request, access, begin_ns);
    }

    /// Continues a read that has waited for a read-ahead.
    pub(in crate::cache) fn read_parked(&mut self, parked: Parked, next: &mut Crossing<'_>) {
        let Parked { request, access, begin_ns, .. } = parked;
        if !self.inner.volume.is_usable() {
            return next.submit(request);
        }
        // Its blocks have been read ahead, so that this is their first use.
        let continued = Continued::default();
        let begin = Begin { time_ns: begin_ns, was_parked: true, is_missed: false, continued };
        self.serve(request, access, begin, next);
    }

    /// Answers a read from the cache, and otherwise from home.
    fn serve(
        &mut self,
        mut request: Box<Request>,
        mut access: BlockAccess,
        begin: Begin,
        next: &mut Crossing<'_>,
    ) {
        let Begin { time_ns: begin_ns, was_parked, is_missed, continued } = begin;
        let mut parts = self.parts();
        let volume = &self.inner.volume;
        let inserts = self.inner.inserts_reads();
        let size = u64::from(volume.format.block_size);
        let mut hits = std::mem::take(&mut self.spare_hits);
        let mut hit_bytes = 0;
        let mut hit_blocks = 0;
        let last = request.offset.saturating_add(request.length.saturating_sub(1));
        let shift = size.trailing_zeros();
        let ends = (request.offset >> shift, last >> shift);
        for (block, start, length) in Self::blocks(request.offset, request.length, size) {
            let key = self.key(block);
            access.is_continued = continued.is_of(block, ends);
            let shard = volume.shard_of(key);
            let covered = Self::covered(start, length, size);
            let wanted = Self::touched(start, length, size);
            // What a volume returns is compared with checksums, which are those of whole granules.
            let is_servable = !volume.is_kept || covered == wanted;
            let is_looked_up = is_servable && !is_missed;
            let hit = if is_looked_up { volume.hit(shard, key, wanted, &access) } else { None };
            let found = if !is_servable {
                Lookup::Miss(0)
            } else if let Some(slot) = hit {
                self.hits.observe(key, &access, begin_ns);
                Lookup::Hit(slot)
            } else {
                self.hits.pass_on();
                volume.shard(shard).read(key, wanted, &access, inserts && covered != 0)
            };
            match found {
                Lookup::Hit(slot) => {
                    hit_bytes += length;
                    hit_blocks += 1;
                    hits.push(Hit { key, shard, slot, start, length });
                }
                Lookup::Miss(0) => {}
                Lookup::Miss(number) => {
                    parts.push(Part { key, shard, number, mask: covered, block: block * size });
                }
            }
        }
        let blocks =
            (request.offset >> shift, (request.offset + request.length + size - 1) >> shift);
        let counted = (request.length, hit_bytes, u64::from(access.miss_ns) * hit_blocks);
        let looked =
            self.account.read_begins(&request.insight, access.class, blocks, counted, begin_ns);
        let whole = request.length == hit_bytes;
        let followed =
            if was_parked { Followed::default() } else { self.follow(&request, &access, !whole) };
        request.course.cache_hit = cache_hit(hit_bytes, request.length);
        let copied = if whole { self.copy(&hits, &mut request, next) } else { None };
        if let Some(outcome) = copied {
            self.unpin(&hits);
            hits.clear();
            self.spare_hits = hits;
            self.keep_parts(parts);
            next.complete(request, outcome);
        } else {
            let (is_hit, is_other) = (whole, followed.is_other);
            let reading = Reading {
                request: None,
                in_store: 0,
                asked_ns: 0,
                is_late: false,
                is_reserved: false,
                hits,
                parts,
                access,
                looked,
                is_hit,
                begin_ns,
                sent_ns: 0,
                is_other,
            };
            self.begin_read(request, reading, next);
        }
        if let Some(wanted) = followed.wanted {
            self.read_ahead(&wanted, next);
        }
    }

    /// Begins a read of slots, of home, or of both.
    fn begin_read(
        &mut self,
        mut request: Box<Request>,
        mut reading: Reading,
        next: &mut Crossing<'_>,
    ) {
        if !reading.parts.is_empty() {
            reading.is_reserved = self.inner.volume.reserve_copy(request.length);
            if !reading.is_reserved {
                self.cancel(&mut reading.parts);
            }
        }
        if reading.is_other {
            self.other_begins();
        }
        if reading.parts.is_empty() && reading.hits.is_empty() {
            self.spare_hits = reading.hits;
            self.keep_parts(reading.parts);
            // Its end is counted, too.
            *next.word(&mut request) = reading.begin_ns << 1 | u64::from(reading.is_other);
            return next.submit(request);
        }
        self.count += 1;
        let number = self.count;
        if reading.parts.is_empty() && !self.inner.volume.is_kept {
            *next.word(&mut request) = number;
            self.send(request, number, &reading.hits, next);
            self.reads.insert(number, reading);
            return;
        }
        // What goes into the cache, or is compared with checksums, must not be in memory that the
        // guest can change. And a store that does not answer in time may fill the memory when the
        // request has ended.
        let mut own = next.request();
        own.operation = Operation::Read;
        (own.offset, own.length) = (request.offset, request.length);
        own.inherit(&request, 0);
        own.buffers.allocate(request.length as usize);
        *next.word(&mut own) = number;
        own.token = number << purpose::BITS | purpose::FILL;
        if reading.hits.is_empty() {
            reading.sent_ns = next.round_ns();
            next.submit(own);
        } else {
            reading.in_store = self.send(own, number, &reading.hits, next);
            reading.asked_ns = self.watch(next);
        }
        reading.request = Some(request);
        self.reads.insert(number, reading);
    }

    /// Copies all of a read out of a cache in memory. `None` if the cache is not in memory. No lock
    /// is held meanwhile: the guest's memory may have to be fetched first.
    #[inline]
    fn copy(
        &self,
        hits: &[Hit],
        request: &mut Request,
        next: &mut Crossing<'_>,
    ) -> Option<Outcome> {
        let volume = &self.inner.volume;
        // What a volume returns is compared with checksums.
        if volume.is_kept {
            return None;
        }
        let size = u64::from(volume.format.block_size);
        let mut outcome = Ok(());
        for hit in hits {
            let place = volume.place(hit.shard, hit.slot) + (hit.start & (size - 1));
            let from = hit.start - request.offset;
            let copied = next.read_now(self.store, place, request, from..from + hit.length)?;
            outcome = outcome.and(copied);
        }
        Some(outcome)
    }

    /// Sends the parts of the read `number` to the slots that have them, and the rest to the disk
    /// beneath. Returns the number of requests to the store.
    fn send(
        &mut self,
        request: Box<Request>,
        number: u64,
        hits: &[Hit],
        next: &mut Crossing<'_>,
    ) -> u32 {
        let mut in_store = 0;
        let volume = &self.inner.volume;
        let size = u64::from(volume.format.block_size);
        let (offset, end) = (request.offset, request.offset + request.length);
        let split = next.split(request);
        let mut at = offset;
        let mut index = 0;
        while at < end {
            let upto = hits.get(index).map_or(end, |hit| hit.start);
            if at < upto {
                let piece = next.piece(split, at - offset, upto - at);
                next.submit(piece);
                at = upto;
                continue;
            }
            let first = hits[index];
            let place = volume.place(first.shard, first.slot) + first.start % size;
            let mut length = first.length;
            index += 1;
            // Adjacent slots are read together.
            while let Some(hit) = hits.get(index) {
                let is_next = hit.start == first.start + length
                    && volume.place(hit.shard, hit.slot) + hit.start % size == place + length;
                if !is_next {
                    break;
                }
                length += hit.length;
                index += 1;
            }
            let mut piece = next.piece(split, at - offset, length);
            piece.offset = place;
            piece.token = number << purpose::BITS | purpose::PIECE;
            next.submit_to(self.store, piece);
            in_store += 1;
            at += length;
        }
        next.join(split);
        in_store
    }

    /// Releases the pins of slots.
    pub(super) fn unpin(&self, hits: &[Hit]) {
        for hit in hits {
            self.inner.volume.unpin(hit.shard, hit.slot);
        }
    }

    /// The first hit whose content is not what the cache has noted. `data` has the request from
    /// `offset` on.
    fn wrong(&self, data: &Request, hits: &[Hit]) -> Option<Hit> {
        let volume = &self.inner.volume;
        if !volume.is_kept {
            return None;
        }
        let (size, granule) = (u64::from(volume.format.block_size), u64::from(GRANULE));
        for hit in hits {
            let covered = Self::covered(hit.start, hit.length, size);
            for number in (0..16).filter(|number| covered >> number & 1 == 1) {
                let place = hit.start / size * size + number * granule;
                let from = (place - data.offset) as usize;
                let own = data.buffers.owned().unwrap_or_default();
                // The memory of a kept cache's reads is the layer's.
                let Some(bytes) = own.get(from..from + granule as usize) else { return Some(*hit) };
                let noted = volume.shard(hit.shard).sum(hit.slot, number as usize);
                if checksum(bytes) != noted {
                    return Some(*hit);
                }
            }
        }
        None
    }

    /// A read has its data.
    pub(super) fn end_read(
        &mut self,
        mut data: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) {
        let number = std::mem::take(next.word(&mut data));
        let Some(reading) = self.reads.remove(&number) else { return next.complete(data, outcome) };
        if reading.request.is_none() && self.inner.volume.is_kept {
            return self.answered_late(&reading, data, next);
        }
        let is_reserved = reading.is_reserved;
        let Reading { request, mut hits, mut parts, access, looked, is_hit, .. } = reading;
        let (begin_ns, sent_ns) = (reading.begin_ns, reading.sent_ns);
        if reading.is_other {
            self.other_ends();
        }
        if outcome.is_ok() {
            let time_ns = next.round_ns().saturating_sub(begin_ns);
            self.account.read_ended(looked, is_hit, time_ns);
        }
        if sent_ns != 0 && outcome.is_ok() {
            let time_ns = next.round_ns().saturating_sub(sent_ns);
            let blocks = self.count_of(data.length);
            self.cost.observe(access.is_sequential, blocks, time_ns);
        }
        let wrong = if outcome.is_ok() { self.wrong(&data, &hits) } else { None };
        // A store that has failed was reported before.
        let is_again = wrong.is_some() || outcome.is_err() && self.inner.volume.has_failed();
        if let Some(wrong) = wrong {
            self.inner.mismatches.fetch_add(1, Ordering::Relaxed);
            let at = hits.iter().position(|hit| hit.slot == wrong.slot && hit.key == wrong.key);
            if let Some(at) = at {
                hits.swap_remove(at);
            }
            self.probe(wrong, next);
        }
        self.unpin(&hits);
        hits.clear();
        self.spare_hits = hits;
        let Some(mut request) = request else {
            // The data is in the request's own memory.
            if is_again {
                return next.submit(data);
            }
            return next.complete(data, outcome);
        };
        if outcome.is_err() || wrong.is_some() {
            self.cancel(&mut parts);
            if is_reserved {
                self.inner.volume.end_copy(data.length);
            }
            next.recycle(data);
            if is_again {
                return next.submit(request);
            }
            return next.complete(request, outcome);
        }
        request.course.follow(&data.course);
        let before = faults();
        if let Some(bytes) = data.buffers.owned() {
            request.buffers.copy_from(0, bytes);
        }
        let lost = if faults() == before { Ok(()) } else { Err(ErrorKind::Memory) };
        next.complete(request, lost);
        if is_reserved {
            return self.insert(data, parts, access, 0, next);
        }
        next.recycle(data);
        self.keep_parts(parts);
    }

    /// Reads a block again into memory that no guest can change. If its content is still wrong, the
    /// volume does not hold what it should. The hit is pinned.
    fn probe(&mut self, hit: Hit, next: &mut Crossing<'_>) {
        let volume = &self.inner.volume;
        let size = u64::from(volume.format.block_size);
        // Until then, nobody reads it.
        volume.shard(hit.shard).forget(hit.key);
        self.count += 1;
        let mut own = next.request();
        own.operation = Operation::Read;
        own.token = self.count << purpose::BITS | purpose::PROBE;
        own.offset = volume.place(hit.shard, hit.slot) + hit.start % size;
        own.length = hit.length;
        own.buffers.allocate(hit.length as usize);
        let asked_ns = self.watch(next);
        self.probes.insert(self.count, (hit, asked_ns));
        next.submit_to(self.store, own);
    }

    /// A slot has been read again.
    pub(super) fn probed(
        &mut self,
        number: u64,
        mut data: Box<Request>,
        outcome: Outcome,
    ) -> Box<Request> {
        if let Some((hit, _)) = self.probes.remove(&number) {
            data.offset = hit.start;
            if outcome.is_err() || self.wrong(&data, &[hit]).is_some() {
                // The volume does not hold what was written to it.
                self.inner.volume.fail(ErrorKind::Malformed);
            }
            self.unpin(&[hit]);
        }
        data
    }
}

/// How much of a read the cache has.
#[inline]
fn cache_hit(hit_bytes: u64, length: u64) -> CacheHit {
    match hit_bytes {
        _ if hit_bytes == length => CacheHit::Hit,
        0 => CacheHit::Miss,
        _ => CacheHit::Part,
    }
}
